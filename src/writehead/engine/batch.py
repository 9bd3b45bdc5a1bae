"""The tensors of one step, complete or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from writehead.cache import KVCache
from writehead.engine.scheduler import Grant, Step
from writehead.kernels import CacheView, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A step as the decoder reads it."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    view: CacheView
    ends: Tensor
    """int64: the last token of each grant that completes; the logits there choose the next one."""


def build_batch(step: Step, cache: KVCache) -> Batch:
    """Lay the tokens of a step one after the other, in the order of its grants, and reserve their slots."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    ends: list[int] = []
    for grant in step.grants:
        sequence, start = grant.sequence, grant.sequence.num_computed
        end = start + grant.num_new
        cache.reserve(sequence.held_row, end)
        token_ids += sequence.tokens[start:end]
        positions += range(start, end)
        rows += [sequence.held_row] * grant.num_new
        if grant.completes:
            ends.append(len(token_ids) - 1)
    ids, slots, held = torch.from_numpy(np.array([token_ids, positions, rows])).unbind()
    groups = tuple(_group(num_new, list(g)) for num_new, g in groupby(step.grants, key=lambda g: g.num_new))
    return Batch(
        token_ids=ids,
        positions=slots,
        view=CacheView(keys=cache.keys, values=cache.values, rows=held, slots=slots, groups=groups),
        ends=torch.tensor(ends, dtype=torch.int64),
    )


def _group(num_new: int, grants: list[Grant]) -> Group:
    rows = [grant.sequence.held_row for grant in grants]
    adjacent = rows[-1] - rows[0] + 1 == len(rows)
    return Group(
        num_new=num_new,
        rows=slice(rows[0], rows[-1] + 1) if adjacent else torch.tensor(rows),
        lengths=tuple(grant.sequence.num_computed + num_new for grant in grants),
    )
