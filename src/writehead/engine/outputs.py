"""What a user gets back, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from writehead.engine.request import Request
from writehead.engine.sequence import FinishReason, Logprobs, Sequence
from writehead.text import TextStream, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """With the token that ended it; with echo after the prompt's."""
    cumulative_logprob: float | None
    """Sum over the generated tokens; None unless logprobs were asked for."""
    logprobs: list[Logprobs | None] | None
    """One entry a token of token_ids; with echo the first has none."""
    finish_reason: FinishReason | None
    """stop: an end token or a stop string; length: max_tokens or the model's limit; error: see stop_reason."""
    stop_reason: int | str | None
    """The stop string or stop_token_id that ended it; None for the model's own end; what went wrong after an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: int
    prompt: str | None
    """The prompt as text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    """One entry a token of the prompt, the first None. Asked for by prompt_logprobs, or by logprobs with echo."""
    outputs: list[CompletionOutput]
    finished: bool


def make_output(prompt: str | None, sequences: Seq[Sequence], echo: str) -> RequestOutput:
    """The output of the sequences of one request; `echo` is what `echo_text` gives."""
    request, scored = sequences[0].request, sequences[0].prompt_logprobs
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=list(request.prompt_ids),
        prompt_logprobs=None if request.params.num_prompt_logprobs is None else list(scored),
        outputs=[_completion(s, echo, scored if request.params.echo else []) for s in sequences],
        finished=all(s.finish_reason is not None for s in sequences),
    )


def echo_text(request: Request, tokenizer: Tokenizer) -> str:
    """What stands before the completions: the prompt's text with `echo`, up to a character that they will finish."""
    if not request.params.echo:
        return ""
    stream = TextStream(tokenizer, skip_special=request.params.skip_special_tokens)
    return "".join(map(stream.push, request.prompt_ids))


def _completion(sequence: Sequence, echo: str, echoed: list[Logprobs | None]) -> CompletionOutput:
    params = sequence.request.params
    return CompletionOutput(
        index=sequence.index,
        text=echo + sequence.stream.text,
        token_ids=list(sequence.tokens) if params.echo else sequence.output_ids,
        cumulative_logprob=None if params.logprobs is None else sequence.cumulative_logprob,
        logprobs=None if params.logprobs is None else [*echoed, *sequence.logprobs],
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
