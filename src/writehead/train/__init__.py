"""Training: a small code model from a folder of source files."""

from __future__ import annotations

from writehead.train.config import STDLIB, TrainConfig
from writehead.train.trainer import TrainResult, train

__all__ = ["STDLIB", "TrainConfig", "TrainResult", "train"]
