"""What the tests of the benchmarks share: the command line, and a reader of what a verb leaves."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Run, run  # noqa: F401 - a fixture

Measure = Callable[..., dict[str, Any]]


def read_csv(path: Path) -> list[list[str]]:
    """The lines of a CSV file, its head first."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.fixture
def measure(run: Run, tmp_path: Path) -> Measure:  # noqa: F811
    """Run a sub-verb of `writehead bench` -> its JSON line, after checking what holds for each of them: nothing else
    on stdout, the machine stated, and a CSV file with the same rows."""

    def call(verb: str, *arguments: str | Path) -> dict[str, Any]:
        done = run("bench", verb, *arguments, "--csv", tmp_path / "rows.csv")
        assert done.code == 0, done.err
        assert done.out.count("\n") == 1
        found: dict[str, Any] = json.loads(done.out)
        assert found["bench"] == verb
        assert found["command"].startswith(f"writehead bench {verb}")
        assert found["machine"]["processor"] in done.err
        assert {"cores", "memory", "instructions", "torch", "writehead", "commit"} <= found["machine"].keys()
        head, *lines = read_csv(tmp_path / "rows.csv")
        assert lines == [["" if value is None else str(value) for value in row.values()] for row in found["rows"]]
        assert all(list(row) == head for row in found["rows"])
        return found

    return call
