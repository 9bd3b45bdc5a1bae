"""What a user gets back, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from writehead.engine.sequence import FinishReason, Logprobs, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the generated tokens; None unless logprobs were asked for."""
    logprobs: list[Logprobs | None] | None
    """One entry a token of token_ids; with echo the first has none."""
    finish_reason: FinishReason | None
    """stop: an end token or a stop string; length: max_tokens or the model's limit."""
    stop_reason: int | str | None
    """The stop string or stop_token_id that ended it; None for the model's own end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: int
    prompt: str | None
    """The prompt as text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool


def make_output(prompt: str | None, sequences: Seq[Sequence], echo_text: str) -> RequestOutput:
    """The output of the finished sequences of one request; `echo_text` is the prompt as text, for `echo`."""
    request = sequences[0].request
    with_prompt = request.params.prompt_logprobs is not None
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=list(request.prompt_ids),
        prompt_logprobs=list(sequences[0].prompt_logprobs) if with_prompt else None,
        outputs=[_completion(s, echo_text) for s in sequences],
        finished=all(s.finish_reason is not None for s in sequences),
    )


def _completion(sequence: Sequence, echo_text: str) -> CompletionOutput:
    params, echo = sequence.request.params, sequence.request.params.echo
    logprobs: list[Logprobs | None] | None = None
    if params.logprobs is not None:
        logprobs = [*(sequence.prompt_logprobs if echo else ()), *sequence.logprobs]
    return CompletionOutput(
        index=sequence.index,
        text=(echo_text if echo else "") + sequence.stream.text,
        token_ids=sequence.tokens if echo else sequence.output_ids,
        cumulative_logprob=None if params.logprobs is None else sequence.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
