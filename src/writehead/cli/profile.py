"""`writehead profile`: where the time of a step goes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from writehead.cli import bench, options


def profile(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A checkpoint, a Hub id, or random:SHAPE; default: the box.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps of a round.")] = 8,
    rounds: bench.Rounds = 3,
    weights: options.Weights = "auto", kernels: options.Kernels = "auto", kv_cache_dtype: options.CacheDtype = "auto",
    seconds: bench.Seconds = 0.5, buffer: bench.Buffer = None, seed: bench.Seed = 0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the last round as a trace for Perfetto.")
    ] = None,
    csv: bench.Csv = None, plot: bench.PlotStem = None,
) -> None:  # fmt: skip
    """Show where the time of a step goes: by operation and layer, against the machine's limits.

    Ends with one JSON line on stdout. What no kernel accounts for is Python, and torch's small operations in it. Every
    operation is called from Python here; otherwise the native kernels repeat a step of few tokens by one call.
    """
    from writehead.bench import limits
    from writehead.bench import profile as what
    from writehead.bench.report import check_writable
    from writehead.bench.subject import open_subject

    if trace is not None:
        check_writable("--trace", trace)
    report = bench.start_report(context, "profile", what.COLUMNS, seed=seed, csv=csv, plot=plot)
    subject = open_subject(
        model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, num_seqs=batch,
        length=prompt + 2 * steps + 1,
    )  # fmt: skip
    found = limits.measure(seconds=seconds, buffer_bytes=buffer and buffer << 20)
    print(found.describe(), file=sys.stderr)
    samples, plain = what.record(subject, batch=batch, prompt=prompt, steps=steps, rounds=rounds, seed=seed)
    summary = what.report_phases(report, samples, found)
    for phase, facts in summary.items():
        print(
            f"{phase}: {facts['ms']:.4g} ms, {100 * facts['python']:.1f} % of it between the kernels; the limits allow "
            f"{facts['limit_ms']:.4g} ms ({100 * facts['share']:.0f} %)",
            file=sys.stderr,
        )
    if trace is not None:
        from writehead.bench.trace import write

        last = [sample.spans for sample in (samples["prefill"][-1], *samples["decode"][-steps:])]
        write(trace, [span for spans in last for span in spans], {"command": report.command, **report.machine})
    report.finish(what.PLOT, limits=dataclasses.asdict(found), unrecorded_step_ms=1e3 * plain, **summary)
