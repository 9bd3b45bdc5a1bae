"""Code length: what a trained model knows of text that it never saw, against a general compressor."""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import nn

from writehead.train.vocabulary import END_OF_TEXT_ID, encode_text


@dataclass(frozen=True)
class CodeLength:
    """Bits that each text costs and bytes that it has, in order."""

    bits: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Bits a byte over all texts together."""
        return sum(self.bits) / sum(self.num_bytes)

    def shorter_than(self, other: CodeLength) -> int:
        """For how many texts this one needs fewer bits."""
        return sum(a < b for a, b in zip(self.bits, other.bits, strict=True))


@torch.no_grad()
def bits_per_byte(model: nn.Module, tokenizer: Tokenizer, texts: Sequence[str], *, context: int) -> CodeLength:
    """Code length of each text under the model, from its first byte on, after one end-of-text token.

    Windows of `context` tokens overlap by half, so each token is predicted from at least context / 2 tokens before it,
    or all there are. Special tokens' names in a text count as text.
    """
    nats = [_nats(model, [END_OF_TEXT_ID, *encode_text(tokenizer, text)], context) for text in texts]
    return CodeLength(tuple(n / math.log(2) for n in nats), tuple(len(text.encode()) for text in texts))


def xz_bits_per_byte(texts: Sequence[str]) -> CodeLength:
    """Code length of each text as a file of its own under `xz -9e`."""
    blobs = [text.encode() for text in texts]
    sizes = [len(lzma.compress(b, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)) for b in blobs]
    return CodeLength(tuple(8.0 * size for size in sizes), tuple(map(len, blobs)))


def _nats(model: nn.Module, ids: list[int], context: int) -> float:
    """Summed -log p of ids[1:]."""
    total, scored = 0.0, 1
    while scored < len(ids):
        start = 0 if scored == 1 else max(0, min(scored - context // 2, len(ids) - 1 - context))
        window = torch.tensor(ids[start : start + context + 1])
        log_probs = torch.log_softmax(model(window[None, :-1])[0].float(), dim=-1)
        picked = log_probs.gather(1, window[1:, None])[:, 0]
        total -= picked[scored - start - 1 :].double().sum().item()
        scored = start + len(window)
    return total
