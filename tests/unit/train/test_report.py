"""A published model: the files, the figures on the card, and a refusal before the run is done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from writehead.errors import UsageError
from writehead.train import TrainConfig, train
from writehead.train.bodies import Complete, Completion
from writehead.train.report import publish


def complete_with(checkpoint: Path) -> Complete:
    """Every second completion is right."""
    assert (checkpoint / "model.safetensors").is_file()
    return lambda prompts, limit: [
        Completion("\n    return 1\n" if i % 2 else "\n    return (\n", ended=limit == 16) for i in range(len(prompts))
    ]


def test_publish(config: TrainConfig, tmp_path: Path) -> None:
    train(config, show_progress=False)
    out = tmp_path / "box"
    out.mkdir()
    (out / "__init__.py").write_text("")
    report = publish(config, out, complete_with=complete_with)
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "__init__.py", "config.json", "manifest.jsonl", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    card = (out / "README.md").read_text()
    manifest = (out / "manifest.jsonl").read_bytes()
    held_out = sum(json.loads(line)["part"] == "held_out" for line in manifest.splitlines())
    bodies = 4 * held_out
    assert report.in_file.num_passed == report.alone.num_passed == bodies // 2
    assert f"`{hashlib.sha256(manifest).hexdigest()}`" in card
    assert f"| bits a byte, this model | {report.model.mean:.3f} |" in card
    assert card.count(f"| {bodies // 2} of {bodies} (of those with a docstring: {bodies // 2} of {bodies}) |") == 2
    assert f"{report.num_parameters:,} (2 layers, width 16, 2 query heads" in card
    assert "6 steps, 768 tokens" in card
    options = json.loads(card.split("```json")[1].split("```")[0])
    assert (options["steps"], options["seed"]) == (6, 0)
    assert not {"out", "corpus", "resume", "threads"} & set(options)
    assert config.corpus not in card
    assert "resumed" not in card
    assert str(tmp_path) not in card


def test_the_card_tells_of_changed_options(config: TrainConfig, tmp_path: Path) -> None:
    train(config, show_progress=False)
    train(dataclasses.replace(config, resume=True, steps=8, lr=0.5, threads=1, fim_rate=0.25), show_progress=False)
    longer = dataclasses.replace(config, resume=True, steps=9, lr=0.5, fim_rate=0.25)
    train(longer, show_progress=False)  # nothing worth telling
    publish(longer, tmp_path / "box", complete_with=complete_with)
    card = (tmp_path / "box" / "README.md").read_text()
    told = card.split("The run was resumed with other options")[1].splitlines()
    assert told[2:] == ["- after step 6: fim_rate 0.2 to 0.25, lr 0.01 to 0.5"]
    assert "9 steps, 1,152 tokens" in card


def test_an_unfinished_run_is_not_published(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no finished model to publish"):
        publish(config, tmp_path / "box", complete_with=complete_with)
    train(config, show_progress=False)
    with pytest.raises(UsageError, match="with seed 0, but 1 is asked for"):
        publish(dataclasses.replace(config, seed=1), tmp_path / "box", complete_with=complete_with)
