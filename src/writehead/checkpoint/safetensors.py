"""safetensors: 8 bytes of header length, a JSON header, then the tensors without gaps.

    <u64 little-endian n> <n bytes of JSON> <data>
    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}

Offsets count from the end of the header. Every number is checked against the file's length before it is used.
Source: the format description of huggingface/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from writehead.checkpoint.contract import DTYPES, OpenCheckpoint, TensorInfo
from writehead.checkpoint.files import (
    MappedFile,
    listing,
    num_elements,
    parse_json,
    quote,
    read_config,
    read_index,
)
from writehead.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_TRUNCATED = "the file is truncated, download it again"


@dataclass(frozen=True)
class _Slice:
    """A tensor at byte `begin` of a mapped file."""

    info: TensorInfo
    file: MappedFile
    begin: int

    def load(self) -> torch.Tensor:
        return self.file.tensor(self.begin, self.info.shape, DTYPES[self.info.dtype])

    def prefetch(self) -> None:
        self.file.prefetch(self.begin, self.info.num_bytes)


def open_safetensors(path: Path) -> OpenCheckpoint:
    """One .safetensors file, with config.json beside it if there is one."""
    sources, metadata = _open_file(path)
    return OpenCheckpoint(path, "safetensors", sources, config=read_config(path.parent), metadata=metadata)


def open_sharded_safetensors(index: Path) -> OpenCheckpoint:
    """All shards that model.safetensors.index.json names.

    A tensor that only the index has is none: savers drop the second name of a tied one from the shards alone.
    """
    weight_map = read_index(index, ".safetensors")
    sources: dict[str, _Slice] = {}
    metadata: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        found, shard_metadata = _open_file(index.parent / shard)
        metadata |= shard_metadata
        twice = sorted(sources.keys() & found.keys())
        if twice:
            raise CheckpointError(f"{index.parent / shard}: these tensors are also in another shard: {listing(twice)}")
        sources |= found
    return OpenCheckpoint(index.parent, "safetensors", sources, config=read_config(index.parent), metadata=metadata)


def _open_file(path: Path) -> tuple[dict[str, _Slice], dict[str, str]]:
    file = MappedFile(path)
    header, start = _read_header(file)
    metadata = _check_metadata(header.pop("__metadata__", {}), path)
    sources = {name: _parse_entry(name, entry, file, start) for name, entry in header.items()}
    _check_layout(sources, file, start)
    return sources, metadata


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        raise CheckpointError(f"{file.path}: has {file.size} bytes, too few for a safetensors file; {_TRUNCATED}")
    length = int.from_bytes(file.data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.path}: announces a header of {length} bytes, more than {MAX_HEADER_BYTES};"
            " this is not a safetensors file or it is damaged"
        )
    if length > file.size - 8:
        raise CheckpointError(
            f"{file.path}: announces a header of {length} bytes but the file has {file.size} bytes; {_TRUNCATED}"
        )
    data = file.data[8 : 8 + length]
    if not data.startswith(b"{"):
        raise CheckpointError(f"{file.path}: the header does not start with '{{'; this is not a safetensors file")
    return parse_json(data, f"{file.path}: the header"), 8 + length


def _check_metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: '__metadata__' must map names to strings")
    return value


def _is_int(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_entry(name: str, entry: object, file: MappedFile, start: int) -> _Slice:
    where = f"{file.path}: tensor {quote(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is described by {quote(entry)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has the dtype {quote(dtype)}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_int, shape)):
        raise CheckpointError(f"{where} has the shape {quote(shape)}, expected a list of non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_int, offsets)):
        raise CheckpointError(f"{where} has the offsets {quote(offsets)}, expected two non-negative integers")
    begin, end = offsets
    num_bytes = num_elements(tuple(shape), where) * DTYPES[dtype].itemsize
    if num_bytes != end - begin:
        raise CheckpointError(
            f"{where} of shape {quote(shape)} and dtype {dtype} needs {num_bytes} bytes"
            f" but has the offsets {quote(offsets)}; the file is damaged"
        )
    if start + end > file.size:
        raise CheckpointError(f"{where} ends at byte {start + end} but the file has {file.size} bytes; {_TRUNCATED}")
    return _Slice(TensorInfo(name, tuple(shape), dtype, num_bytes), file, start + begin)


def _check_layout(sources: Mapping[str, _Slice], file: MappedFile, start: int) -> None:
    """No byte belongs to two tensors or to none: otherwise two programs could read two models from one file."""
    position = start
    for item in sorted(sources.values(), key=lambda item: (item.begin, item.info.num_bytes)):
        if item.begin != position:
            problem = "overlaps the tensor before it" if item.begin < position else "leaves a hole before it"
            raise CheckpointError(
                f"{file.path}: tensor {quote(item.info.name)} starts at byte {item.begin}, expected {position}:"
                f" it {problem}; the file is damaged"
            )
        position += item.info.num_bytes
    if position != file.size:
        raise CheckpointError(
            f"{file.path}: the tensors end at byte {position} but the file has {file.size} bytes; the file is damaged"
        )
