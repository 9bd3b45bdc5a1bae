"""A step taken apart: by operation, by layer, against the limits, and what is left for Python between the kernels."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

from writehead.bench.cost import NOTHING, Cost
from writehead.bench.limits import Limits
from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.spans import DECODER, KERNEL, LAYER, STEP, Recorder, Span, recording
from writehead.bench.subject import Run, Subject
from writehead.bench.timing import median

COLUMNS = {
    "phase": "prefill: the whole prompt of all sequences; decode: one step",
    "op": "operation of the kernels' contract; python: what is between them",
    "of": "where in the model, all layers together; python: within the decoder, or in the engine around it",
    "calls": "calls in the phase",
    "ms": "milliseconds in the phase, all calls together",
    "part": "ms / the whole phase",
    "mbytes": "millions of bytes that the calls must read and write",
    "gb_s": "those bytes in a second",
    "gop_s": "operations in a second, in thousands of millions; a multiply-add is two",
    "limit": "which measured limit bounds them: bandwidth or arithmetic",
    "share": "the least time that the limit allows / ms",
}

PLOT = Plot(x=("op", "of"), y="part", by=("phase",), label="share of the phase")

PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase as it was recorded: its spans, and the whole of it, in nanoseconds."""

    spans: list[Span]
    total: int


@dataclass(slots=True)
class Part:
    """All calls of one operation at one place."""

    calls: float = 0.0
    nanoseconds: float = 0.0
    cost: Cost = NOTHING


def record(
    subject: Subject, *, batch: int, prompt: int, steps: int, rounds: int, seed: int
) -> tuple[dict[str, list[Sample]], float]:
    """Samples of both phases, and the seconds of a decoding step that nobody records (median). A round warms up."""
    prompts = subject.prompts([prompt] * batch, seed)
    samples: dict[str, list[Sample]] = {"prefill": [], "decode": []}
    plain: list[float] = []
    for number in range(rounds + 1):
        run = Run(subject.engine, prompts, 2 * steps + 1)
        recorder = Recorder()
        with recording(subject.engine, recorder):
            found = {"prefill": [_sample(recorder, run.read_prompts)]}
            found["decode"] = [_sample(recorder, partial(run.decode, 1)) for _ in range(steps)]
        unrecorded = run.decode(steps)
        run.close()
        if number:
            plain += unrecorded
            for phase, some in found.items():
                samples[phase] += some
    return samples, median(plain)


def _sample(recorder: Recorder, work: Any) -> Sample:
    first, start = len(recorder.spans), recorder.now()
    work()
    recorder.add(STEP, "step", "", start)
    return Sample(recorder.spans[first:], recorder.spans[-1].duration)


def report_phases(report: Report, samples: dict[str, list[Sample]], limits: Limits) -> dict[str, Any]:
    """A row for each operation of each phase, the longest first -> what sums them up."""
    summary: dict[str, Any] = {}
    for phase, some in samples.items():
        middle = _middle(some)
        parts, total = _parts(middle), sum(sample.total for sample in middle) / len(middle)
        for (op, of), part in sorted(parts.items(), key=lambda item: -item[1].nanoseconds):
            _row(report, limits, phase, op, of, part, total)
        least = sum(limits.seconds(part.cost)[0] for part in parts.values())
        between = sum(part.nanoseconds for (op, _), part in parts.items() if op == PYTHON)
        summary[phase] = {
            "ms": _six(total / 1e6), "python": _six(between / total), "limit_ms": _six(1e3 * least),
            "share": _six(1e9 * least / total), "layers": _layers(middle),
        }  # fmt: skip
    return summary


def _row(report: Report, limits: Limits, phase: str, op: str, of: str, part: Part, total: float) -> None:
    seconds = part.nanoseconds / 1e9
    common = {"phase": phase, "op": op, "of": of, "ms": 1e3 * seconds, "part": part.nanoseconds / total}
    if op == PYTHON or not seconds:
        report.add(**common)
        return
    least, limit = limits.seconds(part.cost)
    report.add(
        **common, calls=part.calls, mbytes=part.cost.bytes / 1e6, gb_s=part.cost.bytes / seconds / 1e9,
        gop_s=part.cost.ops / seconds / 1e9, limit=limit, share=least / seconds,
    )  # fmt: skip


def _middle(samples: Seq[Sample]) -> list[Sample]:
    """The middle half by total time: its mean adds up, and what disturbed a step is not in it."""
    ordered = sorted(samples, key=lambda sample: sample.total)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def _parts(samples: Seq[Sample]) -> dict[tuple[str, str], Part]:
    """The mean of the samples by operation and place; python is what no kernel accounts for."""
    parts: dict[tuple[str, str], Part] = {}
    count = len(samples)
    inside = outside = 0.0
    for sample in samples:
        of_kernels = of_decoder = 0
        for span in sample.spans:
            if span.kind == KERNEL:
                part = parts.setdefault((span.name, span.of), Part())
                part.calls += 1 / count
                part.nanoseconds += span.duration / count
                part.cost = part.cost + span.cost
                of_kernels += span.duration
            elif span.kind == DECODER:
                of_decoder += span.duration
        inside += (of_decoder - of_kernels) / count
        outside += (sample.total - of_decoder) / count
    for part in parts.values():
        part.calls = round(part.calls, 3)
        part.cost = Cost(part.cost.bytes // count, part.cost.ops // count, part.cost.dtype)
    parts[PYTHON, "decoder"], parts[PYTHON, "engine"] = Part(0, inside), Part(0, outside)
    return parts


def _layers(samples: Seq[Sample]) -> list[dict[str, float]]:
    """Milliseconds of each layer, as a whole and in its kernels."""
    layers: dict[int, dict[str, float]] = {}
    for sample in samples:
        for span in sample.spans:
            if span.layer is not None:
                entry = layers.setdefault(span.layer, {"layer": span.layer, "ms": 0.0, "kernels_ms": 0.0})
                entry["ms" if span.kind == LAYER else "kernels_ms"] += span.duration / 1e6 / len(samples)
    return [{key: _six(value) for key, value in layers[index].items()} for index in sorted(layers)]


def _six(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value
