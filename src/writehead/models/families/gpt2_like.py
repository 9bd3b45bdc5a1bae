"""What GPT-2 and its descendants share: the config's keys, and the names of everything but the fused projection."""

from __future__ import annotations

from typing import Any

from writehead.checkpoint.rules import Layout, Rule, RuleSet
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families.base import head_size, module, rule_set

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
}


def read(config: ConfigReader, *, family: str, num_kv_heads: int | None = None, **changes: Any) -> ModelConfig:
    """Read GPT-2's keys. `num_kv_heads` None: as many as query heads; `changes` override what the keys say."""
    config.alias(
        hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )  # fmt: skip
    config.defaults(**DEFAULTS)
    width, heads = config.size("n_embd"), config.size("n_head")
    head_dim = head_size(config, width, heads)
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": config.size("vocab_size"),
        "hidden_size": width,
        "num_layers": config.size("n_layer"),
        "num_heads": heads,
        "num_kv_heads": num_kv_heads or heads,
        "head_dim": head_dim,
        "intermediate_size": config.size("n_inner", 4 * width),
        "max_positions": config.size("n_positions"),
        "positions": "learned",
        "norm_eps": config.get("layer_norm_epsilon", float),
        "activation": config.activation("activation_function"),
        "tie_embeddings": config.get("tie_word_embeddings", bool),
        "attention_scale": head_dim**-0.5 if config.get("scale_attn_weights", bool) else 1.0,
        "bos_id": config.get("bos_token_id", int, None),
        "eos_ids": config.ids("eos_token_id"),
    }
    return ModelConfig(**values | changes)


def rules(config: ModelConfig, qkv: tuple[Rule, ...], dense: Layout) -> RuleSet:
    """GPT-2's names, with the rules of the fused projection and the layout of all other matrices."""
    layer, theirs = "layers.{i}", "h.{i}"
    return rule_set(
        config,
        module("positions", "wpe", bias=False),
        module(f"{layer}.attn_norm", f"{theirs}.ln_1", bias=True),
        qkv,
        module(f"{layer}.attn.out", f"{theirs}.attn.c_proj", bias=True, layout=dense),
        module(f"{layer}.mlp_norm", f"{theirs}.ln_2", bias=True),
        module(f"{layer}.mlp.up", f"{theirs}.mlp.c_fc", bias=True, layout=dense),
        module(f"{layer}.mlp.down", f"{theirs}.mlp.c_proj", bias=True, layout=dense),
        module("norm", "ln_f", bias=True),
        prefix="transformer.",
        embed="wte",
        ignored=("h.{i}.attn.bias", "h.{i}.attn.masked_bias"),
    )
