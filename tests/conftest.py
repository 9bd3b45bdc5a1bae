"""What every test shares: the seed, printed and fixed, a tiny checkpoint and a real one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch

from tests import models, smollm2

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

hypothesis.settings.register_profile("writehead", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("writehead")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run choose another seed than 0."""
    parser.addoption("--seed", type=int, default=0, help="seed of every random number in the suite (default 0)")


def pytest_report_header(config: pytest.Config) -> str:
    """The line that makes a run repeatable."""
    seed = config.getoption("--seed")
    return f"seed: {seed} (hypothesis: derandomized), torch {torch.__version__} on {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, with `random`, numpy and torch seeded by it before each test.

    One thread: products this small only wait for each other's threads, and on a busy machine they wait long.
    """
    value: int = request.config.getoption("--seed")
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)
    torch.set_num_threads(1)
    return value


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The path of SmolLM2-135M-Instruct as GGUF; a test that asks for it fails when it cannot be had."""
    try:
        return smollm2.fetch(smollm2.cache_dir())
    except smollm2.FetchError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny `gpt_bigcode` checkpoint with a tokenizer; shared, so nothing may write into it."""
    return models.write_tiny_model(tmp_path_factory.mktemp("tiny_model"))
