"""The key/value cache: allocated once, written in place, never concatenated.

A sequence owns one row of every layer from its first token to its last. Rows are dense: when a sequence ends, the last
one moves into its place, so that a step reads adjacent rows without copying. The memory is zeroed lazily by the
operating system: rows and slots that are never written cost address space only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take physical memory only when first written (calloc), which torch.zeros does not do on the CPU."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


class KVCache:
    """Keys and values [rows, K, capacity, D] a layer. Unused slots hold finite numbers at all times."""

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, num_rows: int, capacity: int, dtype: torch.dtype
    ) -> None:
        shape = (num_rows, num_kv_heads, capacity, head_dim)
        self.num_rows, self.capacity = num_rows, capacity
        self.keys = tuple(_zeros(shape, dtype) for _ in range(num_layers))
        self.values = tuple(_zeros(shape, dtype) for _ in range(num_layers))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, used or not."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row over another row."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self, row: int, end: int, *, start: int = 0) -> None:
        """Zero the slots from start to end: their next owner must not meet a NaN that a failed request left."""
        for tensor in (*self.keys, *self.values):
            tensor[row, :, start:end] = 0
