"""`writehead env`: versions and backends as they are."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers

from tests.unit.cli.conftest import Run
from writehead import __version__, kernels
from writehead.cli import env
from writehead.errors import UsageError


def test_facts(run: Run) -> None:
    facts = json.loads(run("env", "--json").out)
    assert facts["writehead"] == __version__
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["packages"]["transformers"] == transformers.__version__
    assert facts["cores"] == os.cpu_count()
    assert facts["threads"] == 1  # as the fixture sets it
    assert 10**8 < facts["memory"] < 10**14
    assert facts["kernels"]["reference"] == "loads as reference"
    assert set(facts["kernels"]) == set(kernels.names())
    assert len(facts["gpus"]) == torch.cuda.device_count()


def test_table(run: Run) -> None:
    done = run("env")
    assert (done.code, done.err) == (0, "")
    rows = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in done.out.splitlines()}
    assert rows["writehead"] == __version__
    assert rows["torch"] == torch.__version__
    assert rows["kernels: reference"] == "loads as reference"
    assert f"of {os.cpu_count()} cores, 1 threads" in rows["processor"]


def test_a_backend_says_why_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise UsageError(f"{name} needs a compiler")

    monkeypatch.setattr(kernels, "load", load)
    assert env.backends()["reference"] == "does not load: reference needs a compiler"


def test_a_package_that_is_not_there() -> None:
    assert env._version("no-such-package-as-this") is None
