"""Finds out what kind of checkpoint a path holds, and opens it."""

from __future__ import annotations

import re
from pathlib import Path

from writehead.checkpoint.contract import Checkpoint, OpenCheckpoint, TensorInfo
from writehead.checkpoint.files import listing, quantization, quote, read_json
from writehead.checkpoint.megatron import find_megatron, open_megatron
from writehead.checkpoint.safetensors import open_safetensors, open_sharded_safetensors
from writehead.checkpoint.torchbin import open_sharded_torch, open_torch
from writehead.errors import CheckpointError, ModelNotFoundError

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]

_SEARCHED = (
    "model.safetensors.index.json, one *.safetensors, pytorch_model.bin.index.json, pytorch_model.bin,"
    " one *.gguf, or Megatron's latest_checkpointed_iteration.txt, iter_* or mp_rank_*"
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint directory or a single .safetensors, .bin, .pt, .pth or .gguf file.

    Reads headers only. In a directory safetensors win over .bin, and .bin over GGUF.
    """
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.is_file():
            return _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if path.exists():
        raise CheckpointError(f"{path}: is neither a file nor a directory; give a checkpoint's")
    raise ModelNotFoundError(f"{path}: there is no such file or directory")


def _open_file(path: Path) -> OpenCheckpoint:
    match path.suffix:
        case ".safetensors":
            return open_safetensors(path)
        case ".bin" | ".pt" | ".pth":
            return open_torch(path)
        case ".gguf":
            return _open_gguf(path)
    raise CheckpointError(f"{path}: is not a checkpoint, expected a .safetensors, .bin, .pt, .pth or .gguf file")


def _open_gguf(path: Path) -> OpenCheckpoint:
    from writehead.checkpoint.gguf import open_gguf  # the gguf package takes 0.1 s to import; most users need none

    return open_gguf(path)


def _open_directory(path: Path) -> OpenCheckpoint:
    if (path / "params.json").is_file() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: holds the form of Meta or Mistral (params.json and consolidated files); use the model's "
            "Hugging Face form, which has a config.json"
        )
    if (index := path / "model.safetensors.index.json").is_file():
        return open_sharded_safetensors(index)
    if (file := _only(path, "*.safetensors", "model.safetensors", "model.safetensors.index.json")) is not None:
        return open_safetensors(file)
    if (index := path / "pytorch_model.bin.index.json").is_file():
        return open_sharded_torch(index)
    if (file := _only(path, "pytorch_model*.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")) is not None:
        return open_torch(file)
    if (file := _only(path, "*.gguf", None, None)) is not None:
        return _open_gguf(file)
    if (iteration := find_megatron(path)) is not None:
        return open_megatron(iteration)
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise CheckpointError(
            f"{path}: holds an adapter for {quote(base)} and no model; merge it into that model (merge_and_unload of "
            "peft), and give the result"
        )
    if (method := quantization(file.name for file in path.iterdir())) is not None:
        raise CheckpointError(
            f"{path}: holds weights that are quantized by {method}, which writehead does not read; use the original "
            "model, or a GGUF file of it"
        )
    raise CheckpointError(f"{path}: holds no checkpoint; looked for {_SEARCHED}")


def _only(directory: Path, pattern: str, preferred: str | None, index: str | None) -> Path | None:
    """The one file that matches, or the preferred one; parts of one split GGUF count as one file."""
    if preferred is not None and (directory / preferred).is_file():
        return directory / preferred
    files = sorted(f for f in directory.glob(pattern) if f.is_file() and not f.name.startswith("adapter_"))
    if index is None and files and all("-of-" in file.name for file in files):
        files = [file for file in files if "-00001-of-" in file.name] or files[:1]
    names = [file.name for file in files]
    if index is not None and any(re.search(r"-\d+-of-\d+\.", name) for name in names):
        raise CheckpointError(f"{directory}: holds shards but not their index, download {index}: {listing(names)}")
    if len(files) > 1:
        raise CheckpointError(f"{directory}: holds several checkpoints, name one of them: {listing(names)}")
    return files[0] if files else None
