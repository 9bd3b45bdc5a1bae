"""GGUF files against transformers: each architecture through llama.cpp's conversion, and a real checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from writehead import LLM, SamplingParams, build, kernels
from writehead.checkpoint import TensorInfo
from writehead.errors import CheckpointError, ConfigError
from writehead.models.gguf import ARCHITECTURES, hf_config

State = dict[str, Tensor]
Q = gguf.GGMLQuantizationType
# ---- llama.cpp's conversion/*.py, as far as these architectures go ----


def permute(weight: Tensor, heads: int) -> Tensor:
    """LlamaModel.permute: rotary halves side by side."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def llama(config: Any, state: State) -> State:
    for name, value in state.items():
        if ".q_proj." in name:
            state[name] = permute(value, config.num_attention_heads)
        if ".k_proj." in name:
            state[name] = permute(value, config.num_key_value_heads)
    return state


def gemma(_: Any, state: State) -> State:
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in state.items()}


def gpt2(_: Any, state: State) -> State:
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: value.t() if name.endswith(turned) else value for name, value in state.items()}


def falcon(config: Any, state: State) -> State:
    """Groups of query heads with their key and value become all queries, all keys, all values."""
    heads, shared = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1
    for name, value in state.items():
        if "query_key_value" in name:
            grouped = value.view(shared, heads // shared + 2, config.hidden_size // heads, *value.shape[1:])
            parts = grouped[:, :-2], grouped[:, [-2]], grouped[:, [-1]]
            state[name] = torch.cat([part.reshape(-1, *value.shape[1:]) for part in parts])
    return state


def gpt_neox(config: Any, state: State) -> State:
    for name, value in state.items():
        if "query_key_value" in name:
            grouped = value.view(config.num_attention_heads, 3, -1, *value.shape[1:])
            state[name] = torch.cat([grouped[:, i].reshape(-1, *value.shape[1:]) for i in range(3)])
    return state


CONVERSIONS: dict[str, Callable[[Any, State], State]] = {
    "llama": llama, "granite": llama, "gemma": gemma, "gpt2": gpt2, "falcon": falcon, "gptneox": gpt_neox,
}  # fmt: skip


def parameters(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """The keys that TextModel.set_gguf_parameters and its overrides write."""
    width, heads = config.hidden_size, config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None) or 4 * width
    writer.add_feed_forward_length(inner)
    if arch in ("starcoder", "falcon"):
        writer.add_head_count_kv(config.num_kv_heads if getattr(config, "new_decoder_architecture", False) else 1)
    elif arch not in ("gpt2", "gptneox"):
        writer.add_head_count_kv(config.num_key_value_heads)
    for key in ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"):
        if hasattr(config, key):
            writer.add_layer_norm_eps(getattr(config, key))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "head_dim" in config.to_diff_dict() or arch == "gemma":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in ("llama", "granite"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(getattr(config, "head_dim", None) or width // heads)
    if arch == "falcon":
        writer.add_tensor_data_layout("jploski")
    if arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
        writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * width // heads))
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    rope(writer, config)


def rope(writer: gguf.GGUFWriter, config: Any) -> None:
    given = getattr(config, "rope_parameters", None)
    if given is None:
        return
    writer.add_rope_freq_base(given["rope_theta"])
    kind = given["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(given["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])
    if kind == "llama3":
        dim = config.hidden_size // config.num_attention_heads
        writer.add_tensor("rope_freqs.weight", llama3_divisors(given, dim))


def llama3_divisors(given: dict[str, Any], dim: int) -> np.ndarray:
    """LlamaModel.generate_extra_tensors."""
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    divisors = []
    for freq in 1.0 / (given["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)):
        wavelength = 2 * math.pi / float(freq)
        smooth = (8192 / wavelength - low) / (high - low)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def write(path: Path, arch: str, config: Any, state: State, kind: gguf.GGMLQuantizationType = Q.F32) -> None:
    """A GGUF file of that model, its matrices stored as `kind`, named by the gguf package's own table."""
    writer = gguf.GGUFWriter(path, arch)
    parameters(writer, arch, config)
    number = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    convert = CONVERSIONS.get(arch)
    for name, value in (convert(config, dict(state)) if convert else state).items():
        array = np.ascontiguousarray(value.numpy())
        stored = kind if array.ndim == 2 and "wpe" not in name else Q.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            gguf.quants.quantize(array, stored),
            raw_dtype=stored,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- tiny models ----

COMMON: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT = {
    "vocab_size": 70, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

GQA: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 96}
MQA: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 96}
MHA: dict[str, Any] = {"num_key_value_heads": 4, "intermediate_size": 96}
BIASES = {"attention_bias": True, "mlp_bias": True}
FALCON: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
SCALES = {"attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "starcoder": ("starcoder", "gpt_bigcode", GPT),
    "starcoder untied": ("starcoder", "gpt_bigcode", {**GPT, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", "gpt2", GPT),
    "starcoder2": ("starcoder2", "starcoder2", GQA),
    "starcoder2 bare": ("starcoder2", "starcoder2", {**MQA, "use_bias": False, "tie_word_embeddings": False}),
    "llama": ("llama", "llama", GQA),
    "llama full": ("llama", "llama", {**MHA, **BIASES, "tie_word_embeddings": True}),
    "llama wide heads": ("llama", "llama", {**MQA, "head_dim": 24}),
    "llama linear": ("llama", "llama", {**GQA, "rope_parameters": LINEAR}),
    "llama 3.1": ("llama", "llama", {**GQA, "rope_parameters": LLAMA3}),
    "mistral": ("llama", "mistral", {**GQA, "sliding_window": None}),
    "granite": ("granite", "granite", {**GQA, **SCALES}),
    "qwen2": ("qwen2", "qwen2", {**GQA, "rope_parameters": {"rope_theta": 500000.0}}),
    "qwen2 yarn": ("qwen2", "qwen2", {**MQA, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", "qwen3", {**GQA, "head_dim": 32}),
    "gemma": ("gemma", "gemma", {**MQA, "head_dim": 32}),
    "falcon 7b": ("falcon", "falcon", {"multi_query": True}),
    "falcon 40b": ("falcon", "falcon", FALCON),
    "falcon 11b": ("falcon", "falcon", {**FALCON, "num_ln_in_parallel_attn": 1}),
    "gptneox": ("gptneox", "gpt_neox", {"intermediate_size": 96}),
    "gptneox sequential": ("gptneox", "gpt_neox", {"intermediate_size": 96, "use_parallel_residual": False}),
}  # fmt: skip


def tiny(model_type: str, keys: dict[str, Any]) -> Any:
    """A model of that type with weights large enough that every one of them matters."""
    common = {} if "n_embd" in keys else COMMON
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **common | keys)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    return model.eval()


def weights(model: Any) -> State:
    """The tensors that a checkpoint of the model holds."""
    tied = model.config.tie_word_embeddings
    return {
        k: v.clone()
        for k, v in model.state_dict().items()
        if not (tied and k in ("lm_head.weight", "embed_out.weight"))
    }


def assert_same_logits(path: Path, model: Any) -> None:
    ids = torch.randint(0, model.config.vocab_size, (2, 40))
    source = build.open_source(path)
    decoder = build.build(source, weights="fp32", kernels=kernels.load("reference"))
    with torch.no_grad():
        assert difference(decoder(ids), model(ids).logits) <= 2e-5


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the range of the expected logits."""
    worst = float((actual - expected).abs().max() / (expected.max() - expected.min()))
    print(f"largest difference relative to the range of the logits: {worst:.1e}")
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_architecture_equals_transformers(name: str, tmp_path: Path) -> None:
    arch, model_type, keys = MODELS[name]
    model = tiny(model_type, keys)
    write(tmp_path / "model.gguf", arch, model.config, weights(model))
    assert_same_logits(tmp_path / "model.gguf", model)


def test_every_architecture_is_compared() -> None:
    assert {arch for arch, _, _ in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_quantized_file_equals_transformers_on_the_same_numbers(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    model = tiny("llama", GQA)
    write(tmp_path / "model.gguf", "llama", model.config, weights(model), kind)
    rounded = {
        name: torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind).reshape(value.shape)
        )
        for name, value in weights(model).items()
        if value.dim() == 2
    }
    model.load_state_dict(rounded, strict=False)
    assert_same_logits(tmp_path / "model.gguf", model)


# ---- what is refused ----

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 500000.0,
}
EMBEDDING = {"token_embd.weight": TensorInfo("token_embd.weight", (70, 64), "F32", 70 * 64 * 4)}
DIVISORS = {"rope_freqs.weight": TensorInfo("rope_freqs.weight", (8,), "F32", 32)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "mamba"),
        ("general.architecture", 3),
        ("llama.attention.some_new_scale", 2.0),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 4096),
        ("llama.attention.causal", False),
        ("llama.attention.scale", 0.5),
        ("llama.attention.value_length", 8),
        ("llama.attention.head_count", [4, 2]),
        ("llama.embedding_length", 0),
        ("llama.block_count", "two"),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.attn_factor", 1.2),
        ("tokenizer.ggml.eos_token_id", "</s>"),
    ],
)
def test_a_key_that_would_change_the_model_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key.rpartition("llama.")[2].replace(".", r"\.")):
        hf_config({**METADATA, key: value}, EMBEDDING)


def test_an_unknown_key_can_be_accepted_by_name() -> None:
    plain = hf_config(METADATA, EMBEDDING)
    assert plain == hf_config({**METADATA, "llama.new": 2}, EMBEDDING, accept=["llama.new"])
    assert plain["rms_norm_eps"] == 1e-5


def test_a_key_that_is_off_is_not_refused() -> None:
    off = {"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.attention.clamp_kqv": 0.0}
    assert hf_config({**METADATA, **off}, EMBEDDING) == hf_config(METADATA, EMBEDDING)


def test_every_way_to_end_is_an_end() -> None:
    ends = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 7}
    assert hf_config({**METADATA, **ends}, EMBEDDING)["eos_token_id"] == [7, 9]


def test_frequencies_of_another_scaling_are_refused() -> None:
    divisors = torch.tensor(llama3_divisors(LLAMA3, 16))
    found = hf_config(METADATA, EMBEDDING | DIVISORS, read=lambda _: divisors)
    assert found["rope_parameters"]["factor"] == 32.0
    for other in (divisors * torch.arange(1, 9), divisors[1:], divisors * math.nan):
        with pytest.raises(ConfigError, match="rope_freqs"):
            hf_config(METADATA, EMBEDDING | DIVISORS, read={"rope_freqs.weight": other}.__getitem__)
    with pytest.raises(ConfigError, match="rope_freqs"):
        hf_config({**METADATA, "llama.rope.scaling.factor": 2.0}, EMBEDDING | DIVISORS, read=lambda _: divisors)


def test_a_file_without_an_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_embd"):
        hf_config(METADATA, {})


def test_missing_and_surplus_tensors_are_listed_together(tmp_path: Path) -> None:
    model = tiny("llama", GQA)
    state = weights(model)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    write(tmp_path / "model.gguf", "llama", model.config, state)
    with pytest.raises(CheckpointError) as caught:
        build.build(build.open_source(tmp_path / "model.gguf"), weights="fp32", kernels=kernels.load("reference"))
    assert all(name in str(caught.value) for name in ("blk.1.ffn_up.weight", "blk.0.attn_k.bias", "blk.1.attn_q.bias"))


# ---- a real checkpoint ----

PROMPTS: tuple[Any, ...] = (
    "def is_prime(n: int) -> bool:\n    ",
    "The library of Alexandria was",
    [{"role": "user", "content": "Explain multi-query attention in two sentences."}],
)


@pytest.mark.timeout(900)  # 50 s of one core, which a busy machine stretches
def test_real_checkpoint_decodes_like_transformers(smollm2_gguf: Path) -> None:
    """64 greedy tokens for each prompt, made by our engine; they are transformers' own if each is its first choice.

    transformers sees each whole sequence at once and alone: decoding it step by step would take minutes.
    """
    llm = LLM(smollm2_gguf, max_model_len=160)
    prompts = [llm.encode_chat(p) if isinstance(p, list) else llm.tokenizer.encode(p) for p in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    decoder = llm.engine.decoder
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    for ids, output in zip(prompts, outputs, strict=True):
        made = list(output.outputs[0].token_ids)
        with torch.no_grad():
            whole = torch.tensor([ids + made])
            expected, actual = model(whole).logits, decoder(whole)
        assert len(made) == 64
        assert expected[0, len(ids) - 1 : -1].argmax(-1).tolist() == made
        assert difference(actual, expected) <= 2e-5
