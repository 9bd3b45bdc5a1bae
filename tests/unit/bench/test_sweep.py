"""`writehead bench sweep` and `mqa`: what runs out of memory, or dies, loses its own row and no other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.bench.conftest import Measure, read_csv
from tests.unit.cli.conftest import Run
from writehead import kernels
from writehead.bench import mqa, sweep
from writehead.bench.child import broadcasting
from writehead.bench.mqa import EXPERIMENTS, Experiment
from writehead.bench.report import Report
from writehead.bench.sides import Outcome, Side, compare, stopping
from writehead.bench.worker import RefusedError
from writehead.kernels import AttentionSpec, CacheView, Group

KINDS = ["multi-head", "broadcast", "queries"]


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Side]]:
    """The three kinds of the shape `tiny`, started once."""
    made = sweep.make_sides("random:tiny", weights="fp32", kernels="auto", seed=0)
    with stopping(made):
        yield made


def test_figures_agree_and_what_does_not_fit_is_a_row_with_the_numbers(measure: Measure) -> None:
    """In between, a billion sequences of 16 tokens: 4 TB of cache for one shared head, four times that for four."""
    sizes = ("--batch", "2,999999999,3", "--context", "9,509", "--steps", "2", "--rounds", "2")
    found = measure("sweep", "-m", "random:tiny", *sizes)
    rows = {(r["batch"], r["context"], r["kind"]): r for r in found["rows"]}
    assert list(rows) == [(b, c, kind) for b in (2, 999999999, 3) for c in (9, 509) for kind in KINDS]
    for (batch, context, kind), row in rows.items():
        if batch == 999999999 or context == 509:
            assert (row["status"], row["step_ms"]) == ("refused", None)
            continue
        assert (row["status"], row["alternated"], row["reason"]) == ("measured", True, "")
        assert row["tok_s"] == pytest.approx(1e3 * batch / row["step_ms"], rel=1e-4)
        heads = 4 if kind == "multi-head" else 1
        slots = context + 3 * 2 + 1  # two steps in each of two rounds and the one that warms up
        assert row["cache_gb"] == pytest.approx(2 * 2 * heads * 16 * 4 * batch * slots / 1e9, rel=1e-4)
        assert kind != "multi-head" or row["speedup"] == 1.0
    assert rows[2, 509, "queries"]["reason"] == "516 tokens are more than the model's 512 positions"
    shared, own = (rows[999999999, 9, kind]["reason"] for kind in ("queries", "multi-head"))
    assert "999999999 sequences of 16 tokens need a cache of 4096.0 GB, and " in shared
    assert "need a cache of 16384.0 GB, and " in own
    assert " GB are free" in own


def test_an_int8_cache_takes_its_bytes(measure: Measure) -> None:
    sizes = ("--batch", "2", "--context", "9", "--steps", "1", "--rounds", "1")
    found = measure("sweep", "-m", "random:tiny", *sizes, "--kv-cache-dtype", "int8")
    for row in found["rows"]:
        heads = 4 if row["kind"] == "multi-head" else 1
        assert row["status"] == "measured", row["reason"]
        assert row["cache_gb"] == pytest.approx(2 * 2 * heads * (16 + 4) * 2 * (9 + 2 + 1) / 1e9, rel=1e-4)


class Killing(Report):
    """Kills a child once the first row is there."""

    pid = 0

    def add(self, **values: Any) -> dict[str, Any]:
        if not self.rows:
            os.kill(self.pid, signal.SIGKILL)
        return super().add(**values)


def test_a_child_that_the_system_kills_loses_one_row(sides: list[Side], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    report = Killing("sweep", sweep.COLUMNS, command="", seed=0, settings={}, csv_file=file)
    report.pid = sides[2].worker().pid
    sweep.measure(report, sides, batches=[1, 2, 3], contexts=[10], steps=2, rounds=1)
    died = [row for row in report.rows if row["status"] == "died"]
    assert [(row["batch"], row["kind"]) for row in died] == [(2, "queries")]
    assert died[0]["reason"] == "killed by the system (SIGKILL), most likely for want of memory"
    assert sum(row["status"] == "measured" for row in report.rows) == 8
    assert len(read_csv(file)) == 1 + 9


def test_who_does_not_fit_beside_the_others_is_measured_alone() -> None:
    """A stand-in refuses to open while the real one is open, as memory does."""

    class Beside:
        name = "beside"

        def __init__(self, other: Any) -> None:
            self.other = other

        def ask(self, do: str, **values: Any) -> dict[str, Any]:
            if do == "open" and self.other.open:
                raise RefusedError("no room")
            return {"seconds": 0.5, **values}

    class First:
        name, open = "first", False

        def ask(self, do: str, **_: Any) -> dict[str, Any]:
            self.open = do != "close"
            return {"seconds": 0.25}

    first: Any = First()
    beside: Any = Beside(first)
    found = compare([first, beside], {"do": "decode"}, opening={"do": "open"}, rounds=3)
    assert (found["first"].alternated, found["first"].times) == (True, [0.25] * 3)
    assert (found["beside"].alternated, found["beside"].times) == (False, [0.5] * 3)
    assert found["beside"].ratio_to(found["first"]) == 2.0


def test_ratios_are_taken_within_rounds() -> None:
    slow, fast = Outcome(times=[2.0, 20.0, 6.0]), Outcome(times=[1.0, 10.0, 2.0])
    assert slow.ratio_to(fast) == 2.0  # the median of 2, 2 and 3
    assert slow.ratio_to(Outcome(status="died")) is None


def test_broadcast_computes_the_same() -> None:
    backend = kernels.load("auto")
    keys, values = torch.randn(2, 1, 9, 8), torch.randn(2, 1, 9, 8)
    view = CacheView(
        keys=(keys,), values=(values,), rows=torch.arange(2), slots=torch.tensor([8, 8]),
        groups=(Group(num_new=1, rows=slice(0, 2), lengths=(9, 9)),),
    )  # fmt: skip
    q, spec = torch.randn(2, 4, 8), AttentionSpec(scale=0.3)
    expected = backend.cached_attention(q, view, 0, spec)
    torch.testing.assert_close(broadcasting(backend).cached_attention(q, view, 0, spec), expected)


def test_the_published_runs_are_the_published_ones() -> None:
    """Rates of the README and ratios of the issue, back from what the table holds."""
    [_, short, long] = EXPERIMENTS["attention"]
    assert (short.batch, short.prompt + short.new, long.prompt + long.new) == (1024, 128, 1024)
    assert short.published["multi-head"] / short.published["queries"] == pytest.approx(5.95, abs=0.01)  # type: ignore[operator]
    assert long.published["multi-head"] == "out of memory"
    by_batch = {e.batch: e.published for e in EXPERIMENTS["model"]}
    assert 512 * 100 / by_batch[512]["queries"] == pytest.approx(4559.72)  # type: ignore[operator]


def test_an_experiment_adds_up(sides: list[Side]) -> None:
    experiment = Experiment(model="random:tiny", batch=2, prompt=6, new=10, published={"queries": 1.5})
    report = Report("mqa", mqa.COLUMNS, command="", seed=0, settings={})
    mqa.measure(report, sides, experiment, steps=1, rounds=2)
    assert [row["kind"] for row in report.rows] == KINDS
    base = report.rows[0]["total_s"]
    for row in report.rows:
        steps = 9 * (row["first_ms"] + row["last_ms"]) / 2 / 1e3
        assert row["total_s"] == pytest.approx(row["prefill_s"] + steps, rel=1e-4)
        assert row["tok_s"] == pytest.approx(20 / row["total_s"], rel=1e-4)
        assert row["speedup"] == pytest.approx(base / row["total_s"], rel=1e-4)
        assert row["shape"] == "2x64x4"
    assert [row["published"] for row in report.rows] == [None, None, 1.5]


def test_an_experiment_that_does_not_fit(sides: list[Side]) -> None:
    experiment = Experiment(model="random:tiny", batch=999999999, prompt=6, new=10)
    report = Report("mqa", mqa.COLUMNS, command="", seed=0, settings={})
    mqa.measure(report, sides, experiment, steps=1, rounds=1)
    assert [(row["status"], row["total_s"]) for row in report.rows] == [("refused", None)] * 3
    assert "999999999 sequences of 19 tokens need a cache of " in report.rows[0]["reason"]


def test_a_set_must_be_one_of_them(run: Run) -> None:
    done = run("bench", "mqa", "--set", "everything")
    assert (done.code, done.out) == (2, "")
    assert "--set is 'everything'; choose attention, model or all" in done.err
