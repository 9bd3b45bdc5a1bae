"""`writehead bench throughput`: what it counts is what ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bench.conftest import Measure
from tests.unit.cli.conftest import Run
from writehead.bench.throughput import ragged


def test_figures_agree(measure: Measure, tiny_model: Path) -> None:
    found = measure(
        "throughput", "-m", tiny_model, "--requests", "6", "--batch", "2,6", "--prompt", "4,30", "--new", "5",
        "--rounds", "2",
    )  # fmt: skip
    lengths = ragged(6, 4, 30, 0)
    assert [row["batch"] for row in found["rows"]] == [2, 6]
    for row in found["rows"]:
        assert row["tokens_in"] == sum(lengths)
        assert row["tokens_out"] == 30
        assert row["out_tok_s"] == pytest.approx(row["tokens_out"] / row["seconds"], rel=1e-4)
        assert row["in_tok_s"] == pytest.approx(row["tokens_in"] / row["seconds"], rel=1e-4)
        assert row["requests_s"] == pytest.approx(6 / row["seconds"], rel=1e-4)
        assert row["ttft_ms"] <= row["ttft_ms_p99"] <= 1e3 * row["seconds"]
    two, six = found["rows"]
    assert two["steps"] == 3 * 5  # three pairs, one after the other
    assert six["steps"] == 5


def test_lengths_are_ragged_and_repeatable() -> None:
    lengths = ragged(50, 10, 20, 3)
    assert lengths == ragged(50, 10, 20, 3) != ragged(50, 10, 20, 4)
    assert (min(lengths), max(lengths), len(lengths)) == (10, 20, 50)
    assert len(set(lengths)) > 5
    assert ragged(1, 2, 9, 0) == [9]


def test_bounds_must_be_two_in_order(run: Run) -> None:
    for wrong in ("9,3", "4", "1,2,3"):
        done = run("bench", "throughput", "--prompt", wrong)
        assert (done.code, done.out) == (2, "")
        assert f"--prompt is '{wrong}'; expected the shortest and the longest length" in done.err
