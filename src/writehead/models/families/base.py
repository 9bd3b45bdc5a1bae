"""What a family is: data that says how to read its config and where its weights are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from writehead.checkpoint.rules import Layout, Rule, RuleSet, Same
from writehead.errors import ConfigError
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
    also: tuple[str, ...] = ()
    """Further values of `model_type`."""
    export_as: str | None = None
    """The family in whose form `writehead convert` writes it, if it is not its own."""


def head_size(config: ConfigReader, width: int, heads: int) -> int:
    """The width of a head where the config has no key for it. Raises ConfigError if the heads do not fill the width."""
    if width % heads:
        raise ConfigError(f"{config.source}: a width of {width} cannot be split evenly into {heads} heads")
    return width // heads


SAME = Same()


def module(ours: str, *theirs: str, bias: bool, layout: Layout = SAME) -> tuple[Rule, ...]:
    """The rules of one module of the decoder: its weight, and its bias if it has one, from the modules `theirs`."""
    parts = ("weight", "bias") if bias else ("weight",)
    return tuple(Rule(target=f"{ours}.{p}", sources=tuple(f"{t}.{p}" for t in theirs), layout=layout) for p in parts)


def rule_set(
    config: ModelConfig, *modules: tuple[Rule, ...], prefix: str, embed: str, head: str = "lm_head",
    ignored: tuple[str, ...] = (),
) -> RuleSet:  # fmt: skip
    """The rules of a checkpoint of the usual form: an embedding, `modules`, and a head that is tied or stored apart.

    The head stands outside the `prefix`, which bare checkpoints lack. Files of tied models may repeat the embedding as
    the head.
    """
    tied = config.tie_embeddings
    heads = () if tied else module("lm_head", head, bias=False)
    return RuleSet(
        rules=(*module("embed", embed, bias=False), *(rule for rules in modules for rule in rules), *heads),
        prefixes=(prefix, ""),
        unprefixed=(f"{head}.weight",),
        ignored=ignored,
        aliases={f"{head}.weight": f"{embed}.weight"} if tied else None,
    )
