"""Token batches: each epoch renders and encodes the corpus anew, once, into a memory-mapped file."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from writehead.errors import CheckpointError, UsageError
from writehead.train.config import TrainConfig
from writehead.train.corpus import SourceFile
from writehead.train.fim import Segment, render
from writehead.train.vocabulary import encode_texts

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Batch:
    """`inputs` and `targets`, int64 [B, T]: the target of a token is the token after it."""

    inputs: Tensor
    targets: Tensor

    def halved(self) -> Batch:
        """The same tokens in twice as many sequences of half the length."""
        half = self.inputs.shape[1] // 2
        return Batch(self.inputs.reshape(-1, half), self.targets.reshape(-1, half))


class Batches:
    """An endless iterator of batches. Its place is (epoch, position): two numbers resume it exactly.

    Windows of an epoch are visited in a random order that depends on the seed and the epoch alone.
    """

    def __init__(self, files: tuple[SourceFile, ...], tokenizer: Tokenizer, config: TrainConfig) -> None:
        self.epoch, self.position = 0, 0
        self._files, self._tokenizer, self._config = files, tokenizer, config
        self._tokens: Tokens
        self._order: NDArray[np.int64]
        self._open(0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = np.stack([self._window() for _ in range(self._config.batch)]).astype(np.int64)
        return Batch(torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:]))

    def state(self) -> dict[str, int]:
        """The place of the next batch."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue at a place returned by `state`. ValueError: this run has no such place."""
        if state["epoch"] != self.epoch:
            self._open(state["epoch"])
        if not 0 <= state["position"] <= len(self._order):
            raise ValueError(f"epoch {self.epoch} has {len(self._order)} windows")
        self.position = state["position"]

    def _window(self) -> Tokens:
        if self.position == len(self._order):
            self._open(self.epoch + 1)
        start = int(self._order[self.position]) * self._config.context
        self.position += 1
        return self._tokens[start : start + self._config.context + 1]

    def _open(self, epoch: int) -> None:
        config = self._config
        self._tokens = epoch_tokens(self._files, self._tokenizer, config, epoch)
        windows = (len(self._tokens) - 1) // config.context
        if windows < 1:
            raise UsageError(
                f"the training corpus {config.corpus} has {len(self._tokens)} tokens, fewer than one context of "
                f"{config.context}; give more text or a shorter context"
            )
        self._order = np.random.default_rng([config.seed, epoch]).permutation(windows)
        self.epoch, self.position = epoch, 0


def epoch_tokens(files: tuple[SourceFile, ...], tokenizer: Tokenizer, config: TrainConfig, epoch: int) -> Tokens:
    """The corpus as one epoch sees it, shuffled; made on first use, afterwards a read-only memory map of the run's."""
    path = config.out / f"tokens-{epoch}.npy"
    if not path.exists():
        ids = np.concatenate(list(_encode(files, tokenizer, config, epoch)))
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.save(file, ids)
            os.replace(partial, path)
        except OSError as error:
            raise UsageError(f"{path}: the tokens cannot be written ({error}); make room and resume") from None
    return _read(path, vocab_size=tokenizer.get_vocab_size())


def _read(path: Path, *, vocab_size: int) -> Tokens:
    """Map a file of token ids. Raises CheckpointError for anything else."""
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        tokens = None
    if tokens is None or tokens.dtype != np.uint16 or tokens.ndim != 1 or tokens.max(initial=0) >= vocab_size:
        raise CheckpointError(f"{path}: the tokens of the run are damaged; delete the file, and it is made again")
    return tokens  # type: ignore[no-any-return]


def _encode(files: tuple[SourceFile, ...], tokenizer: Tokenizer, config: TrainConfig, epoch: int) -> Iterator[Tokens]:
    """Some files at a time, so that memory stays flat."""
    order = list(files)
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    remaining = iter(order)
    while chunk := list(islice(remaining, 128)):
        segments: list[Segment] = []
        for file in chunk:
            rng = random.Random(f"{config.seed}/{epoch}/{file.path}")
            segments += render(file.text, rng, fim_rate=config.fim_rate, function_rate=config.function_rate)
        encoded = iter(encode_texts(tokenizer, [s for s in segments if isinstance(s, str)]))
        ids = [[s] if isinstance(s, int) else next(encoded) for s in segments]
        yield np.fromiter((i for part in ids for i in part), dtype=np.uint16)
