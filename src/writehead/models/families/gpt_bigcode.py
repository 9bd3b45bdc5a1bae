"""SantaCoder (converted), StarCoder, Granite-Code 20B/34B and their multi-head twins (`multi_query: false`)."""

from __future__ import annotations

from typing import Any

from writehead.checkpoint.rules import Grouped, Layout, Rule, RuleSet, Same
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families.base import Family


def read(config: ConfigReader) -> ModelConfig:
    width, heads = config.get("n_embd", int, 768), config.get("n_head", int, 12)
    multi_query = config.get("multi_query", bool, True)
    config.harmless("num_key_value_heads")
    head_dim = width // heads
    return ModelConfig(
        family="gpt_bigcode",
        vocab_size=config.get("vocab_size", int),
        hidden_size=width,
        num_layers=config.get("n_layer", int, 12),
        num_heads=heads,
        num_kv_heads=1 if multi_query else heads,
        head_dim=head_dim,
        intermediate_size=config.get("n_inner", int, 4 * width),
        max_positions=config.get("n_positions", int, 1024),
        positions="learned",
        norm_eps=config.get("layer_norm_epsilon", float, 1e-5),
        activation=config.activation("activation_function", "gelu_pytorch_tanh"),
        tie_embeddings=config.get("tie_word_embeddings", bool, True),
        attention_scale=head_dim**-0.5 if config.get("scale_attn_weights", bool, True) else 1.0,
        bos_id=config.get("bos_token_id", int, None),
        eos_ids=config.ids("eos_token_id"),
    )


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
    }


def layer_rules(qkv: Layout) -> tuple[Rule, ...]:
    names = {
        "attn_norm": "ln_1",
        "attn.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    plain = tuple(
        Rule(target=f"layers.{{i}}.{ours}.{part}", sources=(f"h.{{i}}.{theirs}.{part}",))
        for ours, theirs in names.items()
        for part in ("weight", "bias")
    )
    fused = tuple(
        Rule(target=f"layers.{{i}}.attn.qkv.{part}", sources=(f"h.{{i}}.attn.c_attn.{part}",), layout=qkv)
        for part in ("weight", "bias")
    )
    return plain + fused


def rules(config: ModelConfig) -> RuleSet:
    grouped = Same() if config.num_kv_heads == 1 else Grouped(config.num_kv_heads, 1, config.head_dim)
    head = () if config.tie_embeddings else (Rule(target="lm_head.weight", sources=("lm_head.weight",)),)
    return RuleSet(
        rules=(
            Rule(target="embed.weight", sources=("wte.weight",)),
            Rule(target="positions.weight", sources=("wpe.weight",)),
            Rule(target="norm.weight", sources=("ln_f.weight",)),
            Rule(target="norm.bias", sources=("ln_f.bias",)),
            *layer_rules(grouped),
            *head,
        ),
        prefixes=("transformer.", ""),
        unprefixed=("lm_head.weight",),
        ignored=("h.{i}.attn.bias", "h.{i}.attn.masked_bias"),
        aliases={"lm_head.weight": "wte.weight"} if config.tie_embeddings else None,
    )


FAMILY = Family(name="gpt_bigcode", read=read, rules=rules, write=write)
