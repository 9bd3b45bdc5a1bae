"""A run's resumable state on disk: written whole or not at all, read without pickle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from writehead.errors import CheckpointError
from writehead.train.data import Batches

FILE_NAME = "state.pt"


@dataclass
class Progress:
    """How far a run is: optimizer steps done, tokens seen, seconds of training."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save_state(
    path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, progress: Progress
) -> None:
    """Write weights, optimizer, place in the data and progress; an existing file is replaced in one step."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "batches": batches.state(),
        "progress": vars(progress),
    }
    partial = path.with_suffix(".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise CheckpointError(
            f"{path}: the training state cannot be written ({error}); make room and resume"
        ) from error


def load_state(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> Progress:
    """Write a saved state into model, optimizer and batches; return its progress.

    A step draws no random numbers (the data's order follows from its place), so the run continues bit for bit.
    """
    state = read_state(path)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.load_state(state["batches"])
        return Progress(**state["progress"])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: the saved state does not fit this run's model; resume with the options of the original run "
            "or choose another output folder"
        ) from error


def read_progress(out: Path) -> Progress:
    """How far the run in the folder `out` is."""
    return Progress(**read_state(out / FILE_NAME)["progress"])


def read_state(path: Path) -> dict[str, Any]:
    """Read a saved state onto the CPU. Errors: CheckpointError when it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no training state to resume; start the run without resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports damage with a dozen types
        raise CheckpointError(f"{path}: the training state is damaged; start the run again in a new folder") from error
    return state
