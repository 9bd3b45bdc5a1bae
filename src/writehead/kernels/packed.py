"""Weights as the integer and native products read them: tiles of 16 output channels, rounded and laid side by side.

The layout is that of cpu/native/ops.h; here it is in torch, which is also the definition of the rounding:

    int8   a scale a channel, the largest value becomes 127
    int4   a scale (fp16) for `group` inputs of a channel, the value of largest size becomes -8
    x      int8 under one scale a row; the 8 values of largest size keep fp32. Without that, one channel of a hundred
           times the others' size leaves those two or three bits (docs/decisions/0006).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.errors import UsageError
from writehead.kernels.cpu.library import Weight

TILE = 16
OUTLIERS = 8
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = (*FLOATS, "int8", "int4")
GROUPS = (32, 64, 128)
_BLOCK = 64
_LARGEST = 1 << 16
"""Inputs that an int32 sum of int8 products holds for certain."""


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are held. `packed`: as PackedWeight; else plain tensors of a floating-point dtype."""

    kind: str
    group: int = 0
    packed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is not packed, and of the arithmetic between the products."""
        return torch.float32 if self.packed else FLOATS[self.kind]

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the key/value cache: 16 bits unless the weights are fp32."""
        return FLOATS.get(self.kind, torch.bfloat16)

    def at(self, name: str) -> Format:
        """The format of one weight: embeddings and head, which decide the most, are not rounded to four bits."""
        wide = self.kind == "int4" and name.startswith(("embed.", "lm_head."))
        return Format("int8", packed=True) if wide else self

    def __str__(self) -> str:
        return f"{self.kind}-{self.group}" if self.group not in (0, GROUPS[0]) else self.kind


def parse_format(weights: str, *, packs_floats: bool) -> Format:
    """`auto` (fp32), fp32, bf16, fp16, int8, int4, or int4-64 and int4-128 for larger groups."""
    kind, _, group = ("fp32" if weights == "auto" else weights).partition("-")
    allowed = {str(g) for g in GROUPS} if kind == "int4" else set()
    if kind not in KINDS or (group and group not in allowed):
        raise UsageError(f"weights: '{weights}' is not a format; choose auto, {', '.join(KINDS)}, int4-64 or int4-128")
    number = int(group or GROUPS[0]) if kind == "int4" else 0
    return Format(kind, number, packed=packs_floats or kind not in FLOATS)


class PackedWeight:
    """A matrix [out, in] in a packed format. It owns `memory` (uint8); `record` is what the native library reads."""

    __slots__ = ("format", "memory", "record", "shape")

    def __init__(self, shape: tuple[int, int], format: Format, memory: Tensor) -> None:
        assert memory.dtype is torch.uint8
        assert memory.data_ptr() % 64 == 0
        assert memory.shape == (packed_bytes(shape, format),)
        self.shape, self.format, self.memory = shape, format, memory
        self.record = Weight(memory.data_ptr(), *shape, KINDS.index(format.kind), format.group)

    @classmethod
    def pack(cls, weight: Tensor, format: Format) -> PackedWeight:
        """[out, in] rounded and packed in torch."""
        packed = cls(_two(weight), format, aligned(packed_bytes(_two(weight), format)))
        packed.write(weight)
        return packed

    def write(self, weight: Tensor) -> None:
        """Round [out, in] into the memory."""
        tiles = -(-self.shape[0] // TILE)
        padded = weight.new_zeros((tiles * TILE, _columns(self.shape[1], self.format)), dtype=torch.float32)
        padded[: self.shape[0], : self.shape[1]] = weight
        data, scales = self._parts()
        match self.format.kind:
            case "int8":
                top = padded.abs().amax(1, keepdim=True)
                scales.view(torch.float32).copy_((top / 127).flatten())
                values = (padded * torch.where(top > 0, 127 / top, 0)).round().to(torch.int8)
                data.copy_(values.view(tiles, TILE, -1, 4).transpose(1, 2).contiguous().view(torch.uint8).flatten())
            case "int4":
                groups = padded.unflatten(1, (-1, self.format.group))
                top = groups.gather(2, groups.abs().argmax(2, keepdim=True))
                scale = (top / -8).half()
                scales.view(torch.float16).copy_(scale.view(tiles, TILE, -1).transpose(1, 2).flatten())
                wide = scale.float()
                values = (groups * torch.where(wide != 0, 1 / wide, 0)).round().clamp(-8, 7).add(8).to(torch.uint8)
                pairs = values.view(tiles, TILE, -1, 2, 4)
                data.copy_((pairs[..., 0, :] | pairs[..., 1, :] << 4).transpose(1, 2).flatten())
            case kind:
                data.copy_(
                    padded.view(tiles, TILE, -1)
                    .transpose(1, 2)
                    .to(FLOATS[kind])
                    .contiguous()
                    .view(torch.uint8)
                    .flatten()
                )

    def unpack(self) -> Tensor:
        """fp32 [out, in]: the numbers that the products use."""
        tiles = -(-self.shape[0] // TILE)
        data, scales = self._parts()
        match self.format.kind:
            case "int8":
                values = data.view(torch.int8).view(tiles, -1, TILE, 4).transpose(1, 2).reshape(tiles * TILE, -1)
                whole = values * scales.view(torch.float32)[:, None]
            case "int4":
                pairs = data.view(tiles, -1, TILE, 1, 4).transpose(1, 2)
                values = (
                    torch.cat([pairs & 15, pairs >> 4], dim=3)
                    .flatten(1, 2)
                    .reshape(tiles * TILE, -1, self.format.group)
                )
                scale = scales.view(torch.float16).view(tiles, -1, TILE).transpose(1, 2).reshape(tiles * TILE, -1, 1)
                whole = ((values.float() - 8) * scale.float()).flatten(1)
            case kind:
                whole = data.view(FLOATS[kind]).view(tiles, -1, TILE).transpose(1, 2).reshape(tiles * TILE, -1).float()
        return whole[: self.shape[0], : self.shape[1]]

    def _parts(self) -> tuple[Tensor, Tensor]:
        """The memory of the values and of the scales, uint8."""
        values, scales = self.memory.split([*_sizes(self.shape, self.format)])
        return values, scales


def round_rows(x: Tensor) -> Tensor:
    """fp32 [..., K] as int8 products read it: int8 under one scale a row, the largest values as they are."""
    count = min(OUTLIERS, x.shape[-1])
    # A stable order: of equal sizes the first is taken.
    places = x.abs().sort(dim=-1, descending=True, stable=True).indices[..., :count]
    rest = x.scatter(-1, places, 0.0)
    top = rest.abs().amax(-1, keepdim=True)
    used = top > 1e-30
    values = (rest * torch.where(used, 127 / top, 0)).round() * torch.where(used, top / 127, 0)
    return values.scatter(-1, places, x.gather(-1, places))


def packed_bytes(shape: tuple[int, int], format: Format) -> int:
    """Bytes of a packed matrix [out, in]."""
    return sum(_sizes(shape, format))


def check_packable(name: str, shape: tuple[int, int], format: Format) -> None:
    """Raise UsageError if integer sums over so many inputs could overflow."""
    if format.kind not in FLOATS and shape[1] > _LARGEST:
        raise UsageError(f"'{name}' has {shape[1]} inputs, too many for {format} weights ({_LARGEST}); choose bf16")


def aligned(size: int) -> Tensor:
    """uint8 [size], not initialized, at the start of a cache line."""
    memory = torch.empty(size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + size]


def _columns(columns: int, format: Format) -> int:
    unit = 1 if format.kind in FLOATS else max(_BLOCK, format.group)
    return -(-columns // unit) * unit


def _sizes(shape: tuple[int, int], format: Format) -> tuple[int, int]:
    channels, columns = -(-shape[0] // TILE) * TILE, _columns(shape[1], format)
    match format.kind:
        case "int8":
            return channels * columns, 4 * channels
        case "int4":
            return channels * columns // 2, 2 * channels * (columns // format.group)
        case kind:
            return channels * columns * FLOATS[kind].itemsize, 0


def _two(weight: Tensor) -> tuple[int, int]:
    out_size, in_size = weight.shape
    return out_size, in_size
