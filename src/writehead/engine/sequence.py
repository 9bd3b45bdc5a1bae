"""What the engine knows of one completion while it runs."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from random import Random
from typing import Literal

from writehead.engine.request import Request
from writehead.text import TextStream, Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model's own distribution."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str


Logprobs = dict[int, Logprob]
"""The chosen token first, then the likeliest ones."""


class Sequence:
    """The mutable state of one completion. The scheduler owns `row`; the engine all else."""

    __slots__ = (
        "cumulative_logprob", "finish_reason", "index", "logprobs", "max_length", "num_computed", "num_prompt",
        "prompt_logprobs", "random", "request", "row", "stop_reason", "stream", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request, self.index = request, index
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        room = request.max_length - self.num_prompt
        self.max_length = self.num_prompt + (room if params.max_tokens is None else min(params.max_tokens, room))
        """Tokens at which it ends at the latest, the prompt's among them."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.row: int | None = None
        self.stream = TextStream(
            tokenizer,
            params.stop_strings,
            skip_special=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            prompt_ids=request.prompt_ids,
            min_tokens=params.min_tokens,
        )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.random = Random(f"{seed}/{index}")
        """One number a token, so that a choice depends on the seed and on nothing else that runs."""
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs | None] = []
        """Kept by the first of the request's sequences, for all of them."""
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that are known but not yet in the cache: the rest of the prompt, or the last token."""
        return len(self.tokens) - self.num_computed

    @property
    def held_row(self) -> int:
        """The cache row of a running sequence."""
        assert self.row is not None, "the sequence is not running"
        return self.row

    def append(self, token: int, logprobs: Logprobs | None) -> str:
        """Take the next token -> the text that is certain now. Sets `finish_reason` if the sequence ends with it."""
        params = self.request.params
        self.tokens.append(token)
        self.num_computed = len(self.tokens) - 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        if token in self.request.stop_ids and self.num_output > params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = token if token in params.stop_ids else None
            text = self.stream.push(token) if params.include_stop_str_in_output else ""
            return text + self.stream.finish()
        full = len(self.tokens) >= self.max_length
        text = self.stream.push(token) + (self.stream.finish() if full else "")
        if self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped
        elif full:
            self.finish_reason = "length"
        return text
