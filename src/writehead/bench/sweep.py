"""Decoding over batch and context, for each way to attend: what sharing one key/value head is worth, and until when.

Three sides, alternated: the shape with one shared head and the query heads as rows; the same with the shared head
expanded to all query heads; and the multi-head twin. All are noise, in a process each, so that one that runs out of
memory takes nothing with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

from writehead.bench.child import BROADCAST, MULTI_HEAD, QUERIES
from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.sides import Outcome, Side, compare
from writehead.bench.worker import Worker

COLUMNS = {
    "kind": "multi-head: a key/value head for each query head; broadcast: one shared head, expanded to all of them; "
    "queries: one shared head, the query heads as rows of one product",
    "batch": "sequences that decode together",
    "context": "tokens that each has in the cache",
    "status": "measured; refused: it does not fit the memory; died: the process ended",
    "step_ms": "milliseconds of one decoding step, median over the rounds",
    "tok_s": "tokens generated in a second: batch / step",
    "speedup": "time of the multi-head twin / this time, median over the rounds",
    "cache_gb": "the key/value cache in thousands of millions of bytes",
    "alternated": "whether the kinds took turns; not if they do not fit the memory together",
    "reason": "why it was not measured",
}

PLOT = Plot(x="context", y="tok_s", by=("kind", "batch"), kind="line", label="tokens generated in a second", log=True)

COMMAND = (sys.executable, "-m", "writehead.bench.child")


def make_sides(model: str | None, *, weights: str, kernels: str, kv_cache_dtype: str = "auto", seed: int) -> list[Side]:
    """The three kinds of a shape, on the same kernels."""
    return [
        Side(
            kind, partial(Worker, kind, COMMAND),
            {"model": model, "heads": kind, "weights": weights, "kernels": kernels, "kv_cache_dtype": kv_cache_dtype,
             "seed": seed},
        )
        for kind in (MULTI_HEAD, BROADCAST, QUERIES)
    ]  # fmt: skip


def measure(
    report: Report, sides: list[Side], *, batches: Seq[int], contexts: Seq[int], steps: int, rounds: int
) -> None:
    """Rows for each batch and context, as they come."""
    for batch in batches:
        for context in contexts:
            opening = {"do": "open", "batch": batch, "context": context,
                       "capacity": context + (rounds + 1) * steps + 1}  # fmt: skip
            outcomes = compare(sides, {"do": "decode", "steps": steps}, opening=opening, rounds=rounds)
            add_rows(report, outcomes, batch, context)


def add_rows(report: Report, outcomes: Mapping[str, Outcome], batch: int, context: int) -> None:
    """A row for each kind."""
    for name, outcome in outcomes.items():
        seconds, slower = outcome.seconds, outcome.ratio_to(outcomes.get(MULTI_HEAD))
        report.add(
            kind=name, batch=batch, context=context, status=outcome.status,
            step_ms=seconds and 1e3 * seconds, tok_s=seconds and batch / seconds, speedup=slower and 1 / slower,
            cache_gb=outcome.answer.get("cache_bytes", 0) / 1e9 or None, alternated=outcome.alternated,
            reason=outcome.reason,
        )  # fmt: skip
