"""The registry of families. Adding one is a file of data and a line here (docs/adding-a-family.md)."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from writehead.errors import ConfigError
from writehead.models.families import (
    falcon,
    gemma,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    granite,
    llama,
    mistral,
    qwen2,
    qwen3,
    refined_web,
    santacoder,
    starcoder2,
)
from writehead.models.families.base import Family

__all__ = ["FAMILIES", "Family", "family_of"]

_MODULES = (
    gpt_bigcode, gpt2, santacoder, starcoder2, llama, mistral, qwen2, qwen3, granite, gemma, falcon, refined_web,
    gpt_neox,
)  # fmt: skip

FAMILIES: dict[str, Family] = {m.FAMILY.name: m.FAMILY for m in _MODULES}


def family_of(config: Mapping[str, Any], *, source: str = "config.json") -> Family:
    """The family of a Hugging Face config. Raises ConfigError if there is none."""
    kind = config.get("model_type")
    found = [
        f
        for f in FAMILIES.values()
        if kind in (f.model_type or f.name, *f.also) and (f.matches is None or f.matches(config))
    ]
    if not found:
        known = sorted({f.model_type or f.name for f in FAMILIES.values()}, key=str.lower)
        raise ConfigError(
            f"{source}: model_type is {short(kind)}; writehead knows {', '.join(known)}, so use a model of one of these"
        )
    return found[0]
