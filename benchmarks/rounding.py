"""What rounding the activations costs, by how they are rounded: perplexity and KL divergence against fp32.

    python benchmarks/rounding.py MODEL [--windows 8] [--length 512]

The text is the running Python's own library, every ninth module, in windows of `length` tokens. Weights stay fp32. Ends
with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from writehead.build import build, load_tokenizer, open_source
from writehead.kernels import PackedWeight
from writehead.kernels.packed import round_rows
from writehead.kernels.reference import ReferenceKernels

METHODS: list[tuple[int, int] | str] = [(0, 0), (128, 0), (32, 0), (0, 4), (0, 8), (0, 16), "round_rows"]
"""Values under one scale (0: a row) and values that are left as they are; last, what the kernels do."""


class Rounding(ReferenceKernels):
    """The reference, but every product reads rounded activations."""

    method: tuple[int, int] | str | None = None

    def _product(self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
        return super()._product(self._round(x), weight, bias)

    def _round(self, x: Tensor) -> Tensor:
        if self.method is None:
            return x
        if isinstance(self.method, str):
            return round_rows(x)
        group, outliers = self.method
        places = x.abs().topk(outliers, dim=-1).indices
        rest = x.scatter(-1, places, 0.0)
        size = math.gcd(group, x.shape[-1]) if group else x.shape[-1]
        groups = rest.unflatten(-1, (-1, size))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return ((groups / scale).round() * scale).flatten(-2).scatter(-1, places, x.gather(-1, places))


@torch.inference_mode()
def main() -> None:
    """Print a line a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    source, kernels = open_source(args.model), Rounding()
    tokenizer, model = load_tokenizer(source), build(source, weights="fp32", kernels=kernels)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::9]
    ids = [i for file in files for i in tokenizer.encode(file.read_text("utf-8")[:6000])]
    windows = torch.tensor(ids[: args.windows * args.length]).view(args.windows, args.length)

    def log_probabilities() -> list[Tensor]:
        return [torch.log_softmax(model(row[None])[0].float(), dim=-1) for row in windows]

    def loss(found: list[Tensor]) -> float:
        each = [-f[:-1].gather(1, row[1:, None]).mean().item() for f, row in zip(found, windows, strict=True)]
        return sum(each) / len(each)

    exact = log_probabilities()
    rows: list[dict[str, object]] = []
    for kernels.method in METHODS:
        found = log_probabilities()
        kl = sum((e.exp() * (e - f)).sum(-1).mean().item() for e, f in zip(exact, found, strict=True)) / len(exact)
        percent = 100 * math.expm1(loss(found) - loss(exact))
        rows.append({"method": kernels.method, "kl": kl, "perplexity_percent": percent})
        print(f"{kernels.method}: KL divergence {kl:.4f}, perplexity {percent:+.3f} %", flush=True)
    print(json.dumps({"model": args.model, "tokens": windows.numel(), "rows": rows}))


if __name__ == "__main__":
    main()
