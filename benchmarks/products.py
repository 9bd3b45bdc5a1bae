"""The matrix products of one step of a model of SantaCoder's shape, by each way that torch offers, fp32.

    python benchmarks/products.py [--rows 1,2,4,8,16,32,64,128] [--rounds 5]

Alternates torch's `linear`, `addmm` with the operands swapped, and the product of the `onednn` kernels. Prints the time
of all products of a step (24 layers, width 2048, vocabulary 49,280; medians over the rounds) and one JSON line a number
of rows. Docs: docs/decisions/0004.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from writehead import kernels

SHAPES = {(2304, 2048): 24, (2048, 2048): 24, (8192, 2048): 24, (2048, 8192): 24, (49280, 2048): 1}
"""[out, in] of each product, and how often a step has it."""

COPIES = 3
"""Weights of each shape, used in turn, so that none stays in a cache."""


def swapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is not None
    return torch.addmm(bias[:, None], weight, x.t()).t().contiguous()


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "linear": torch.nn.functional.linear,
    "addmm": swapped,
    "onednn": kernels.load("onednn").linear,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    weights = {shape: [torch.randn(shape) for _ in range(COPIES)] for shape in SHAPES}
    for rows in (int(r) for r in args.rows.split(",")):
        with torch.inference_mode():
            totals = step_times(rows, weights, args.rounds)
        print(f"{rows} rows: " + ", ".join(f"{way} {ms:.0f} ms" for way, ms in totals.items()))
        print(json.dumps({"rows": rows, **{way: round(ms, 1) for way, ms in totals.items()}}), flush=True)


def step_times(rows: int, weights: dict[tuple[int, int], list[Tensor]], rounds: int) -> dict[str, float]:
    """Milliseconds of all products of a step, for each way."""
    totals = dict.fromkeys(WAYS, 0.0)
    for (outs, ins), count in SHAPES.items():
        x, bias = torch.randn(rows, ins), torch.randn(outs)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds + 1):  # the first round warms up
            for way, product in WAYS.items():
                start = time.perf_counter()
                for weight in weights[outs, ins]:
                    product(x, weight, bias)
                times[way].append((time.perf_counter() - start) / COPIES)
        for way in WAYS:
            totals[way] += count * statistics.median(times[way][1:]) * 1e3
    return totals


if __name__ == "__main__":
    main()
