"""`writehead env`: what a bug report needs to say, and why a backend does not run here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

from writehead import __version__
from writehead.bench import machine
from writehead.cli import options
from writehead.cli.inspect import readable
from writehead.errors import WriteheadError

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "gguf", "transformers")


def env(as_json: options.Json = False) -> None:
    """Show versions, processor, memory and kernel backends."""
    facts = gather()
    print(json.dumps(facts) if as_json else _table(facts))


def gather() -> dict[str, Any]:
    """All facts, as plain values; sizes in bytes."""
    import torch
    from huggingface_hub import constants

    return {
        "writehead": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "processor": machine.processor(),
        "instructions": machine.instructions(),
        "cores": os.cpu_count(),
        "usable_cores": machine.usable_cores(),
        "threads": torch.get_num_threads(),
        "memory": machine.total_memory(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "kernels": backends(),
        "model_cache": constants.HF_HUB_CACHE,
        "offline": bool(constants.HF_HUB_OFFLINE),
    }


def backends() -> dict[str, str]:
    """What each kernel backend and each instruction set of the native one loads as, or why it does not."""
    from writehead import kernels

    found = {}
    for name in kernels.names():
        try:
            found[name] = f"loads as {kernels.load(name).name}"
        except WriteheadError as error:
            found[name] = f"does not load: {error}"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_words(version: str | None) -> str:
    return "this torch is built without CUDA" if version is None else f"this torch is built for CUDA {version}"


def _table(facts: dict[str, Any]) -> str:
    rows = [
        ("writehead", facts["writehead"]),
        ("python", f"{facts['python']} on {facts['system']}"),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("processor", f"{facts['processor']}, {facts['usable_cores']} of {facts['cores']} cores, "
                      f"{facts['threads']} threads"),
        ("instructions", " ".join(facts["instructions"]) or "none that is known"),
        ("memory", readable(facts["memory"])),
        ("gpu", ", ".join(facts["gpus"]) or f"none ({_cuda_words(facts['cuda'])})"),
        *((f"kernels: {name}", text) for name, text in facts["kernels"].items()),
        ("model cache", facts["model_cache"] + " (offline)" * facts["offline"]),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
