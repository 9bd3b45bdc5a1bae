"""What all sub-verbs share: rows that are safe as they come, plots, and the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.unit.bench.conftest import read_csv
from tests.unit.cli.conftest import Run
from writehead.bench import machine
from writehead.bench.report import Report

LATENCY = ("bench", "latency", "-m", "random:tiny", "--prompt", "3,9", "--new", "3", "--rounds", "1")


def test_a_row_is_in_the_file_before_the_next_one(tmp_path: Path) -> None:
    report = Report("x", {"a": "", "b": ""}, command="x", seed=0, settings={}, csv_file=tmp_path / "x.csv")
    report.add(a=1)
    assert read_csv(tmp_path / "x.csv") == [["a", "b"], ["1", ""]]
    report.add(a="two, three", b=0.123456789)
    assert read_csv(tmp_path / "x.csv")[2] == ["two, three", "0.123457"]


def test_a_plot_is_a_picture_twice(run: Run, tmp_path: Path) -> None:
    done = run(*LATENCY, "--plot", tmp_path / "p")
    assert done.code == 0, done.err
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size == (1200, 750)
        assert len(picture.getcolors(1 << 24) or ()) > 10
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    text = " ".join(root.itertext())
    assert root.tag.endswith("svg")
    assert f"torch {machine.describe()['torch']}" in text
    assert "writehead bench latency --model random:tiny" in text


def test_without_matplotlib_the_plot_is_refused_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("writehead.bench.plot.find_spec", lambda _: None)
    done = run(*LATENCY, "--plot", tmp_path / "p", "--csv", tmp_path / "p.csv")
    assert (done.code, done.out) == (6, "")
    assert (
        "--plot draws with matplotlib, which is not installed; install it with pip install 'writehead[bench]'"
        in done.err
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "name"), [("--csv", "x.csv"), ("--plot", "x")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(run: Run, option: str, name: str) -> None:
    done = run(*LATENCY, option, f"/no/such/folder/{name}")
    assert (done.code, done.out) == (2, "")
    assert f"{option}: /no/such/folder/x." in done.err
    assert "cannot be written (No such file or directory)" in done.err


def test_the_commit_is_of_our_own_tree_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that lies in somebody else's repository does not take its commit for ours."""
    package = tmp_path / "site" / "writehead"
    (package / "bench").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(machine, "__file__", str(package / "bench" / "machine.py"))
    git = [shutil.which("git") or "git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert machine.commit() is None
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    assert machine.commit() is None
    subprocess.run([*git, "add", "site"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert machine.commit() == head[:12]
    (package / "__init__.py").write_text("changed")
    assert machine.commit() == head[:12] + "-dirty"
