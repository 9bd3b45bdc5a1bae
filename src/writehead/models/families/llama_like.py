"""What Llama and its descendants share: the config's keys, and the names of the weights."""

from __future__ import annotations

from typing import Any

from writehead.checkpoint.rules import Rule, RuleSet, stacked
from writehead.errors import ConfigError
from writehead.models.config import MAX_LAYERS, ConfigReader, ModelConfig
from writehead.models.families.base import head_size, module, rule_set
from writehead.models.rope import read_rope

QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Defaults of both Qwen2Config and Qwen3Config."""


def read(config: ConfigReader, *, family: str, **changes: Any) -> ModelConfig:
    """Read the keys that all of them have, defaults declared before; `changes` add and override what the keys say."""
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim") if config.has("head_dim") else head_size(config, width, heads)
    max_positions = config.size("max_position_embeddings")
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": config.size("vocab_size"),
        "hidden_size": width,
        "num_layers": config.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.size("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": config.size("intermediate_size"),
        "max_positions": max_positions,
        "positions": "rope",
        "rope": read_rope(config, head_dim, max_positions=max_positions),
        "norm": "rms",
        "norm_bias": False,
        "activation": config.activation("hidden_act"),
        "gated": True,
        "qkv_bias": False,
        "attn_out_bias": False,
        "mlp_bias": False,
        "tie_embeddings": config.get("tie_word_embeddings", bool),
        "attention_scale": head_dim**-0.5,
        "bos_id": config.get("bos_token_id", int, None),
        "eos_ids": config.ids("eos_token_id"),
    }
    if "norm_eps" not in changes:
        values["norm_eps"] = config.get("rms_norm_eps", float)
    return ModelConfig(**values | changes)


def attention_bias(config: ConfigReader) -> dict[str, bool]:
    """`attention_bias`: all four projections of attention have one, or none."""
    bias = config.get("attention_bias", bool)
    return {"qkv_bias": bias, "attn_out_bias": bias}


def window(config: ConfigReader) -> dict[str, Any]:
    """Qwen's sliding window: off unless `use_sliding_window`, and then on the layers that `layer_types` names.

    Without `layer_types`, on the layers from `max_window_layers` on.
    """
    layers, first = config.size("num_hidden_layers"), config.get("max_window_layers", int)
    size = config.get("sliding_window", int, None)
    size = size if config.get("use_sliding_window", bool) else None
    kinds = config.get("layer_types", list, None)
    if kinds is None:
        windowed = [size is not None and layer >= first for layer in range(min(layers, MAX_LAYERS))]
    else:
        windowed = [kind == "sliding_attention" for kind in kinds]
    unknown = [kind for kind in kinds or () if kind not in ("full_attention", "attention", "sliding_attention")]
    if unknown:
        raise ConfigError(
            f"{config.source}: 'layer_types' has {unknown[0]!r}; writehead knows full and sliding_attention"
        )
    return {"sliding_window": size, "windowed_layers": tuple(windowed)}


def rules(config: ModelConfig) -> RuleSet:
    layer = "layers.{i}"
    gate_up = stacked(config.intermediate_size, config.intermediate_size)
    return rule_set(
        config,
        *attention(config),
        module(
            f"{layer}.mlp.up", f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj", bias=config.mlp_bias, layout=gate_up
        ),
        module(f"{layer}.mlp.down", f"{layer}.mlp.down_proj", bias=config.mlp_bias),
        prefix="model.",
        embed="embed_tokens",
        ignored=IGNORED,
    )


IGNORED = ("rotary_emb.inv_freq", "layers.{i}.self_attn.rotary_emb.inv_freq")
"""Buffers that old checkpoints carry."""


def attention(config: ModelConfig) -> tuple[tuple[Rule, ...], ...]:
    """The norms and the attention: everything but the feed-forward part."""
    layer, theirs = "layers.{i}", "layers.{i}.self_attn"
    qkv = (f"{theirs}.q_proj", f"{theirs}.k_proj", f"{theirs}.v_proj")
    rows = stacked(config.q_size, config.kv_size, config.kv_size)
    names = ("q_norm", "k_norm") if config.qk_norm else ()
    return (
        module(f"{layer}.attn_norm", f"{layer}.input_layernorm", bias=config.norm_bias),
        module(f"{layer}.attn.qkv", *qkv, bias=config.qkv_bias, layout=rows),
        *(module(f"{layer}.attn.{name}", f"{theirs}.{name}", bias=False) for name in names),
        module(f"{layer}.attn.out", f"{theirs}.o_proj", bias=config.attn_out_bias),
        module(f"{layer}.mlp_norm", f"{layer}.post_attention_layernorm", bias=config.norm_bias),
        module("norm", "norm", bias=config.norm_bias),
    )
