"""Many completions at once: what a machine does in a second when there is always work."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.subject import Ids, Run, Subject
from writehead.bench.timing import median, percentile

COLUMNS = {
    "requests": "prompts given at once",
    "batch": "sequences that may run at the same time; the others wait for a place",
    "tokens_in": "tokens of all prompts together",
    "tokens_out": "tokens generated, all together",
    "seconds": "from the first request to the last token, in the round of the median",
    "in_tok_s": "tokens_in / seconds",
    "out_tok_s": "tokens_out / seconds",
    "requests_s": "requests / seconds",
    "ttft_ms": "milliseconds from the start to a request's first token, waiting included, median over the requests",
    "ttft_ms_p99": "99 % of the requests have their first token by then",
    "steps": "forward passes",
    "rounds": "measured; one more warms up",
}

PLOT = Plot(x="batch", y="out_tok_s", label="tokens generated in a second")


@dataclass(frozen=True, slots=True)
class _Round:
    seconds: float
    firsts: list[float]
    steps: int


def ragged(count: int, low: int, high: int, seed: int) -> list[int]:
    """`count` lengths between low and high, both included and reached."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    lengths[0] = high
    if count > 1:
        lengths[1] = low
    return lengths


def measure(subject: Subject, report: Report, *, lengths: Seq[int], new: int, rounds: int) -> None:
    """One row: all prompts through the engine at once, as often as there are rounds."""
    prompts = subject.prompts(lengths, report.seed)
    done = [_one(subject, prompts, new) for _ in range(rounds + 1)][1:]
    middle = sorted(done, key=lambda r: r.seconds)[(rounds - 1) // 2]
    tokens_in, tokens_out = sum(lengths), new * len(lengths)
    report.add(
        requests=len(lengths), batch=subject.engine.cache.num_rows, tokens_in=tokens_in, tokens_out=tokens_out,
        seconds=middle.seconds, in_tok_s=tokens_in / middle.seconds, out_tok_s=tokens_out / middle.seconds,
        requests_s=len(lengths) / middle.seconds, ttft_ms=1e3 * median(middle.firsts),
        ttft_ms_p99=1e3 * percentile(middle.firsts, 0.99), steps=middle.steps, rounds=rounds,
    )  # fmt: skip


def _one(subject: Subject, prompts: Seq[Ids], new: int) -> _Round:
    run = Run(subject.engine, prompts, new)
    start = time.perf_counter()
    firsts: dict[int, float] = {}
    steps = 0
    while any(s.finish_reason is None for s in run.sequences):
        events = subject.engine.step()
        now = time.perf_counter() - start
        steps += 1
        for event in events:
            firsts.setdefault(event.request_id, now)
    seconds = time.perf_counter() - start
    run.close()
    return _Round(seconds, list(firsts.values()), steps)
