"""Kernel backends: one contract, one choice. `load(name)` is the only switch."""

from __future__ import annotations

import logging

from writehead.errors import UsageError
from writehead.kernels import onednn
from writehead.kernels.contract import AttentionSpec, CacheView, Group, Kernels
from writehead.kernels.reference import ReferenceKernels

__all__ = ["AttentionSpec", "CacheView", "Group", "Kernels", "load"]

BACKENDS = ("auto", "onednn", "reference", "reference-broadcast")


def load(name: str = "auto") -> Kernels:
    """Choose a backend by name. `auto` takes the fastest that runs here; an explicit choice never falls back.

    `reference-broadcast` is the reference with the other published MQA computation, for comparisons.
    """
    match name:
        case "auto" | "onednn":
            reason = onednn.unavailable()
            if reason is None:
                return onednn.OneDNNKernels()
            if name == "onednn":
                raise UsageError(f"kernels: 'onednn' cannot be used, {reason}; choose auto or reference")
            logging.getLogger(__name__).warning("kernels: %s; using the reference, which is slower", reason)
            return ReferenceKernels("queries")
        case "reference":
            return ReferenceKernels("queries")
        case "reference-broadcast":
            return ReferenceKernels("broadcast")
    raise UsageError(f"kernels: there is no backend '{name}'; choose one of {', '.join(BACKENDS)}")
