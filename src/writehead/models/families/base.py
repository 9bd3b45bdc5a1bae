"""What a family is: data that says how to read its config and where its weights are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from writehead.checkpoint.rules import RuleSet
from writehead.models.config import ConfigReader, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One `model_type` of Hugging Face configs."""

    name: str
    read: Callable[[ConfigReader], ModelConfig]
    rules: Callable[[ModelConfig], RuleSet]
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    """A Hugging Face config that reads back to the same model, for checkpoints that are made without one."""
    matches: Callable[[Mapping[str, Any]], bool] | None = None
    """Tells apart families that share a `model_type`; None: the type alone decides."""
    model_type: str | None = None
    """The `model_type` in config.json, if it is not the family's name."""
    export_as: str | None = None
    """The family in whose form `writehead convert` writes it, if it is not its own."""
