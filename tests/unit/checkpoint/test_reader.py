"""What a path holds is found out, or the refusal says what was looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from writehead.checkpoint import open_checkpoint
from writehead.checkpoint.files import MappedFile, read_json
from writehead.errors import CheckpointError, ModelNotFoundError


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere: there is no such file or directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_empty_directory_lists_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    for name in ("model.safetensors.index.json", "*.safetensors", "pytorch_model.bin", "*.gguf", "mp_rank_*"):
        assert name in str(caught.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model.onnx: is not a checkpoint, expected a .safetensors, .bin"):
        open_checkpoint(tmp_path / "model.onnx")


def test_safetensors_win_over_torch_files(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).format == "torch"
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "weights.safetensors")
    assert open_checkpoint(tmp_path).format == "safetensors"
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"name one of them: other.safetensors, weights.safetensors"):
        open_checkpoint(tmp_path)
    safetensors.torch.save_file({"x": torch.full((1,), 2.0)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).read("x").item() == 2
    assert open_checkpoint(tmp_path / "other.safetensors").read("x").item() == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[1]", "must be a JSON object, not list"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": "' + b"x" * 200 + b'"}', "209 bytes are too many for a JSON file, the limit is 100"),
    ],
    ids=["list", "cut", "binary", "duplicate", "deep", "big"],
)
def test_json_that_is_not_a_config(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_json(path, max_bytes=100 if message.endswith("100") else 1 << 20)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


def test_what_is_not_a_regular_file_is_not_opened(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            MappedFile(path)


def test_a_mapping_counts_as_cache_not_as_memory(tmp_path: Path) -> None:
    """Files larger than the machine's memory must open: the mapping reserves nothing."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    mapped = MappedFile(path)
    mapped.prefetch(1 << 39, 5000)
    assert mapped.size == 1 << 40
    assert mapped.tensor((1 << 40) - 8, (2,), torch.float32).tolist() == [0, 0]


def test_a_pipe_is_no_checkpoint_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m.gguf: is neither a file nor a directory"):
        open_checkpoint(tmp_path / "m.gguf")
