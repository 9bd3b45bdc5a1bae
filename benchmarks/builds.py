"""One matrix product in two builds of the native library, alternated: what a change of the kernels is worth.

    cmake -S src/writehead/kernels/cpu/native -B build/before && cmake --build build/before    (at the commit before)
    python benchmarks/builds.py build/before/libwritehead_cpu.so [--weights int8] [--size 8192x2048] [--rows 1,16,64]

Both multiply the same packed weights, as many copies of them as leave the caches (huge pages, as a model's), by all
threads. Prints microseconds of each, the bytes of weights read in a second, the median of the rounds' ratios (this
build / the other), and whether the results are the same bytes. Docs: docs/decisions/0006.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import time
from ctypes import addressof, byref
from pathlib import Path

import torch
from torch import Tensor

from writehead.kernels.cpu.library import Library, Linear, Ops, open_file, open_library
from writehead.kernels.packed import PackedWeight, packed_bytes, parse_format

READ = 700_000_000
"""Bytes of all copies together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--size", default="8192x2048", help="outputs x inputs")
    parser.add_argument("--rows", default="1,4,8,16,64,128,512")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each number of rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    builds = [opened(args.other), opened(None)]
    shape = tuple(int(n) for n in args.size.split("x"))
    weights = copies(builds[0], (shape[0], shape[1]), args.weights)
    for rows in (int(n) for n in args.rows.split(",")):
        print(json.dumps({"weights": args.weights, "size": args.size} | compare(builds, weights, rows, args.seconds)))


def opened(path: Path | None) -> Ops:
    """The fastest set of a build; None: the installed one."""
    library = open_library() if path is None else open_file(path)
    if not isinstance(library, Library):
        sys.exit(f"error: {library}")
    library.handle.writehead_threads(torch.get_num_threads())
    return library.ops(next(s.name for s in library.sets if s.missing is None))


def copies(ops: Ops, shape: tuple[int, int], weights: str) -> list[PackedWeight]:
    """Copies of one packed weight, one after the other."""
    format = parse_format(weights, packs_floats=True)
    size = packed_bytes(shape, format)
    each, count = -(-size // 64) * 64, max(2, READ // size)
    block = mmap.mmap(-1, each * count)
    block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    found = [PackedWeight(shape, format, memory[i * each : i * each + size]) for i in range(count)]
    numbers = torch.randn(shape) * 0.02
    ops.pack(byref(found[0].record), numbers.data_ptr(), 0, shape[1])
    for weight in found[1:]:
        weight.memory.copy_(found[0].memory)
    return found


def compare(builds: list[Ops], weights: list[PackedWeight], rows: int, seconds: float) -> dict[str, object]:
    outs, ins = weights[0].shape
    x, bias, y = torch.randn(rows, ins), torch.randn(outs), torch.empty(rows, outs)
    calls = [
        Linear(addressof(w.record), rows, x.data_ptr(), bias.data_ptr(), None, y.data_ptr(), 0)
        for w in (weights if rows < 32 else weights[:8])
    ]
    results: list[Tensor] = []
    times: list[list[float]] = [[], []]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 3:
        for ops, spent in zip(builds, times, strict=True):
            start = time.perf_counter()
            for call in calls:
                ops.linear(byref(call))
            spent.append((time.perf_counter() - start) / len(calls))
            if len(results) < len(builds):
                results.append(y.clone())
    other, own = (statistics.median(spent) for spent in times)
    return {
        "rows": rows, "other_us": round(other * 1e6), "us": round(own * 1e6),
        "gb_s": round(weights[0].memory.numel() / own / 1e9, 1),
        "ratio": round(statistics.median(b / a for a, b in zip(*times, strict=True)), 3),
        "same_bytes": torch.equal(*results),
    }  # fmt: skip


if __name__ == "__main__":
    main()
