"""Families read what their config classes mean, refuse what they do not know, and never fail in another way."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from writehead.errors import ConfigError
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import FAMILIES, Family, family_of

ROTARY = [f for f in FAMILIES.values() if f.name not in ("gpt_bigcode", "gpt2", "santacoder")]

REFINED_WEB: dict[str, Any] = {
    "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02, "use_cache": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "multi_query": False, "alibi": False,
    "bias": False, "parallel_attn": False, "activation": "gelu",
}  # fmt: skip
"""The defaults of the class RWConfig in the repositories of the first Falcon models."""


def bare(family: Family) -> dict[str, Any]:
    """The shortest config of a family."""
    values: dict[str, Any] = {"model_type": family.model_type or family.name}
    return values | ({"attention_head_type": "multiquery"} if family.name == "santacoder" else {})


def complete(family: Family) -> dict[str, Any]:
    """The config class's own keys with their defaults."""
    if family.name == "refined_web":  # transformers never knew it
        return bare(family) | REFINED_WEB
    values: dict[str, Any] = AutoConfig.for_model(family.model_type or family.name).to_dict()
    return values | bare(family)


def read(values: dict[str, Any]) -> ModelConfig:
    reader = ConfigReader(values)
    config = family_of(values).read(reader)
    reader.finish()
    return config


@pytest.fixture(params=list(FAMILIES.values()), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


def test_family_of_finds_it(family: Family) -> None:
    assert family_of(bare(family)) is family


def test_absent_keys_mean_the_config_class_defaults(family: Family) -> None:
    assert read(bare(family)) == read(complete(family))
    assert read(bare(family)).family == family.name


def test_an_unknown_key_is_refused(family: Family) -> None:
    with pytest.raises(ConfigError, match="unknown key 'attention_sinks'"):
        read({**bare(family), "attention_sinks": 4})


@pytest.mark.parametrize("family", ROTARY, ids=lambda f: f.name)
def test_an_unsupported_rope_type_is_refused(family: Family) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match="rope scaling 'longrope' is not supported"):
            read({**bare(family), key: {"rope_type": "longrope", "factor": 2.0}})


def test_an_unknown_activation_is_refused(family: Family) -> None:
    key = next(k for k in ("activation_function", "hidden_act", "activation") if k in complete(family))
    with pytest.raises(ConfigError, match=f"'{key}' is 'quick_gelu'; known activations are"):
        read({**bare(family), key: "quick_gelu"})


def test_no_value_of_a_config_raises_anything_but_config_error(family: Family) -> None:
    """Wrong types, signs, sizes and nonsense in every key."""
    rubbish = ["x", "", -1, 0, 1, 7, 10**30, -1.5, float("nan"), True, [], [None], {}, {"a": 1}, None]
    values, refused = complete(family), 0
    for key in values:
        for value in rubbish:
            try:
                read(values | {key: value})
            except ConfigError:
                refused += 1
    assert refused > 100


def test_no_huge_number_of_a_config_is_taken(family: Family) -> None:
    values = complete(family)
    whole = [key for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]
    for key in {*whole, "sliding_window", "bos_token_id", "eos_token_id"}:
        for huge in (10**30, -(10**30)):
            try:
                config = read(values | {key: huge})
            except ConfigError as error:
                assert key in str(error)  # noqa: PT017
            else:
                assert config == read(values), f"{key} is not harmless"


def test_an_unknown_model_type_is_refused() -> None:
    for values in ({"model_type": "bert"}, {}, {"model_type": ["llama"]}):
        with pytest.raises(ConfigError, match=r"model_type is .*; writehead knows falcon, gemma, gpt2, gpt_bigcode, "):
            family_of(values)


SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
KV = {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "starcoder2", "sliding_window": 9}, [9] * 4),
        ({"model_type": "starcoder2"}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 9}, [None] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 4096]),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9}, [9] * 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None}, [None] * 4),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention", "attention"] * 2},
            [4096, None] * 2,
        ),
    ],
)
def test_sliding_windows(values: dict[str, Any], windows: list[int | None]) -> None:
    config = read({**KV, **SMALL, **values})
    assert [config.window(i) for i in range(4)] == windows


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4}, "'layer_types' has 'chunked_attention'"),
        ({"model_type": "qwen2", **KV, "layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"model_type": "qwen2", **KV, "layer_types": ["sliding_attention"] * 4}, "sliding_window is None"),
        ({"model_type": "mistral", **KV, "layer_types": ["sliding_attention"] * 4}, "unknown key 'layer_types'"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ({"model_type": "llama", "num_attention_heads": 5}, "a width of 32 cannot be split evenly into 5 heads"),
        ({"model_type": "llama", "num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "'quantization_config' says that"),
        ({"model_type": "starcoder2", "norm_type": "rms"}, "'norm_type' is 'rms'; writehead supports 'layer_norm'"),
        ({"model_type": "starcoder2", "mlp_type": "gated"}, "'mlp_type' is 'gated'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ({"model_type": "gemma", "hidden_activation": "silu"}, "'hidden_activation' is 'silu'"),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
            "'parallel_attn' is False",
        ),
        (
            {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
            "'num_ln_in_parallel_attn' is 2; writehead supports 1",
        ),
        ({"model_type": "falcon", "apply_residual_connection_post_layernorm": True}, "'apply_residual_connection"),
    ],
)
def test_flags_that_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**SMALL, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2", "attention_head_type": "grouped"}, "'attention_head_type' is 'grouped'"),
        ({"model_type": "gpt_bigcode", "scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx'"),
        (
            {"model_type": "gpt2", "attention_head_type": "multiquery", "scale_attn_by_inverse_layer_idx": True},
            "'scale_attn_by_inverse_layer_idx' is True",
        ),
        ({"model_type": "gpt2", "n_head": 7}, "a width of 768 cannot be split evenly into 7 heads"),
    ],
)
def test_flags_of_gpt2_that_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(values)


def test_santacoder_as_published() -> None:
    config = read({
        "activation_function": "gelu_fast", "architectures": ["GPT2LMHeadCustomModel"], "attn_pdrop": 0.1,
        "attention_head_type": "multiquery", "auto_map": {"AutoConfig": "configuration_gpt2_mq.GPT2CustomConfig"},
        "bos_token_id": 49152, "embd_pdrop": 0.1, "eos_token_id": 49152, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_embd": 2048, "n_head": 16, "n_inner": 8192,
        "n_layer": 24, "n_positions": 2048, "reorder_and_upcast_attn": False, "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "torch_dtype": "float32", "transformers_version": "4.25.1", "use_cache": True,
        "vocab_size": 49280,
    })  # fmt: skip
    assert (config.family, config.num_kv_heads, config.head_dim) == ("santacoder", 1, 128)
    assert (config.activation, config.eos_ids, config.cache_values_per_token()) == ("gelu_tanh", (49152,), 24 * 256)


def test_falcon_7b_as_published() -> None:
    config = read({
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
        "vocab_size": 65024,
    })  # fmt: skip
    assert (config.num_kv_heads, config.residual, config.shared_norm) == (1, "parallel", True)
    assert (config.tie_embeddings, config.intermediate_size, config.qkv_bias) == (True, 4 * 4544, False)
