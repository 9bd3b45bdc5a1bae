"""`writehead inspect`: the figures are those of the model that would be loaded, and no weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.cases import CASES
from tests.unit.cli.conftest import Run
from writehead.checkpoint.contract import OpenCheckpoint
from writehead.cli import inspect
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.families import family_of


def config_of(case: str) -> ModelConfig:
    values = CASES[case]
    return family_of(values).read(ConfigReader(values))


def test_figures(run: Run, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: object, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(OpenCheckpoint, "read", never)
    facts = json.loads(run("inspect", tiny_model, "--json").out)
    count = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()
    assert facts["parameters"] == count
    assert facts["weight_bytes"] == {"fp32": 4 * count, "bf16": 2 * count, "fp16": 2 * count}
    assert facts["stored_bytes_by_dtype"] == {"F32": 4 * count}
    # 2 layers, one key and one value of 8 numbers each
    assert facts["cache_bytes_per_token"] == {"fp32": 128, "bf16": 64, "fp16": 64}
    assert facts["cache_bytes_at_full_context"]["fp32"] == 128 * 128
    assert facts["tokenizer"] == {
        "vocabulary": 320, "special_tokens": 5, "fill_in_the_middle": "starcoder (psm, spm)", "chat_template": False,
    }  # fmt: skip


def test_table(run: Run, tiny_model: str) -> None:
    done = run("inspect", tiny_model)
    assert (done.code, done.err) == (0, "")
    rows = dict(line.split("  ", 1) for line in done.out.splitlines())
    assert {name.strip(): value.strip() for name, value in rows.items()} == {
        "path": tiny_model,
        "format": "safetensors (148 KB F32)",
        "family": "gpt_bigcode",
        "parameters": "36,896",
        "attention": "multi-query (MQA): 4 heads, 1 for keys and values, of 8",
        "layers": "2 of width 32, sequential residual",
        "MLP": "width 128, gelu_tanh",
        "norm": "LayerNorm, eps 1e-05",
        "positions": "learned; 128 tokens",
        "vocabulary": "328, tied to the output",
        "tokenizer": "320 tokens, 5 special; fill in the middle: starcoder (psm, spm); no chat template",
        "weights": "148 KB in fp32, 73.8 KB in bf16 or fp16",
        "cache per token": "128 bytes in fp32, 64 bytes in bf16 or fp16",
        "cache at full context": "16.4 KB in fp32, 8.19 KB in bf16 or fp16",
    }


@pytest.mark.parametrize(
    ("case", "key", "words"),
    [
        ("gpt_bigcode-mqa", "attention", "multi-query (MQA)"),
        ("gpt2-plain", "attention", "multi-head (MHA)"),
        ("llama-gqa-bias", "attention", "grouped-query (GQA, 2 queries share a head)"),
        ("falcon-rw", "positions", "ALiBi"),
        ("llama-mha", "positions", "rotary, base 1234.5"),
        ("llama-linear", "positions", "rotary, base 10000, linear scaling by 3"),
        ("gpt_neox-new-keys", "positions", "rotary, base 300, 6 of 8 values"),
        ("llama-mha", "norm", "RMSNorm, eps 1e-06"),
        ("llama-mha", "activation", "silu (gated)"),
        ("gpt_neox-parallel", "residual", "parallel"),
        ("mistral-gqa-window", "window", 5),
        ("qwen2-some-windows", "window", "5 in some layers"),
        ("llama-mha", "window", None),
        ("qwen3-mha", "norm", "RMSNorm, eps 1e-06, also on queries and keys"),
        ("llama-mha", "tied", False),
    ],
)
def test_words(case: str, key: str, words: object) -> None:
    assert inspect.architecture(config_of(case))[key] == words


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 KB"),
        (1536, "1.54 KB"),
        (999_999, "1 MB"),
        (2_250_000_000, "2.25 GB"),
        (3 * 10**12, "3 TB"),
    ],
)
def test_readable(size: int, text: str) -> None:
    assert inspect.readable(size) == text


def test_a_checkpoint_without_a_tokenizer(run: Run, tiny_model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model) / name, tmp_path)
    done = run("inspect", tmp_path)
    assert done.code == 0
    assert "the checkpoint has no tokenizer" in done.out


def test_tensors_that_do_not_fit_are_listed_after_the_facts(run: Run, tiny_model: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    state = load_file(tmp_path / "m/model.safetensors")
    del state["transformer.ln_f.bias"]
    save_file(state, tmp_path / "m/model.safetensors")
    done = run("inspect", tmp_path / "m")
    assert done.code == 4
    assert "parameters             36,896" in done.out
    assert "1 missing: 'transformer.ln_f.bias' [32]" in done.err
