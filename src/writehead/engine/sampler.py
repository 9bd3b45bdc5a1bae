"""From logits to tokens: what vLLM's sampling parameters mean, one pure function each.

A token depends on its own row of logits, its own parameters and its own generator: never on the rest of the batch.
The order is vLLM's: log-probabilities of the raw logits; logit bias, minimum length, penalties; temperature; min_p,
top_k, top_p, typical_p; one draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from writehead.engine.request import SamplingParams
from writehead.engine.sequence import Logprob, Logprobs, Sequence
from writehead.text import Tokenizer


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """fp32 logits [S, V], a row a sequence -> the next token of each."""
    plain = [s.request.params.temperature == 0.0 and not _adjusts(s) for s in sequences]
    greedy: list[int] = logits.argmax(dim=-1).tolist() if any(plain) else []
    return [greedy[i] if plain[i] else _sample_one(logits[i], s) for i, s in enumerate(sequences)]


def logprobs_of(logits: Tensor, chosen: int, num_top: int, tokenizer: Tokenizer) -> Logprobs:
    """[V] raw logits -> the chosen token's log-probability and the likeliest ones', the chosen first."""
    values = torch.log_softmax(logits.float(), dim=-1)
    top = torch.topk(values, num_top).indices.tolist() if num_top else []
    ranked = {token: rank for rank, token in enumerate(top, start=1)}
    rank = ranked.get(chosen) or int((values > values[chosen]).sum()) + 1
    order = [chosen, *(t for t in top if t != chosen)]
    picked: list[float] = values[torch.tensor(order)].tolist()
    return {
        token: Logprob(value, rank if token == chosen else ranked[token], _spell(tokenizer, token))
        for token, value in zip(order, picked, strict=True)
    }


def _spell(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _adjusts(sequence: Sequence) -> bool:
    """Whether the logits are changed before the choice."""
    p = sequence.request.params
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalized or bool(p.logit_bias) or sequence.num_output < p.min_tokens


def _sample_one(logits: Tensor, sequence: Sequence) -> int:
    params = sequence.request.params
    if _adjusts(sequence):
        logits = _adjust(logits.clone(), sequence)
    if params.greedy:
        return int(logits.argmax())
    probs = torch.softmax(_filter(logits / params.temperature, params), dim=-1)
    return int(torch.multinomial(probs, 1, generator=sequence.generator))


def _adjust(logits: Tensor, sequence: Sequence) -> Tensor:
    """Writes and returns `logits` [V]."""
    params, request = sequence.request.params, sequence.request
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.tokens).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output:
        tokens, counts = torch.tensor(sequence.output_ids).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if sequence.num_output < params.min_tokens:
        logits[[i for i in request.stop_ids if i < logits.shape[-1]]] = -torch.inf
    return logits


def _filter(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] -> the same with excluded tokens at -inf; the likeliest token always stays."""
    if params.min_p > 0.0:
        probs = torch.softmax(logits, dim=-1)
        logits = logits.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if 0 < params.top_k < logits.shape[-1]:
        kth = torch.topk(logits, params.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.softmax(logits, dim=-1).sort(descending=True, stable=True)
        outside = ordered.cumsum(0) - ordered >= params.top_p
        logits = logits.index_fill(0, order[outside], -torch.inf)
    if params.typical_p < 1.0:
        logits = _typical(logits, params.typical_p)
    return logits


def _typical(logits: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose information is nearest to the entropy, until their probabilities add up to `mass`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    entropy = -torch.nansum(probs * logprobs)
    order = (-logprobs - entropy).abs().argsort(stable=True)
    ordered = probs[order]
    outside = ordered.cumsum(0) - ordered >= mass
    return logits.index_fill(0, order[outside], -torch.inf)
