"""Batches: the same tokens in the same order for the same seed, from any place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from writehead.errors import UsageError
from writehead.train import TrainConfig, folder
from writehead.train.corpus import Corpus, read_corpus
from writehead.train.data import Batch, Batches, epoch_tokens


@pytest.fixture
def parts(config: TrainConfig) -> tuple[Corpus, Tokenizer]:
    corpus = read_corpus(config.corpus, pattern=config.pattern, held_out=config.held_out)
    return corpus, folder.start(config, corpus)


def test_targets_follow_inputs(config: TrainConfig, parts: tuple[Corpus, Tokenizer]) -> None:
    batch = next(Batches(parts[0].train, parts[1], config))
    assert batch.inputs.shape == batch.targets.shape == (2, 32)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_an_epoch_shows_every_window_once(config: TrainConfig, parts: tuple[Corpus, Tokenizer]) -> None:
    config = dataclasses.replace(config, batch=1)
    tokens = epoch_tokens(parts[0].train, parts[1], config, 0)
    batches = Batches(parts[0].train, parts[1], config)
    count = (len(tokens) - 1) // 32
    rows = [next(batches).inputs[0].tolist() for _ in range(count)]
    assert batches.state() == {"epoch": 0, "position": count}
    assert sorted(rows) == sorted(tokens[i * 32 : i * 32 + 32].tolist() for i in range(count))
    next(batches)
    assert batches.state() == {"epoch": 1, "position": 1}


def test_a_place_resumes_exactly(config: TrainConfig, parts: tuple[Corpus, Tokenizer]) -> None:
    first = Batches(parts[0].train, parts[1], config)
    for _ in range(60):  # beyond the first epoch
        next(first)
    assert first.epoch >= 1
    second = Batches(parts[0].train, parts[1], config)
    second.load_state(first.state())
    for _ in range(3):
        assert torch.equal(next(first).inputs, next(second).inputs)


def test_epochs_and_seeds_differ_and_repeat(
    config: TrainConfig, parts: tuple[Corpus, Tokenizer], tmp_path: Path
) -> None:
    def tokens(out: str, seed: int, epoch: int) -> list[int]:
        folder = tmp_path / out
        folder.mkdir(exist_ok=True)
        made = epoch_tokens(parts[0].train, parts[1], dataclasses.replace(config, out=folder, seed=seed), epoch)
        assert made.dtype == np.uint16
        ids: list[int] = made.tolist()
        return ids

    assert tokens("a", 0, 0) == tokens("b", 0, 0)
    assert tokens("a", 0, 0) != tokens("a", 0, 1)
    assert tokens("a", 0, 0) != tokens("c", 1, 0)


def test_held_out_text_is_never_in_an_epoch(config: TrainConfig, parts: tuple[Corpus, Tokenizer]) -> None:
    whole = dataclasses.replace(config, fim_rate=0.0, function_rate=0.0)
    text = parts[1].decode(epoch_tokens(parts[0].train, parts[1], whole, 0).tolist(), skip_special_tokens=False)
    names = [f"NAME = {f.path[1:-3]}\n" for f in parts[0].held_out]
    assert names
    assert not any(name in text for name in names)
    assert all(f"NAME = {f.path[1:-3]}\n" in text for f in parts[0].train)


def test_halved_keeps_every_pair() -> None:
    batch = Batch(torch.arange(16).view(2, 8), torch.arange(1, 17).view(2, 8))
    half = batch.halved()
    assert half.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert torch.equal(half.targets, half.inputs + 1)


def test_too_little_text_is_refused(config: TrainConfig, parts: tuple[Corpus, Tokenizer]) -> None:
    with pytest.raises(UsageError, match="fewer than one context of 65536"):
        Batches(parts[0].train, parts[1], dataclasses.replace(config, context=65536))
