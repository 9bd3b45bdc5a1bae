"""A tiny corpus and a tiny run over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from writehead.train import TrainConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of thirty small modules, six of them held out at a share of 0.2."""
    root = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        code = f'def f{i}(x):\n    """Add {i}."""\n    y = x + {i}\n    return y\n\n\n'
        (root / f"m{i}.py").write_text(code * 4 + f"NAME = {i}\n", encoding="utf-8")
    return root


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> TrainConfig:
    """A run of six steps that takes well under a second."""
    return TrainConfig(
        out=tmp_path / "run", corpus=str(corpus), held_out=0.2, vocab_size=300, layers=2, width=16, heads=2,
        context=32, steps=6, batch=2, accumulate=2, warmup=2, lr=1e-2, min_lr=1e-3, eval_every=3, eval_files=2,
    )  # fmt: skip
