"""`writehead env`: what a bug report needs to say, and why a backend does not run here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from writehead import __version__
from writehead.cli import options
from writehead.cli.inspect import readable
from writehead.errors import WriteheadError

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "gguf", "transformers")
FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8",
         "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve")  # fmt: skip
"""Instruction sets that kernels for these models can use, as Linux spells them."""


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
        "processor": _processor(),
        "instructions": [flag for flag in FLAGS if flag in _cpu("flags", "Features").split()],
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "kernels": backends(),
        "model_cache": constants.HF_HUB_CACHE,
        "offline": bool(constants.HF_HUB_OFFLINE),
    }


def backends() -> dict[str, str]:
    """What each kernel backend loads as, or why it does not."""
    from writehead import kernels

    found = {}
    for name in kernels.BACKENDS:
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


def _processor() -> str:
    return _cpu("model name", "Hardware") or platform.processor() or platform.machine()


def _cpu(*keys: str) -> str:
    """The first value of one of these keys in /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


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
