"""`writehead train`: each field of the config is an option, and a run ends with a model that completes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from writehead.cli import train
from writehead.train import TrainConfig, TrainResult

VALUES = {
    "corpus": "folder", "pattern": "*.txt", "held_out": 0.5, "vocab_size": 400, "fim_rate": 0.1, "function_rate": 0.2,
    "layers": 2, "width": 64, "heads": 2, "context": 32, "steps": 9, "batch": 3, "accumulate": 2, "short_share": 0.3,
    "lr": 0.01, "min_lr": 0.001, "warmup": 1, "weight_decay": 0.2, "beta1": 0.8, "beta2": 0.7, "clip": 2.0,
    "dtype": "bfloat16", "seed": 5, "minutes": 0.5, "checkpoint_minutes": 1.5, "eval_every": 4, "eval_files": 2,
    "threads": 1, "optimizer": "adamw", "repetition": 0.5, "loop_share": 0.1, "loop_every": 3, "loop_batch": 2,
    "loop_tokens": 9, "loop_weight": 0.5,
}  # fmt: skip


def test_every_field_is_an_option(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert set(train.HELP) == names == {*VALUES, "out", "resume"}
    seen: list[TrainConfig] = []

    def spy(config: TrainConfig, *, show_progress: bool) -> TrainResult:
        assert not show_progress
        seen.append(config)
        values = {field.name: tmp_path for field in dataclasses.fields(TrainResult)}
        numbers = {"steps": 9, "tokens": 100, "seconds": 90.0, "held_out_bits_per_byte": 2.5}
        return TrainResult(**{**values, **numbers})  # type: ignore[arg-type]

    monkeypatch.setattr("writehead.train.train", spy)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in VALUES.items()]
    done = run("train", "--out", tmp_path, "--resume", *arguments)
    assert done.code == 0, done.err
    assert seen == [TrainConfig(out=tmp_path, resume=True, **VALUES)]  # type: ignore[arg-type]
    assert f"{tmp_path}: 9 steps, 100 tokens in 1.5 minutes, 2.500 bits per byte on held-out files" in done.out
    assert run("train", "--out", tmp_path).code == 0
    assert seen[1] == TrainConfig(out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width=33", "--heads=2"], "width is 33, but it must be a multiple of the 2 heads"),
        (["--seed=1208925819614629174706176"], f"seed is {2**80}, but it must be from 0 to {2**64 - 1}"),
        (["--lr=nan"], "lr is nan, but it must be a finite number"),
        (["--threads=100000"], "threads is 100000, but it must be from 1 to 1024"),
        (["--steps=1", "--warmup=3"], "warmup is 3, but it must be below the number of steps, 1; lower warmup (0 is "
                                      "none), or raise steps"),
        (["--pattern="], "pattern is '', but it must be a pattern of paths inside the corpus, such as '**/*.py'"),
        (["--pattern=/*.py"], "pattern is '/*.py', but it must be a pattern of paths inside the corpus, such as "
                              "'**/*.py'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run("train", "--out", tmp_path / "out", "--corpus", tmp_path, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: training option {message}\n"
    assert not (tmp_path / "out").exists()


def test_a_run_can_be_published_and_completes(run: Run, tmp_path: Path) -> None:
    corpus, out, box = tmp_path / "corpus", tmp_path / "out", tmp_path / "box"
    corpus.mkdir()
    for i in range(30):
        (corpus / f"m{i}.py").write_text(f"def f{i}(x):\n    y = x + {i}\n    return y\n" * 4, encoding="utf-8")
    sizes = ["--vocab-size=300", "--layers=1", "--width=16", "--heads=2", "--context=32", "--batch=2", "--threads=1"]
    steps = ["--steps=3", "--warmup=1", "--eval-every=3", "--eval-files=2", "--held-out=0.2"]
    done = run("train", "--out", out, "--corpus", corpus, "--publish", box, *sizes, *steps)
    assert done.code == 0, done.err
    assert f"{box}: " in done.out
    assert "function bodies parse" in done.out
    assert "# A small code model" in (box / "README.md").read_text("utf-8")
    assert run("generate", "def f", "--model", box, "--max-tokens", "3").code == 0


def test_a_folder_that_cannot_be_published_to_is_said_before_the_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("train", "--out", tmp_path / "out", "--publish", tmp_path / "file")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: --publish: {tmp_path / 'file'} cannot be a folder (File exists); choose another\n"
    assert not (tmp_path / "out").exists()
