"""GPT-NeoX and Pythia: multi-head, interleaved by head, part of each head rotated, parallel or sequential blocks."""

from __future__ import annotations

from writehead.checkpoint.rules import Grouped, RuleSet
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families.base import Family, head_size, module, rule_set
from writehead.models.rope import read_rope


def read(config: ConfigReader) -> ModelConfig:
    config.alias(rope_theta="rotary_emb_base")  # later versions of transformers wrote both
    config.defaults(
        vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576,
        hidden_act="gelu", max_position_embeddings=2048, layer_norm_eps=1e-5, bos_token_id=0, eos_token_id=2,
        tie_word_embeddings=False, use_parallel_residual=True, attention_bias=True, rotary_pct=0.25,
        rotary_emb_base=10000.0,
    )  # fmt: skip
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim, max_positions = head_size(config, width, heads), config.size("max_position_embeddings")
    fraction, theta = config.get("rotary_pct", float), config.get("rotary_emb_base", float)
    bias = config.get("attention_bias", bool)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=config.size("vocab_size"),
        hidden_size=width,
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=config.size("intermediate_size"),
        max_positions=max_positions,
        positions="rope",
        rope=read_rope(config, head_dim, max_positions=max_positions, theta=theta, fraction=fraction, partial=True),
        norm_eps=config.get("layer_norm_eps", float),
        activation=config.activation("hidden_act"),
        qkv_bias=bias,
        attn_out_bias=bias,
        residual="parallel" if config.get("use_parallel_residual", bool) else "sequential",
        tie_embeddings=config.get("tie_word_embeddings", bool),
        attention_scale=head_dim**-0.5,
        bos_id=config.get("bos_token_id", int, None),
        eos_ids=config.ids("eos_token_id"),
    )


def rules(config: ModelConfig) -> RuleSet:
    layer, theirs = "layers.{i}", "layers.{i}.attention"
    rows = Grouped(config.num_kv_heads, 1, config.head_dim)
    return rule_set(
        config,
        module(f"{layer}.attn_norm", f"{layer}.input_layernorm", bias=True),
        module(f"{layer}.attn.qkv", f"{theirs}.query_key_value", bias=config.qkv_bias, layout=rows),
        module(f"{layer}.attn.out", f"{theirs}.dense", bias=config.attn_out_bias),
        module(f"{layer}.mlp_norm", f"{layer}.post_attention_layernorm", bias=True),
        module(f"{layer}.mlp.up", f"{layer}.mlp.dense_h_to_4h", bias=True),
        module(f"{layer}.mlp.down", f"{layer}.mlp.dense_4h_to_h", bias=True),
        module("norm", "final_layer_norm", bias=True),
        prefix="gpt_neox.",
        embed="embed_in",
        head="embed_out",
        ignored=tuple(f"{theirs}.{buffer}" for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq")),
    )


FAMILY = Family(name="gpt_neox", read=read, rules=rules)
