"""The one description of a decoder, and the reader that turns a foreign config into it.

A family (models/families) reads a checkpoint's own keys through `ConfigReader` and returns a `ModelConfig`. A key that
is neither read nor known to be harmless is an error, because a silently dropped key is how a model gets the wrong GELU.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, Literal, TypeVar, overload

from writehead.errors import ConfigError

MAX_SIZE = 1 << 28
"""No dimension is larger: the bytes of a product of two fit 64 bits, and a hostile config fails here."""

MAX_LAYERS = 10_000

MAX_WHOLE = 1 << 53
"""No whole number is further from 0: any sum of two fits 64 bits, and any reader of JSON has it exactly."""

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
"""Hugging Face's names. All tanh forms are one function; their constants differ below one unit in the last place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864). `dim` of each head are rotated, the first half paired with the second."""

    dim: int
    theta: float = 10000.0
    scaling: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"{self.dim} values of each head are rotated; expected an even, positive number")
        if self.theta <= 1:
            raise ConfigError(f"rope_theta is {self.theta}; expected a number above 1")
        for name in ("factor", "original_max_positions", "low_freq_factor", "beta_fast", "beta_slow"):
            if getattr(self, name) < 1e-6:
                raise ConfigError(f"the rope scaling's {name} is {getattr(self, name)}; it must be positive")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError("the rope scaling's high_freq_factor must be above its low_freq_factor")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The structure of a decoder. `num_heads / num_kv_heads` query heads share a key/value head (MQA: all of them)."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int

    positions: Literal["learned", "rope", "alibi"]
    rope: RopeConfig | None = None
    alibi_scale: float = 1.0
    """Multiplies the ALiBi bias (Falcon scales it with the scores)."""

    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    norm_offset: float = 0.0
    """Added to a norm's weight (Gemma stores weight - 1)."""
    qk_norm: bool = False

    activation: Activation = "gelu_tanh"
    gated: bool = False
    qkv_bias: bool = True
    attn_out_bias: bool = True
    mlp_bias: bool = True
    tie_embeddings: bool = True

    residual: Literal["sequential", "parallel"] = "sequential"
    """parallel: attention and MLP read the same input and are added to it together."""
    shared_norm: bool = False
    """With a parallel residual: one norm feeds both attention and MLP."""

    attention_scale: float
    """Multiplies q.k; usually 1/sqrt(head_dim)."""
    scale_by_layer: bool = False
    """GPT-2's scale_attn_by_inverse_layer_idx: layer i divides the scores by i + 1."""
    sliding_window: int | None = None
    """A token sees itself and the window - 1 tokens before it."""
    windowed_layers: tuple[bool, ...] | None = None
    """Which layers use the window; None: all of them."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_layers > MAX_LAYERS or self.num_heads * self.head_dim > MAX_SIZE:
            raise ConfigError(
                f"{self.num_layers} layers of {self.num_heads} heads of {self.head_dim} are beyond any model"
            )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if (self.positions == "rope") != (self.rope is not None):
            raise ConfigError("rotary settings are given exactly when positions are rotary")
        if self.windowed_layers is not None and len(self.windowed_layers) != self.num_layers:
            raise ConfigError(
                f"layer_types names {len(self.windowed_layers)} layers, but num_layers is {self.num_layers}"
            )
        if (self.sliding_window is not None and self.sliding_window < 1) or (
            self.sliding_window is None and any(self.windowed_layers or ())
        ):
            raise ConfigError(
                f"layers use a sliding window, and sliding_window is {self.sliding_window}; expected a positive number"
            )
        if self.attention_scale <= 0 or self.logits_divisor <= 0 or self.norm_eps < 0:
            raise ConfigError("the attention scale, the logits' divisor and the norm's epsilon must be positive")

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection; the value projection has as many."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The attention window of one layer, in tokens."""
        if self.windowed_layers is not None and not self.windowed_layers[layer]:
            return None
        return self.sliding_window

    def cache_values_per_token(self) -> int:
        """Numbers that the key/value cache holds for each token, over all layers."""
        return 2 * self.num_layers * self.kv_size


# Keys that every checkpoint may carry and that change nothing of what a forward pass computes in inference.
# fmt: off
HARMLESS = frozenset([
    "_name_or_path", "_attn_implementation_autoset", "architectures", "auto_map", "model_type",
    "transformers_version", "dtype", "torch_dtype", "use_cache", "cache_implementation", "return_dict",
    "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16", "pruned_heads", "is_decoder",
    "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "chunk_size_feed_forward",
    "gradient_checkpointing", "tokenizer_class", "prefix", "task_specific_params", "problem_type", "finetuning_task",
    "id2label", "label2id", "num_labels", "initializer_range", "initializer_factor", "pretraining_tp",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "reorder_and_upcast_attn", "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout",
    "residual_dropout", "embedding_dropout", "dropout", "classifier_dropout", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "sep_token_id", "pad_token_id", "bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "exponential_decay_length_penalty", "tf_legacy_loss", "tie_encoder_decoder", "n_ctx",
    "inference_runner", "max_batch_size", "max_sequence_length", "pre_allocate_kv_cache", "validate_runner_input",
    "pad_key_length", "fused_softmax", "predict_last_token", "attention_implementation", "runner_max_sequence_length",
    "n_special", "predict_special_tokens", "output_past", "_num_labels", "attention_probs_dropout_prob",
    "hidden_dropout_prob", "custom_pipelines", "transformers.js_config", "is_llama_config", "unsloth_fixed",
    "unsloth_version", "_attn_implementation", "attn_implementation", "_flash_attn_2_enabled", "_commit_hash",
    "neftune_noise_alpha", "model_max_length",
])
# fmt: on
"""`attention_softmax_in_fp32` and its scale: mathematically without effect; our softmax is always computed in fp32."""

T = TypeVar("T")


class ConfigReader:
    """Accounts for every key of a config: each is read, declared harmless, or an error that names it."""

    def __init__(self, values: Mapping[str, Any], *, source: str = "config.json", accept: Collection[str] = ()) -> None:
        self.values = dict(values)
        self.source = source
        self.accept = frozenset(accept)
        self._accounted = set(HARMLESS | self.accept)

    def defaults(self, **values: Any) -> None:
        """What keys mean that are absent: the defaults of the family's config class. A key that is null stays null."""
        self.values = {**values, **self.values}

    def alias(self, **names: str) -> None:
        """Other names of keys, alias=key: the alias counts where the key is absent and must agree where it is not."""
        for alias, key in names.items():
            self._accounted.add(alias)
            value = self.values.get(alias)
            if value is not None and not self.has(key):
                self.values[key] = value
            if value is not None and self.values[key] != value:
                raise ConfigError(
                    f"{self.source}: '{alias}' is {short(value)} and '{key}' is {short(self.values[key])}, but "
                    "they are two names of one number; correct one of them"
                )

    def has(self, key: str) -> bool:
        """Whether the key is present and not null; does not account for it."""
        return self.values.get(key) is not None

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...

    def get(self, key: str, kind: type[T], default: Any = ...) -> T | None:
        """Read one key; null gives the default. Raises ConfigError if it has none, or if the value has another type."""
        self._accounted.add(key)
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise ConfigError(f"{self.source}: the key '{key}' is missing; it is needed to build the model")
            return default  # type: ignore[no-any-return]  # the overloads type it
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1 << 64 else math.inf
        misread = kind is int and isinstance(value, bool)
        if not isinstance(value, kind) or misread or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{self.source}: '{key}' is {short(value)}; expected {_KIND_NAMES[kind]}")
        if isinstance(value, int) and abs(value) > MAX_WHOLE:
            raise ConfigError(f"{self.source}: '{key}' is {short(value)}; expected a number of a model's size")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Read a number of things: at least 1, and small enough to be one."""
        value = self.get(key, int) if default is None else self.get(key, int, default)
        if not 1 <= value <= MAX_SIZE:
            raise ConfigError(f"{self.source}: '{key}' is {value}; expected a number from 1 to {MAX_SIZE}")
        return value

    def activation(self, key: str) -> Activation:
        """Read an activation by Hugging Face's name for it."""
        name = self.get(key, str)
        if name not in ACTIVATIONS:
            raise ConfigError(f"{self.source}: '{key}' is '{name}'; known activations are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def require(self, key: str, *allowed: Any) -> None:
        """Account for a key of which only some values, absent or null among them, are supported; refuse any other."""
        self._accounted.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{self.source}: '{key}' is {short(value)}; writehead supports {' or '.join(repr(a) for a in allowed)}"
            )

    def ids(self, key: str) -> tuple[int, ...]:
        """Read a token id or a list of them; absent: none."""
        self._accounted.add(key)
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_SIZE for i in ids):
            raise ConfigError(f"{self.source}: '{key}' is {short(value)}; expected a token id or a list of them")
        return tuple(i for i in ids if i >= 0)

    def harmless(self, *keys: str) -> None:
        """Declare keys that this family carries and that change nothing."""
        self._accounted.update(keys)

    def finish(self) -> None:
        """Raise ConfigError if any key was neither read nor declared harmless."""
        unknown = sorted(k for k, v in self.values.items() if k not in self._accounted and v is not None)
        if not unknown:
            return
        if "quantization_config" in unknown:
            about = self.values["quantization_config"]
            method = about.get("quant_method") if isinstance(about, dict) else None
            raise ConfigError(
                f"{self.source}: 'quantization_config' says that the weights are quantized ({short(method or about)}), "
                "which writehead does not read; use the original model, or a GGUF file of it"
            )
        near = difflib.get_close_matches(unknown[0], self._accounted, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(
            f"{self.source}: unknown key{'s' * (len(unknown) > 1)} {', '.join(repr(k) for k in unknown)}{hint}; it may "
            "change what the model computes. If it does not, accept it: accept_config_keys=[...] or --accept-config-key"
        )


_KIND_NAMES: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false",
                                list: "a list", dict: "an object"}  # fmt: skip
