"""How a sequence takes tokens, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.tiny import request, tokenizer
from writehead.engine.sequence import Logprob, Sequence

Outcome = tuple[str, str | None, int | str | None, int]


def feed(tokens: list[int], *, prompt: int = 2, **params: Any) -> Outcome:
    """Text, finish reason, stop reason and tokens taken of a sequence that is given `tokens` until it ends."""
    sequence = Sequence(request([1] * prompt, **{"max_tokens": 50, **params}), 0, tokenizer())
    pieces = []
    for count, token in enumerate(tokens, start=1):
        pieces.append(sequence.append(token, None))
        assert (sequence.num_output, sequence.num_pending) == (count, 1)
        if sequence.finish_reason is not None:
            break
    assert "".join(pieces) == sequence.stream.text
    return "".join(pieces), sequence.finish_reason, sequence.stop_reason, sequence.num_output


@pytest.mark.parametrize(
    ("params", "outcome"),
    [
        ({}, ("<3><4><5><6>", None, None, 4)),
        ({"max_tokens": 2}, ("<3><4>", "length", None, 2)),
        ({"max_length": 5}, ("<3><4><5>", "length", None, 3)),
        ({"stop_ids": [5]}, ("<3><4>", "stop", None, 3)),
        ({"stop_token_ids": [5]}, ("<3><4>", "stop", 5, 3)),
        ({"stop_token_ids": {5}, "include_stop_str_in_output": True}, ("<3><4><5>", "stop", 5, 3)),
        ({"stop_ids": [3, 4], "min_tokens": 1}, ("<3>", "stop", None, 2)),
        ({"stop_ids": [3, 4], "min_tokens": 2}, ("<3><4><5><6>", None, None, 4)),
        ({"stop": "4><5"}, ("<3><", "stop", "4><5", 3)),
        ({"stop": "4><5", "include_stop_str_in_output": True}, ("<3><4><5", "stop", "4><5", 3)),
        ({"stop": ["5", "<4>"]}, ("<3>", "stop", "<4>", 2)),
        ({"stop": "<4>", "min_tokens": 2}, ("<3><4><5><6>", None, None, 4)),
        ({"stop": "><5", "min_tokens": 2}, ("<3><4", "stop", "><5", 3)),
        ({"stop": "<4>", "max_tokens": 2}, ("<3>", "stop", "<4>", 2)),
        ({"stop": "6>x", "max_tokens": 4}, ("<3><4><5><6>", "length", None, 4)),
        ({"stop": "<4>x", "stop_ids": [5]}, ("<3><4>", "stop", None, 3)),
    ],
)
def test_what_ends_it(params: dict[str, Any], outcome: Outcome) -> None:
    assert feed([3, 4, 5, 6], **params) == outcome


def test_text_that_may_become_a_stop_string_waits() -> None:
    sequence = Sequence(request([1], stop="<4><5>", max_tokens=9), 0, tokenizer())
    assert [sequence.append(t, None) for t in (3, 4, 6)] == ["<3>", "", "<4><6>"]


def test_log_probabilities_add_up() -> None:
    sequence = Sequence(request([1], logprobs=0), 0, tokenizer())
    for token, value in ((3, -0.5), (4, -1.25)):
        sequence.append(token, {token: Logprob(value, 1, "")})
    assert sequence.cumulative_logprob == -1.75
    assert [list(entry) for entry in sequence.logprobs] == [[3], [4]]


def test_a_seed_gives_the_same_numbers_again_and_an_index_others() -> None:
    def numbers(seed: int | None, index: int = 0) -> list[float]:
        sequence = Sequence(request([1], seed=seed), index, tokenizer())
        return [sequence.random.random() for _ in range(3)]

    distinct = [
        numbers(s, i) for s, i in ((0, 0), (0, 1), (1, 0), (2**32, 0), (-1, 0), (2**64 - 1, 0), (None, 0), (None, 0))
    ]
    assert len({tuple(n) for n in distinct}) == len(distinct)
    assert numbers(0) == distinct[0]
    assert numbers(0, 1) == distinct[1]


def test_a_row_is_known_only_while_it_is_held() -> None:
    sequence = Sequence(request([1]), 0, tokenizer())
    with pytest.raises(AssertionError, match="not running"):
        _ = sequence.held_row
    sequence.row = 3
    assert sequence.held_row == 3
