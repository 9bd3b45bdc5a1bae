"""What the engine knows of one completion while it runs."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal

import torch

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
    """The mutable state of one completion. The scheduler owns `row` and `num_computed`; the engine all else."""

    __slots__ = (
        "cumulative_logprob", "finish_reason", "generator", "index", "logprobs", "num_computed", "num_prompt",
        "prompt_logprobs", "request", "row", "stop_reason", "stream", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request, self.index = request, index
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.row: int | None = None
        self.stream = TextStream(
            tokenizer,
            params.stop_strings,
            skip_special=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self.generator = torch.Generator()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self.generator.manual_seed((seed + index) % 2**63)
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs | None] = []
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
