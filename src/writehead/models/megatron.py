"""gpt_bigcode as BigCode's Megatron-LM trains it: a Hugging Face config from the arguments, and the tensors' rules.

Names are those of the merged checkpoint (checkpoint/megatron.py).
Source: megatron/model/{transformer,language_model}.py of bigcode-project/Megatron-LM, branch multi-query-attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from writehead.checkpoint.rules import Grouped, Layout, RuleSet, stacked
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families.base import head_size, module

# Arguments that make another model: name -> the values, besides None, that leave it gpt_bigcode.
_ONLY: dict[str, tuple[Any, ...]] = {
    "add_bias_linear": (True,),
    "add_position_embedding": (True,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "glu_activation": (False,),
    "group_query_attention": (False,),
    "normalization": ("LayerNorm",),
    "num_experts": (0, 1),
    "position_embedding_type": (2, "absolute", "learned_absolute"),  # 2: PositionEmbeddingType.absolute
    "qk_layernorm": (False,),
    "retro_add_retriever": (False,),
    "rotary_interleaved": (False,),
    "squared_relu": (False,),
    "swiglu": (False,),
    "use_rotary_position_embeddings": (False,),
    "window_size": (False,),
}


def hf_config(args: Mapping[str, Any], *, source: str = "Megatron arguments") -> dict[str, Any]:
    """The Hugging Face config of a training run. Raises ConfigError that names an argument of another kind of model."""
    reader = ConfigReader(args, source=source)
    for name, allowed in _ONLY.items():
        reader.require(name, *allowed)
    reader.require("attention_head_type", "multihead", "multiquery")
    width, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    reader.require("kv_channels", head_size(reader, width, heads))
    return {
        "model_type": "gpt_bigcode",
        "vocab_size": reader.size("padded_vocab_size"),
        "n_embd": width,
        "n_layer": reader.size("num_layers"),
        "n_head": heads,
        "n_inner": reader.size("ffn_hidden_size", 4 * width),
        "n_positions": reader.size("max_position_embeddings"),
        "multi_query": reader.get("attention_head_type", str, "multihead") == "multiquery",
        "layer_norm_epsilon": reader.get("layernorm_epsilon", float),
        "activation_function": _activation(reader),
        "bos_token_id": None,  # the tokenizer knows them; Hugging Face's defaults would be GPT-2's
        "eos_token_id": None,
        "tie_word_embeddings": not reader.get("untie_embeddings_and_output_weights", bool, False),
    }


def _activation(reader: ConfigReader) -> str:
    """The order of Megatron's own choice. The fused GELU, its default, is the tanh form; onnx_safe is the exact one."""
    if reader.get("openai_gelu", bool, False):
        return "gelu_new"
    if reader.get("onnx_safe", bool, False):
        return "gelu"
    return "gelu_pytorch_tanh" if reader.get("bias_gelu_fusion", bool, True) else "gelu"


def rules(config: ModelConfig) -> RuleSet:
    """Where the merged checkpoint keeps the decoder's parameters. Multi-head rows are interleaved by head."""
    names = {
        "norm": "final_layernorm",
        "layers.{i}.attn_norm": "layers.{i}.input_layernorm",
        "layers.{i}.attn.out": "layers.{i}.self_attention.dense",
        "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.up": "layers.{i}.mlp.dense_h_to_4h",
        "layers.{i}.mlp.down": "layers.{i}.mlp.dense_4h_to_h",
    }
    tables = {"embed": "embedding.word_embeddings", "positions": "embedding.position_embeddings"}
    if not config.tie_embeddings:
        tables["lm_head"] = "output_layer"
    qkv: list[str]
    layout: Layout
    if config.num_kv_heads == 1:
        qkv, layout = ["query", "key_value"], stacked(config.q_size, 2 * config.kv_size)
    else:
        qkv, layout = ["query_key_value"], Grouped(config.num_kv_heads, 1, config.head_dim)
    sources = [f"layers.{{i}}.self_attention.{name}" for name in qkv]
    return RuleSet(
        rules=(
            *(rule for ours, theirs in tables.items() for rule in module(ours, theirs, bias=False)),
            *(rule for ours, theirs in names.items() for rule in module(ours, theirs, bias=True)),
            *module("layers.{i}.attn.qkv", *sources, bias=True, layout=layout),
        )
    )
