"""What the tests of the native kernels share: the sets that run here, formats, and a cache with poison in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from writehead.kernels import AttentionSpec, CacheView, Group, Kernels, slot_size
from writehead.kernels.cpu.kernels import CPUKernels
from writehead.kernels.cpu.library import Library, open_library
from writehead.kernels.packed import Format, PackedWeight

FORMATS = [
    Format("fp32", packed=True), Format("bf16", packed=True), Format("fp16", packed=True), Format("int8", packed=True),
    Format("int4", 32, packed=True), Format("int4", 64, packed=True), Format("int4", 128, packed=True),
]  # fmt: skip


def library() -> Library:
    """The library; a suite without a compiler fails here and says why."""
    found = open_library()
    assert isinstance(found, Library), found
    return found


def sets() -> list[str]:
    """The instruction sets that run on this machine."""
    return [s.name for s in library().sets if s.missing is None]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads in the pool; then one, as the suite has it."""
    library().handle.writehead_threads(count)
    try:
        yield
    finally:
        library().handle.writehead_threads(1)


def packed(kernels: CPUKernels, weight: Tensor, format: Format) -> PackedWeight:
    """The weight as these kernels pack it, into memory full of rubbish."""
    empty = PackedWeight.pack(torch.zeros_like(weight), format)
    empty.memory.fill_(0xA5)
    kernels.pack(weight, empty)
    return empty


def attend(
    kernels: Kernels,
    texts: list[tuple[Tensor, Tensor, Tensor]],
    steps: list[list[int]],
    spec: AttentionSpec,
    *,
    dtype: torch.dtype = torch.float32,
    capacity: int | None = None,
) -> list[Tensor]:
    """Attention outputs [T, H, D] of each text's q, k, v [T, heads, D], in steps that give each of them so many tokens.

    Slots that a text has not reached hold NaN, so reading one shows. Rows are taken in reverse, so none is adjacent.
    """
    poison = torch.nan if dtype.is_floating_point else -1  # four of which are a scale that is NaN
    room = capacity or max(len(q) for q, _, _ in texts) + 3
    shape = (1, len(texts), texts[0][1].shape[1], room, slot_size(texts[0][1].shape[2], dtype))
    keys, values = torch.full(shape, poison, dtype=dtype), torch.full(shape, poison, dtype=dtype)
    done = [0] * len(texts)
    found: list[list[Tensor]] = [[] for _ in texts]
    for counts in steps:
        order = [i for i in sorted(range(len(texts)), key=lambda i: counts[i]) if counts[i]]
        groups: list[Group] = []
        rows: list[int] = []
        slots: list[int] = []
        parts: list[tuple[int, int, int]] = []
        for num_new, members in groupby(order, key=lambda i: counts[i]):
            some = list(members)
            groups.append(
                Group(
                    num_new=num_new,
                    rows=torch.tensor([len(texts) - 1 - i for i in some]),
                    lengths=tuple(done[i] + num_new for i in some),
                )
            )
            for i in some:
                rows += [len(texts) - 1 - i] * num_new
                slots += range(done[i], done[i] + num_new)
                parts.append((i, done[i], done[i] + num_new))
        view = CacheView(
            keys=tuple(keys),
            values=tuple(values),
            rows=torch.tensor(rows),
            slots=torch.tensor(slots),
            groups=tuple(groups),
        )
        fused = torch.cat([torch.cat([t[a:b] for t in texts[i]], dim=1) for i, a, b in parts])  # q | k | v, one tensor
        heads, shared = texts[0][0].shape[1], texts[0][1].shape[1]
        q, k, v = fused.split([heads, shared, shared], dim=1)
        kernels.store(view, 0, k, v)
        out = kernels.cached_attention(q, view, 0, spec)
        for (i, _, b), piece in zip(parts, out.split([b - a for _, a, b in parts]), strict=True):
            found[i].append(piece)
            done[i] = b
    return [torch.cat(pieces) for pieces in found]
