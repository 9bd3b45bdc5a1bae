"""The tensors of a step."""

from __future__ import annotations

import torch

from tests.unit.engine.tiny import make_engine, request, tokenizer
from writehead.engine.batch import build_batch
from writehead.engine.scheduler import Grant, Step
from writehead.engine.sequence import Sequence


def sequence(row: int, tokens: list[int], num_computed: int) -> Sequence:
    made = Sequence(request(tokens), 0, tokenizer())
    made.row, made.num_computed = row, num_computed
    return made


def test_a_step_is_laid_out_in_the_order_of_its_grants() -> None:
    step = Step(
        (
            Grant(sequence(0, [1, 2, 3], 2), 1),
            Grant(sequence(1, [4, 5], 1), 1),
            Grant(sequence(3, [6, 7, 8, 9, 10], 1), 3),
            Grant(sequence(2, [11, 12, 13, 14], 0), 4),
        )
    )
    cache = make_engine().cache
    batch = build_batch(step, cache)
    assert batch.token_ids.tolist() == [3, 5, 7, 8, 9, 11, 12, 13, 14]
    assert batch.positions.tolist() == batch.view.slots.tolist() == [2, 1, 1, 2, 3, 0, 1, 2, 3]
    assert batch.view.rows.tolist() == [0, 1, 3, 3, 3, 2, 2, 2, 2]
    assert batch.ends.tolist() == [0, 1, 8], "the third has a token left, so nothing is chosen for it"
    assert [(g.num_new, g.rows, g.lengths) for g in batch.view.groups] == [
        (1, slice(0, 2), (3, 2)),
        (3, slice(3, 4), (4,)),
        (4, slice(2, 3), (4,)),
    ]
    assert [batch.token_ids.dtype, batch.positions.dtype, batch.ends.dtype] == [torch.int64] * 3
    assert cache._used == [3, 2, 4, 4]


def test_rows_with_a_hole_are_named_one_by_one() -> None:
    step = Step((Grant(sequence(0, [1], 0), 1), Grant(sequence(2, [1], 0), 1), Grant(sequence(3, [1], 0), 1)))
    (group,) = build_batch(step, make_engine().cache).view.groups
    assert isinstance(group.rows, torch.Tensor)
    assert group.rows.tolist() == [0, 2, 3]


def test_a_step_that_chooses_nothing_has_no_ends() -> None:
    batch = build_batch(Step((Grant(sequence(0, [1, 2, 3], 0), 2),)), make_engine().cache)
    assert batch.ends.tolist() == []
    assert batch.ends.dtype == torch.int64
