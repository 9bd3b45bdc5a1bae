"""Mistral 7B and Codestral: Llama with a sliding window in every layer."""

from __future__ import annotations

from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import llama_like
from writehead.models.families.base import Family


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1e-6, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False, sliding_window=4096,
    )  # fmt: skip
    return llama_like.read(config, family="mistral", sliding_window=config.get("sliding_window", int, None))


FAMILY = Family(name="mistral", read=read, rules=llama_like.rules)
