"""Weights as the integer and native products read them: tiles of 16 output channels, rounded and laid side by side.

The layout is that of cpu/native/ops.h; here it is in torch, which is also the definition of the rounding:

    int8   a scale a channel, the largest value becomes 127
    int4   int8 weights that are steps apart: half * step + offset, halves from -8 to 7, a step and an offset for
           `group` inputs of a channel. Read as halves or as int8, the integer sums are the same.
    x      int8 under one scale a row, but for 8 values of largest size, which may have up to 2^20 steps. Without that,
           one channel of a hundred times the others' size leaves those two or three bits (docs/decisions/0006).
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
                top = padded.abs().amax(1, keepdim=True)
                channels = 4 * len(padded)
                scales[-channels:].view(torch.float32).copy_(torch.where(top > 1e-30, top / 127, 0).flatten())
                halves, steps, offsets = _fit_int4(padded, top, self.format.group)
                values = halves.to(torch.int8).add(8).view(torch.uint8)
                pairs = values.view(tiles, TILE, -1, 2, 4)
                data.copy_((pairs[..., 0, :] | pairs[..., 1, :] << 4).transpose(1, 2).flatten())
                both = torch.stack([steps, offsets]).to(torch.int8).view(2, tiles, TILE, -1)
                scales[:-channels].view(torch.int8).copy_(both.permute(1, 3, 0, 2).flatten())
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
                halves = torch.cat([pairs & 15, pairs >> 4], dim=3).view(torch.int8).flatten(1) - 8
                channels = 4 * tiles * TILE
                both = scales[:-channels].view(torch.int8).view(tiles, -1, 2, TILE).permute(2, 0, 3, 1)
                steps, offsets = both.reshape(2, tiles * TILE, -1, 1)
                values = halves.view(tiles * TILE, -1, self.format.group) * steps + offsets
                whole = values.flatten(1) * scales[-channels:].view(torch.float32)[:, None]
            case kind:
                whole = data.view(FLOATS[kind]).view(tiles, -1, TILE).transpose(1, 2).reshape(tiles * TILE, -1).float()
        return whole[: self.shape[0], : self.shape[1]]

    def _parts(self) -> tuple[Tensor, Tensor]:
        """The memory of the values and of the scales, uint8."""
        values, scales = self.memory.split([*_sizes(self.shape, self.format)])
        return values, scales


def round_rows(x: Tensor) -> Tensor:
    """fp32 [..., K] as integer products read it: whole steps of one scale a row, in which all but 8 fit an int8."""
    sizes = x.abs()
    largest = sizes.topk(min(OUTLIERS + 1, x.shape[-1]), dim=-1).values
    rest = largest[..., OUTLIERS:] if x.shape[-1] > OUTLIERS else torch.zeros_like(largest[..., :1])
    scale = torch.maximum(rest / 127, largest[..., :1] / 2**20)
    scale = torch.where(scale > 1e-30, scale, 0)
    steps = (x * torch.where(scale > 0, 1 / scale, 0)).round()
    return steps * scale


def _fit_int4(padded: Tensor, top: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """[channels, K], largest sizes [channels, 1] -> halves [channels, K], steps and offsets [channels, K / group].

    For the step that covers a group's range, and for one less that cuts its ends: the nearest halves for an offset in
    the middle, then the offset that is best for those halves, then the nearest halves again. The least squared error
    wins. Errors are integers (sixteenths of an int8 weight), so that every processor takes the same decision.
    """
    x = (padded * torch.where(top > 1e-30, 127 * 16 / top, 0)).round().int().unflatten(1, (-1, group))
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    covering = ((high - low + 239) // 240).clamp_min(1)
    best: tuple[Tensor, ...] = ()
    for step in (covering, (covering - 1).clamp_min(1)):
        offset = ((low + high + 16 * step) / 32.0).round().int().clamp(-127, 127)
        for _ in range(2):
            least = -((127 + offset) // step).clamp_max(8)
            most = ((127 - offset) // step).clamp_max(7)
            halves = ((x - 16 * offset) * (1 / (16 * step).float())).round().int().clamp(least, most)
            rest = x - 16 * step * halves
            error = (rest - 16 * offset).square().sum(2, keepdim=True, dtype=torch.int32)
            found = (error, halves, step, offset)
            best = tuple(torch.where(error < best[0], *two) for two in zip(found, best, strict=True)) if best else found
            offset = (rest.sum(2, keepdim=True).float() * (1 / (16 * group))).round().int().clamp(-127, 127)
    return best[1].flatten(1), best[2].squeeze(2), best[3].squeeze(2)


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
            return channels * columns // 2, 2 * channels * (columns // format.group) + 4 * channels
        case kind:
            return channels * columns * FLOATS[kind].itemsize, 0


def _two(weight: Tensor) -> tuple[int, int]:
    out_size, in_size = weight.shape
    return out_size, in_size
