"""Log-probabilities under the model's own distribution: over all rows of its vocabulary, before any adjustment."""

from __future__ import annotations

import torch
from torch import Tensor

from writehead.engine.sequence import Logprob, Logprobs
from writehead.text import Tokenizer


def score(logits: Tensor, tokens: list[int], num_top: int, tokenizer: Tokenizer) -> list[Logprobs]:
    """fp32 logits [N, V], a token a row -> its log-probability and the `num_top` likeliest ones' (-1: all)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens).unsqueeze(1))
    ranks: list[int] = (logprobs > chosen).sum(1).add(1).tolist()
    num_top = logprobs.shape[1] if num_top == -1 else min(num_top, logprobs.shape[1])
    values, ids = logprobs.topk(num_top, dim=-1)
    rows = zip(tokens, chosen.squeeze(1).tolist(), ranks, values.tolist(), ids.tolist(), strict=True)
    return [_row(token, value, rank, dict(zip(i, v, strict=True)), tokenizer) for token, value, rank, v, i in rows]


def _row(token: int, value: float, rank: int, top: dict[int, float], tokenizer: Tokenizer) -> Logprobs:
    found = {token: Logprob(value, rank, _spell(tokenizer, token))}
    for place, (other, logprob) in enumerate(top.items(), start=1):
        if other != token:
            found[other] = Logprob(logprob, place, _spell(tokenizer, other))
    return found


def _spell(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
