"""Code length, against its definition and against the xz program's format."""

from __future__ import annotations

import lzma
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from writehead import kernels
from writehead.models.decoder import Decoder
from writehead.train import TrainConfig
from writehead.train.evaluate import CodeLength, bits_per_byte, xz_bits_per_byte
from writehead.train.init import initialize
from writehead.train.trainer import model_config
from writehead.train.vocabulary import encode_text, train_tokenizer

TOKENIZER = train_tokenizer(["def f(x):\n    return x\n"], vocab_size=280)
TEXT = "".join(f"x{i} = 'é{i * i}'\n" for i in range(12))


class Uniform(nn.Module):
    """Knows nothing; remembers how long its inputs were."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.lengths.append(ids.shape[1])
        return torch.zeros(*ids.shape, 256)


@pytest.mark.parametrize("context", [8, 16, 64, 1024])
def test_every_token_is_counted_once(context: int) -> None:
    model = Uniform()
    tokens = len(encode_text(TOKENIZER, TEXT))
    length = bits_per_byte(model, TOKENIZER, [TEXT], context=context)
    assert length.bits[0] == pytest.approx(8 * tokens)
    assert length.num_bytes == (len(TEXT.encode()),)
    assert max(model.lengths) == min(context, tokens)


@pytest.mark.parametrize("context", [16, 32, 512])
def test_tokens_are_predicted_from_half_a_context_or_more(context: int) -> None:
    config = TrainConfig(out=Path("run"), layers=1, width=16, heads=2, context=512)
    model = Decoder(model_config(config, vocab_size=280), kernels.load("reference"))
    initialize(model, num_layers=1, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)  # so that the context matters
    ids = [0, *encode_text(TOKENIZER, TEXT)]
    expected = 0.0
    for place in range(1, len(ids)):
        if place <= context:
            start = 0
        else:
            windows = (place - context - 1) // (context // 2 + 1)
            start = min(context + 1 + windows * (context // 2 + 1) - context // 2, len(ids) - 1 - context)
        assert place - start >= min(place, context // 2)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:place]]))[0, -1]
        expected -= torch.log_softmax(logits, -1)[ids[place]].item() / math.log(2)
    assert bits_per_byte(model, TOKENIZER, [TEXT], context=context).bits[0] == pytest.approx(expected, rel=1e-4)


def test_xz_is_file_by_file_at_its_best() -> None:
    length = xz_bits_per_byte([TEXT, "x"])
    best = lzma.compress(TEXT.encode(), preset=9 | lzma.PRESET_EXTREME)
    assert best[:6] == b"\xfd7zXZ\x00"
    assert length.bits[0] == 8 * len(best)
    assert length.num_bytes == (len(TEXT.encode()), 1)
    assert length.mean == sum(length.bits) / (len(TEXT.encode()) + 1)


def test_comparison_counts_texts() -> None:
    assert CodeLength((1.0, 5.0, 2.0), (1, 1, 1)).shorter_than(CodeLength((2.0, 4.0, 2.0), (1, 1, 1))) == 1
