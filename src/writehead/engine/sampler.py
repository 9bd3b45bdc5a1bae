"""From logits to tokens: what vLLM's sampling parameters mean, one pure function each.

A token depends on its own row of logits, its own parameters and its own random numbers: never on the rest of the batch.
The order is vLLM's: minimum length, logit bias, penalties; temperature; min_p, top_k, top_p, then typical_p; one draw.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from writehead.engine.request import SamplingParams
from writehead.engine.sequence import Sequence


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int | None]:
    """fp32 logits [S, V], a row a sequence -> the next token of each; None if its numbers give no choice (NaN)."""
    rows = logits.numpy()
    greedy = rows.argmax(axis=-1).tolist()  # NaN and infinity come out on top; a tenth of the time that torch takes
    tokens: list[int | None] = []
    for i, (sequence, likeliest) in enumerate(zip(sequences, greedy, strict=True)):
        if not math.isfinite(rows[i, likeliest]):
            tokens.append(None)
        elif sequence.request.params.greedy and not _adjusts(sequence):
            tokens.append(likeliest)
        else:
            tokens.append(choose(logits[i], sequence))
    return tokens


def choose(logits: Tensor, sequence: Sequence) -> int | None:
    """[V] -> the next token; None if no finite number is left to choose from."""
    params = sequence.request.params
    if _adjusts(sequence):
        logits = adjust(logits.clone(), sequence)
    best, greedy = logits.max(dim=-1)
    if not best.isfinite():
        return None
    if params.greedy:
        return int(greedy)
    # From the top down to 0, so that no temperature makes an infinity.
    logits, tokens = restrict((logits - best) / params.temperature, params)
    drawn = draw(logits, sequence.random.random())
    return drawn if tokens is None else int(tokens[drawn])


def draw(logits: Tensor, uniform: float) -> int:
    """[N], a number in [0, 1) -> where it falls among the probabilities laid side by side."""
    cumulative = torch.softmax(logits, dim=-1).cumsum(0, dtype=torch.float64)
    return int(torch.searchsorted(cumulative / cumulative[-1], uniform, right=True))


def adjust(logits: Tensor, sequence: Sequence) -> Tensor:
    """Writes and returns `logits` [V]: what changes the order of tokens."""
    params = sequence.request.params
    if sequence.num_output < params.min_tokens:
        logits[[i for i in sequence.request.stop_ids if i < len(logits)]] = -torch.inf
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(sequence.tokens)))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output:
        tokens, counts = torch.tensor(sequence.output_ids).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def _adjusts(sequence: Sequence) -> bool:
    p = sequence.request.params
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalized or bool(p.logit_bias) or sequence.num_output < p.min_tokens


def restrict(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """[V] at temperature -> the logits of the tokens that may be drawn, and their ids (None: all)."""
    tokens: Tensor | None = None
    for wanted, keep, value in (
        (params.min_p > 0.0, keep_min_p, params.min_p),
        (params.top_k > 0, keep_top_k, params.top_k),
        (params.top_p < 1.0, keep_top_p, params.top_p),
        (params.typical_p < 1.0, keep_typical, params.typical_p),
    ):
        if wanted:
            kept = keep(logits, value).nonzero().squeeze(1)
            logits, tokens = logits[kept], kept if tokens is None else tokens[kept]
    return logits, tokens


def keep_min_p(logits: Tensor, fraction: float) -> Tensor:
    """[N] -> bool [N]: tokens at least `fraction` as likely as the likeliest."""
    probs = torch.softmax(logits, dim=-1)
    return probs >= fraction * probs.max()


def keep_top_k(logits: Tensor, count: float) -> Tensor:
    """[N] -> bool [N]: the `count` likeliest, and what is as likely as the last of them."""
    return logits >= torch.topk(logits, min(int(count), len(logits))).values[-1]


def keep_top_p(logits: Tensor, mass: float) -> Tensor:
    """[N] -> bool [N]: the likeliest tokens, until their probabilities add up to `mass`."""
    probs = torch.softmax(logits, dim=-1)
    # All tokens below (1 - mass) / N together have less than 1 - mass: they are outside and need no sorting.
    likely = (probs >= probs.max().clamp(max=(1.0 - mass) / len(probs))).nonzero().squeeze(1)
    ordered, order = probs[likely].sort(descending=True, stable=True)
    inside = ordered.cumsum(0, dtype=torch.float64) - ordered < mass
    return torch.zeros(len(probs), dtype=torch.bool).index_fill_(0, likely[order[inside]], True)


def keep_typical(logits: Tensor, mass: float) -> Tensor:
    """[N] -> bool [N]: the tokens nearest to the expected information, until they add up to `mass`, ties included."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    distance = (logprobs - torch.nansum(probs * logprobs)).abs()
    ordered, order = distance.sort(stable=True)
    count = int((probs[order].cumsum(0, dtype=torch.float64) < mass).sum())
    return distance <= ordered[min(count, len(ordered) - 1)]
