"""The config.json files of public models mean what their authors meant; what cannot be run is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models.public_gpt import CARRIED, GPT, Public
from tests.unit.models.public_llama import LLAMA
from writehead.build import make_decoder
from writehead.errors import ConfigError
from writehead.kernels import load
from writehead.models.config import ConfigReader, ModelConfig, RopeConfig
from writehead.models.families import FAMILIES, falcon, family_of

PUBLIC = GPT | LLAMA


def read(values: dict[str, Any]) -> ModelConfig:
    reader = ConfigReader(CARRIED | values)
    config = family_of(values).read(reader)
    reader.finish()
    return config


def number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(round(value, 4)) if 40 < value < 60 else str(value)


def rotation(rope: RopeConfig, head_dim: int) -> str:
    scaling = "" if rope.scaling == "default" else f" {rope.scaling} {number(rope.factor)}"
    return f"rope {number(rope.theta)}{scaling}" + (f" on {rope.dim}" if rope.dim != head_dim else "")


def meaning(config: ModelConfig) -> str:
    """A config in words: what is not said is absent, and the attention scale is the usual one."""
    positions = config.positions + (f" {config.max_positions}" if config.positions == "learned" else "")
    biases = {"qkv": config.qkv_bias, "out": config.attn_out_bias, "mlp": config.mlp_bias}
    scales = (
        config.embedding_multiplier, config.residual_multiplier, config.logits_divisor, config.attention_scale
    )  # fmt: skip
    usual = (1.0, 1.0, 1.0, config.head_dim**-0.5)
    parts = [
        f"{config.num_heads}/{config.num_kv_heads} x {config.head_dim}",
        f"{'gated ' * config.gated}ffn {config.intermediate_size}",
        positions if config.rope is None else rotation(config.rope, config.head_dim),
        config.activation,
        "tied" if config.tie_embeddings else "untied",
        f"window {config.window(0)}" if config.window(0) else "",
        "head norms" if config.qk_norm else "",
        f"bias {' '.join(name for name, has in biases.items() if has)}" if any(biases.values()) else "",
        f"scaled {' '.join(map(number, scales))}" if scales != usual else "",
        f"parallel{' on one norm' * config.shared_norm}" if config.residual == "parallel" else "",
        f"eos {' '.join(map(str, config.eos_ids))}",
    ]
    return ", ".join(part for part in parts if part)


@pytest.fixture(params=PUBLIC)
def public(request: pytest.FixtureRequest) -> Public:
    return PUBLIC[request.param]


def test_meaning(public: Public) -> None:
    config = read(public.config)
    assert meaning(config) == public.meaning
    assert config.window(config.num_layers - 1) == config.window(0)


def test_number_of_parameters(public: Public) -> None:
    """The decoder has all of them, and the weight rules read all of them, once each."""
    config = read(public.config)
    shapes = {name: tuple(p.shape) for name, p in make_decoder(config, load("reference")).named_parameters()}
    assert sum(map(math.prod, shapes.values())) == public.parameters
    rules = FAMILIES[config.family].rules(config).expand(config.num_layers)
    stored = [shape for rule in rules for shape in rule.layout.shapes(shapes[rule.target])]
    assert sum(map(math.prod, stored)) == public.parameters


@pytest.mark.parametrize("name", ["tiiuae/falcon-7b", "tiiuae/falcon-40b", "tiiuae/falcon-rw-1b"])
def test_the_first_form_of_falcon_is_falcon(name: str) -> None:
    old, new = read(PUBLIC[f"{name}, May 2023"].config), read(PUBLIC[name].config)
    assert replace(old, family="falcon") == new
    assert (old.family, FAMILIES[old.family].export_as) == ("refined_web", "falcon")
    assert FAMILIES[old.family].rules(old) == FAMILIES["falcon"].rules(new)


@pytest.mark.parametrize("name", [name for name in PUBLIC if "falcon" in name])
def test_falcon_writes_what_it_reads(name: str) -> None:
    config = replace(read(PUBLIC[name].config), family="falcon")
    assert read(falcon.write(config)) == config


@pytest.mark.parametrize(
    "model_type",
    [
        "bloom", "chatglm", "codegen", "deepseek_v2", "gemma2", "gpt_neo", "gptj", "granitemoe", "granitemoehybrid",
        "mixtral", "mpt", "phi", "phi3", "qwen", "qwen2_moe", "qwen3_moe", "replit_lm", "stablelm", "stablelm_epoch",
    ],
)  # fmt: skip
def test_other_families_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config.json: model_type is '{model_type}'; writehead knows .*, so use a"):
        read({"model_type": model_type, "hidden_size": 64})


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"bits": 4, "group_size": 128, "quant_method": "gptq"}, "'gptq'"),
        ({"bits": 4, "quant_method": "awq", "version": "gemm"}, "'awq'"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"activation_scheme": "dynamic", "quant_method": "fp8"}, "'fp8'"),
        ({"bits": 4}, "{'bits': 4}"),
        ("int8", "'int8'"),
    ],
)
def test_quantized_models_are_refused_by_method(quantization: Any, named: str) -> None:
    values = PUBLIC["meta-llama/Llama-2-7b-hf"].config | {"quantization_config": quantization}
    with pytest.raises(ConfigError) as error:
        read(values)
    assert str(error.value) == (
        f"config.json: 'quantization_config' says that the weights are quantized ({named}), which writehead does not "
        "read; use the original model, or a GGUF file of it"
    )
    reader = ConfigReader(values, accept=["quantization_config"])
    family_of(values).read(reader)
    reader.finish()


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("HuggingFaceTB/SmolLM2-135M", {"rope_interleaved": True}, "'rope_interleaved' is True; writehead supports"),
        ("Qwen/Qwen2.5-Coder-0.5B", {"use_mrope": True}, "'use_mrope' is True; writehead supports False"),
        ("openai-community/gpt2", {"hidden_size": 32}, "'hidden_size' is 32 and 'n_embd' is 768, but they are two"),
        ("tiiuae/falcon-7b", {"n_head": 8}, "'n_head' is 8 and 'num_attention_heads' is 71"),
        ("tiiuae/falcon-7b, May 2023", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' is "),
        ("bigcode/starcoder2-3b", {"scale_attn_weights": False}, "'scale_attn_weights' is False"),
    ],
)
def test_what_would_change_a_public_model_is_refused(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(PUBLIC[name].config | more)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("openai-community/gpt2", {"hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 1024}),
        ("tiiuae/falcon-7b", {"n_head": 71, "n_layer": 32}),
        ("mistralai/Mistral-7B-v0.1", {"_flash_attn_2_enabled": True, "_attn_implementation": "flash_attention_2"}),
        ("bigcode/starcoder2-3b", {"activation_function": "gelu", "layer_norm_epsilon": 1e-5}),
        ("bigcode/starcoder2-3b", {"attention_softmax_in_fp32": True, "scale_attn_weights": True}),
    ],
)  # fmt: skip
def test_keys_that_repeat_what_is_said_change_nothing(name: str, more: dict[str, Any]) -> None:
    assert read(PUBLIC[name].config | more) == read(PUBLIC[name].config)


def test_other_names_of_keys_count_where_the_first_is_absent_or_null() -> None:
    gpt2 = PUBLIC["openai-community/gpt2"].config
    names = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    renamed = {names.get(key, key): value for key, value in gpt2.items()}
    assert read(renamed) == read(renamed | dict.fromkeys(names)) == read(gpt2)
