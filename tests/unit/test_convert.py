"""`convert`: every number of every form comes out as it was, and transformers computes the same with it."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import SPECIAL_TOKENS, make_tokenizer, write_tiny_model
from tests.parity.cases import CASES
from tests.parity.harness import make_oracle, santacoder_state
from writehead.build import load_tokenizer, open_source, parameter_shapes, stored_rules
from writehead.convert import CLASSES, convert
from writehead.errors import CheckpointError, ConfigError, UsageError
from writehead.models.families import FAMILIES

State = dict[str, Tensor]
TOKENS = torch.tensor([[1, 5, 9, 2, 8, 8, 3]])
ONE_OF_EACH = [next(iter(group)) for _, group in itertools.groupby(CASES, key=lambda name: name.split("-")[0])]
UNTIED = [name for name in CASES if "untied" in name or name.endswith("-tied")]


@pytest.fixture(autouse=True)
def _quick_and_quiet() -> Iterator[None]:
    """Products this small are slower on several threads."""
    transformers.utils.logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def loaded(path: Path) -> Any:
    """What transformers makes of a directory; every weight is found and none is left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def write(path: Path, case: str) -> Any:
    """A checkpoint of transformers as its `save_pretrained` writes it."""
    oracle = make_oracle(CASES[case])
    oracle.save_pretrained(path)
    return oracle


def same(found: State, expected: Mapping[str, Tensor]) -> None:
    """Equal names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", [c for c in dict.fromkeys(ONE_OF_EACH + UNTIED) if not c.startswith("santacoder")])
def test_a_family_comes_out_bit_for_bit(case: str, tmp_path: Path) -> None:
    oracle = write(tmp_path / "in", case)
    done = convert(tmp_path / "in", tmp_path / "out")
    same(load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "in/model.safetensors"))
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(oracle))
    assert (done.family, done.dtypes) == (oracle.config.model_type, ["float32"])
    assert done.num_bytes == sum(t.nbytes for t in load_file(tmp_path / "out/model.safetensors").values())


@pytest.mark.parametrize("stated", [["GPT2LMHeadModel"], ["GPTBigCodeModel"], [], None, "x"])
def test_the_class_in_the_config_is_the_models(stated: object, tmp_path: Path) -> None:
    oracle = write(tmp_path / "in", "gpt_bigcode-mqa")
    values = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(values | {"architectures": stated}))
    convert(tmp_path / "in", tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == values | {"architectures": ["GPTBigCodeForCausalLM"]}
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(oracle))


def test_every_family_has_its_class() -> None:
    names = {family.export_as or name for name, family in FAMILIES.items()}
    assert names == set(CLASSES)
    assert all(hasattr(transformers, name) for name in CLASSES.values())


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("santacoder")])
def test_santacoder_becomes_gpt_bigcode(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(CASES[case])
    (tmp_path / "in").mkdir()
    old = santacoder_state(oracle.state_dict(), CASES[case]["n_embd"])
    if oracle.config.tie_word_embeddings:
        old.pop("lm_head.weight", None)
    save_file(old, tmp_path / "in/model.safetensors")
    values = CASES[case] | {"eos_token_id": 3, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    (tmp_path / "in/config.json").write_text(json.dumps(values))
    convert(tmp_path / "in", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["multi_query"], config["eos_token_id"]) == ("gpt_bigcode", True, 3)
    assert "auto_map" not in config
    model = loaded(tmp_path / "out")
    same(model.state_dict(), oracle.state_dict())
    # The tanh GELU is written under its plain name, whose constants differ from gelu_fast's in the last place.
    torch.testing.assert_close(logits(model), logits(oracle), rtol=0, atol=2e-5)


def test_torch_bin_with_stale_buffers_and_without_prefix(tmp_path: Path) -> None:
    oracle = make_oracle(CASES["gpt_bigcode-mqa"])
    state = {name.removeprefix("transformer."): tensor for name, tensor in oracle.state_dict().items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    (tmp_path / "in").mkdir()
    torch.save(state, tmp_path / "in/pytorch_model.bin")
    oracle.config.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert "h.0.attn.bias" not in found
    assert "transformer.h.0.attn.c_attn.weight" in found
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(oracle))


@pytest.mark.parametrize("multi_query", [True, False])
def test_megatron(multi_query: bool, tmp_path: Path) -> None:
    oracle = make_oracle(CASES["gpt_bigcode-mqa" if multi_query else "gpt_bigcode-mha"])
    write_megatron(tmp_path / "in", oracle, multi_query=multi_query)
    convert(tmp_path / "in", tmp_path / "out")
    model = loaded(tmp_path / "out")
    same(model.state_dict(), {name: tensor.half() for name, tensor in oracle.state_dict().items()})
    assert model.dtype == torch.float16


MEGATRON_NAMES = {
    "ln_1": "input_layernorm",
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}


def write_megatron(root: Path, oracle: Any, *, multi_query: bool) -> None:
    """The checkpoint of one rank in fp16, as BigCode's Megatron-LM writes it."""
    config = oracle.config
    encoder: State = {}
    for name, tensor in oracle.half().state_dict().items():
        name = name.removeprefix("transformer.")
        if name.startswith("ln_f."):
            encoder[f"final_layernorm.{name[5:]}"] = tensor
        elif name.startswith("h."):
            _, layer, *middle, part = name.split(".")
            inner = ".".join(middle)
            if inner != "attn.c_attn":
                encoder[f"layers.{layer}.{MEGATRON_NAMES[inner]}.{part}"] = tensor
            elif multi_query:
                encoder[f"layers.{layer}.self_attention.query.{part}"] = tensor[: config.n_embd].clone()
                encoder[f"layers.{layer}.self_attention.key_value.{part}"] = tensor[config.n_embd :].clone()
            else:
                encoder[f"layers.{layer}.self_attention.query_key_value.{part}"] = tensor
    state = oracle.transformer.state_dict()
    embedding = {
        "word_embeddings": {"weight": state["wte.weight"]},
        "position_embeddings": {"weight": state["wpe.weight"]},
    }
    args = argparse.Namespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, hidden_size=config.n_embd,
        num_attention_heads=config.n_head, num_layers=config.n_layer, padded_vocab_size=config.vocab_size,
        max_position_embeddings=config.n_positions, layernorm_epsilon=config.layer_norm_epsilon,
        attention_head_type="multiquery" if multi_query else "multihead", kv_channels=config.n_embd // config.n_head,
    )  # fmt: skip
    (root / "mp_rank_00").mkdir(parents=True)
    model = {"language_model": {"embedding": embedding, "encoder": encoder}}
    torch.save({"args": args, "checkpoint_version": 3.0, "model": model}, root / "mp_rank_00/model_optim_rng.pt")


GGUF_NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name for a tensor of gpt_bigcode."""
    *middle, part = name.removeprefix("transformer.").split(".")
    if middle[0] == "h":
        return f"blk.{middle[1]}.{GGUF_NAMES['.'.join(middle[2:])]}.{part}"
    return f"{GGUF_NAMES[middle[0]]}.{part}"


def write_gguf(path: Path, source: Path, dtype_of: Callable[[str], gguf.GGMLQuantizationType]) -> State:
    """The tiny model as llama.cpp stores it, with tokenizer and chat template; returns what it holds, by HF's names."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "starcoder")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    spec = json.loads(make_tokenizer().to_str())["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get) + [f"[PAD{i}]" for i in range(320, 328)]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if t in SPECIAL_TOKENS else unused if "[PAD" in t else normal for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in spec["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")
    held: State = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        kind = dtype_of(name)
        raw = gguf.quants.quantize(tensor.numpy(), kind)
        held[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def test_gguf_with_its_tokenizer(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hf")
    quantized = gguf.GGMLQuantizationType.Q8_0
    held = write_gguf(
        tmp_path / "m.gguf", source,
        lambda name: quantized if "weight" in name and "ln_" not in name else gguf.GGMLQuantizationType.F32,
    )  # fmt: skip
    done = convert(tmp_path / "m.gguf", tmp_path / "out")
    same(load_file(tmp_path / "out/model.safetensors"), held)
    assert done.has_tokenizer
    ours, copy = (load_tokenizer(open_source(path)) for path in (tmp_path / "m.gguf", tmp_path / "out"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("def f(x):\n    return x * 1234  # é €\n\n", "  two  spaces <fim_prefix>", ""):
        assert copy.encode(text) == ours.encode(text)
    assert theirs("def f(x): 12\n")["input_ids"] == ours.encode("def f(x): 12\n")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.chat_template) == (0, 0, "{{ messages[0].content }}")
    assert (copy.eos_ids, copy.chat_template, copy.special_ids) == (ours.eos_ids, ours.chat_template, ours.special_ids)
    expected = loaded(source)
    expected.load_state_dict(held, strict=False)
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(expected))


def test_gguf_keeps_float_types_and_names_the_widest(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hf")
    kinds = gguf.GGMLQuantizationType
    write_gguf(tmp_path / "m.gguf", source, lambda name: kinds.F32 if "ln_" in name or "bias" in name else kinds.F16)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["transformer.wte.weight"].dtype == torch.float16
    assert found["transformer.ln_f.weight"].dtype == torch.float32
    assert loaded(tmp_path / "out").dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_cast_is_torchs_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "in", "llama-mha")
    convert(tmp_path / "in", tmp_path / "out", dtype=name)
    expected = {n: t.to(dtype) for n, t in load_file(tmp_path / "in/model.safetensors").items()}
    same(load_file(tmp_path / "out/model.safetensors"), expected)
    assert loaded(tmp_path / "out").dtype == dtype


def test_bf16_is_kept_and_comes_back_from_fp32(tmp_path: Path) -> None:
    make_oracle(CASES["qwen2-mha"]).bfloat16().save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "wide", dtype="fp32")
    convert(tmp_path / "wide", tmp_path / "back", dtype="bf16")
    convert(tmp_path / "in", tmp_path / "kept")
    stored = load_file(tmp_path / "in/model.safetensors")
    same(load_file(tmp_path / "back/model.safetensors"), stored)
    same(load_file(tmp_path / "kept/model.safetensors"), stored)


def test_numbers_beyond_fp16_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path / "in", "llama-mha")
    state = load_file(tmp_path / "in/model.safetensors")
    state["model.norm.weight"][3] = 70000.0
    save_file(state, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' holds numbers beyond the range of float16; choose"):
        convert(tmp_path / "in", tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "in", tmp_path / "out", dtype="bf16")


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out").has_tokenizer
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    write(tmp_path / "bare", "llama-mha")
    assert not convert(tmp_path / "bare", tmp_path / "out2").has_tokenizer


def test_the_directory_of_the_model_itself_can_be_overwritten(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m")
    before = load_file(tmp_path / "m/model.safetensors")
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(tmp_path / "m", tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "m", overwrite=True, dtype="bf16")
    same(load_file(tmp_path / "m/model.safetensors"), {name: t.bfloat16() for name, t in before.items()})
    assert (tmp_path / "m/tokenizer.json").is_file()


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "in")
    seen: list[tuple[int, int]] = []
    done = convert(tmp_path / "in", tmp_path / "out", on_bytes=lambda written, total: seen.append((written, total)))
    assert seen[-1] == (done.num_bytes, done.num_bytes)
    assert [written for written, _ in seen] == sorted({written for written, _ in seen})


def test_a_config_key_can_be_accepted(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "in")
    values = json.loads((tmp_path / "in/config.json").read_text()) | {"novelty": 1}
    (tmp_path / "in/config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="unknown key 'novelty'"):
        convert(tmp_path / "in", tmp_path / "out")
    convert(tmp_path / "in", tmp_path / "out", accept_config_keys=["novelty"])
    assert json.loads((tmp_path / "out/config.json").read_text())["novelty"] == 1


def test_refusals(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "in")
    with pytest.raises(UsageError, match="'int8' is not a dtype; choose keep, fp32, bf16, fp16"):
        convert(tmp_path / "in", tmp_path / "out", dtype="int8")
    state = load_file(tmp_path / "in/model.safetensors")
    del state["transformer.h.1.ln_2.bias"]
    save_file(state | {"surplus": torch.ones(2)}, tmp_path / "in/model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: 'transformer.h.1.ln_2.bias' .*1 unknown: 'surplus'"):
        convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_of_the_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "in")
    state = load_file(tmp_path / "in/model.safetensors")
    head = state["transformer.wte.weight"].clone()
    save_file(state | {"lm_head.weight": head}, tmp_path / "in/model.safetensors")
    convert(tmp_path / "in", tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    head[0, 0] += 1
    save_file(state | {"lm_head.weight": head}, tmp_path / "in/model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'transformer.wte.weight'"):
        convert(tmp_path / "in", tmp_path / "again")


def test_a_parameter_is_served_by_one_rule(tmp_path: Path) -> None:
    source = open_source(write_tiny_model(tmp_path / "in"))
    shapes = parameter_shapes(source)
    assert sorted(rule.target for rule in stored_rules(source, shapes)) == sorted(shapes)
    assert shapes["layers.0.attn.qkv.weight"] == (32 + 2 * 8, 32)
