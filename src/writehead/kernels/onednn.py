"""The reference with oneDNN's matrix product, for fp32 inference on the CPU.

torch's own `linear` goes through BLAS, whose path for few rows and a transposed weight is slow: on the shapes of a
1.1 B model oneDNN takes 0.8 of its time at one row, 0.4 to 0.7 at 2 to 64 (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from writehead.kernels.packed import PackedWeight
from writehead.kernels.reference import ReferenceKernels


def unavailable() -> str | None:
    """Why these kernels cannot run here; None if they can."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return f"torch {torch.__version__} does not offer oneDNN's matrix product"
    return None


class OneDNNKernels(ReferenceKernels):
    """Equal to the reference within fp32 rounding; gradients and other dtypes take the reference's path."""

    name = "onednn"

    def __init__(self) -> None:
        super().__init__("queries")
        self._pointwise = cast(Callable[..., Tensor], torch.ops.mkldnn._linear_pointwise)

    def _product(self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, PackedWeight):
            return super()._product(x, weight, bias)
        trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if trains or x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type != "cpu":
            return super()._product(x, weight, bias)
        return self._pointwise(x, weight, bias, "none", [], "")
