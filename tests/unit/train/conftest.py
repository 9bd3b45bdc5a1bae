"""A tiny corpus and a tiny run over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from writehead.train import TrainConfig


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
        loop_batch=4,
    )  # fmt: skip
