"""Qwen 1.5, 2 and 2.5 with their Coder models: Llama with biases on queries, keys and values alone."""

from __future__ import annotations

from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import llama_like
from writehead.models.families.base import Family


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(**llama_like.QWEN)
    config.require("use_mrope", False)
    return llama_like.read(config, family="qwen2", qkv_bias=True, **llama_like.window(config))


FAMILY = Family(name="qwen2", read=read, rules=llama_like.rules)
