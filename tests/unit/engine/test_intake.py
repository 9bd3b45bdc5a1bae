"""Every form that a prompt may have, and every prompt that cannot be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests import models
from tests.unit.engine.tiny import NUM_TOKENS, tokenizer
from writehead.engine.intake import Intake, as_params, as_prompts, prompt_text
from writehead.engine.request import SamplingParams
from writehead.errors import PromptError, UsageError
from writehead.text import Tokenizer, detect_fim
from writehead.text.source import Source

LIMIT = 32


@pytest.fixture(scope="module")
def code() -> Tokenizer:
    return Tokenizer(Source(origin="a test", backend=models.make_tokenizer(), eos_ids=frozenset({0})))


def make(tokens: Tokenizer) -> Intake:
    return Intake(
        tokens,
        detect_fim(tokens),
        max_length=LIMIT,
        vocab_size=tokens.vocab_size + 4,
        num_sampleable=tokens.vocab_size,
        stop_ids=frozenset({0, 2}),
    )


@pytest.fixture(scope="module")
def intake(code: Tokenizer) -> Intake:
    return make(code)


def ids(intake: Intake, prompt: Any, **params: Any) -> tuple[int, ...]:
    return intake.request(prompt, SamplingParams(**params), where="prompt 3").prompt_ids


def refusal(intake: Intake, prompt: Any, **params: Any) -> str:
    with pytest.raises(UsageError) as caught:
        ids(intake, prompt, **params)
    return str(caught.value)


def test_text_and_ids_in_every_form(intake: Intake, code: Tokenizer) -> None:
    expected = tuple(code.encode("x = 1"))
    forms: list[Any] = [
        "x = 1",
        list(expected),
        expected,
        np.array(expected),
        torch.tensor(expected),
        {"prompt": "x = 1"},
        {"prompt": "x = 1", "suffix": None},
        {"prompt_token_ids": list(expected)},
        {"prompt_token_ids": np.array(expected, dtype=np.int32)},
    ]
    for form in forms:
        found = ids(intake, form)
        assert found == expected
        assert all(type(i) is int for i in found)


def test_a_suffix_asks_for_the_middle(intake: Intake, code: Tokenizer) -> None:
    found = ids(intake, {"prompt": "a = ", "suffix": "\nb"}, max_tokens=4)
    assert found == (1, *code.encode("a = "), 3, *code.encode("\nb"), 2)


@pytest.mark.parametrize(
    ("max_tokens", "room"),
    [(4, LIMIT - 4), (LIMIT // 2, LIMIT // 2), (1000, LIMIT // 2), (None, LIMIT // 2), (0, LIMIT)],
)
def test_code_around_the_cursor_is_cut_to_leave_room(intake: Intake, max_tokens: int | None, room: int) -> None:
    prompt = {"prompt": "abcdefgh" * 20, "suffix": "ijklmnop" * 20}
    assert len(ids(intake, prompt, max_tokens=max_tokens, echo=max_tokens == 0)) == room


def test_text_that_spells_a_token_is_text(intake: Intake) -> None:
    assert not {0, 1, 2, 3, 4} & set(ids(intake, "<|endoftext|>"))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 3 is empty; give at least one token"),
        ([], "prompt 3 is empty; give at least one token"),
        ({"prompt_token_ids": []}, "prompt 3 is empty; give at least one token"),
        ([5, -1], "prompt 3 has the token id -1; the vocabulary has 0 to 323"),
        ([5, 324, 999], "prompt 3 has the token id 324; the vocabulary has 0 to 323"),
        ([2**70], f"prompt 3 has the token id {2**70}; the vocabulary has 0 to 323"),
        ([1.0], "prompt 3 is neither text nor a list of token ids"),
        ([1, "a"], "prompt 3 is neither text nor a list of token ids"),
        ([True, False], "prompt 3 is neither text nor a list of token ids"),
        ([[1]], "prompt 3 is neither text nor a list of token ids"),
        (None, "prompt 3 is neither text nor a list of token ids"),
        (b"def", "prompt 3 is neither text nor a list of token ids"),
        ({"prompt_token_ids": "x"}, "prompt 3 is neither text nor a list of token ids"),
        ({"prompt_token_ids": 7}, "prompt 3 is neither text nor a list of token ids"),
        (np.array([0.5]), "prompt 3 is neither text nor a list of token ids"),
        ({"prompt": 7}, "prompt 3: 'prompt' and 'suffix' must be text"),
        ({"prompt": "x", "suffix": 7}, "prompt 3: 'prompt' and 'suffix' must be text"),
        ("x" * 33, "prompt 3 has 33 tokens; the limit is 32 for prompt and completion together, so at most 31 fit: "
                   "shorten it"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_its_name(intake: Intake, prompt: Any, message: str) -> None:
    assert refusal(intake, prompt) == message


@pytest.mark.parametrize(
    ("prompt", "keys"),
    [
        ({}, "nothing"),
        ({"text": "x"}, "'text'"),
        ({"suffix": "x"}, "'suffix'"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "'prompt', 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "suffix": "x"}, "'prompt_token_ids', 'suffix'"),
    ],
)
def test_a_mapping_has_the_keys_it_may_have(intake: Intake, prompt: Mapping[str, Any], keys: str) -> None:
    expected = f"prompt 3 is a mapping with {keys}; it takes 'prompt' with an optional 'suffix', or 'prompt_token_ids'"
    assert refusal(intake, prompt) == expected


def test_text_that_is_not_unicode_is_refused_by_its_name(intake: Intake) -> None:
    assert refusal(intake, "\ud800").startswith("prompt 3: The text cannot be tokenized")


def test_a_vocabulary_without_markers_has_no_middle() -> None:
    message = "prompt 3 has a suffix, but the model's vocabulary has no fill-in-the-middle tokens"
    assert refusal(make(tokenizer()), {"prompt": "x", "suffix": "y"}) == message


@pytest.mark.parametrize(("max_tokens", "longest"), [(1, LIMIT - 1), (None, LIMIT - 1), (0, LIMIT)])
def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer(
    intake: Intake, max_tokens: int | None, longest: int
) -> None:
    assert len(ids(intake, [5] * longest, max_tokens=max_tokens, prompt_logprobs=0)) == longest
    assert f"at most {longest} fit" in refusal(intake, [5] * (longest + 1), max_tokens=max_tokens, prompt_logprobs=0)


def test_text_that_no_tokens_could_hold_is_refused_by_its_bytes(intake: Intake, code: Tokenizer) -> None:
    assert code.max_token_bytes == 13
    fits = 2 * (31 * 13 // 2)
    assert refusal(intake, "é" * (fits // 2)) == (
        f"prompt 3 has {fits} tokens; the limit is 32 for prompt and completion together, so at most 31 fit: shorten it"
    )
    assert refusal(intake, "é" * (fits // 2 + 1)) == (
        f"prompt 3 has {fits + 2} bytes; the limit is 32 tokens for prompt and completion together, and no token has "
        f"more than 13 bytes, so at most {31 * 13} fit: shorten it"
    )
    assert f"at most {32 * 13} fit" in refusal(intake, "x" * 10**6, max_tokens=0, echo=True)


@pytest.mark.parametrize("params", [{"logit_bias": {NUM_TOKENS: 1.0}}, {"stop_token_ids": [3, NUM_TOKENS]}])
def test_parameters_name_tokens_that_exist(params: dict[str, Any]) -> None:
    assert (
        refusal(make(tokenizer()), [1], **params)
        == f"{next(iter(params))} has the token id 60; the tokenizer has 0 to 59"
    )


def test_what_ends_a_request(intake: Intake) -> None:
    def stops(**params: Any) -> frozenset[int]:
        return intake.request([1], SamplingParams(**params), where="").stop_ids

    assert stops() == {0, 2}
    assert stops(stop_token_ids=[9]) == {0, 2, 9}
    assert stops(stop_token_ids=[9], ignore_eos=True) == {9}


def test_requests_are_numbered(intake: Intake) -> None:
    first, second = (intake.request("x", SamplingParams(), where="") for _ in range(2))
    assert second.id == first.id + 1
    assert second.max_length == LIMIT


def test_one_prompt_or_several() -> None:
    one: list[Any] = ["x", {"prompt": "x"}, [1, 2]]
    for prompt in one:
        assert as_prompts(prompt) == {"the prompt": prompt}
    assert as_prompts(np.array([1, 2])) == {"the prompt": [1, 2]}
    several: list[Any] = [[1, 2], "x", (3,)]
    assert as_prompts(several) == {"prompt 0": [1, 2], "prompt 1": "x", "prompt 2": (3,)}
    assert as_prompts(["x"]) == {"prompt 0": "x"}
    assert as_prompts(str(n) for n in range(2)) == {"prompt 0": "0", "prompt 1": "1"}
    rows = as_prompts(np.array([[1, 2], [3, 4]])).values()
    assert [list(row) for row in rows] == [[1, 2], [3, 4]]
    assert as_prompts([]) == {}


@pytest.mark.parametrize("prompts", [None, 5, b"def", np.array(5)])
def test_what_is_no_prompt_at_all(prompts: Any) -> None:
    with pytest.raises(
        PromptError, match=r"^the prompt is .*; expected text, token ids, a mapping, or a list of these$"
    ):
        as_prompts(prompts)


def test_parameters_for_all_or_for_each() -> None:
    a, b = SamplingParams(seed=1), SamplingParams(seed=2)
    assert as_params(None, 2) == [SamplingParams()] * 2
    assert as_params(a, 2) == [a, a]
    assert as_params([a, b], 2) == [a, b]
    assert as_params(iter((a, b)), 2) == [a, b]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "sampling_params has 1 entries for 2 prompts; give one, or one for each"),
        ([], "sampling_params has 0 entries for 2 prompts; give one, or one for each"),
        ([SamplingParams(), None], "sampling_params has None; expected SamplingParams, or a list of them"),
        (0.7, "sampling_params has 0.7; expected SamplingParams, or a list of them"),
        ({"n": 2}, "sampling_params has 'n'; expected SamplingParams, or a list of them"),
    ],
)
def test_parameters_that_do_not_fit(params: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        as_params(params, 2)
    assert str(caught.value) == message


def test_the_text_of_a_prompt() -> None:
    assert prompt_text("x") == prompt_text({"prompt": "x", "suffix": "y"}) == "x"
    assert prompt_text([1]) is prompt_text({"prompt_token_ids": [1]}) is None
