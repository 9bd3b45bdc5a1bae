"""Files of strangers: mapped, measured and parsed without trusting a single number in them."""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from writehead.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20  # index files of the largest public models are below 1 MB
MAX_RANK = 64  # torch's iterators stop at 64 dimensions
_INT64_MAX = 2**63 - 1
_QUANTIZERS = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
_MAP_NORESERVE = 0x4000  # Linux; the mmap module names it only from Python 3.13


def quote(value: object) -> str:
    """`value` for an error message: escaped, and cut when a hostile file makes it long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def listing(names: list[str]) -> str:
    """At most ten names for an error message, those with control characters escaped."""
    shown = [name if name.isprintable() and len(name) <= 100 else quote(name) for name in names[:10]]
    return ", ".join(shown) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def quantization(names: Iterable[str]) -> str | None:
    """What quantized the weights of a folder that holds these files, if one of them is its settings.

    Newer programs write a quantization_config into config.json instead.
    """
    present = set(names)
    return next((f"{method} ({name})" for name, method in _QUANTIZERS.items() if name in present), None)


def num_elements(shape: tuple[int, ...], where: str) -> int:
    """The product of `shape`; CheckpointError unless torch can address such a tensor (64-bit strides)."""
    if len(shape) > MAX_RANK:
        raise CheckpointError(f"{where} has {len(shape)} dimensions, more than {MAX_RANK}; the file is damaged")
    if any(not 0 <= dim <= _INT64_MAX for dim in shape) or math.prod(max(dim, 1) for dim in shape) > _INT64_MAX:
        raise CheckpointError(f"{where} has the impossible shape {quote(list(shape))}; the file is damaged")
    return math.prod(shape)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quote(twice)} appears twice")
    return result


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object with unique keys, or CheckpointError starting with `where`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 text (byte {error.start}); the file is damaged") from None
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply to be meant seriously") from None
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError when it is too big, unreadable, or anything else."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path}: {size} bytes are too many for a JSON file, the limit is {max_bytes}")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_json(data, f"{path}:")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of `directory`, or {} when there is none."""
    path = directory / "config.json"
    return read_json(path) if path.is_file() else {}


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """Tensor name -> shard file name from a Hugging Face index; every shard is a plain name beside it, and exists."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: 'weight_map' must be a non-empty object of tensor and file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(suffix) or set(shard) & set("/\\\0:") or shard[0] == ".":
            raise CheckpointError(
                f"{path}: tensor {quote(name)} is said to be in {quote(shard)}, expected a plain *{suffix} file name"
            )
    missing = [shard for shard in sorted(set(weight_map.values())) if not (path.parent / shard).is_file()]
    if missing:
        raise CheckpointError(f"{path}: these shards are missing, download them again: {listing(missing)}")
    return weight_map


class MappedFile:
    """A whole file as copy-on-write memory: torch sees it as writable, the file is never written.

    Tensors and arrays hold references to the mapping, which goes away with the last of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # a pipe or device would block or never end
                raise CheckpointError(f"{path}: is not a regular file")
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self.data: mmap.mmap | bytes = self._map(file.fileno()) if self.size else b""
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if self.data[:24] == b"version https://git-lfs.":
            raise CheckpointError(f"{path}: is a Git LFS pointer and not the file itself; get it with `git lfs pull`")

    @staticmethod
    def _map(fileno: int) -> mmap.mmap:
        if sys.platform == "linux":  # without NORESERVE, files larger than the memory are refused
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(fileno, 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=protection)
        return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)

    def array(self, begin: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 view of `num_bytes` bytes from `begin`; the caller has checked the bounds."""
        assert 0 <= begin <= begin + num_bytes <= self.size
        return np.frombuffer(self.data, dtype=np.uint8, count=num_bytes, offset=begin)

    def tensor(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zero-copy tensor at byte `begin`, or a copy when that is not a multiple of the item size."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        num_bytes = count * dtype.itemsize
        assert 0 <= begin <= begin + num_bytes <= self.size
        if begin % dtype.itemsize:
            return torch.frombuffer(bytearray(self.data[begin : begin + num_bytes]), dtype=dtype).reshape(shape)
        return torch.frombuffer(self.data, dtype=dtype, count=count, offset=begin).reshape(shape)

    def prefetch(self, begin: int, num_bytes: int) -> None:
        """Asks for these bytes to be read ahead; a hint, so systems without it do nothing."""
        if num_bytes and isinstance(self.data, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
            start = begin - begin % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_WILLNEED, start, begin + num_bytes - start)
