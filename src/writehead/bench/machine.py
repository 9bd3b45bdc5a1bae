"""What a figure was measured on: processor, memory, versions, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from writehead import __version__

FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8",
         "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve")  # fmt: skip
"""Instruction sets that kernels for these models can use, as Linux spells them."""


def describe() -> dict[str, Any]:
    """All facts, as plain values; memory in bytes."""
    import torch

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory": total_memory(),
        "instructions": instructions(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "writehead": __version__,
        "commit": commit(),
    }


def sentence(facts: dict[str, Any]) -> str:
    """The facts in one line, for a table's head and a plot's foot."""
    version = f"writehead {facts['writehead']}" + (f" ({facts['commit']})" if facts["commit"] else "")
    vector = [flag for flag in facts["instructions"] if flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimd")]
    return (
        f"{facts['processor']}, {facts['threads']} threads on {facts['usable_cores']} of {facts['cores']} cores, "
        f"{facts['memory'] / 1e9:.1f} GB, {' '.join(vector)}; {version}, torch {facts['torch']}"
    )


def processor() -> str:
    """The processor's name."""
    return _cpu("model name", "Hardware") or platform.processor() or platform.machine()


def instructions() -> list[str]:
    """Which of FLAGS this processor has."""
    has = _cpu("flags", "Features").split()
    return [flag for flag in FLAGS if flag in has]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def last_cache() -> int:
    """Bytes of the largest cache that a core sees, as Linux tells; 32 MiB where it does not."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text("ascii").strip()
            sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0))
    return max(sizes)


def commit() -> str | None:
    """The commit that this package's sources are at, `-dirty` behind it if they were changed; None outside a tree."""
    folder = str(Path(__file__).resolve().parents[1])

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:  # another project's tree, around an installed package
        return None
    revision = git("rev-parse", "--short=12", "HEAD")
    return revision and revision + "-dirty" * bool(git("status", "--porcelain", "--untracked-files=no", "."))


def _cpu(*keys: str) -> str:
    """The first value of one of these keys in /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""
