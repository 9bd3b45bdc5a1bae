"""The heart: schedule, build the batch, forward, sample, commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.cache import KVCache
from writehead.engine.batch import build_batch
from writehead.engine.request import Request
from writehead.engine.sampler import sample
from writehead.engine.scheduler import Scheduler, Step
from writehead.engine.scores import score
from writehead.engine.sequence import FinishReason, Logprobs, Sequence
from writehead.models.decoder import Decoder
from writehead.text import Tokenizer

_SCORED_AT_ONCE = 256  # tokens of a prompt: a row of logits is as wide as the vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What came out of a step for one sequence: a token and the text that is now certain, or its end."""

    request_id: int
    index: int
    text: str
    token_id: int | None
    logprobs: Logprobs | None
    sequence: Sequence
    """The state behind the event; read it after a terminal event, never change it."""
    finish_reason: FinishReason | None
    """Set exactly once for each sequence, on its last event."""


class Engine:
    """Runs sequences through a decoder. It owns the cache and the scheduler, does no I/O and starts no thread.

    A step that is interrupted leaves every sequence as it was or with its next token: it can be run again.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, cache: KVCache, *, max_step_tokens: int | None = None
    ) -> None:
        self.decoder, self.tokenizer, self.cache = decoder, tokenizer, cache
        self.scheduler = Scheduler(cache, max_step_tokens=max_step_tokens)
        self.num_sampleable = min(tokenizer.vocab_size, decoder.config.vocab_size)
        """Rows of the vocabulary past the tokenizer's are padding and never sampled."""

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; a sequence for each of its `n` completions."""
        sequences = [Sequence(request, index, self.tokenizer) for index in range(request.params.n)]
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One forward pass over what the scheduler grants; the events it caused. Empty when there is no work."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        batch = build_batch(step, self.cache)
        hidden = self.decoder.hidden(batch.token_ids, batch.positions, batch.view)
        self._score_prompts(step, hidden)
        logits = self._logits(hidden[batch.ends])
        ready = [grant.sequence for grant in step.grants if grant.completes]
        tokens = sample(logits[:, : self.num_sampleable], ready)
        logprobs = self._score(logits, tokens, ready)
        for grant in step.grants:
            if not grant.completes:
                grant.sequence.num_computed += grant.num_new
        return [_commit(*choice) for choice in zip(ready, tokens, logprobs, strict=True)]

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence, unless it has ended. No event follows, and its row is free in the next step."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"

    def _logits(self, hidden: Tensor) -> Tensor:
        """fp32 [N, V]."""
        return self.decoder.logits(hidden).float()

    def _score_prompts(self, step: Step, hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that this step predicts. Writing them twice changes nothing."""
        first = 0
        for grant in step.grants:
            sequence, start = grant.sequence, grant.sequence.num_computed
            num_top = sequence.request.params.num_prompt_logprobs
            if num_top is not None and sequence.index == 0 and start < sequence.num_prompt:
                targets = sequence.tokens[start + 1 : min(start + grant.num_new + 1, sequence.num_prompt)]
                scored = sequence.prompt_logprobs[: start + 1] or [None]
                for at in range(0, len(targets), _SCORED_AT_ONCE):
                    some = targets[at : at + _SCORED_AT_ONCE]
                    logits = self._logits(hidden[first + at : first + at + len(some)])
                    scored += score(logits, some, num_top, self.tokenizer)
                sequence.prompt_logprobs = scored
            first += grant.num_new

    def _score(self, logits: Tensor, tokens: list[int | None], ready: list[Sequence]) -> list[Logprobs | None]:
        """The log-probabilities of the chosen tokens, for the sequences that asked."""
        found: list[Logprobs | None] = [None] * len(ready)
        for i, (sequence, token) in enumerate(zip(ready, tokens, strict=True)):
            num_top = sequence.request.params.logprobs
            if num_top is not None and token is not None:
                (found[i],) = score(logits[i : i + 1], [token], num_top, self.tokenizer)
        return found


def _commit(sequence: Sequence, token: int | None, logprobs: Logprobs | None) -> Event:
    """Give a sequence its next token, or its end, and say what happened."""
    text = ""
    if token is None:
        sequence.finish_reason = "error"
        sequence.stop_reason = "the model's logits leave no token to choose: they are NaN or infinite"
    elif sequence.request.params.max_tokens == 0:
        sequence.finish_reason, token, logprobs = "length", None, None
    else:
        text = sequence.append(token, logprobs)
    return Event(
        request_id=sequence.request.id,
        index=sequence.index,
        text=text,
        token_id=token,
        logprobs=logprobs,
        sequence=sequence,
        finish_reason=sequence.finish_reason,
    )
