"""Writes a Hugging Face safetensors checkpoint, one tensor in memory at a time.

Names, shapes and dtypes come first (`specs`), so that each tensor has its place in a shard before the first one
arrives; the tensors themselves may then come in any order. Files are written into a hidden folder inside the target and
renamed when all are complete, config.json last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from writehead.checkpoint.contract import DTYPE_NAMES
from writehead.checkpoint.files import listing, quote
from writehead.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_CHUNK_BYTES = 64 << 20
_TEMPORARY = ".writing"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def write_safetensors(
    directory: Path,
    specs: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    config: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer_from: Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes the checkpoint and returns its weight files.

    specs: name -> tensor that gives shape and dtype; meta tensors will do when `tensors` brings the values, and without
    `tensors` the values of `specs` are written. tokenizer_from: a directory whose tokenizer files are copied.
    overwrite: replace the weights and config in a non-empty directory; unrelated files in it stay.
    Raises CheckpointError when the directory is not empty, the disk is full, or tensors are missing, surplus or do not
    fit; nothing is left under a final name then.
    """
    existed = True
    temporary = directory / f"{_TEMPORARY}-{os.getpid()}"
    try:
        existed = directory.exists()
        _check_directory(directory, overwrite)
        temporary.mkdir(parents=True)
        shards = _plan(specs, max_shard_bytes)
        _check_space(temporary, shards)
        _write_shards(temporary, shards, specs.items() if tensors is None else tensors, metadata or {"format": "pt"})
        if tokenizer_from is not None:
            _copy_tokenizer(tokenizer_from, temporary)
        if len(shards) > 1:
            _write_json(temporary / "model.safetensors.index.json", _index(shards))
        _write_json(temporary / "config.json", config)
        _publish(temporary, directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: the checkpoint could not be written ({error.strerror})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # only an empty one goes
                directory.rmdir()
    return [directory / shard.name for shard in shards]


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: `begin` counts from the end of the shard's header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class _Shard:
    name: str
    places: Mapping[str, _Place]

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self.places.values())


def _check_directory(directory: Path, overwrite: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file, expected a directory to write the checkpoint to")
    if not directory.is_dir() or overwrite:
        return
    present = sorted(item.name for item in directory.iterdir() if not item.name.startswith(_TEMPORARY))
    if present:
        raise CheckpointError(
            f"{directory}: is not empty ({listing(present)}); choose another directory or ask to overwrite it"
        )


def _plan(specs: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[_Shard]:
    """Fills shards in the order of the specs; a tensor larger than a shard gets one of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in specs.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor {quote(name)} has the dtype {tensor.dtype}, which safetensors cannot hold")
        if groups[-1] and filled + tensor.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.nbytes
    total = len(groups)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    if total == 1:
        names = ["model.safetensors"]
    return [_Shard(name, _places(specs, group)) for name, group in zip(names, groups, strict=True)]


def _places(specs: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, _Place]:
    """Wide types first, so that every tensor is aligned to its item size and can be mapped without a copy."""
    places: dict[str, _Place] = {}
    begin = 0
    for name in sorted(names, key=lambda name: -specs[name].dtype.itemsize):
        tensor = specs[name]
        places[name] = _Place(tuple(tensor.shape), tensor.dtype, begin, tensor.nbytes)
        begin += tensor.nbytes
    return places


def _check_space(directory: Path, shards: Sequence[_Shard]) -> None:
    needed, free = sum(shard.num_bytes for shard in shards), shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(
            f"{directory.parent}: needs {needed / 1e6:,.1f} MB but the disk has {free / 1e6:,.1f} MB free;"
            " make room or choose another disk"
        )


def _header(places: Mapping[str, _Place], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} | {
        name: {
            "dtype": DTYPE_NAMES[place.dtype],
            "shape": place.shape,
            "data_offsets": (place.begin, place.begin + place.num_bytes),
        }
        for name, place in places.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the data begins on a cache line
    return len(text).to_bytes(8, "little") + text


def _write_shards(
    directory: Path, shards: Sequence[_Shard], tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
) -> None:
    where = {name: (index, place) for index, shard in enumerate(shards) for name, place in shard.places.items()}
    with contextlib.ExitStack() as stack:
        files, starts = [], []
        for shard in shards:
            file = stack.enter_context((directory / shard.name).open("wb", buffering=0))
            header = _header(shard.places, metadata)
            _write_at(file.fileno(), memoryview(header), 0)
            files.append(file)
            starts.append(len(header))
        for name, tensor in tensors:
            if name not in where:
                raise CheckpointError(f"{directory.parent}: tensor {quote(name)} came twice or was not announced")
            index, place = where.pop(name)
            if (tuple(tensor.shape), tensor.dtype) != (place.shape, place.dtype):
                raise CheckpointError(
                    f"{directory.parent}: tensor {quote(name)} is {tensor.dtype} {list(tensor.shape)},"
                    f" expected {place.dtype} {list(place.shape)}"
                )
            _write_at(files[index].fileno(), _bytes_of(tensor), starts[index] + place.begin)
            del tensor  # or it would still be there while the next one is computed
        if where:
            raise CheckpointError(f"{directory.parent}: these tensors never came: {listing(sorted(where))}")
        for file in files:
            os.fsync(file.fileno())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data: memoryview = flat.numpy().data
    return data


def _write_at(fileno: int, data: memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fileno, data[written : written + _CHUNK_BYTES], offset + written)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _index(shards: Sequence[_Shard]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
        "weight_map": {name: shard.name for shard in shards for name in shard.places},
    }


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            try:
                original = (source / name).open("rb")
            except OSError as error:
                raise CheckpointError(f"{source / name}: cannot be read ({error.strerror})") from None
            with original, (target / name).open("wb") as copy:
                shutil.copyfileobj(original, copy)


def _publish(temporary: Path, directory: Path) -> None:
    """Moves the finished files into place; until config.json follows last, nobody takes them for a checkpoint.

    What was there may be what was read, so nothing of it goes before all is known to fit.
    """
    names = [file.name for file in temporary.iterdir() if file.name != "config.json"]
    patterns = (*_WEIGHTS, *(TOKENIZER_FILES if set(names) & set(TOKENIZER_FILES) else ()))
    stale = [path for pattern in patterns for path in directory.glob(pattern) if path.name not in names]
    blocked = [path.name for path in (*(directory / name for name in (*names, "config.json")), *stale) if path.is_dir()]
    if blocked:
        raise CheckpointError(f"{directory}: holds directories where files belong: {listing(sorted(blocked))}")
    (directory / "config.json").unlink(missing_ok=True)
    for name in names:
        (temporary / name).replace(directory / name)
    for path in stale:
        path.unlink()
    (temporary / "config.json").replace(directory / "config.json")
