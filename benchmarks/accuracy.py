"""What rounded weights cost: perplexity and KL divergence against fp32, on text that the model in the box never saw.

    python benchmarks/accuracy.py [MODEL] [--tokens 50000] [--weights int8,int4] [--length 512]

MODEL is a checkpoint (default: the model in the box). The text is the held-out part of the box's corpus, in windows of
`length` tokens. `q4_0` among the weights is llama.cpp's format of that name (ggml-quants.c): 32 weights under one fp16
scale, the largest becoming -8; embeddings, head and activations stay exact, which favours it. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from writehead import kernels
from writehead.build import build, load_tokenizer, open_source
from writehead.models.decoder import Decoder
from writehead.models.layers import Linear
from writehead.train.config import TrainConfig
from writehead.train.corpus import read_corpus


def rounded_q4_0(decoder: Decoder) -> Decoder:
    """The decoder with every matrix between embedding and head rounded."""
    for name, module in decoder.named_modules():
        if isinstance(module, Linear) and name != "lm_head":
            assert isinstance(module.weight, Tensor)
            blocks = module.weight.data.unflatten(1, (-1, 32))
            scale = (blocks.gather(2, blocks.abs().argmax(2, keepdim=True)) / -8).half().float()
            steps = (blocks * torch.where(scale != 0, 1 / scale, 0)).round().clamp(-8, 7)
            module.weight.data = (steps * scale).flatten(1)
    return decoder


def load(model: str | None, weights: str) -> Decoder:
    """A decoder with such weights, on the kernels that users get."""
    source = open_source(model)
    if weights == "q4_0":
        return rounded_q4_0(build(source, weights="fp32", kernels=kernels.load(packed=False)))
    return build(source, weights=weights, kernels=kernels.load(packed=weights != "fp32"))


def windows(model: str | None, count: int, length: int) -> Tensor:
    """int64 [windows, length]."""
    config, tokenizer = TrainConfig(out=Path()), load_tokenizer(open_source(model))
    texts = read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out).held_out
    ids = [i for text in texts for i in tokenizer.encode(text.text)][: count // length * length]
    return torch.tensor(ids).view(-1, length)


def log_probabilities(decoder: Decoder, rows: Tensor) -> Iterator[Tensor]:
    """fp32 [length, V] of each window."""
    for row in rows:
        yield torch.log_softmax(decoder(row[None])[0].float(), dim=-1)


@torch.inference_mode()
def main() -> None:
    """Print a line a kind of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=50000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--weights", default="int8,int4,q4_0")
    args = parser.parse_args()
    names = args.weights.split(",")
    rows = windows(args.model, args.tokens, args.length)
    exact, others = load(args.model, "fp32"), [load(args.model, name) for name in names]
    loss, losses, divergences = 0.0, [0.0] * len(names), [0.0] * len(names)
    found = zip(rows, log_probabilities(exact, rows), *(log_probabilities(d, rows) for d in others), strict=True)
    for row, true, *rounded in found:
        loss -= true[:-1].gather(1, row[1:, None]).double().mean().item()
        for i, log_probs in enumerate(rounded):
            losses[i] -= log_probs[:-1].gather(1, row[1:, None]).double().mean().item()
            divergences[i] += (true.exp() * (true - log_probs)).sum(-1).double().mean().item()
    table = [
        {"weights": name, "perplexity_percent": 100 * math.expm1((ours - loss) / len(rows)), "kl": kl / len(rows)}
        for name, ours, kl in zip(names, losses, divergences, strict=True)
    ]
    print(f"{rows.numel()} tokens, perplexity of fp32 {math.exp(loss / len(rows)):.3f}")
    for line in table:
        print(f"{line['weights']}: perplexity {line['perplexity_percent']:+.3f} %, KL divergence {line['kl']:.5f}")
    print(json.dumps({"model": args.model or "box", "tokens": rows.numel(), "rows": table}))


if __name__ == "__main__":
    main()
