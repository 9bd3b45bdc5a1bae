"""Kernel backends: one contract, one choice. `load(name)` is the only switch."""

from __future__ import annotations

import logging

from writehead.errors import UsageError
from writehead.kernels import onednn
from writehead.kernels.contract import AttentionSpec, CacheView, Group, Kernels, Rotation
from writehead.kernels.cpu import kernels as cpu
from writehead.kernels.cpu.library import open_library
from writehead.kernels.packed import Format, PackedWeight, parse_format
from writehead.kernels.reference import ReferenceKernels
from writehead.kernels.slots import cache_dtype, slot_size, write_slots

__all__ = [
    "AttentionSpec", "CacheView", "Format", "Group", "Kernels", "PackedWeight", "Rotation", "cache_dtype", "load",
    "names", "parse_format", "slot_size", "write_slots",
]  # fmt: skip

BACKENDS = ("auto", "cpu", "onednn", "reference", "reference-broadcast")


def names() -> tuple[str, ...]:
    """What `load` knows here: the backends, and the instruction sets of the native library."""
    library = open_library()
    sets = () if isinstance(library, str) else tuple(f"cpu-{s.name}" for s in library.sets)
    return *BACKENDS, *sets


def load(name: str = "auto", *, packed: bool = True) -> Kernels:
    """Choose a backend by name. `auto` takes the fastest that runs here; an explicit choice never falls back.

    `cpu` is the native library; `cpu-avx2` and the like are one instruction set of it, for tests. It packs all weights:
    with `packed` false, `auto` is oneDNN, which leaves plain tensors of floats. `reference-broadcast` is the reference
    with the other published MQA computation, for comparisons.
    """
    if name == "auto":
        reasons = [cpu.unavailable()] if packed else []
        if reasons == [None]:
            return cpu.CPUKernels()
        reasons.append(onednn.unavailable())
        found = ReferenceKernels("queries") if reasons[-1] else onednn.OneDNNKernels()
        for said in filter(None, reasons):
            logging.getLogger(__name__).warning("kernels: %s; using %s, which is slower", said, found.name)
        return found
    if name == "cpu" or name.startswith("cpu-"):
        return cpu.CPUKernels(name.partition("-")[2] or None)
    match name:
        case "onednn":
            reason = onednn.unavailable()
            if reason is not None:
                raise UsageError(f"kernels: 'onednn' cannot be used, {reason}; choose auto or reference")
            return onednn.OneDNNKernels()
        case "reference":
            return ReferenceKernels("queries")
        case "reference-broadcast":
            return ReferenceKernels("broadcast")
    raise UsageError(f"kernels: there is no backend '{name}'; choose one of {', '.join(BACKENDS)}")
