"""Qwen 3: Llama with a norm on each head of queries and keys."""

from __future__ import annotations

from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import llama_like
from writehead.models.families.base import Family


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(**llama_like.QWEN, head_dim=128, attention_bias=False)
    changes = llama_like.window(config) | llama_like.attention_bias(config)
    return llama_like.read(config, family="qwen3", qk_norm=True, **changes)


FAMILY = Family(name="qwen3", read=read, rules=llama_like.rules)
