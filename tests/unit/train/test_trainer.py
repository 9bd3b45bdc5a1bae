"""A whole run, tiny: it resumes bit for bit, ends with a model that loads, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from writehead import LLM, SamplingParams, load
from writehead.errors import CheckpointError, UsageError
from writehead.train import TrainConfig, train
from writehead.train.state import FILE_NAME, read_state
from writehead.train.trainer import Run
from writehead.train.vocabulary import END_OF_TEXT_ID


class ProcessDiedError(Exception):
    """Stands for a process that dies."""


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run save its state after so many steps and die in the middle of the next."""
    original = Run.step

    def dying(run: Run) -> float:
        if run.progress.step == step:
            run.save()
            next(run.batches)
            raise ProcessDiedError
        return original(run)

    monkeypatch.setattr(Run, "step", dying)


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_same_run(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, optimizer: Literal["adamw", "muon"]
) -> None:
    config = dataclasses.replace(config, optimizer=optimizer)
    whole = train(config, show_progress=False)
    parts = dataclasses.replace(config, out=tmp_path / "parts")
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        with pytest.raises(ProcessDiedError):
            train(parts, show_progress=False)
    resumed = train(dataclasses.replace(parts, resume=True), show_progress=False)
    assert (resumed.steps, resumed.tokens) == (whole.steps, whole.tokens) == (6, 6 * 2 * 2 * 32)
    assert resumed.held_out_bits_per_byte == whole.held_out_bits_per_byte
    a, b = read_state(whole.state), read_state(resumed.state)
    assert a["batches"] == b["batches"]
    assert all(torch.equal(v, b["model"][k]) for k, v in a["model"].items())
    for i, moments in a["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["optimizer"]["state"][i][name]))


def test_a_run_learns_and_leaves_a_checkpoint_that_generates(config: TrainConfig) -> None:
    config = dataclasses.replace(config, steps=60, accumulate=1)
    result = train(config, show_progress=False)
    quality = [row["held_out_bits_per_byte"] for row in log(config.out) if "held_out_bits_per_byte" in row]
    assert quality[-1] < 0.7 * quality[0]
    assert result.held_out_bits_per_byte == quality[-1]
    settings = json.loads((result.model / "config.json").read_text())
    assert (settings["model_type"], settings["multi_query"], settings["n_positions"]) == ("gpt_bigcode", True, 32)
    assert settings["activation_function"] == "gelu_pytorch_tanh"
    stored = dict(load(result.model).named_parameters())
    for name, value in read_state(result.state)["model"].items():
        assert torch.equal(stored[name], value.bfloat16().float()), name
    output = LLM(result.model).generate("def f", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(output[0].outputs[0].token_ids) == 4


def test_the_log_follows_the_schedule(config: TrainConfig) -> None:
    train(dataclasses.replace(config, steps=20), show_progress=False)
    rates = {row["step"]: row["lr"] for row in log(config.out) if "lr" in row}
    assert list(rates) == [1, 10, 20]
    assert rates[1] == pytest.approx(5e-3)
    assert rates[10] > rates[20] > 1e-3
    assert [r["step"] for r in log(config.out) if "held_out_bits_per_byte" in r][:3] == [3, 6, 9]


def test_minutes_end_a_run_with_its_schedule_complete(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # every look at the clock takes a second; a step looks twice
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    result = train(dataclasses.replace(config, steps=10**6, minutes=1.0), show_progress=False)
    assert 60 <= result.seconds <= 61
    assert 29 <= result.steps <= 31
    rates = [row["lr"] for row in log(config.out) if "lr" in row]
    assert rates[-1] == pytest.approx(1e-3, rel=0.1)


def test_a_folder_keeps_one_run(config: TrainConfig) -> None:
    train(config, show_progress=False)
    with pytest.raises(UsageError, match="already holds a training run"):
        train(config)
    with pytest.raises(UsageError, match="holds a run with width 16, but 32 is asked for"):
        train(dataclasses.replace(config, resume=True, width=32))


def test_a_changed_corpus_does_not_resume(config: TrainConfig, tmp_path: Path) -> None:
    root = tmp_path / "other"
    root.mkdir()
    for path in Path(config.corpus).iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    config = dataclasses.replace(config, corpus=str(root))
    train(config, show_progress=False)
    (root / "m0.py").write_text("x = 0\n")
    with pytest.raises(UsageError, match="changed since the run"):
        train(dataclasses.replace(config, resume=True))


def test_nothing_to_resume(config: TrainConfig) -> None:
    with pytest.raises(CheckpointError, match="no complete training run to resume"):
        train(dataclasses.replace(config, resume=True))


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "other", "list"])
def test_a_damaged_state_is_one_sentence(config: TrainConfig, damage: str) -> None:
    train(config, show_progress=False)
    path = config.out / FILE_NAME
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        torch.save({"model": {}}, path)
    elif damage == "list":
        torch.save({"model": {}, "optimizer": []}, path)
    else:
        os.truncate(path, 0 if damage == "empty" else 1000)
    with pytest.raises(CheckpointError, match="state"):
        train(dataclasses.replace(config, resume=True))


@pytest.mark.parametrize("damage", ["empty", "truncated", "zeros", "other", "out of range"])
def test_damaged_tokens_are_one_sentence_that_helps(config: TrainConfig, damage: str) -> None:
    whole = train(config, show_progress=False)
    path = config.out / "tokens-0.npy"
    intact = path.read_bytes()
    if damage == "other":
        np.save(path, np.zeros((2, 2), np.float32))
    elif damage == "out of range":
        np.save(path, np.full(10_000, config.vocab_size, np.uint16))
    else:
        path.write_bytes({"empty": b"", "truncated": intact[:-100], "zeros": bytes(len(intact))}[damage])
    with pytest.raises(
        CheckpointError, match=f"^{path}: the tokens of the run are damaged; delete the file, and it is"
    ):
        train(dataclasses.replace(config, resume=True))
    path.unlink()
    assert train(dataclasses.replace(config, resume=True), show_progress=False).steps == whole.steps
    assert path.read_bytes() == intact


def test_a_place_beyond_the_tokens_does_not_resume(config: TrainConfig) -> None:
    state = read_state(train(config, show_progress=False).state)
    state["batches"]["position"] = 10**6
    torch.save(state, config.out / FILE_NAME)
    with pytest.raises(CheckpointError, match="the saved state does not fit this run"):
        train(dataclasses.replace(config, resume=True))


def test_an_unwritable_folder_is_one_sentence(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        train(dataclasses.replace(config, out=tmp_path / "file" / "run"))


def test_divergence_is_one_sentence(config: TrainConfig) -> None:
    with pytest.raises(UsageError, match="the loss became nan"):
        train(dataclasses.replace(config, lr=1e30, min_lr=1e30, steps=50), show_progress=False)


def test_bfloat16_trains(config: TrainConfig) -> None:
    result = train(dataclasses.replace(config, dtype="bfloat16"), show_progress=False)
    assert all(v.dtype is torch.float32 for v in read_state(result.state)["model"].values())
    assert result.held_out_bits_per_byte < 8


def test_the_published_tokenizer_is_the_runs_and_opens_a_prompt(config: TrainConfig) -> None:
    result = train(config, show_progress=False)
    made, published = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (config.out, result.model))
    text = "def f(x):\n    return 10"
    ids = made.encode(text, add_special_tokens=False).ids
    assert published.encode(text, add_special_tokens=False).ids == ids
    assert published.encode(text).ids == [END_OF_TEXT_ID, *ids]  # a document began so while training
