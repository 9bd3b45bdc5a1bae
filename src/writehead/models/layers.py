"""The parameters of a decoder, each with the kernel that uses it. Nothing here initializes a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from writehead.kernels import Kernels, PackedWeight


class Linear(nn.Module):
    """[..., in] -> [..., out]; weight [out, in], a parameter or packed."""

    weight: Tensor | PackedWeight
    bias: Tensor | None

    def __init__(self, in_size: int, out_size: int, *, bias: bool, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias, activation, residual)


class LayerNorm(nn.Module):
    """[..., size] -> [..., size]."""

    bias: Tensor | None

    def __init__(self, size: int, *, eps: float, bias: bool, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.eps = kernels, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """[..., size] -> [..., size]."""

    def __init__(self, size: int, *, eps: float, offset: float, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.eps, self.offset = kernels, eps, offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, self.offset)


class Embedding(nn.Module):
    """int64 [...] -> [..., size]."""

    weight: Tensor | PackedWeight

    def __init__(self, num_rows: int, size: int, *, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(num_rows, size))

    def forward(self, ids: Tensor) -> Tensor:
        return self.kernels.embed(ids, self.weight)
