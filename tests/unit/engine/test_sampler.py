"""Sampling against the logits processors of transformers, and draws against the distribution they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from tests.unit.engine.tiny import request, tokenizer
from writehead.engine.request import SamplingParams
from writehead.engine.sampler import (
    adjust,
    choose,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    restrict,
    sample,
)
from writehead.engine.sequence import Sequence

V = 50


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Sequence:
    """A sequence that has generated `output` so far."""
    made = Sequence(request(prompt or [1], **{"max_tokens": None, **params}), 0, tokenizer())
    for token in output or []:
        made.append(token, None)
    return made


def rows(num: int = 60) -> list[Tensor]:
    """Logits of many shapes: flat, peaked, with ties, with excluded tokens, with one token left."""
    found = []
    for n in range(num):
        row = torch.randn(V) * (0.1, 1.0, 3.0, 10.0)[n % 4]
        if n % 3 == 1:
            row = (row * 2).round() / 2  # ties
        if n % 5 == 2:
            row[torch.randperm(V)[: V // 3]] = -torch.inf
        found.append(row)
    one = torch.full((V,), -torch.inf)
    one[7] = 1.0
    return [*found, one, torch.zeros(V)]


def survivors(processor: hf.LogitsProcessor, row: Tensor) -> Tensor:
    """What transformers leaves of a row: bool [V]."""
    kept: Tensor = processor(torch.zeros(1, 1, dtype=torch.long), row[None].clone())[0] > -torch.inf
    return kept


@pytest.mark.parametrize("k", [1, 2, 7, V - 1, V, V + 10])
def test_top_k_keeps_what_transformers_keeps(k: int) -> None:
    for row in rows():
        kept = keep_top_k(row, k) & (row > -torch.inf)
        assert torch.equal(kept, survivors(hf.TopKLogitsWarper(k), row))


@pytest.mark.parametrize("p", [0.013, 0.11, 0.53, 0.91, 0.997])
def test_top_p_keeps_what_transformers_keeps(p: float) -> None:
    for row in rows():
        kept, theirs = keep_top_p(row, p) & (row > -torch.inf), survivors(hf.TopPLogitsWarper(p), row)
        # Of equally likely tokens at the edge, it takes the later and we the earlier ones: as many, as likely.
        assert torch.equal(row[kept].sort().values, row[theirs].sort().values)
        if row.unique().numel() == V:
            assert torch.equal(kept, theirs)


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    for row in rows():
        kept = keep_min_p(row, p) & (row > -torch.inf)
        assert torch.equal(kept, survivors(hf.MinPLogitsWarper(p), row))


@pytest.mark.parametrize("mass", [0.01, 0.2, 0.5, 0.9, 0.999])
def test_typical_keeps_what_transformers_keeps(mass: float) -> None:
    for row in rows():
        kept = keep_typical(row, mass) & (row > -torch.inf)
        assert torch.equal(kept, survivors(hf.TypicalLogitsWarper(mass), row))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 10},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1, "top_k": 30, "top_p": 0.9, "typical_p": 0.8},
        {"top_k": -1, "typical_p": 0.5},
    ],
)
def test_the_whole_chain_is_that_of_transformers(params: dict[str, Any]) -> None:
    asked = SamplingParams(**params)
    chain = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(float(asked.temperature))])
    if asked.min_p > 0:
        chain.append(hf.MinPLogitsWarper(asked.min_p))
    if asked.top_k > 0:
        chain.append(hf.TopKLogitsWarper(asked.top_k))
    if asked.top_p < 1:
        chain.append(hf.TopPLogitsWarper(asked.top_p))
    if asked.typical_p < 1:
        chain.append(hf.TypicalLogitsWarper(asked.typical_p))
    for row in rows()[::3]:  # those without ties
        theirs = torch.softmax(chain(torch.zeros(1, 1, dtype=torch.long), row[None].clone())[0], dim=-1)
        logits, tokens = restrict((row - row.max()) / asked.temperature, asked)
        ours = torch.zeros(V)
        ours[torch.arange(V) if tokens is None else tokens] = torch.softmax(logits, dim=-1)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.001, 1.0, exclude_max=True), st.integers(1, V))
def test_the_likeliest_token_always_stays(seed: int, p: float, k: int) -> None:
    row = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 10
    for kept in (keep_top_k(row, k), keep_top_p(row, p), keep_min_p(row, p)):
        assert kept[row.argmax()]
    assert keep_typical(row, p).any()


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.9, 0.999])
def test_top_p_sorts_few_tokens_and_misses_none(p: float) -> None:
    row = torch.randn(20_000) * 4
    kept, probs = keep_top_p(row, p), torch.softmax(row.double(), dim=-1)
    mass, last = float(probs[kept].sum()), float(probs[kept].min())
    assert p - 1e-5 <= mass
    assert mass - last < p + 1e-5
    assert probs[~kept].max() <= last


def test_repetition_penalty_is_that_of_transformers() -> None:
    for n, row in enumerate(rows(20)):
        made = sequence([1, 2, n], [2, 30, 31], repetition_penalty=1.7)
        processor = hf.RepetitionPenaltyLogitsProcessor(1.7)
        theirs = processor(torch.tensor([made.tokens]), row[None].clone())[0]
        torch.testing.assert_close(adjust(row.clone(), made), theirs, atol=0, rtol=0)


def test_presence_and_frequency_count_the_output_alone() -> None:
    made = sequence([1, 2, 2], [5, 5, 5, 9], presence_penalty=0.5, frequency_penalty=0.25)
    expected = torch.zeros(V)
    expected[5], expected[9] = -(0.5 + 3 * 0.25), -(0.5 + 0.25)
    assert torch.equal(adjust(torch.zeros(V), made), expected)
    assert torch.equal(adjust(torch.zeros(V), sequence([1], presence_penalty=0.5)), torch.zeros(V))


def test_bias_is_added_before_the_penalties_and_end_tokens_stay_shut() -> None:
    made = Sequence(
        request([3], stop_ids=[7, 999], logit_bias={3: 4.0, 7: 50.0}, repetition_penalty=2.0, min_tokens=1),
        0,
        tokenizer(),
    )
    adjusted = adjust(torch.ones(V), made)
    assert adjusted[3] == (1.0 + 4.0) / 2.0
    assert adjusted[7] == -torch.inf
    made.append(5, None)
    assert adjust(torch.ones(V), made)[7] == 51.0, "min_tokens is over"


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1, "temperature": 1.0}])
def test_greedy_takes_the_first_of_the_likeliest(params: dict[str, Any]) -> None:
    row = torch.zeros(V)
    row[[9, 4, 30]] = 2.0
    assert sample(row[None], [sequence(**params)]) == [4]


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_a_bias_forces_or_bans_a_token(bias: float) -> None:
    row = torch.zeros(V)
    row[8] = -10.0 if bias > 0 else 10.0
    for temperature in (0.0, 1.0):
        drawn = [
            sample(row[None], [sequence(logit_bias={8: bias}, temperature=temperature, seed=s)]) for s in range(40)
        ]
        assert all((token == [8]) == (bias > 0) for token in drawn)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_no_temperature_makes_an_infinity(temperature: float, scale: float) -> None:
    row = torch.randn(V) * scale
    drawn = [choose(row, sequence(temperature=temperature, seed=seed)) for seed in range(20)]
    assert None not in drawn
    if temperature < 1 or scale > 1:
        assert set(drawn) == {int(row.argmax())}


def test_the_only_token_left_is_drawn() -> None:
    row = torch.full((V,), -torch.inf)
    row[17] = -3.0
    restrictions: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"typical_p": 0.5}, {"min_p": 0.3}, {"top_k": 4}]
    for params in restrictions:
        assert sample(row[None], [sequence(temperature=1.0, seed=1, **params)]) == [17]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logit_bias": {2: 1.0}}])
def test_a_row_without_numbers_gives_none_and_touches_no_other(value: float, params: dict[str, Any]) -> None:
    logits = torch.randn(3, V)
    logits[1, 20] = value
    fine = [sequence(**params, seed=n) for n in (1, 2, 3)]
    expected = [sample(logits[i : i + 1], [sequence(**params, seed=i + 1)])[0] for i in (0, 2)]
    assert sample(logits, fine) == [expected[0], None, expected[1]]


def test_excluding_every_token_gives_none() -> None:
    assert sample(torch.full((1, V), -torch.inf), [sequence()]) == [None]
    shut = Sequence(request([1], stop_ids=range(V), min_tokens=2), 0, tokenizer())
    assert sample(torch.zeros(1, V), [shut]) == [None]


def test_sampling_writes_into_no_logits() -> None:
    logits = torch.randn(4, V)
    before = logits.clone()
    every: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 1.0,
        "logit_bias": {3: 5.0},
        "min_tokens": 1,
    }
    sample(logits, [sequence(), sequence(**every), sequence(temperature=1.0, **every), sequence(temperature=0.5)])
    assert torch.equal(logits, before)


def test_a_draw_is_where_the_number_falls() -> None:
    logits = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0]).log()
    at = {0.0: 0, 0.4999: 0, 0.5: 2, 0.7499: 2, 0.75: 3, 1.0 - 2**-53: 3}
    assert {u: draw(logits, u) for u in at} == at
    assert draw(torch.tensor([-torch.inf, 0.0]), 0.0) == 1


def test_the_largest_number_never_falls_off_the_end() -> None:
    for row in rows():
        assert row[draw(row, 1.0 - 2**-53)] > -torch.inf
        assert row[draw(row, 0.0)] > -torch.inf


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 8},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.5},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    num_draws = 2000
    row = torch.randn(12) * 1.5
    made = sequence([3], seed=11, **params)
    counts = torch.bincount(torch.tensor([choose(row, made) for _ in range(num_draws)]), minlength=12)
    scored = adjust(row.clone(), made) / made.request.params.temperature
    logits, tokens = restrict(scored, made.request.params)
    expected = torch.zeros(12)
    expected[torch.arange(12) if tokens is None else tokens] = torch.softmax(logits, dim=-1) * num_draws
    assert not counts[expected == 0].any()
    likely = expected >= 5
    chi_square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    degrees = int(likely.sum()) - 1
    # Wilson and Hilferty's approximation: a normal variable; 4 sigma is one run in 30,000, and the seed is fixed.
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert z < 4
    assert degrees >= 3
