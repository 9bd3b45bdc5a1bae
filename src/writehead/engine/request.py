"""What a user asks: sampling parameters with vLLM's names, and a request, both frozen."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from writehead.errors import UsageError

MAX_STOPS = 64
MAX_LOGPROBS = 100
MAX_N = 128
MAX_BIAS = 1e6
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's, so that scripts move over."""

    n: int = 1
    """Completions for each prompt."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: until the model's limit."""
    min_tokens: int = 0
    """No end token is chosen, and no stop string that is complete counts, within this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities add up to p (arXiv 1904.09751)."""
    min_p: float = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest (arXiv 2407.01082)."""
    typical_p: float = 1.0
    """Sample from the tokens nearest to the expected information that add up to p (arXiv 2202.00666)."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in the prompt or the output (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token of the output."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Same seed and prompt, same text; each of `n` completions draws its own numbers. None: a fresh seed every time."""
    stop: str | Collection[str] | None = None
    """Text that ends the completion; it is cut off unless include_stop_str_in_output."""
    stop_token_ids: Collection[int] | None = None
    """Tokens that end the completion, besides the model's own."""
    ignore_eos: bool = False
    """Generate past the model's own end tokens."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Return the log-probability of each token and of this many likeliest ones (-1: all), as the model has them, before
    any of the adjustments above."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; the first has none."""
    echo: bool = False
    """Begin text, token ids and logprobs with the prompt's. With max_tokens=0 the prompt is scored and nothing else."""

    def __post_init__(self) -> None:
        _whole(self, "n", 1, MAX_N)
        _whole(self, "max_tokens", 0 if self.prompt_logprobs is not None or self.echo else 1, None, optional=True)
        _whole(self, "min_tokens", 0, None)
        _whole(self, "top_k", -1, None)
        _whole(self, "logprobs", -1, MAX_LOGPROBS, optional=True)
        _whole(self, "prompt_logprobs", -1, MAX_LOGPROBS, optional=True)
        _whole(self, "seed", -(2**63), 2**64 - 1, optional=True)
        _real(self, "temperature", 0.0, 100.0)
        _real(self, "top_p", 0.0, 1.0, above=True)
        _real(self, "min_p", 0.0, 1.0)
        _real(self, "typical_p", 0.0, 1.0, above=True)
        _real(self, "repetition_penalty", 0.0, 100.0, above=True)
        _real(self, "presence_penalty", -100.0, 100.0)
        _real(self, "frequency_penalty", -100.0, 100.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower one of them"
            )
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | Collection | None) or isinstance(self.stop, bytes | Mapping):
            raise UsageError(f"stop is {self.stop!r}; expected a string or a list of strings")
        if not all(isinstance(s, str) and s for s in self.stop_strings):
            raise UsageError("stop holds an empty string or something that is no string; give non-empty strings")
        if len(self.stop_strings) > MAX_STOPS:
            raise UsageError(f"stop has {len(self.stop_strings)} strings; at most {MAX_STOPS} are supported")
        ids = self.stop_token_ids
        if not isinstance(ids, Collection | None) or not all(map(_is_id, () if ids is None else ids)):
            raise UsageError(f"stop_token_ids is {ids!r}; expected a list of token ids (whole numbers from 0)")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping | None):
            raise UsageError(f"logit_bias is {self.logit_bias!r}; expected a mapping of token ids to numbers")
        for token, bias in (self.logit_bias or {}).items():
            if not _is_id(token) or not _is_real(bias) or not abs(bias) <= MAX_BIAS:
                raise UsageError(
                    f"logit_bias maps {token!r} to {bias!r}; expected a token id and a number from {-MAX_BIAS:g} to "
                    f"{MAX_BIAS:g}"
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else tuple(self.stop)

    @property
    def stop_ids(self) -> frozenset[int]:
        """stop_token_ids as a set."""
        return frozenset[int]() if self.stop_token_ids is None else frozenset(self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens to return for each of the prompt's; None: the prompt is not scored."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt and what to do with it."""

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_length: int
    """Tokens of prompt and completion together, at most."""
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    """Tokens that end it: the model's own (unless ignored) and the user's."""


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return _is_whole(value) and value >= 0  # type: ignore[operator]


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _whole(params: SamplingParams, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if optional and value is None:
        return
    if not _is_whole(value) or value < low or (high is not None and value > high):
        limits = f"from {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} is {value!r}; expected a whole number {limits}")


def _real(params: SamplingParams, name: str, low: float, high: float, *, above: bool = False) -> None:
    value = getattr(params, name)
    if not _is_real(value) or value > high or value < low or (above and value == low):
        raise UsageError(f"{name} is {value!r}; expected a number {'above' if above else 'from'} {low:g} to {high:g}")
