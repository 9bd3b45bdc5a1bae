"""Llama 1 to 3, Code Llama, DeepSeek-Coder, Granite-Code 3B/8B, SmolLM."""

from __future__ import annotations

from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import llama_like
from writehead.models.families.base import Family


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    config.require("rope_interleaved", False)
    return llama_like.read(
        config, family="llama", **llama_like.attention_bias(config), mlp_bias=config.get("mlp_bias", bool)
    )


FAMILY = Family(name="llama", read=read, rules=llama_like.rules)
