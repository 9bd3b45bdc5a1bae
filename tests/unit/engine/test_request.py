"""Sampling parameters: vLLM's names and defaults, and one sentence for each value that cannot work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from writehead.engine.request import SamplingParams
from writehead.errors import UsageError


def test_the_defaults_are_those_of_vllm() -> None:
    p = SamplingParams()
    assert (p.n, p.max_tokens, p.min_tokens, p.temperature, p.top_k, p.top_p, p.min_p) == (1, 16, 0, 1.0, 0, 1.0, 0.0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (p.skip_special_tokens, p.ignore_eos, p.include_stop_str_in_output) == (True, False, False)
    assert {p.seed, p.stop, p.stop_token_ids, p.logit_bias, p.logprobs, p.prompt_logprobs} == {None}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n is 0; expected a whole number from 1 to 128"),
        ({"n": True}, "n is True; expected a whole number from 1 to 128"),
        ({"max_tokens": 0}, "max_tokens is 0; expected a whole number from 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; expected a whole number from 1"),
        ({"min_tokens": -1}, "min_tokens is -1; expected a whole number from 0"),
        ({"min_tokens": 17}, "min_tokens is 17, more than max_tokens 16; lower one of them"),
        ({"temperature": -0.1}, "temperature is -0.1; expected a number from 0 to 100"),
        ({"temperature": math.nan}, "temperature is nan; expected a number from 0 to 100"),
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number from 0 to 100"),
        ({"top_k": -2}, "top_k is -2; expected a whole number from -1"),
        ({"top_p": 0}, "top_p is 0; expected a number above 0 to 1"),
        ({"top_p": 1.01}, "top_p is 1.01; expected a number above 0 to 1"),
        ({"min_p": 2}, "min_p is 2; expected a number from 0 to 1"),
        ({"typical_p": 0.0}, "typical_p is 0.0; expected a number above 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected a number above 0 to 100"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf; expected a number from -100 to 100"),
        ({"frequency_penalty": None}, "frequency_penalty is None; expected a number from -100 to 100"),
        ({"seed": 2**64}, f"seed is {2**64}; expected a whole number from {-(2**63)} to {2**64 - 1}"),
        ({"logprobs": 101}, "logprobs is 101; expected a whole number from -1 to 100"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2; expected a whole number from -1 to 100"),
        ({"echo": 1}, "echo is 1; expected True or False"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; expected True or False"),
        ({"stop": 5}, "stop is 5; expected a string or a list of strings"),
        ({"stop": b"x"}, "stop is b'x'; expected a string or a list of strings"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}; expected a string or a list of strings"),
        ({"stop": ""}, "stop holds an empty string or something that is no string; give non-empty strings"),
        ({"stop": ["a", 3]}, "stop holds an empty string or something that is no string; give non-empty strings"),
        ({"stop": ["a"] * 65}, "stop has 65 strings; at most 64 are supported"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; expected a list of token ids (whole numbers from 0)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is [-1]; expected a list of token ids (whole numbers from 0)"),
        ({"logit_bias": [1]}, "logit_bias is [1]; expected a mapping of token ids to numbers"),
        ({"logit_bias": {"5": 1}}, "logit_bias maps '5' to 1; expected a token id and a number from -1e+06 to 1e+06"),
        (
            {"logit_bias": {5: math.nan}},
            "logit_bias maps 5 to nan; expected a token id and a number from -1e+06 to 1e+06",
        ),
        (
            {"logit_bias": {5: 1e7}},
            "logit_bias maps 5 to 10000000.0; expected a token id and a number from -1e+06 to 1e+06",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**params)
    assert str(caught.value) == message


def test_an_unknown_name_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'best_of'"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]


def test_numbers_of_numpy_are_numbers() -> None:
    p = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=np.array([3, 4]).tolist(), top_k=-1)  # type: ignore[arg-type]
    assert (p.n, p.temperature, p.top_k) == (2, 0.5, -1)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, None),
        ({"logprobs": 3}, None),
        ({"prompt_logprobs": 2}, 2),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 0}, 0),
    ],
)
def test_when_a_prompt_is_scored(params: dict[str, Any], expected: int | None) -> None:
    assert SamplingParams(**params).num_prompt_logprobs == expected


@pytest.mark.parametrize("params", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_token_at_all_makes_sense_when_the_prompt_comes_back(params: dict[str, Any]) -> None:
    assert SamplingParams(max_tokens=0, **params).max_tokens == 0


def test_arrays_are_lists() -> None:
    p = SamplingParams(stop=np.array(["a", "b"]), stop_token_ids=np.array([3, 4]))
    assert (p.stop_strings, p.stop_ids) == (("a", "b"), frozenset({3, 4}))
    assert SamplingParams(stop=[], stop_token_ids=()).stop_ids == frozenset()


def test_stop_strings_are_a_tuple_whatever_they_were() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
