"""SantaCoder as first published: GPT-2 with one key/value head, whose projection stands apart from the queries'."""

from __future__ import annotations

from writehead.checkpoint.rules import RuleSet, Transposed, stacked
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import gpt2_like
from writehead.models.families.base import Family, module


def read(config: ConfigReader) -> ModelConfig:
    config.require("attention_head_type", "multiquery")
    config.require("scale_attn_by_inverse_layer_idx", False)
    return gpt2_like.read(config, family="santacoder", num_kv_heads=1)


def rules(config: ModelConfig) -> RuleSet:
    rows = stacked(config.q_size, 2 * config.kv_size, each=Transposed())
    attention = module("layers.{i}.attn.qkv", "h.{i}.attn.q_attn", "h.{i}.attn.kv_attn", bias=True, layout=rows)
    return gpt2_like.rules(config, attention, Transposed())


FAMILY = Family(
    name="santacoder",
    read=read,
    rules=rules,
    model_type="gpt2",
    matches=lambda c: c.get("attention_head_type") == "multiquery",
    export_as="gpt_bigcode",
)
