"""The sampling options of `generate` and `chat`: the fields of SamplingParams, under their own names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from writehead.engine.request import SamplingParams
from writehead.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from writehead.engine.sequence import Sequence

HELP = {
    "n": "Completions of the prompt.",
    "max_tokens": "Tokens to generate at most.",
    "min_tokens": "Nothing ends the text before this many tokens.",
    "temperature": "0 takes the likeliest token.",
    "top_k": "Sample from the k likeliest tokens; 0: all.",
    "top_p": "Sample from the likeliest tokens whose probabilities add up to p.",
    "min_p": "Sample from tokens at least this fraction as likely as the likeliest.",
    "typical_p": "Sample from the tokens nearest to the expected information that add up to p.",
    "repetition_penalty": "Divides the score of tokens that were there before; 1: none.",
    "presence_penalty": "Subtracted from the score of each token of the output.",
    "frequency_penalty": "Subtracted for each time that a token is in the output.",
    "logit_bias": "ID=BIAS: added to the score of a token id. Repeatable.",
    "seed": "Same seed, same text.",
    "stop": "Text that ends the completion and is cut off. Repeatable.",
    "stop_token_ids": "Token id that ends the completion. Repeatable.",
    "ignore_eos": "Generate past the model's own end.",
    "include_stop_str_in_output": "Keep the stop text.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "logprobs": "Log-probabilities of this many likeliest tokens, in --json.",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "echo": "Begin with the prompt.",
}
"""A line for each field; a test holds that none is missing."""

DEFAULTS: Mapping[str, Any] = {"max_tokens": 128, "temperature": 0.0}
"""Where the command line differs from the library: longer, and repeatable."""

ONE_ANSWER = {k: v for k, v in HELP.items() if k not in ("n", "logprobs", "prompt_logprobs", "echo")}
"""The fields that make sense in a conversation."""


def read_params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters that the options spell. Raises UsageError."""
    given = {key: value for key, value in values.items() if key != "logit_bias"}
    return SamplingParams(**given, logit_bias=_read_bias(values.get("logit_bias") or ()))


def check_end(sequence: Sequence) -> None:
    """Raise CheckpointError if the sequence ended because the model computes no numbers."""
    if sequence.finish_reason == "error":
        raise CheckpointError(f"{sequence.stop_reason}; check the weights, or use --weights fp32 if it was fp16")


def _read_bias(items: Collection[str]) -> dict[int, float]:
    bias = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UsageError(f"--logit-bias is '{item}'; expected ID=BIAS, such as 42=-5") from None
    return bias
