"""Tiny configurations of every family in the keys of config.json, those of transformers 4 and of transformers 5."""

from __future__ import annotations

from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]
Variants: TypeAlias = dict[str, Values]

VOCAB = 97
MAX_POSITIONS = 64

_IDS: Values = {"bos_token_id": None, "eos_token_id": None, "vocab_size": VOCAB}
_GPT: Values = {**_IDS, "n_positions": MAX_POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4}
_LLAMA: Values = {
    **_IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
_FALCON: Values = {k: v for k, v in _LLAMA.items() if k != "intermediate_size"}

LINEAR: Values = {"rope_scaling": {"type": "linear", "factor": 3.0}}
DYNAMIC: Values = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
LLAMA3: Values = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "rope_theta": 500.0,
}
YARN: Values = {
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "rope_theta": 100.0,
}
YARN_MSCALE: Values = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    }
}
NEW_THETA: Values = {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.5}}
OLD_THETA: Values = {"rope_theta": 1234.5}
SCALINGS: Variants = {
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": YARN_MSCALE,
}


def _kv(num_heads: int) -> Values:
    return {"num_key_value_heads": num_heads}


def _llama_like(model_type: str, variants: Variants, **common: Any) -> Variants:
    """Named variants, and every rope scaling with 1, 2 and 4 key/value heads in turn."""
    base = {"model_type": model_type, **_LLAMA, **common}
    scaled = {
        name: _kv(2**n) | keys for name, n, keys in zip(SCALINGS, (0, 1, 2, 0, 1), SCALINGS.values(), strict=True)
    }
    return {f"{model_type}-{name}": {**base, **keys} for name, keys in (variants | scaled).items()}


_GPT_BIGCODE: Variants = {
    "mqa": {},
    "mha": {"multi_query": False},
    "wide-untied": {
        "n_inner": 72,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-3,
    },
    "mha-unscaled": {"multi_query": False, "scale_attn_weights": False, "activation_function": "gelu_fast"},
    "relu": {"activation_function": "relu", "n_head": 2},
}
_GPT2: Variants = {
    "plain": {},
    "layer-scale": {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "n_layer": 3},
    "untied": {"tie_word_embeddings": False, "activation_function": "gelu", "n_head": 1},
    "unscaled": {"scale_attn_weights": False, "activation_function": "silu", "layer_norm_epsilon": 1e-2},
}
_SANTACODER: Variants = {
    "plain": {},
    "fast": {"activation_function": "gelu_fast", "n_inner": 72, "layer_norm_epsilon": 1e-3},
    "untied": {"tie_word_embeddings": False, "n_head": 2},
}
_STARCODER2: Variants = {
    "mqa": _kv(1) | OLD_THETA,
    "gqa-window": _kv(2) | {"sliding_window": 6, "mlp_type": "default", "norm_type": "layer_norm"},
    "mha-bare": _kv(4) | {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    "wide-heads": _kv(2) | {"head_dim": 12, "norm_epsilon": 1e-3} | NEW_THETA,
}
_LLAMA_VARIANTS: Variants = {
    "mha": OLD_THETA,
    "mqa-tied": _kv(1) | {"tie_word_embeddings": True, "pretraining_tp": 1},
    "gqa-bias": _kv(2) | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    "wide-heads": _kv(2) | {"head_dim": 12, "hidden_act": "gelu"} | NEW_THETA,
}
_MISTRAL: Variants = {
    "gqa-window": _kv(2) | {"sliding_window": 5},
    "mqa-window": _kv(1) | {"sliding_window": 2, "tie_word_embeddings": True},
    "mha-full": _kv(4) | {"sliding_window": None, "head_dim": 12} | NEW_THETA,
}
_QWEN: Variants = {
    "mha": OLD_THETA,
    "mqa-tied": _kv(1) | {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4},
    "some-windows": _kv(2) | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "named-windows": _kv(2)
    | {
        "use_sliding_window": True,
        "sliding_window": 4,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
_GRANITE: Variants = {
    "mha": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 6.0,
    },
    "mqa-bias-tied": _kv(1) | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gqa": _kv(2) | {"residual_multiplier": 0.5, "attention_multiplier": 0.125} | NEW_THETA,
}
_GEMMA: Variants = {
    "mha": _kv(4) | {"hidden_act": "gelu_pytorch_tanh"},
    "mqa-bias": _kv(1) | {"attention_bias": True, "hidden_activation": "gelu_pytorch_tanh"},
    "gqa-untied": _kv(2) | {"tie_word_embeddings": False, "rms_norm_eps": 1e-3} | NEW_THETA,
}
_FALCON_VARIANTS: Variants = {
    "7b": {},
    "7b-bias-untied": {"bias": True, "tie_word_embeddings": False, "ffn_hidden_size": 40, **OLD_THETA},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    "40b-mha-bias": {"new_decoder_architecture": True, "bias": True, "num_ln_in_parallel_attn": 2},
    "11b": {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1, **NEW_THETA},
    "rw": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "rw-six-heads": {"alibi": True, "multi_query": False, "hidden_size": 48, "num_attention_heads": 6},
    "alibi-mqa": {"alibi": True, "activation": "gelu_pytorch_tanh", "hidden_size": 64, "num_attention_heads": 16},
    "alibi-40b": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    "sequential-mqa": {"parallel_attn": False, "layer_norm_epsilon": 1e-3},
    "parallel-mha": {"multi_query": False},
} | {f"7b-{name}": keys for name, keys in SCALINGS.items()}
_GPT_NEOX: Variants = {
    "parallel": {"rotary_pct": 0.5, "rotary_emb_base": 1000},
    "sequential": {"use_parallel_residual": False, "rotary_pct": 1.0, "layer_norm_eps": 1e-3},
    "bare-tied": {"attention_bias": False, "tie_word_embeddings": True, "hidden_act": "gelu_new"},
    "new-keys": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.75}},
    **{
        name: {"rotary_pct": 0.5, **{{"rope_theta": "rotary_emb_base"}.get(k, k): v for k, v in keys.items()}}
        for name, keys in SCALINGS.items()
    },
}


def _named(model_type: str, base: Values, variants: Variants, family: str = "") -> Variants:
    return {f"{family or model_type}-{name}": {"model_type": model_type, **base, **v} for name, v in variants.items()}


CASES: Variants = {
    **_named("gpt_bigcode", _GPT, _GPT_BIGCODE),
    **_named("gpt2", _GPT, _GPT2),
    **_named("gpt2", {**_GPT, "attention_head_type": "multiquery"}, _SANTACODER, "santacoder"),
    **_llama_like("starcoder2", _STARCODER2),
    **_llama_like("llama", _LLAMA_VARIANTS),
    **_llama_like("mistral", _MISTRAL),
    **_llama_like("qwen2", _QWEN, num_key_value_heads=4),
    **_llama_like("qwen3", _QWEN | {"bias": _kv(2) | {"attention_bias": True}}, num_key_value_heads=4, head_dim=12),
    **_llama_like("granite", _GRANITE),
    **_llama_like("gemma", _GEMMA, head_dim=12),
    **_named("falcon", _FALCON, _FALCON_VARIANTS),
    **_named("gpt_neox", _LLAMA, _GPT_NEOX),
}
"""Name, which begins with the family's, to config."""
