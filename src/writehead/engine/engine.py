"""The heart: schedule, build the batch, forward, sample, commit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from writehead.cache import KVCache
from writehead.engine.batch import Batch, build_batch
from writehead.engine.request import Request
from writehead.engine.sampler import logprobs_of, sample
from writehead.engine.scheduler import Scheduler, Step
from writehead.engine.sequence import FinishReason, Logprobs, Sequence
from writehead.models.decoder import Decoder
from writehead.text import Tokenizer


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
    """Runs sequences through a decoder. It owns the cache and the scheduler, does no I/O and starts no thread."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, cache: KVCache, *, max_step_tokens: int) -> None:
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
        logits = self._forward(batch)
        self._record_prompts(step, batch, logits)
        done = [(i, grant.sequence) for i, grant in enumerate(step.grants) if grant.completes]
        rows = logits[[batch.spans[i][1] - 1 for i, _ in done]]
        for grant in step.grants:
            grant.sequence.num_computed += grant.num_new
        tokens = sample(rows, [sequence for _, sequence in done])
        return [self._commit(s, token, row) for (_, s), token, row in zip(done, tokens, rows, strict=True)]

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence now; its row is free before the next step. No event follows."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"
            self.scheduler.remove(sequence)

    def _forward(self, batch: Batch) -> Tensor:
        """fp32 logits of the wanted tokens, [len(logits_at), num_sampleable]."""
        hidden = self.decoder.hidden(batch.token_ids, batch.positions, batch.view)
        return self.decoder.logits(hidden[batch.logits_at])[:, : self.num_sampleable].float()

    def _record_prompts(self, step: Step, batch: Batch, logits: Tensor) -> None:
        for grant, (first, last) in zip(step.grants, batch.spans, strict=True):
            sequence, num_top = grant.sequence, grant.sequence.request.params.prompt_logprobs
            if num_top is None or sequence.num_output:
                continue
            if sequence.num_computed == 0:
                sequence.prompt_logprobs.append(None)
            targets = sequence.tokens[sequence.num_computed + 1 : sequence.num_computed + grant.num_new + 1]
            for row, token in zip(logits[first:last], targets, strict=False):
                sequence.prompt_logprobs.append(logprobs_of(row, token, num_top, self.tokenizer))

    def _commit(self, sequence: Sequence, token: int, logits: Tensor) -> Event:
        """Append a token, find out whether the sequence ends with it, and say what happened."""
        params = sequence.request.params
        if params.max_tokens == 0:
            return self._finish(sequence, "length", "", None, None)
        logprobs = None
        if params.logprobs is not None:
            logprobs = logprobs_of(logits, token, params.logprobs, self.tokenizer)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token].logprob
        sequence.tokens.append(token)
        if token in sequence.request.stop_ids and sequence.num_output > params.min_tokens:
            sequence.stop_reason = token if token in (params.stop_token_ids or ()) else None
            text = sequence.stream.push(token) if params.include_stop_str_in_output else ""
            return self._finish(sequence, "stop", text + sequence.stream.finish(), token, logprobs)
        text = sequence.stream.push(token)
        if sequence.stream.stopped is not None:
            sequence.stop_reason = sequence.stream.stopped
            return self._finish(sequence, "stop", text, token, logprobs)
        full = params.max_tokens is not None and sequence.num_output >= params.max_tokens
        if full or len(sequence.tokens) >= sequence.request.max_length:
            return self._finish(sequence, "length", text + sequence.stream.finish(), token, logprobs)
        return _event(sequence, text, token, logprobs)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, text: str, token: int | None, logprobs: Logprobs | None
    ) -> Event:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        return _event(sequence, text, token, logprobs)


def _event(sequence: Sequence, text: str, token: int | None, logprobs: Logprobs | None) -> Event:
    return Event(
        request_id=sequence.request.id,
        index=sequence.index,
        text=text,
        token_id=token,
        logprobs=logprobs,
        sequence=sequence,
        finish_reason=sequence.finish_reason,
    )
