"""Options of a run that cannot work are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from writehead.errors import UsageError
from writehead.train import TrainConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", 0), ("steps", 0), ("batch", 0), ("accumulate", 0), ("eval_every", 0), ("eval_files", 0), ("lr", 0.0),
        ("clip", 0.0), ("checkpoint_minutes", 0.0), ("fim_rate", 1.1), ("function_rate", -0.1), ("short_share", 2.0),
        ("repetition", -1.0),
        ("held_out", 0.0), ("held_out", 1.0), ("min_lr", 1.0), ("warmup", 10**9), ("width", 255), ("vocab_size", 100),
        ("vocab_size", 65537), ("context", 8), ("context", 33), ("dtype", "int8"),
        ("optimizer", "sgd"), ("minutes", 0.0), ("threads", 0),
    ],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"training option {name} is {value}"):
        TrainConfig(out=Path("run"), **{name: value})


def test_defaults_are_valid_and_plain() -> None:
    values = json.loads(json.dumps(TrainConfig(out=Path("run")).as_json()))
    assert values["out"] == "run"
    assert (values["corpus"], values["minutes"], values["dtype"]) == ("stdlib", None, "float32")
