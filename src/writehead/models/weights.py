"""How each parameter of a decoder is held in memory: its shape, its format, and where it is put."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from writehead.kernels import Format, PackedWeight
from writehead.kernels.packed import check_packable, packed_bytes
from writehead.models.decoder import Decoder
from writehead.models.layers import Linear


@dataclass(frozen=True, slots=True)
class Spec:
    """One parameter; `packed` is its format if it is packed, else it is a plain tensor of `dtype`."""

    shape: tuple[int, ...]
    packed: Format | None
    dtype: torch.dtype

    @property
    def matrix(self) -> tuple[int, int]:
        """[out, in] of a packed one."""
        rows, columns = self.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        if self.packed is not None:
            return packed_bytes(self.matrix, self.packed)
        return math.prod(self.shape) * self.dtype.itemsize

    def over(self, memory: Tensor) -> Tensor | PackedWeight:
        """The parameter in uint8 memory of exactly its size."""
        if self.packed is not None:
            return PackedWeight(self.matrix, self.packed, memory)
        return memory.view(self.dtype).view(self.shape)


def weight_specs(decoder: Decoder, format: Format) -> dict[str, Spec]:
    """Every parameter in order; tied ones once. Raises UsageError for a matrix that the format cannot hold.

    Packed are the matrices that products read, and the token embedding, which may be the head.
    """
    linears = {f"{name}.weight" for name, module in decoder.named_modules() if isinstance(module, Linear)}
    packed = linears | {"embed.weight"} if format.packed else set()
    specs = {
        name: Spec(tuple(p.shape), format.at(name) if name in packed else None, format.dtype)
        for name, p in decoder.named_parameters()
    }
    for name, spec in specs.items():
        if spec.packed is not None:
            check_packable(name, spec.matrix, spec.packed)
    return specs


def place(decoder: Decoder, name: str, weight: Tensor | PackedWeight) -> None:
    """Put a weight where the parameter `name` was."""
    path, _, attribute = name.rpartition(".")
    owner = decoder.get_submodule(path)
    delattr(owner, attribute)
    setattr(owner, attribute, nn.Parameter(weight, requires_grad=False) if isinstance(weight, Tensor) else weight)
