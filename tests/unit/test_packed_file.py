"""`convert --weights`: the file gives the same numbers as rounding while loading, and a damaged one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from writehead import LLM, SamplingParams, load
from writehead.build import open_source
from writehead.checkpoint import write_safetensors
from writehead.convert import convert
from writehead.errors import CheckpointError, UsageError
from writehead.models import packed_file
from writehead.verify import verify

PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
PROMPTS = ["def walk(path):", "x"]


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-64", "bf16", "fp32"])
def test_a_packed_file_gives_the_same_bytes_as_rounding_on_the_way(
    tiny_model: Path, tmp_path: Path, weights: str
) -> None:
    done = convert(tiny_model, tmp_path / "packed", weights=weights)
    assert done.dtypes == [weights]
    packed, rounded = LLM(tmp_path / "packed"), LLM(tiny_model, weights=weights, kernels="cpu")
    assert packed.engine.cache.keys[0].dtype == rounded.engine.cache.keys[0].dtype
    for ours, theirs in zip(packed.generate(PROMPTS, PARAMS), rounded.generate(PROMPTS, PARAMS), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
    reference = load(tmp_path / "packed", kernels="reference")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.allclose(reference(ids), load(tmp_path / "packed")(ids), atol=1e-3)


def test_other_uses_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    convert(tiny_model, out, weights="int8")
    with pytest.raises(UsageError, match="holds weights packed as int8, not int4; choose auto, or the original model"):
        LLM(out, weights="int4")
    with pytest.raises(UsageError, match="rounded and packed already; convert the original model"):
        convert(out, tmp_path / "again")
    with pytest.raises(UsageError, match="its weights are rounded to int8; verify the original model"):
        verify(out)
    with pytest.raises(UsageError, match="'int3' is not a format"):
        convert(tiny_model, tmp_path / "third", weights="int3")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("layout", "packed in layout '0', and this version of writehead reads layout '2'"),
        ("name", "weights: 'int5' is not a format"),
        ("shape", "expected torch.uint8"),
        ("missing", "is missing"),
        ("surplus", "'more' does not belong there"),
    ],
)
def test_damaged_files_are_refused(tiny_model: Path, tmp_path: Path, damage: str, message: str) -> None:
    convert(tiny_model, tmp_path / "packed", weights="int8")
    source = open_source(tmp_path / "packed")
    tensors = {name: source.checkpoint.read(name) for name in source.checkpoint.tensors}
    metadata = dict(source.checkpoint.metadata)
    match damage:
        case "layout":
            metadata["writehead.layout"] = "0"
        case "name":
            metadata["writehead.weights"] = "int5"
        case "shape":
            tensors["embed.weight"] = tensors["embed.weight"][:-64]
        case "missing":
            del tensors["layers.0.mlp.up.weight"]
        case "surplus":
            tensors["more"] = torch.zeros(3)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    write_safetensors(tmp_path / "bad", tensors, config=config, metadata=metadata, tokenizer_from=tmp_path / "packed")
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path / "bad")


def test_a_matrix_that_is_not_aligned_is_copied(tiny_model: Path, tmp_path: Path) -> None:
    """Another writer of the format may begin its data anywhere."""
    convert(tiny_model, tmp_path / "packed", weights="int8")
    file = tmp_path / "packed" / "model.safetensors"
    expected = LLM(tmp_path / "packed").generate(PROMPTS, PARAMS)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little") + 8
    file.write_bytes(length.to_bytes(8, "little") + data[8:length] + b" " * 8 + data[length:])
    assert packed_file.format_of(open_source(tmp_path / "packed").checkpoint) is not None
    assert [o.outputs[0].text for o in LLM(tmp_path / "packed").generate(PROMPTS, PARAMS)] == [
        o.outputs[0].text for o in expected
    ]
