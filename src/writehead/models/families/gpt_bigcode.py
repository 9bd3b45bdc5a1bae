"""SantaCoder (converted), StarCoder, Granite-Code 20B/34B and their multi-head twins (`multi_query: false`)."""

from __future__ import annotations

from typing import Any

from writehead.checkpoint.rules import Grouped, RuleSet, Same
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import gpt2_like
from writehead.models.families.base import Family, module


def read(config: ConfigReader) -> ModelConfig:
    config.defaults(activation_function="gelu_pytorch_tanh", multi_query=True)
    config.harmless("num_key_value_heads")  # transformers derives it from multi_query
    config.require("scale_attn_by_inverse_layer_idx", False)
    return gpt2_like.read(config, family="gpt_bigcode", num_kv_heads=1 if config.get("multi_query", bool) else None)


def write(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_positions,
        "multi_query": config.num_kv_heads == 1,
        "activation_function": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": config.attention_scale != 1.0,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
    }


def rules(config: ModelConfig) -> RuleSet:
    rows = Grouped(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    fused = module("layers.{i}.attn.qkv", "h.{i}.attn.c_attn", bias=True, layout=rows)
    return gpt2_like.rules(config, fused, Same())


FAMILY = Family(name="gpt_bigcode", read=read, rules=rules, write=write)
