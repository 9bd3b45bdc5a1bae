"""Log-probabilities, ranks and spellings."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.tiny import tokenizer
from writehead.engine.scores import score


def test_values_ranks_and_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    first, second = score(logits, [2, 3], 2, tokenizer())
    expected = torch.log_softmax(logits[0], dim=-1)
    assert {token: (entry.rank, entry.decoded_token) for token, entry in first.items()} == {
        2: (2, "<2>"),
        1: (1, "<1>"),
    }
    assert [entry.logprob for entry in first.values()] == pytest.approx([float(expected[2]), float(expected[1])])
    assert next(iter(second)) == 3
    assert all(entry.logprob == pytest.approx(-1.3862944) for entry in second.values())


@pytest.mark.parametrize(("num_top", "count"), [(0, 1), (1, 2), (3, 4), (10, 10), (100, 10), (-1, 10)])
def test_as_many_as_asked_for_and_the_chosen_one(num_top: int, count: int) -> None:
    logits = torch.arange(10.0)[None]
    (entries,) = score(logits, [0], num_top, tokenizer())
    assert len(entries) == count
    assert next(iter(entries)) == 0
    assert entries[0].rank == 10
    assert [entry.rank for token, entry in entries.items() if token] == list(range(1, count))


def test_a_token_without_spelling_has_an_empty_one() -> None:
    (entries,) = score(torch.zeros(1, 64), [62], 0, tokenizer())
    assert entries[62].decoded_token == ""


def test_no_rows_give_no_entries() -> None:
    assert score(torch.zeros(0, 5), [], 2, tokenizer()) == []
