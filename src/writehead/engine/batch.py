"""The tensors of one step, complete or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

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
    logits_at: Tensor
    """int64: the tokens of the step whose logits are wanted."""
    spans: tuple[tuple[int, int], ...]
    """For each grant of the step, which of those logits are its own: (first, last)."""


def build_batch(step: Step, cache: KVCache) -> Batch:
    """Lay the tokens of a step one after the other, in the order of its grants."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    wanted: list[int] = []
    spans: list[tuple[int, int]] = []
    for grant in step.grants:
        sequence, start = grant.sequence, grant.sequence.num_computed
        assert sequence.row is not None
        first = len(wanted)
        wanted += range(len(token_ids) + _first_logit(grant), len(token_ids) + grant.num_new)
        spans.append((first, len(wanted)))
        token_ids += sequence.tokens[start : start + grant.num_new]
        positions += range(start, start + grant.num_new)
        rows += [sequence.row] * grant.num_new
    slots = torch.tensor(positions)
    groups = tuple(_group(num_new, list(g)) for num_new, g in groupby(step.grants, key=lambda g: g.num_new))
    view = CacheView(keys=cache.keys, values=cache.values, rows=torch.tensor(rows), slots=slots, groups=groups)
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=slots,
        view=view,
        logits_at=torch.tensor(wanted, dtype=torch.int64),
        spans=tuple(spans),
    )


def _first_logit(grant: Grant) -> int:
    """The first token of the grant whose logits are wanted: all of a prompt with prompt_logprobs, else the last one."""
    sequence = grant.sequence
    if sequence.request.params.prompt_logprobs is not None and sequence.num_output == 0:
        return 0
    return grant.num_new - 1 if grant.completes else grant.num_new


def _group(num_new: int, grants: list[Grant]) -> Group:
    rows = [grant.sequence.row for grant in grants]
    first, last = rows[0], rows[-1]
    assert first is not None
    assert last is not None
    adjacent = last - first + 1 == len(rows)
    return Group(
        num_new=num_new,
        rows=slice(first, last + 1) if adjacent else torch.tensor(rows),
        lengths=tuple(grant.sequence.num_computed + num_new for grant in grants),
    )
