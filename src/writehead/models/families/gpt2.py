"""GPT-2: multi-head, every matrix stored [in, out] (Conv1D), learned positions."""

from __future__ import annotations

from writehead.checkpoint.rules import RuleSet, Transposed
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import gpt2_like
from writehead.models.families.base import Family, module


def read(config: ConfigReader) -> ModelConfig:
    config.require("attention_head_type", "multihead")
    return gpt2_like.read(
        config, family="gpt2", scale_by_layer=config.get("scale_attn_by_inverse_layer_idx", bool, False)
    )


def rules(config: ModelConfig) -> RuleSet:
    fused = module("layers.{i}.attn.qkv", "h.{i}.attn.c_attn", bias=True, layout=Transposed())
    return gpt2_like.rules(config, fused, Transposed())


FAMILY = Family(name="gpt2", read=read, rules=rules, matches=lambda c: c.get("attention_head_type") != "multiquery")
