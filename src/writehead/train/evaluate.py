"""What a trained model is worth on files that it never saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import nn

from writehead.train.vocabulary import END_OF_TEXT_ID, encode_text


@dataclass(frozen=True)
class BitsPerByte:
    """Bits and bytes of each text, in order."""

    bits: tuple[float, ...]
    bytes: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Bits a byte over all texts together."""
        return sum(self.bits) / max(1, sum(self.bytes))


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, tokenizer: Tokenizer, texts: Sequence[str], *, context: int, max_tokens: int | None = None
) -> BitsPerByte:
    """Code length of each text under the model, from its first byte on, after an end-of-text token.

    Windows of `context` tokens overlap by half, so a token has at least context / 2 tokens before it (or all there
    are). `max_tokens` scores only the beginning of a text.
    """
    bits, sizes = [], []
    for text in texts:
        ids = encode_text(tokenizer, text)[:max_tokens]
        bits.append(_nats(model, [END_OF_TEXT_ID, *ids], context) / math.log(2))
        sizes.append(len(text.encode()) if max_tokens is None else len(tokenizer.decode(ids, skip_special_tokens=False).encode()))
    return BitsPerByte(tuple(bits), tuple(sizes))


def _nats(model: nn.Module, ids: list[int], context: int) -> float:
    """Summed -log p of ids[1:]."""
    total, scored = 0.0, 1
    while scored < len(ids):
        start = 0 if scored == 1 else max(0, min(scored - context // 2, len(ids) - 1 - context))
        window = torch.tensor(ids[start : start + context + 1])
        logp = torch.log_softmax(model(window[None, :-1])[0].float(), dim=-1)
        picked = logp.gather(1, window[1:, None])[:, 0]
        total -= picked[scored - start - 1 :].double().sum().item()
        scored = start + len(window)
    return total
