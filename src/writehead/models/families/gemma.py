"""Gemma 1 and CodeGemma (2B is MQA): Llama with scaled embeddings, norms stored as weight - 1, and wide heads."""

from __future__ import annotations

from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import llama_like
from writehead.models.families.base import Family


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(
        vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-6, bos_token_id=2, eos_token_id=1, tie_word_embeddings=True, attention_bias=False,
    )  # fmt: skip
    config.require("use_bidirectional_attention", False)
    # The first releases say "gelu" and mean the tanh form; later ones add the key hidden_activation to say so.
    config.require("hidden_activation", "gelu", "gelu_pytorch_tanh")
    named = config.activation("hidden_act")
    return llama_like.read(
        config,
        family="gemma",
        **llama_like.attention_bias(config),
        norm_offset=1.0,
        activation="gelu_tanh" if named == "gelu" else named,
        embedding_multiplier=config.size("hidden_size") ** 0.5,
    )


FAMILY = Family(name="gemma", read=read, rules=llama_like.rules)
