"""StarCoder2: Llama's attention with layer norms, biases, GPT's feed-forward part and a sliding window."""

from __future__ import annotations

from writehead.checkpoint.rules import RuleSet
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import llama_like
from writehead.models.families.base import Family, module, rule_set


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(
        vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
        num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", max_position_embeddings=4096, norm_epsilon=1e-5,
        bos_token_id=50256, eos_token_id=50256, tie_word_embeddings=True, use_bias=True,
    )  # fmt: skip
    config.require("mlp_type", "default")
    config.require("norm_type", "layer_norm")
    config.harmless("activation_function", "layer_norm_epsilon")  # left from gpt_bigcode: its other keys say it
    config.require("scale_attn_weights", True)
    bias = config.get("use_bias", bool)
    return llama_like.read(
        config,
        family="starcoder2",
        norm="layer",
        norm_bias=True,
        norm_eps=config.get("norm_epsilon", float),
        gated=False,
        qkv_bias=bias,
        attn_out_bias=bias,
        mlp_bias=bias,
        sliding_window=config.get("sliding_window", int, None),
    )


def rules(config: ModelConfig) -> RuleSet:
    return rule_set(
        config,
        *llama_like.attention(config),
        module("layers.{i}.mlp.up", "layers.{i}.mlp.c_fc", bias=config.mlp_bias),
        module("layers.{i}.mlp.down", "layers.{i}.mlp.c_proj", bias=config.mlp_bias),
        prefix="model.",
        embed="embed_tokens",
        ignored=llama_like.IGNORED,
    )


FAMILY = Family(name="starcoder2", read=read, rules=rules)
