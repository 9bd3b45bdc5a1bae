"""`writehead verify` as a command; tests/unit/verify holds the comparisons."""

from __future__ import annotations

import json

from tests.unit.cli.conftest import Run


def test_a_sound_model_passes(run: Run, tiny_model: str) -> None:
    done = run("verify", tiny_model, "--prompt", "def f(x):", "--max-new-tokens", "4")
    assert done.code == 0, done.err
    assert "queries = tiled" in done.out
    assert "FAIL" not in done.out
    assert done.out.rstrip().endswith("passed")


def test_a_failure_is_an_exit_code(run: Run, tiny_model: str) -> None:
    done = run("verify", tiny_model, "--prompt", "def f(x):", "--max-new-tokens", "4", "--tolerance", "0")
    assert done.code == 7
    assert "FAIL" in done.out
    assert "comparisons failed (" in done.err
    assert done.err.startswith("error: ")


def test_json(run: Run, tiny_model: str) -> None:
    done = run("verify", tiny_model, "--prompt", "def f(x):", "--max-new-tokens", "4", "--json")
    report = json.loads(done.out)
    assert report["passed"] is True
    assert all(row["relative"] <= row["tolerance"] for row in report["rows"])
