"""The key/value cache: allocated once, written in place, never concatenated.

A sequence owns one row of every layer from its first token to its last. Its token at position p sits in slot p:

    row 0   [ k k k k k k . . . . ]     used 6
    row 1   [ k k . . . . . . . . ]     used 2
    row 2   [ . . . . . . . . . . ]     used 0, free

A step reads rows together up to the longest of them, so a slot that is not used must hold finite numbers: it gets the
weight 0, and 0 * NaN is NaN. Free slots are therefore zero at all times. The operating system zeroes them lazily: what
is never written costs address space only.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from writehead.errors import UsageError


class KVCache:
    """Keys and values [rows, K, capacity, slot_size] a layer, `slot_size` elements for a head's key of a token.

    Raises UsageError if the system does not grant the memory.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, slot_size: int, num_rows: int, capacity: int, dtype: torch.dtype
    ) -> None:
        shape = (num_rows, num_kv_heads, capacity, slot_size)
        self.num_rows, self.capacity = num_rows, capacity
        try:
            self.keys = tuple(_zeros(shape, dtype) for _ in range(num_layers))
            self.values = tuple(_zeros(shape, dtype) for _ in range(num_layers))
        except (MemoryError, ValueError) as error:
            size = 2 * num_layers * math.prod(shape) * dtype.itemsize
            raise UsageError(
                f"the key/value cache of {num_rows} sequences of {capacity} tokens needs {size / 2**30:.1f} GiB, which "
                "the system does not grant; lower max_num_seqs or max_model_len"
            ) from error
        self._used = [0] * num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, used or not."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reserve(self, row: int, end: int) -> None:
        """Announce that slots before `end` may be written. A step does so first: if it fails, they count as used."""
        assert end <= self.capacity, f"slot {end - 1} of a row of {self.capacity}"
        self._used[row] = max(self._used[row], end)

    def free(self, row: int) -> None:
        """Zero what was used of a row."""
        self._clear(row, 0)

    def copy(self, source: int, target: int) -> None:
        """Make a row a copy of another. What it held before is gone."""
        length = self._used[source]
        self.reserve(target, length)
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self._clear(target, length)

    def _clear(self, row: int, start: int) -> None:
        end = self._used[row]
        if end > start:
            for tensor in (*self.keys, *self.values):
                tensor[row, :, start:end] = 0
        self._used[row] = start


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take physical memory only when first written (calloc), which torch.zeros does not do on the CPU."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
