"""Directories as people download them: what lies beside the weights, and what is no model at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import write_tiny_model
from writehead.build import build, open_source
from writehead.checkpoint.reader import open_checkpoint
from writehead.convert import convert
from writehead.errors import CheckpointError
from writehead.kernels import load


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def embedding(model: Path) -> torch.Tensor:
    return build(open_source(model), weights="fp32", kernels=load("reference")).get_parameter("embed.weight")


def test_the_weights_are_those_of_the_hub_form(model: Path) -> None:
    """Copies in other forms lie beside them."""
    expected = embedding(model)
    torch.save({"transformer.wte.weight": torch.zeros(3)}, model / "pytorch_model.bin")
    save_file({"tok_embeddings.weight": torch.zeros(3)}, model / "consolidated.safetensors")
    save_file({"x.lora_A.weight": torch.zeros(3)}, model / "adapter_model.safetensors")
    (model / "original").mkdir()
    torch.save({"tok_embeddings.weight": torch.zeros(3)}, model / "original/consolidated.00.pth")
    for name in ("params.json", "adapter_config.json", "original/params.json"):
        (model / name).write_text("{}")
    assert torch.equal(embedding(model), expected)


def test_a_tied_embedding_may_be_kept_under_the_name_of_the_head(model: Path, tmp_path: Path) -> None:
    state, expected = load_file(model / "model.safetensors"), embedding(model)
    renamed = {"lm_head.weight" if name.endswith("wte.weight") else name: tensor for name, tensor in state.items()}
    save_file(renamed, model / "model.safetensors", metadata={"transformer.wte.weight": "lm_head.weight"})
    assert torch.equal(embedding(model), expected)
    convert(model, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_refused(tmp_path: Path, name: str) -> None:
    state = {"base_model.model.h.0.attn.c_attn.lora_A.weight": torch.zeros(2, 2)}
    save_file(state, tmp_path / name) if name.endswith("safetensors") else torch.save(state, tmp_path / name)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "bigcode/starcoder"}))
    with pytest.raises(CheckpointError, match="holds an adapter for 'bigcode/starcoder' and no model; merge it into"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated.00.pth"])
def test_the_form_of_meta_and_mistral_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds the form of Meta or Mistral .* use the model's Hugging Face"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_a_git_lfs_pointer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer and not the file itself; get it with"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "method"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")])
def test_quantized_weights_in_files_of_their_own_are_called_so(tmp_path: Path, name: str, method: str) -> None:
    (tmp_path / name).write_text('{"bits": 4}')
    (tmp_path / "gptq_model-4bit-128g.bin").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=rf"are quantized by {method} \({name}\), which writehead does not read; use"
    ):
        open_checkpoint(tmp_path)
