"""Models without a checkpoint: a shape, and weights that are noise. Time and memory do not depend on the numbers.

`random:NAME` is one of SHAPES, `random:MODEL` the shape of a checkpoint, whose weights are not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from writehead.build import ModelSource, open_source, parameter_shapes
from writehead.checkpoint.contract import OpenCheckpoint, TensorInfo
from writehead.checkpoint.rules import Rule, RuleSet, Shape
from writehead.errors import UsageError
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import family_of

PREFIX = "random:"


def _gpt_bigcode(layers: int, width: int, heads: int, *, positions: int, vocab: int) -> Mapping[str, Any]:
    return MappingProxyType(
        {"model_type": "gpt_bigcode", "n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": positions,
         "vocab_size": vocab}
    )  # fmt: skip


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "tiny": _gpt_bigcode(2, 64, 4, positions=512, vocab=512),
    "small": _gpt_bigcode(6, 512, 8, positions=1024, vocab=49280),
    "gpt2-medium": _gpt_bigcode(24, 1024, 16, positions=2048, vocab=50257),
    "santacoder": _gpt_bigcode(24, 2048, 16, positions=2048, vocab=49280),
    "gpt2-1b": _gpt_bigcode(24, 2048, 16, positions=2048, vocab=50258),
    "starcoderbase-3b": _gpt_bigcode(36, 2816, 22, positions=8192, vocab=49152),
    "starcoderbase-7b": _gpt_bigcode(42, 4096, 32, positions=8192, vocab=49152),
    "starcoder": _gpt_bigcode(40, 6144, 48, positions=8192, vocab=49152),
})  # fmt: skip
"""Hugging Face's keys of some gpt_bigcode models; all of them multi-query."""


def structure(model: str | None) -> ModelConfig:
    """The structure of what a `--model` names, without its weights. Raises UsageError for a shape that is neither in
    the table nor a checkpoint."""
    if model is None or not model.startswith(PREFIX):
        return open_source(model).config
    name = model.removeprefix(PREFIX)
    if name in SHAPES:
        return family_of(SHAPES[name]).read(ConfigReader(SHAPES[name], source=model))
    if "/" not in name and not Path(name).exists():
        raise UsageError(f"'{model}': '{name}' is neither a shape ({', '.join(SHAPES)}) nor a checkpoint")
    return open_source(name).config


def noise_source(config: ModelConfig) -> ModelSource:
    """A checkpoint of bf16 noise in the decoder's own names, to be built like any other."""
    path = Path(f"{PREFIX}{config.family}")
    values = {"model_type": "gpt_bigcode"}
    empty = OpenCheckpoint(path, "safetensors", {}, config=values)
    source = ModelSource(
        path=path, checkpoint=empty, values=values, family=family_of(values), config=config, rules=RuleSet(rules=())
    )
    shapes = parameter_shapes(source)
    return replace(
        source,
        checkpoint=OpenCheckpoint(path, "safetensors", {n: _Noise(n, s) for n, s in shapes.items()}, config=values),
        rules=RuleSet(rules=tuple(Rule(target=name, sources=(name,)) for name in shapes)),
    )


class _Noise:
    """One tensor: norms around one, all else as small as weights after initialization."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.info = TensorInfo(name, shape, "BF16", 2 * math.prod(shape))

    def load(self) -> Tensor:
        """Repeats of one block of noise: as fast as memory, and no two rows of a matrix next to each other alike."""
        block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
        count = math.prod(self.info.shape)
        flat = block.expand(-(-count // _BLOCK), _BLOCK).reshape(-1)[:count]
        is_norm = "norm" in self.info.name and self.info.name.endswith("weight")
        return (flat + 1 if is_norm else flat).view(self.info.shape)

    def prefetch(self) -> None:
        """Nothing to read."""


_BLOCK = (1 << 18) - 5
