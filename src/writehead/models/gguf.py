"""The families as GGUF stores them: a Hugging Face config from a file's metadata, and the rules of its tensors.

An architecture is a row of data: which key is called what, what llama.cpp holds to be fixed, and how its converter
rearranged the tensors. Keys of the architecture that are neither read nor known to be without effect are refused.
Two things are not in such files: the exact form of the GELU (the original model's is taken) and StarCoder2's window.
Source: conversion/*.py, src/llama-model.cpp and gguf-py/gguf/tensor_mapping.py of ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from writehead.checkpoint import TensorInfo
from writehead.checkpoint.rules import Interleaved, Layout, Rule, RuleSet, Same, Stacked, stacked
from writehead.errors import ConfigError
from writehead.models.config import ConfigReader, ModelConfig, RopeConfig
from writehead.models.families.base import head_size, module
from writehead.models.rope import inverse_frequencies

Tensors = Mapping[str, TensorInfo]
Values = dict[str, Any]
Read = Callable[[str], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One `general.architecture`."""

    model_type: str
    sizes: Mapping[str, str]
    """Whole numbers that must be there: metadata key -> Hugging Face key. All keys stand without their prefix."""
    epsilon: tuple[str, str]
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Numbers that may be there, 0 meaning absent."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face key -> the tensor whose presence makes it true."""
    heads: Callable[[ConfigReader, int, Tensors], Values] = lambda reader, heads, _: {
        "num_key_value_heads": reader.size("attention.head_count_kv", heads)
    }
    """(metadata, query heads, tensors) -> how Hugging Face says which heads share a key/value head."""
    head_dim: bool = False
    """Whether Hugging Face's default for `head_dim` is something else than hidden size / heads."""
    switches: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Metadata key -> (Hugging Face key, llama.cpp's default)."""
    partial_rope: bool = False
    rope: bool = True
    interleaved: bool = False
    """Whether the rows of q and k were rearranged for rotation by neighbours."""
    norm_shift: float = 0.0


def _multi_query(reader: ConfigReader, heads: int, _: Tensors) -> Values:
    reader.require("attention.head_count_kv", 1, heads)
    return {"multi_query": reader.size("attention.head_count_kv", heads) == 1}


def _multi_head(reader: ConfigReader, heads: int, _: Tensors) -> Values:
    reader.require("attention.head_count_kv", heads)
    return {}


def _falcon_heads(reader: ConfigReader, heads: int, tensors: Tensors) -> Values:
    """The 40B form has two norms or shares a key/value head among some; else it is the 7B form."""
    shared = reader.size("attention.head_count_kv", heads)
    two_norms = "blk.0.attn_norm_2.weight" in tensors
    return {
        "new_decoder_architecture": two_norms or shared not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "num_kv_heads": shared,
        "multi_query": shared == 1,
    }


_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
}
_GPT_SIZES = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "feed_forward_length": "n_inner",
    "context_length": "n_positions",
}
_RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
_LLAMA = Architecture(
    model_type="llama",
    sizes=_SIZES,
    epsilon=_RMS,
    constants={"hidden_act": "silu"},
    present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    interleaved=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "starcoder": Architecture(
        model_type="gpt_bigcode",
        sizes=_GPT_SIZES,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        constants={"activation_function": "gelu_pytorch_tanh"},
        heads=_multi_query,
        rope=False,
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        sizes=_GPT_SIZES,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        constants={"activation_function": "gelu_new"},
        heads=_multi_head,
        rope=False,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        sizes=_SIZES,
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
        numbers={"attention.sliding_window": "sliding_window"},
        constants={"hidden_act": "gelu_pytorch_tanh"},
        present={"use_bias": "blk.0.attn_q.bias"},
    ),
    "llama": _LLAMA,
    "granite": Architecture(
        model_type="granite",
        sizes=_SIZES,
        epsilon=_RMS,
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        constants=_LLAMA.constants,
        present=_LLAMA.present,
        interleaved=True,
    ),
    "qwen2": Architecture(model_type="qwen2", sizes=_SIZES, epsilon=_RMS, constants={"hidden_act": "silu"}),
    "qwen3": Architecture(
        model_type="qwen3",
        sizes=_SIZES,
        epsilon=_RMS,
        constants={"hidden_act": "silu"},
        present={"attention_bias": "blk.0.attn_q.bias"},
        head_dim=True,
    ),
    "gemma": Architecture(
        model_type="gemma",
        sizes=_SIZES,
        epsilon=_RMS,
        constants={"hidden_act": "gelu_pytorch_tanh"},
        head_dim=True,
        norm_shift=-1.0,
    ),
    "falcon": Architecture(
        model_type="falcon",
        sizes={**_SIZES, "feed_forward_length": "ffn_hidden_size"},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
        constants={"activation": "gelu", "alibi": False, "parallel_attn": True},
        present={"bias": "blk.0.attn_qkv.bias"},
        heads=_falcon_heads,
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        sizes=_SIZES,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        constants={"hidden_act": "gelu"},
        present={"attention_bias": "blk.0.attn_qkv.bias"},
        heads=_multi_head,
        switches={"use_parallel_residual": ("use_parallel_residual", True)},
        partial_rope=True,
    ),
}

# Keys that some files carry and that change nothing, and keys that change nothing while they are 0.
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
_OFF = (
    "attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv", "attention.max_alibi_bias",
    "attention.sliding_window", "expert_count", "expert_used_count", "attention.scale", "embedding_scale",
    "residual_scale", "logit_scale",
)  # fmt: skip


def _architecture(name: object, source: str) -> Architecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{source}: general.architecture is {short(name)}; writehead knows {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def hf_config(
    metadata: Mapping[str, Any],
    tensors: Tensors,
    *,
    read: Read | None = None,
    accept: Collection[str] = (),
    source: str = "GGUF file",
) -> Values:
    """The Hugging Face config of a GGUF file.

    `read` gets the one tensor that belongs to the config, rope_freqs.weight; without it a file that has one is refused.
    `accept`: unknown keys that the user vouches for. Raises ConfigError that names the file (`source`) and the key.
    """
    name = metadata.get("general.architecture")
    architecture = _architecture(name, source)
    own = {k.removeprefix(f"{name}."): v for k, v in metadata.items() if k.startswith(f"{name}.")}
    accept = [key.removeprefix(f"{name}.") for key in accept]
    reader = ConfigReader(own, source=f"{source}, keys of '{name}.'", accept=accept)
    reader.harmless(*_HARMLESS)
    reader.require("attention.causal", True)
    values: Values = {"model_type": architecture.model_type, **architecture.constants}
    values |= _tokens(metadata, tensors, source)
    values |= {theirs: reader.size(ours) for ours, theirs in architecture.sizes.items()}
    values[architecture.epsilon[1]] = _single(reader.get(architecture.epsilon[0], float))
    values |= {theirs: number for ours, theirs in architecture.numbers.items() if (number := _number(reader, ours))}
    values |= {theirs: reader.get(ours, bool, default) for ours, (theirs, default) in architecture.switches.items()}
    values |= {theirs: tensor in tensors for theirs, tensor in architecture.present.items()}
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values |= _attention(architecture, reader, tensors, values, read)
    for key in set(_OFF) - set(architecture.numbers):
        reader.require(key, 0)
    reader.finish()
    return values


def _single(value: float) -> float:
    """A number that the file holds in single precision, as it was written before: 1e-05, not 9.99999974e-06."""
    return value if value.is_integer() else float(f"{value:.7g}")


def _number(reader: ConfigReader, key: str) -> float | int:
    value = _single(reader.get(key, float, 0.0))
    return int(value) if isinstance(reader.values.get(key), int) else value


def _tokens(metadata: Mapping[str, Any], tensors: Tensors, source: str) -> Values:
    """Vocabulary size and special tokens. End of turn and end of message stop a generation as end of sequence does."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{source}: there is no matrix 'token_embd.weight'; expected the weights of a language model")
    reader = ConfigReader(metadata, source=source)
    ends = [i for name in ("eos", "eot", "eom") for i in reader.ids(f"tokenizer.ggml.{name}_token_id")]
    bos = reader.ids("tokenizer.ggml.bos_token_id")
    return {
        "vocab_size": embedding.shape[0],
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": list(dict.fromkeys(ends)),
    }


def _attention(form: Architecture, reader: ConfigReader, tensors: Tensors, values: Values, read: Read | None) -> Values:
    """Heads, their size and the rotation."""
    width, heads = (values[form.sizes[key]] for key in ("embedding_length", "attention.head_count"))
    found = form.heads(reader, heads, tensors)
    explicit = reader.has("attention.key_length")
    head_dim = reader.size("attention.key_length") if explicit else head_size(reader, width, heads)
    reader.require("attention.value_length", head_dim)
    if form.head_dim or head_dim * heads != width:
        found["head_dim"] = head_dim
    if "attention.scale" in form.numbers:
        found.setdefault(form.numbers["attention.scale"], values.get(form.numbers["attention.scale"], head_dim**-0.5))
    rotated = reader.size("rope.dimension_count", head_dim)
    if form.rope:
        found["rope_parameters"] = _rope(reader, values[form.sizes["context_length"]], head_dim, tensors, read)
        if form.partial_rope:
            found["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
        else:
            reader.require("rope.dimension_count", head_dim)
    return found


def _rope(reader: ConfigReader, context: int, head_dim: int, tensors: Tensors, read: Read | None) -> Values:
    """Hugging Face's `rope_parameters`. As in llama.cpp the kind is linear unless named, and a factor of 0 is 1."""
    kind = reader.get("rope.scaling.type", str, "linear")
    factor = _single(reader.get("rope.scaling.factor", float, reader.get("rope.scale_linear", float, 0.0))) or 1.0
    original = reader.size("rope.scaling.original_context_length", context)
    betas = {f"beta_{x}": reader.get(f"rope.scaling.yarn_beta_{x}", float, None) for x in ("fast", "slow")}
    reader.require("rope.scaling.yarn_log_multiplier", 0)
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        reader.require(f"rope.scaling.{key}", 1)
    plain = {"rope_type": "default", "rope_theta": _single(reader.get("rope.freq_base", float, 10000.0))}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return _divided(reader, plain, head_dim, read) if "rope_freqs.weight" in tensors else plain
    if kind not in ("linear", "yarn") or "rope_freqs.weight" in tensors:
        raise ConfigError(
            f"{reader.source}: 'rope.scaling.type' is {short(kind)}; "
            "writehead supports none, linear, yarn, and with 'rope_freqs.weight' none"
        )
    plain |= {"rope_type": kind, "factor": factor}
    return plain if kind == "linear" else {**plain, "original_max_position_embeddings": original, **betas}


def _divided(reader: ConfigReader, plain: Values, head_dim: int, read: Read | None) -> Values:
    """Llama 3.1's scaling, which files hold as a divisor of each frequency. Refuses divisors of another origin."""
    if read is None:
        raise ConfigError(f"{reader.source}: 'rope_freqs.weight' scales the rotation and cannot be read here")
    divisors = read("rope_freqs.weight").float().flatten()
    if len(divisors) != head_dim // 2:
        raise ConfigError(f"{reader.source}: 'rope_freqs.weight' has {len(divisors)} values; expected {head_dim // 2}")
    theta, trained = plain["rope_theta"], reader.size("rope.scaling.original_context_length", 8192)
    factor = _single(max(divisors.tolist(), default=1.0))
    unscaled = RopeConfig(dim=head_dim, theta=theta, original_max_positions=trained)
    scaled = replace(unscaled, scaling="llama3", factor=factor)
    expected = inverse_frequencies(unscaled)[0] / inverse_frequencies(scaled)[0]
    if not torch.allclose(divisors, expected, rtol=1e-4):
        raise ConfigError(
            f"{reader.source}: 'rope_freqs.weight' does not hold Llama 3.1's scaling by {factor:g}; "
            "writehead supports no other frequencies"
        )
    llama3 = {"low_freq_factor": scaled.low_freq_factor, "high_freq_factor": scaled.high_freq_factor}
    return {**plain, **llama3, "rope_type": "llama3", "factor": factor, "original_max_position_embeddings": trained}


def rules(config: ModelConfig, architecture: str, tensors: Tensors) -> RuleSet:
    """Where a GGUF file of that architecture keeps the decoder's parameters."""
    form = ARCHITECTURES[architecture]
    two_norms = "blk.0.attn_norm_2.weight" in tensors  # Falcon 40B: ln_attn is attn_norm_2, ln_mlp is attn_norm
    names = {"norm": "output_norm", "layers.{i}.attn_norm": "blk.{i}.attn_norm" + "_2" * two_norms}
    if not config.shared_norm:
        names["layers.{i}.mlp_norm"] = "blk.{i}.attn_norm" if two_norms else "blk.{i}.ffn_norm"
    if config.qk_norm:
        names |= {f"layers.{{i}}.attn.{x}_norm": f"blk.{{i}}.attn_{x}_norm" for x in "qk"}
    bias = config.norm == "layer" and config.norm_bias
    norms = [
        replace(r, shift=form.norm_shift) for ours, theirs in names.items() for r in module(ours, theirs, bias=bias)
    ]
    outer = {"embed": "token_embd"}
    if config.positions == "learned":
        outer["positions"] = "position_embd"
    if not config.tie_embeddings:
        outer["lm_head"] = "output"
    tables = [rule for ours, theirs in outer.items() for rule in module(ours, theirs, bias=False)]
    ignored = ("rope_freqs.weight",) if config.positions == "rope" else ()
    return RuleSet(rules=(*tables, *norms, *_layers(config, form, tensors)), ignored=ignored)


def _layers(config: ModelConfig, form: Architecture, tensors: Tensors) -> tuple[Rule, ...]:
    """The products of a layer. q, k and v are one tensor or three; a fused one has been sorted to q | k | v."""
    rotated: Layout = Interleaved(config.head_dim) if form.interleaved else Same()
    qkv, arrangement = ["blk.{i}.attn_qkv"], rotated
    if form.interleaved or "blk.0.attn_qkv.weight" not in tensors:
        qkv = [f"blk.{{i}}.attn_{x}" for x in "qkv"]
        arrangement = Stacked(((config.q_size, rotated), (config.kv_size, rotated), (config.kv_size, Same())))
    gate_up = ["blk.{i}.ffn_gate", "blk.{i}.ffn_up"] if config.gated else ["blk.{i}.ffn_up"]
    width = config.intermediate_size
    return (
        *module("layers.{i}.attn.qkv", *qkv, bias=config.qkv_bias, layout=arrangement),
        *module("layers.{i}.attn.out", "blk.{i}.attn_output", bias=config.attn_out_bias),
        *module("layers.{i}.mlp.up", *gate_up, bias=config.mlp_bias, layout=stacked(*[width] * len(gate_up))),
        *module("layers.{i}.mlp.down", "blk.{i}.ffn_down", bias=config.mlp_bias),
    )
