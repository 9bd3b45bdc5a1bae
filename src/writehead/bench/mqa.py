"""The published comparison of multi-head and multi-query attention, as far as this machine's memory goes.

Two sets. `attention`: what made people look at MQA again (bigcode-project/bigcode-inference-benchmark, issue 3, October
2022): 0.3 B parameters, fp32, 16 tokens of prompt, an A100 of 80 GB. `model`: the same repository's README of December
2022: 1.1 B parameters, 100 new tokens, fp32, the same device. Their seconds stand beside ours for the ratios between
the kinds; the devices have nothing in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from writehead.bench.child import BROADCAST, MULTI_HEAD, QUERIES
from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.shapes import structure
from writehead.bench.sides import MEASURED, Outcome, Side, compare

COLUMNS = {
    "shape": "layers x width x heads",
    "kind": "multi-head, broadcast or queries, as in sweep",
    "batch": "sequences together",
    "prompt": "tokens of each prompt",
    "new": "tokens generated for each",
    "status": "measured; refused: it does not fit the memory; died: the process ended",
    "prefill_s": "seconds until all sequences have their first token",
    "first_ms": "milliseconds of a decoding step at the prompt's length",
    "last_ms": "milliseconds of a decoding step at the full length",
    "total_s": "seconds of the whole generation: prefill, and the steps as a straight line from first to last",
    "tok_s": "tokens generated in a second: batch x new / total",
    "speedup": "total of the multi-head twin / this total",
    "published": "seconds published for this kind on an A100, or that its memory did not suffice",
    "reason": "why it was not measured",
}

PLOT = Plot(x=("shape", "batch", "new"), y="tok_s", by=("kind",), label="tokens generated in a second", log=True)

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One published run. `published` has seconds, or why there are none, by kind."""

    model: str
    batch: int
    prompt: int
    new: int
    published: Mapping[str, float | str] = field(default_factory=dict)


def _attention(batch: int, length: int, multi_head: float | str, broadcast: float, queries: float) -> Experiment:
    published = {MULTI_HEAD: multi_head, BROADCAST: broadcast, QUERIES: queries}
    return Experiment(model="random:gpt2-medium", batch=batch, prompt=16, new=length - 16, published=published)


def _model(batch: int, multi_head: float | str, queries: float) -> Experiment:
    """Published as tokens a second, for heads as queries only."""
    rates = {MULTI_HEAD: multi_head, QUERIES: queries}
    seconds = {kind: rate if isinstance(rate, str) else 100 * batch / rate for kind, rate in rates.items()}
    return Experiment(model="random:gpt2-1b", batch=batch, prompt=16, new=100, published=seconds)


EXPERIMENTS = {
    "attention": [
        _attention(8, 1024, 19.13, 18.27, 16.58),
        _attention(1024, 128, 38.4, 10.31, 6.453),
        _attention(1024, 1024, OUT_OF_MEMORY, 346.33, 80.8),
    ],
    "model": [
        _model(1, 63.55, 72.61), _model(8, 481.43, 538.85), _model(32, 1706.28, 1863.15), _model(128, 2930.07, 3399.45),
        _model(256, 3584.40, 4208.59), _model(512, 3778.97, 4559.72), _model(1024, OUT_OF_MEMORY, 4969.87),
    ],
}  # fmt: skip


@dataclass(slots=True)
class _Total:
    """One kind's run put together."""

    prefill: Outcome
    first: Outcome
    last: Outcome

    @property
    def worst(self) -> Outcome:
        """The part that was not measured, if any."""
        return next((o for o in (self.last, self.first, self.prefill) if o.status != MEASURED), self.last)

    def seconds(self, new: int) -> float | None:
        """Of the whole generation; the first token comes with the prefill."""
        prefill, first, last = self.prefill.seconds, self.first.seconds, self.last.seconds
        if prefill is None or first is None or last is None:
            return None
        return prefill + (new - 1) * (first + last) / 2


def measure(report: Report, sides: list[Side], experiment: Experiment, *, steps: int, rounds: int) -> None:
    """A row for each kind. Every part runs in a cache of the full length, so what is refused is the whole run."""
    room = (rounds + 1) * steps + 1
    full = experiment.prompt + experiment.new
    size = {"batch": experiment.batch, "capacity": full + room}
    decode = {"do": "decode", "steps": steps}
    last = compare(sides, decode, opening={"do": "open", "context": full - 1, **size}, rounds=rounds)
    able = [side for side in sides if last[side.name].status == MEASURED]
    first = compare(able, decode, opening={"do": "open", "context": experiment.prompt, **size}, rounds=rounds)
    prefill = compare(able, {"do": "prefill", "tokens": experiment.prompt, **size}, rounds=1)
    totals = {
        side.name: _Total(prefill.get(side.name, Outcome()), first.get(side.name, Outcome()), last[side.name])
        for side in sides
    }
    for name, total in totals.items():
        _row(report, experiment, name, total, totals[MULTI_HEAD])


def _row(report: Report, experiment: Experiment, kind: str, total: _Total, base: _Total) -> None:
    config, new = structure(experiment.model), experiment.new
    seconds, slowest = total.seconds(new), base.seconds(new)
    first, last = total.first.seconds, total.last.seconds
    report.add(
        shape=f"{config.num_layers}x{config.hidden_size}x{config.num_heads}", kind=kind, batch=experiment.batch,
        prompt=experiment.prompt, new=new, status=total.worst.status, prefill_s=total.prefill.seconds,
        first_ms=first and 1e3 * first, last_ms=last and 1e3 * last, total_s=seconds,
        tok_s=seconds and experiment.batch * new / seconds, speedup=seconds and slowest and slowest / seconds,
        published=experiment.published.get(kind), reason=total.worst.reason,
    )  # fmt: skip
