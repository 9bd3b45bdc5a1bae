"""Options of a run that cannot work are refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
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
        ("repetition", -1.0), ("held_out", 0.0), ("held_out", 1.0), ("min_lr", 1.0), ("warmup", -1),
        ("vocab_size", 100), ("vocab_size", 65537), ("context", 8), ("context", 33), ("dtype", "int8"),
        ("optimizer", "sgd"), ("minutes", 0.0), ("threads", 0), ("threads", 100_000), ("seed", -1), ("seed", 2**80),
        ("beta1", 1.0), ("beta1", -0.1), ("beta2", 1.0), ("beta2", -0.1), ("weight_decay", -1.0),
        ("loop_share", 1.1), ("loop_share", -0.1), ("loop_every", 0), ("loop_batch", 0), ("loop_tokens", 0),
        ("loop_weight", -1.0),
    ],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"training option {name} is {value}, but it must be "):
        TrainConfig(out=Path("run"), **{name: value})


def test_numbers_without_a_value_or_an_end_are_named() -> None:
    floats = [f.name for f in dataclasses.fields(TrainConfig) if f.type in ("float", "float | None")]
    whole = [f.name for f in dataclasses.fields(TrainConfig) if f.type in ("int", "int | None")]
    assert {"lr", "minutes"} < set(floats)
    assert {"seed", "threads"} < set(whole)
    values: list[tuple[str, Any]] = [(n, v) for n in floats for v in (math.nan, math.inf, -math.inf)]
    for name, value in [*values, *((n, 10**30) for n in whole)]:
        with pytest.raises(UsageError, match=f"training option {name} is {value}, but it must be "):
            TrainConfig(out=Path("run"), **{name: value})


def test_values_that_contradict_each_other_are_named() -> None:
    with pytest.raises(UsageError, match=r"option width is 33, but it must be a multiple of the 2 heads$"):
        TrainConfig(out=Path("run"), width=33, heads=2)
    expected = r"warmup is 7, but it must be below the number of steps, 7; lower warmup \(0 is none\), or raise steps$"
    with pytest.raises(UsageError, match=expected):
        TrainConfig(out=Path("run"), warmup=7, steps=7)
    assert TrainConfig(out=Path("run"), warmup=0, steps=1).steps == 1


def test_defaults_are_valid_and_plain() -> None:
    config = TrainConfig(out=Path("run"))
    values = json.loads(json.dumps(config.as_json()))
    assert values["out"] == "run"
    assert TrainConfig(**values | {"out": Path("run")}) == config
