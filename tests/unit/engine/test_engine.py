"""The engine against whole forward passes: batches, chunks, cancels and failures change no token of anybody else."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine import tiny
from tests.unit.engine.tiny import NUM_POSITIONS, NUM_TOKENS, POISON, alone, finish, make_engine, naive_greedy, request
from writehead.engine.engine import Event
from writehead.engine.request import Request
from writehead.engine.sequence import Sequence

PROMPTS = ((1,), (2, 3, 4), (5, 6) * 6, tuple(range(20, 55)), (7, 8, 9, 10, 11), (5, POISON, 6), (0, 0))
LONGEST = 12


@cache
def greedy_reference(prompt: tuple[int, ...]) -> list[int]:
    return naive_greedy(prompt, LONGEST)


@cache
def sampled_reference(prompt: tuple[int, ...], seed: int) -> list[list[int]]:
    """Two completions, the request alone in an engine."""
    return [s.output_ids for s in alone(sampled(prompt, seed))]


def sampled(prompt: tuple[int, ...], seed: int, *, id: int = 0, max_tokens: int = LONGEST) -> Request:
    return request(prompt, id=id, n=2, temperature=0.9, top_k=20, top_p=0.95, seed=seed, max_tokens=max_tokens)


def check(sequence: Sequence) -> None:
    """What a sequence generated, to its end or to where it was cancelled, is what it generates alone."""
    prompt, params = sequence.request.prompt_ids, sequence.request.params
    if POISON in prompt:
        assert sequence.finish_reason in ("error", "abort")
        assert sequence.output_ids == []
        return
    expected = (
        greedy_reference(prompt) if params.seed is None else sampled_reference(prompt, params.seed)[sequence.index]
    )
    assert sequence.output_ids == expected[: sequence.num_output]
    assert sequence.finish_reason == ("abort" if sequence.num_output != params.max_tokens else "length")


ADD = st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, LONGEST))
SAMPLE = st.tuples(st.just("sample"), st.integers(0, len(PROMPTS) - 1), st.integers(1, LONGEST))
STEP = st.tuples(st.just("step"), st.integers(1, 3), st.just(0))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0))


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(0, 9), st.lists(st.one_of(ADD, SAMPLE, STEP, CANCEL), max_size=14))
def test_any_company_gives_the_same_tokens(num_rows: int, spare: int, operations: list[tuple[str, int, int]]) -> None:
    engine = make_engine(num_rows=num_rows, max_step_tokens=num_rows + spare)
    sequences: list[Sequence] = []
    events: list[Event] = []
    for id, (name, first, second) in enumerate(operations):
        if name == "add":
            sequences += engine.add(request(PROMPTS[first], id=id, max_tokens=second))
        elif name == "sample":
            sequences += engine.add(sampled(PROMPTS[first], first, id=id, max_tokens=second))
        elif name == "step":
            for _ in range(first):
                events += engine.step()
        elif first < len(sequences):
            engine.cancel(sequences[first])
    events += finish(engine)
    for sequence in sequences:
        check(sequence)
    check_events(events, sequences)


def check_events(events: list[Event], sequences: list[Sequence]) -> None:
    """Each token is told once, in order, and each end once, last; nothing follows a cancel."""
    for sequence in sequences:
        mine = [e for e in events if e.sequence is sequence]
        assert [e.token_id for e in mine if e.token_id is not None] == sequence.output_ids
        assert "".join(e.text for e in mine) == sequence.stream.text
        reasons = [e.finish_reason for e in mine]
        ended = [] if sequence.finish_reason == "abort" else [sequence.finish_reason]
        assert [r for r in reasons if r] == ended
        assert reasons[-1:] == ended or not ended


def test_a_failed_request_leaves_nothing_behind() -> None:
    engine = make_engine(num_rows=1, dirty=False)
    (bad,) = engine.add(request([5] * 30 + [POISON] * 30, max_tokens=2))
    (event,) = engine.step()
    assert (event.finish_reason, event.token_id, event.text) == ("error", None, "")
    assert bad.stop_reason == "the model's logits leave no token to choose: they are NaN or infinite"
    assert any(t.isnan().any() for t in engine.cache.values), "the test must leave a NaN"
    assert engine.step() == []
    assert not any(t.any() for t in (*engine.cache.keys, *engine.cache.values))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"logit_bias": {3: 2.0}}])
def test_a_nan_ends_its_own_request_whatever_the_sampling(params: dict[str, Any]) -> None:
    bad, good = tiny.run(make_engine(), request([1, POISON, 2], **params), request([2, 3, 4], id=1, max_tokens=5))
    assert (bad[0].finish_reason, good[0].output_ids) == ("error", greedy_reference((2, 3, 4))[:5])


def test_a_step_that_fails_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_rows=3, max_step_tokens=6)
    plain = [engine.add(request(p, id=i, max_tokens=8))[0] for i, p in enumerate(PROMPTS[:3])]
    logits, fails = engine.decoder.logits, iter([False, True, False, True, True] + [False] * 100)

    def flaky(hidden: torch.Tensor) -> torch.Tensor:
        if next(fails):
            raise KeyboardInterrupt
        return logits(hidden)

    monkeypatch.setattr(engine.decoder, "logits", flaky)
    interrupts = 0
    while any(s.finish_reason is None for s in plain):
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    for sequence in plain:
        assert sequence.output_ids == greedy_reference(sequence.request.prompt_ids)[:8]


def test_what_a_failed_step_wrote_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_rows=1, dirty=False)
    (sequence,) = engine.add(request([POISON] * 9))
    monkeypatch.setattr(engine.decoder, "logits", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert sequence.num_computed == 0
    assert any(t.isnan().any() for t in engine.cache.keys)
    engine.cancel(sequence)
    assert engine.step() == []
    assert not any(t.any() for t in (*engine.cache.keys, *engine.cache.values))


@pytest.mark.parametrize("length", [1, 30, NUM_POSITIONS - 1])
def test_the_limit_of_positions_ends_a_sequence(length: int) -> None:
    prompt = [n % 12 for n in range(length)]
    (sequence,) = alone(request(prompt, max_tokens=None))
    assert sequence.finish_reason == "length"
    assert len(sequence.tokens) == NUM_POSITIONS
    assert sequence.output_ids == naive_greedy(prompt, NUM_POSITIONS - length)


def test_padding_rows_are_never_drawn() -> None:
    drawn = [alone(request([1], temperature=100.0, seed=seed, max_tokens=60))[0].output_ids for seed in range(4)]
    assert [len(ids) for ids in drawn] == [60] * 4
    found = {token for ids in drawn for token in ids}
    assert max(found) < NUM_TOKENS
    assert len(found) > 50, "the test must draw from nearly all"


def test_greedy_never_takes_a_padding_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    logits = engine.decoder.logits
    monkeypatch.setattr(engine.decoder, "logits", lambda h: logits(h).index_fill(-1, torch.tensor([61]), 1e3))
    ((sequence,),) = tiny.run(engine, request([1], max_tokens=6))
    assert sequence.output_ids == naive_greedy([1], 6)


@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("at_once", [3, 256])
def test_prompt_logprobs_are_those_of_a_whole_pass(monkeypatch: pytest.MonkeyPatch, budget: int, at_once: int) -> None:
    monkeypatch.setattr("writehead.engine.engine._SCORED_AT_ONCE", at_once)
    prompt = [*range(20, 40), 62]  # a padding row in a prompt is scored like any other
    asked = request(prompt, prompt_logprobs=2, logprobs=3, max_tokens=4, n=2)
    ((first, second),) = tiny.run(make_engine(num_rows=3, max_step_tokens=budget), asked)
    with torch.inference_mode():
        expected = torch.log_softmax(tiny.decoder()(torch.tensor([first.tokens]))[0], dim=-1)
    scored = [*first.prompt_logprobs, *first.logprobs]
    assert scored[0] is None
    assert len(scored) == len(first.tokens)
    for position, (token, entry) in enumerate(zip(first.tokens[1:], scored[1:], strict=True)):
        assert entry is not None
        assert next(iter(entry)) == token
        row = expected[position]
        for other, found in entry.items():
            assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert found.rank == int((row > row[other]).sum()) + 1
        top = row.topk(2 if position < len(prompt) - 1 else 3).indices.tolist()
        assert set(entry) == {token, *top}
    assert first.cumulative_logprob == pytest.approx(
        math.fsum(e[t].logprob for e, t in zip(first.logprobs, first.output_ids, strict=True))
    )
    assert (second.prompt_logprobs, second.output_ids) == ([], first.output_ids)


def test_a_prompt_can_be_scored_and_nothing_else() -> None:
    asked = request([1, 2, 3], max_tokens=0, prompt_logprobs=0)
    engine = make_engine()
    (sequence,) = engine.add(asked)
    (event,) = engine.step()
    assert (event.finish_reason, event.token_id, event.text) == ("length", None, "")
    assert [None if e is None else list(e) for e in sequence.prompt_logprobs] == [None, [2], [3]]
    assert sequence.output_ids == []


def test_each_index_draws_its_own_numbers_and_the_first_those_of_n_1() -> None:
    three = [s.output_ids for s in alone(request([1], n=3, temperature=2.0, seed=5, max_tokens=10))]
    (one,) = alone(request([1], temperature=2.0, seed=5, max_tokens=10))
    (other,) = alone(request([1], temperature=2.0, seed=6, max_tokens=10))
    assert three[0] == one.output_ids
    assert len({*map(tuple, three), tuple(other.output_ids)}) == 4


def test_without_a_seed_every_run_is_another() -> None:
    runs = {tuple(alone(request([1], temperature=5.0, max_tokens=12))[0].output_ids) for _ in range(3)}
    assert len(runs) == 3


def test_logprobs_of_different_widths_share_a_batch() -> None:
    widths = [None, 0, 1, 100, -1]
    asked = [request([n + 1], id=n, logprobs=w, max_tokens=2) for n, w in enumerate(widths)]
    found = [s.logprobs for (s,) in tiny.run(make_engine(num_rows=5), *asked)]
    assert found[0] == []
    assert [[len(e) for e in entries] for entries in found[1:]] == [[1, 1], [1, 1], [64, 64], [64, 64]]


def test_fp32_logits_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = make_engine(), torch.randn(2, 64)
    monkeypatch.setattr(engine.decoder, "logits", lambda _: made)
    assert engine._logits(torch.zeros(2, 16)).data_ptr() == made.data_ptr()


def test_an_engine_without_work_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    (sequence,) = engine.add(request([1]))
    engine.cancel(sequence)
    engine.cancel(sequence)
    assert engine.step() == []
    assert sequence.finish_reason == "abort"
