"""Slots of the key/value cache: where one head keeps the key or the value of one token.

A slot is D floats, or in an int8 cache D numbers and, in four bytes right after them, their scale in fp32: the largest
size becomes 127, others the nearest step, ties to even. native/slots.h reads and writes the same bytes. A slot that was
never written is zero bytes, which are zeros. What holds an infinity or a NaN becomes NaN as a whole, so that it is seen
as it is in a cache of floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from writehead.errors import UsageError
from writehead.kernels.packed import FLOATS, Format

DTYPES = {**FLOATS, "int8": torch.int8}
_SCALE_BYTES = 4
_TINY = 1e-30
"""Sizes up to this are zero: 127 / size is a number for all others."""


def cache_dtype(name: str, format: Format) -> torch.dtype:
    """The dtype of a cache by name; `auto` is what the weights' format suggests. Raises UsageError."""
    if name == "auto":
        return format.cache_dtype
    if name not in DTYPES:
        raise UsageError(f"kv_cache_dtype: '{name}' is not one; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def slot_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a slot."""
    return head_dim + (_SCALE_BYTES if dtype is torch.int8 else 0)


def write_slots(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] -> [..., slot_size]."""
    if dtype is not torch.int8:
        return x.to(dtype)
    x = x.float()
    size = x.abs().amax(-1, keepdim=True)
    usable = (size > _TINY) & (size < torch.inf)
    numbers = torch.where(usable, (x * (torch.full_like(size, 127) / size)).round(), 0).to(torch.int8)
    scale = (size / 127).masked_fill(size <= _TINY, 0).masked_fill(~(size < torch.inf), torch.nan)
    return torch.cat([numbers, scale.view(torch.int8)], dim=-1)


def read_slots(slots: Tensor) -> Tensor:
    """[..., slot_size] -> [..., D]: floats as they are, int8 as fp32."""
    if slots.dtype is not torch.int8:
        return slots
    scale = slots[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return slots[..., :-_SCALE_BYTES].float() * scale
