"""The two published computations of multi-query attention against each other: one decoded token, fp32.

    python benchmarks/mqa.py [--batch 64] [--context 1000] [--heads 16] [--head-dim 128] [--rounds 15]

Prints the median over the rounds of time(broadcast) / time(heads as queries), the two alternated, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from writehead import kernels
from writehead.kernels import AttentionSpec, CacheView, Group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 64), ("context", 1000), ("heads", 16), ("head-dim", 128), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (args.batch, 1, args.context, args.head_dim)
    view = CacheView(
        keys=(torch.randn(shape),),
        values=(torch.randn(shape),),
        rows=torch.arange(args.batch),
        slots=torch.full((args.batch,), args.context - 1),
        groups=(Group(num_new=1, rows=slice(0, args.batch), lengths=(args.context,) * args.batch),),
    )
    q = torch.randn(args.batch, args.heads, args.head_dim)
    spec = AttentionSpec(scale=args.head_dim**-0.5)
    backends = {name: kernels.load(name) for name in ("reference", "reference-broadcast")}
    times: dict[str, list[float]] = {name: [] for name in backends}
    outputs = {}
    with torch.inference_mode():
        for _ in range(args.rounds + 1):  # the first round warms up
            for name, backend in backends.items():
                start = time.perf_counter()
                outputs[name] = backend.cached_attention(q, view, 0, spec)
                times[name].append(time.perf_counter() - start)
    queries, broadcast = times["reference"][1:], times["reference-broadcast"][1:]
    ratio = statistics.median(b / q for q, b in zip(queries, broadcast, strict=True))
    difference = (outputs["reference"] - outputs["reference-broadcast"]).abs().max().item()
    for name, values in (("heads as queries", queries), ("broadcast", broadcast)):
        print(f"{name}: {statistics.median(values) * 1e3:.2f} ms")
    print(f"broadcast / heads as queries: {ratio:.2f} (median of {args.rounds} alternated rounds)")
    print(json.dumps({**vars(args), "ratio": round(ratio, 3), "largest_difference": difference}))


if __name__ == "__main__":
    main()
