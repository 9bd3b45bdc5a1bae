"""Falcon: 7B (MQA, one norm for a parallel block), 40B and 11B (GQA, the new block), RW (multi-head, ALiBi)."""

from __future__ import annotations

from typing import Any

from writehead.checkpoint.rules import Grouped, RuleSet
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families.base import Family, head_size, module, rule_set
from writehead.models.rope import read_rope


def read(config: ConfigReader) -> ModelConfig:
    config.alias(n_head="num_attention_heads", n_layer="num_hidden_layers", n_head_kv="num_kv_heads")
    config.defaults(
        vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, layer_norm_epsilon=1e-5,
        multi_query=True, parallel_attn=True, max_position_embeddings=2048, bos_token_id=11, eos_token_id=11,
        activation="gelu", tie_word_embeddings=True,
    )  # fmt: skip
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    width = config.size("n_embed", width)
    head_dim, max_positions = head_size(config, width, heads), config.size("max_position_embeddings")
    new = config.get("new_decoder_architecture", bool, False)
    parallel, norms = _block(config, new=new)
    bias, alibi = config.get("bias", bool, False), config.get("alibi", bool, False)
    rope = read_rope(config, head_dim, max_positions=max_positions)
    config.harmless("ff_factor")  # ffn_hidden_size says it
    config.require("apply_residual_connection_post_layernorm", False)
    return ModelConfig(
        family="falcon",
        vocab_size=config.size("vocab_size"),
        hidden_size=width,
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, heads, new=new),
        head_dim=head_dim,
        intermediate_size=config.size("ffn_hidden_size", 4 * width),
        max_positions=max_positions,
        positions="alibi" if alibi else "rope",
        rope=None if alibi else rope,
        alibi_scale=head_dim**-0.5,
        norm_eps=config.get("layer_norm_epsilon", float),
        activation=config.activation("activation"),
        qkv_bias=bias,
        attn_out_bias=bias,
        mlp_bias=bias,
        residual="parallel" if parallel else "sequential",
        shared_norm=norms == 1,
        tie_embeddings=config.get("tie_word_embeddings", bool),
        attention_scale=head_dim**-0.5,
        bos_id=config.get("bos_token_id", int, None),
        eos_ids=config.ids("eos_token_id"),
    )


def _block(config: ConfigReader, *, new: bool) -> tuple[bool, int]:
    """Whether attention and MLP are parallel, and how many norms a layer has."""
    if new:
        config.require("parallel_attn", True)
        config.require("num_ln_in_parallel_attn", 1, 2)
        return True, config.get("num_ln_in_parallel_attn", int, 2)
    config.require("num_ln_in_parallel_attn", 1)
    parallel = config.get("parallel_attn", bool, False)
    return parallel, 1 if parallel else 2


def _num_kv_heads(config: ConfigReader, heads: int, *, new: bool) -> int:
    multi_query = config.get("multi_query", bool, False)
    shared = config.size("num_kv_heads", heads)
    return shared if new else 1 if multi_query else heads


def write(config: ModelConfig) -> dict[str, Any]:
    """The keys of a model without a rotary scaling."""
    heads, parallel = config.num_heads, config.residual == "parallel"
    new = parallel and not (config.shared_norm and config.num_kv_heads in (1, heads))
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_kv_heads": config.num_kv_heads,
        "multi_query": config.num_kv_heads == 1,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (1 if config.shared_norm else 2) if new else None,
        "parallel_attn": parallel,
        "ffn_hidden_size": config.intermediate_size,
        "activation": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "bias": config.qkv_bias,
        "alibi": config.positions == "alibi",
        "rope_theta": 10000.0 if config.rope is None else config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
    }


def rules(config: ModelConfig) -> RuleSet:
    layer, theirs = "layers.{i}", "h.{i}"
    rows = Grouped(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    attn_norm, mlp_norm = "input_layernorm", "post_attention_layernorm"
    if config.residual == "parallel" and not config.shared_norm:
        attn_norm, mlp_norm = "ln_attn", "ln_mlp"
    return rule_set(
        config,
        module(f"{layer}.attn_norm", f"{theirs}.{attn_norm}", bias=True),
        module(f"{layer}.attn.qkv", f"{theirs}.self_attention.query_key_value", bias=config.qkv_bias, layout=rows),
        module(f"{layer}.attn.out", f"{theirs}.self_attention.dense", bias=config.attn_out_bias),
        () if config.shared_norm else module(f"{layer}.mlp_norm", f"{theirs}.{mlp_norm}", bias=True),
        module(f"{layer}.mlp.up", f"{theirs}.mlp.dense_h_to_4h", bias=config.mlp_bias),
        module(f"{layer}.mlp.down", f"{theirs}.mlp.dense_4h_to_h", bias=config.mlp_bias),
        module("norm", "ln_f", bias=True),
        prefix="transformer.",
        embed="word_embeddings",
        ignored=("h.{i}.self_attention.rotary_emb.inv_freq", "h.{i}.self_attention.maybe_rotary.inv_freq"),
    )


FAMILY = Family(name="falcon", read=read, rules=rules, write=write)
