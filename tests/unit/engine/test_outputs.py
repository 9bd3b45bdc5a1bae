"""What a user gets back."""

from __future__ import annotations

from typing import Any

import pytest

from tests import models
from tests.unit.engine.tiny import make_engine, request, run, tokenizer
from writehead.engine.outputs import RequestOutput, echo_text, make_output
from writehead.text import Tokenizer
from writehead.text.source import Source

PROMPT = (20, 21, 22, 23)


def output(**params: Any) -> RequestOutput:
    asked = request(PROMPT, **{"max_tokens": 3, **params})
    ((*sequences,),) = run(make_engine(), asked)
    return make_output("hello", sequences, echo_text(asked, tokenizer()))


def test_a_plain_output() -> None:
    found = output()
    (completion,) = found.outputs
    assert (found.prompt, found.prompt_token_ids, found.prompt_logprobs, found.finished) == (
        "hello",
        list(PROMPT),
        None,
        True,
    )
    assert completion.text == "".join(f"<{token}>" for token in completion.token_ids)
    assert (len(completion.token_ids), completion.index, completion.finish_reason) == (3, 0, "length")
    assert (completion.logprobs, completion.cumulative_logprob, completion.stop_reason) == (None, None, None)


def test_echo_puts_the_prompt_in_front_of_everything() -> None:
    plain, echoed = output(logprobs=1).outputs[0], output(logprobs=1, echo=True)
    (completion,) = echoed.outputs
    assert completion.text == "<20><21><22><23>" + plain.text
    assert completion.token_ids == [*PROMPT, *plain.token_ids]
    assert completion.logprobs is not None
    assert plain.logprobs is not None
    assert completion.logprobs[4:] == plain.logprobs
    assert echoed.prompt_logprobs == completion.logprobs[:4]
    assert completion.cumulative_logprob == plain.cumulative_logprob


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("prompt_logprobs", [None, 0, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_with_echo_there_is_an_entry_for_every_token(
    n: int, max_tokens: int, prompt_logprobs: int | None, logprobs: int | None
) -> None:
    found = output(n=n, max_tokens=max_tokens, echo=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    width = logprobs if prompt_logprobs is None else prompt_logprobs
    if width is None:
        assert found.prompt_logprobs is None
    else:
        assert found.prompt_logprobs is not None
        first, *others = found.prompt_logprobs
        assert first is None
        for token, entry in zip(PROMPT[1:], others, strict=True):
            assert entry is not None
            assert next(iter(entry)) == token
            assert len(entry) in (max(width, 1), width + 1)
    for completion in found.outputs:
        assert len(completion.token_ids) == len(PROMPT) + max_tokens
        if logprobs is None:
            assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
        else:
            assert completion.logprobs is not None
            for place, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                assert (entry is None) == (place == 0)
                assert entry is None or next(iter(entry)) == token


def test_an_output_of_an_unfinished_request_says_so() -> None:
    engine = make_engine()
    sequences = engine.add(request(PROMPT, max_tokens=9))
    engine.step()
    found = make_output(None, sequences, "")
    assert (found.finished, found.outputs[0].finish_reason, len(found.outputs[0].token_ids)) == (False, None, 1)


def test_an_output_is_a_copy() -> None:
    engine = make_engine()
    (sequence,) = engine.add(request(PROMPT, max_tokens=9, echo=True, logprobs=0))
    engine.step()
    found = make_output(None, [sequence], "").outputs[0]
    engine.step()
    assert (len(found.token_ids), len(sequence.tokens)) == (5, 6)
    assert found.logprobs is not None
    assert len(found.logprobs) == 5


def test_the_echo_ends_before_a_character_that_the_completion_finishes() -> None:
    code = Tokenizer(Source(origin="a test", backend=models.make_tokenizer()))
    tokens = code.encode("aé", add_special=False)
    assert len(tokens) == 3, "é must be two tokens"
    assert echo_text(request(tokens[:2], echo=True), code) == "a"
    assert echo_text(request([1, *tokens], echo=True), code) == "aé"
    assert echo_text(request([1, *tokens], echo=True, skip_special_tokens=False), code) == "<fim_prefix>aé"
    assert echo_text(request(tokens), code) == ""
