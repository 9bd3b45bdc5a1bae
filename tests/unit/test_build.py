"""What `build` accepts and refuses when config, tokenizer and weights meet."""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tests.models import NUM_ROWS, write_tiny_model
from writehead import LLM, SamplingParams, build
from writehead import kernels as kernel_backends
from writehead.build import load_tokenizer, open_source
from writehead.checkpoint.contract import OpenCheckpoint
from writehead.errors import CheckpointError, ConfigError, PromptError, TokenizerError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=6, min_tokens=2)


def test_tokens_added_past_the_models_rows_are_never_used(tmp_path: Path) -> None:
    """As in Code Llama 34B and fine-tunes with a padding token of their own."""
    expected = LLM(write_tiny_model(tmp_path)).generate("def f(x):", GREEDY)[0].outputs[0].token_ids
    file = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([f"<extra_{i}>" for i in range(20)])
    assert tokenizer.get_vocab_size() > NUM_ROWS
    tokenizer.save(str(file))
    llm = LLM(tmp_path)
    assert llm.generate("def f(x):", GREEDY)[0].outputs[0].token_ids == expected
    with pytest.raises(PromptError, match=f"has the token id {NUM_ROWS}; the vocabulary has 0 to {NUM_ROWS - 1}"):
        llm.generate([[1, NUM_ROWS]], GREEDY)


def test_fim_tokens_without_rows_are_no_fill_in_the_middle(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    text = file.read_text("utf-8").replace("<fim_", "<xim_")
    file.write_text(text, encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    fillers = [f"<extra_{i}>" for i in range(10)]
    tokenizer.add_special_tokens([*fillers, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"])
    tokenizer.save(str(file))
    llm = LLM(tmp_path)
    assert llm.fim is None
    with pytest.raises(PromptError, match="no fill-in-the-middle tokens"):
        llm.generate({"prompt": "a", "suffix": "b"}, GREEDY)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    content["model"]["vocab"] |= {f"token{i}": 1000 + i for i in range(3)}
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=f"has 1003 tokens but the model only {NUM_ROWS}; use the tokenizer that"):
        load_tokenizer(open_source(tmp_path))


def test_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing or empty; the weights beside it cannot be"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 10**30}, f"'sliding_window' is {10**30}; expected a number of a"),
        ({"model_type": "mistral", "sliding_window": 0}, "layers use a sliding window, and sliding_window is 0; exp"),
        ({"model_type": "mistral", "num_key_value_heads": 5}, "32 query heads cannot share 5 key/value heads evenly"),
        ({"model_type": "llama", "rope_theta": 0.5}, "rope_theta is 0.5; expected a number above 1"),
        ({"model_type": "bert"}, "model_type is 'bert'; writehead knows"),
    ],
)
def test_what_is_wrong_with_a_config_names_its_file(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{tmp_path}/config.json: {message}')}"):
        open_source(tmp_path)


def test_weights_that_do_not_fit_into_the_memory_are_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path)
    source, kernels = open_source(tmp_path), kernel_backends.load("reference")
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("the memory was taken"))
    for free, advice in ((1_200_000, "choose weights bf16, or"), (0, "choose a smaller model, or")):
        monkeypatch.setattr(build, "free_memory", lambda free=free: free)
        expected = rf"need 0.0 GB of memory in fp32, but 0.0 GB are free; {advice} free memory"
        with pytest.raises(UsageError, match=expected):
            build.build(source, weights="fp32", kernels=kernels)


def test_loading_ends_with_what_proceed_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(write_tiny_model(tmp_path))
    loaded: list[str] = []
    read = OpenCheckpoint.read

    def counted(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
        loaded.append(name)
        return read(checkpoint, name)

    def proceed() -> None:
        if len(loaded) >= 3:
            raise TokenizerError("bad")

    monkeypatch.setattr(OpenCheckpoint, "read", counted)
    with pytest.raises(TokenizerError, match="bad"):
        build.build(source, weights="fp32", kernels=kernel_backends.load("reference"), proceed=proceed)
    assert 3 <= len(loaded) < 3 + build.NUM_LOADERS < len(source.checkpoint.tensors)


def test_a_bad_tokenizer_is_reported_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    loaded: list[str] = []
    read = OpenCheckpoint.read

    def slow(checkpoint: OpenCheckpoint, name: str) -> torch.Tensor:
        loaded.append(name)
        time.sleep(0.3)
        return read(checkpoint, name)

    monkeypatch.setattr(OpenCheckpoint, "read", slow)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: this is not a tokenizer"):
        LLM(tmp_path)
    assert len(loaded) <= 2 * build.NUM_LOADERS


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 100 kB\nMemAvailable:  50 kB\nSwapFree: 10 kB\n", "max\n", 60 << 10),
        ("MemTotal: 100 kB\nMemAvailable:  50 kB\nSwapFree: 10 kB\n", "40000\n", 40000),
        (None, None, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    ],
    ids=["free", "control group", "another system"],
)
def test_free_memory(monkeypatch: pytest.MonkeyPatch, meminfo: str | None, limit: str | None, expected: int) -> None:
    def read_text(path: Path, _encoding: str) -> str:
        text = {"meminfo": meminfo, "memory.max": limit}[path.name]
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    assert build.free_memory() == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tiny_model(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    save_file(state | {name: state[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"no floating-point numbers: '{name}' \w+; they may be quantized"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ("quantize_config.json", r"GPTQ \(quantize_config\.json\)"),
        ("quant_config.json", r"AWQ \(quant_config\.json\)"),
        ("other.json", "GPTQ or AWQ"),
    ],
)
def test_old_quantized_weights_are_called_so(tmp_path: Path, settings: str, method: str) -> None:
    """As in repositories from before config.json had a quantization_config."""
    write_tiny_model(tmp_path)
    (tmp_path / settings).write_text('{"bits": 4}')
    assert LLM(tmp_path).config.num_layers == 2  # the settings alone quantize nothing
    state = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc"
    del state[f"{name}.weight"]
    packed = {f"{name}.qweight": torch.zeros(4, 8, dtype=torch.int32), f"{name}.scales": torch.ones(1, 8)}
    (tmp_path / "model.safetensors").unlink()
    save_file(state | packed, tmp_path / "gptq_model-4bit-128g.safetensors")
    expected = (
        f"'{name}.qweight' is quantized by {method}, which writehead does not read; use the original model, or a GGUF"
    )
    with pytest.raises(CheckpointError, match=expected):
        LLM(tmp_path)


def test_the_tokenizer_of_a_gguf_file_is_blamed_by_its_path(tmp_path: Path) -> None:
    source = replace(open_source(write_tiny_model(tmp_path)), checkpoint=OpenCheckpoint(tmp_path, "gguf", {}))
    with pytest.raises(TokenizerError, match=rf"^{re.escape(str(tmp_path))}: "):
        load_tokenizer(source)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_huge_file_of_a_tokenizer_is_not_read(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path)
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)  # zeros that take no room
    with pytest.raises(TokenizerError, match=rf"{name}: 1099511627776 bytes are too many for a tokenizer's file"):
        load_tokenizer(open_source(tmp_path))


def test_huge_pages_change_no_number_and_do_not_hold_the_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_GATHER_AFTER", 0.0)
    monkeypatch.setattr(build, "_HUGE_PAGE", 4096)  # what the tiny block has whole pages of
    monkeypatch.setattr(build, "_GATHER_FROM", 1)
    write_tiny_model(tmp_path)
    decoder = build.build(open_source(tmp_path), weights="fp32", kernels=kernel_backends.load("reference"))
    for thread in threading.enumerate():
        if thread.name == "gather pages":
            thread.join(30)
            assert not thread.is_alive()
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(decoder.get_parameter("embed.weight"), state["transformer.wte.weight"])
    monkeypatch.setattr(build, "_GATHER_AFTER", 0.2)
    owner = weakref.ref(build.build(open_source(tmp_path), weights="fp32", kernels=kernel_backends.load("reference")))
    gc.collect()
    assert owner() is None
