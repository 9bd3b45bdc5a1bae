"""What a training run is: one frozen value, written beside its results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from writehead.errors import UsageError

STDLIB = "stdlib"

_WHOLE = {
    "vocab_size": (300, 65536),
    "layers": (1, 1000),
    "width": (1, 1 << 16),
    "heads": (1, 1 << 16),
    "context": (16, 1 << 20),
    "steps": (1, 10**9),
    "batch": (1, 1 << 16),
    "accumulate": (1, 1 << 16),
    "warmup": (0, 10**9),
    "loop_every": (1, 10**9),
    "loop_batch": (1, 1 << 16),
    "loop_tokens": (1, 1 << 20),
    "seed": (0, 2**64 - 1),  # what both torch and numpy take
    "eval_every": (1, 10**9),
    "eval_files": (1, 10**9),
    "threads": (1, 1024),  # torch dies of some ten thousand
}
"""The whole numbers, with the least and the largest value of each."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the result of a run; the defaults are those of the model in the box.

    `minutes` is a budget of training time: the learning rate then follows whichever of steps / `steps` and
    minutes spent / `minutes` is further, so a run on a slow machine still ends with a complete decay.
    Without it a run is a function of this config alone.
    """

    out: Path
    corpus: str = STDLIB  # a folder, or "stdlib" for the running Python's own
    pattern: str = "**/*.py"
    held_out: float = 0.025  # share of the files that no step and no tokenizer ever sees

    # text
    vocab_size: int = 4096
    fim_rate: float = 0.2  # share of the documents that are turned into fill-in-the-middle
    function_rate: float = 0.6  # share of the other documents that are shown one function at a time

    # model
    layers: int = 5
    width: int = 320
    heads: int = 5
    context: int = 1024

    # optimization
    steps: int = 5000
    batch: int = 8  # sequences of `context` tokens a pass
    accumulate: int = 1  # passes a step
    short_share: float = 0.75  # share of the run, from its start, that sees sequences cut in two: attention is cheaper
    optimizer: Literal["adamw", "muon"] = "muon"
    lr: float = 6e-3
    min_lr: float = 3e-5
    warmup: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    repetition: float = 1.0  # weight of unlikelihood against repeating the last tokens; 0: plain cross-entropy
    loop_share: float = 0.25  # share of the run, at its end, that also trains against loops (loops.py); 0: none
    loop_every: int = 2  # steps from one that does so to the next
    loop_batch: int = 32  # greedy completions of such a step
    loop_tokens: int = 160  # tokens of a completion, fewer in a short context
    loop_weight: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: int = 0

    # the run
    minutes: float | None = None
    resume: bool = False
    checkpoint_minutes: float = 4.0
    eval_every: int = 250
    eval_files: int = 12
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work, by name."""
        for name, value in vars(self).items():
            _require(not isinstance(value, float) or math.isfinite(value), name, value, "a finite number")
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            _require(value is None or low <= value <= high, name, value, f"from {low} to {high}")
        for name in ("lr", "clip", "checkpoint_minutes"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("fim_rate", "function_rate", "short_share", "repetition", "loop_share"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        _require(0 < self.held_out < 1, "held_out", self.held_out, "between 0 and 1, both excluded")
        _require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"between 0 and the learning rate {self.lr}")
        for name in ("weight_decay", "loop_weight"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        fewer = f"below the number of steps, {self.steps}; lower warmup (0 is none), or raise steps"
        _require(self.warmup < self.steps, "warmup", self.warmup, fewer)
        _require(self.width % self.heads == 0, "width", self.width, f"a multiple of the {self.heads} heads")
        _require(self.context % 2 == 0, "context", self.context, "even")
        _require(self.optimizer in ("adamw", "muon"), "optimizer", self.optimizer, "adamw or muon")
        _require(self.dtype in ("float32", "bfloat16"), "dtype", self.dtype, "float32 or bfloat16")
        _require(self.minutes is None or self.minutes > 0, "minutes", self.minutes, "more than 0")

    def as_json(self) -> dict[str, object]:
        """The config as plain values, for the log, the checkpoint and the model card."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise UsageError(f"training option {name} is {value}, but it must be {expected}")
