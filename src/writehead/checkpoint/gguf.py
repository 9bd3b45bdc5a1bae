"""GGUF, the file format of llama.cpp: typed key/values, a table of tensors, then aligned blocks of numbers.

    "GGUF" <u32 version> <u64 num_tensors> <u64 num_keys>
    num_keys    x  <string key> <u32 type> <value>            string = <u64 length> <UTF-8 bytes>
    num_tensors x  <string name> <u32 num_dims> <u64 dim>... <u32 type> <u64 offset>     dims fastest first
    padding to general.alignment, then the data that offsets count from

The `gguf` package's reader trusts all of these numbers, so the header is parsed here: each count and length is compared
with the bytes that remain before anything is allocated. Its dequantization is used as it is.
Source: docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import torch

from writehead.checkpoint.contract import OpenCheckpoint, TensorInfo
from writehead.checkpoint.files import MappedFile, listing, num_elements, quote
from writehead.errors import CheckpointError

MAX_ARRAY_ELEMENTS = 1 << 24  # of all arrays together; the largest public vocabularies need about 2**20
MAX_STRING_BYTES = 1 << 26
MAX_NAME_BYTES = 65535
MAX_NESTING = 4
_TRUNCATED = "the file is truncated, download it again"
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_ELEMENT_BYTES: Mapping[int, int] = {
    **{kind: struct.calcsize(code) for kind, code in _SCALARS.items()},
    _BOOL: 1,
    _STRING: 8,
    _ARRAY: 4 + 8,
}
_PLAIN: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


@dataclass(frozen=True)
class _Blocks:
    """A tensor at byte `begin`; `row_bytes` is the size of one row of its last dimension."""

    info: TensorInfo
    file: MappedFile
    begin: int
    row_bytes: int

    def load(self) -> torch.Tensor:
        """Stored dtype for plain types (zero-copy), fp32 for quantized ones."""
        shape = self.info.shape
        if self.info.dtype in _PLAIN:
            return self.file.tensor(self.begin, shape, _PLAIN[self.info.dtype])
        if self.info.num_bytes == 0:
            return torch.empty(shape)
        kind = gguf.GGMLQuantizationType[self.info.dtype]
        with np.errstate(all="ignore"):  # scales of a damaged file may be infinite; that is the file's value
            rows = gguf.quants.dequantize(self.raw().reshape(-1, self.row_bytes), kind)
        return torch.from_numpy(rows.reshape(shape))

    def raw(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        data = self.file.array(self.begin, self.info.num_bytes)
        return data.reshape(*self.info.shape[:-1], self.row_bytes)

    def prefetch(self) -> None:
        self.file.prefetch(self.begin, self.info.num_bytes)


class GGUFCheckpoint(OpenCheckpoint):
    """A GGUF model; `raw` gives the stored blocks to kernels that compute on them."""

    def __init__(self, path: Path, sources: Mapping[str, _Blocks], metadata: Mapping[str, Any]) -> None:
        super().__init__(path, "gguf", sources, metadata=metadata)

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [..., bytes of a row]: the blocks as stored, zero-copy."""
        source = self._source(name)
        assert isinstance(source, _Blocks)
        return source.raw()


def open_gguf(path: Path) -> GGUFCheckpoint:
    """One .gguf file, or all parts of a split one when `path` is any `*-00001-of-0000N.gguf`."""
    paths = _parts(path)
    metadata: Mapping[str, Any] = {}
    sources: dict[str, _Blocks] = {}
    for number, part in enumerate(paths):
        values, blocks = _Header(MappedFile(part)).parse()
        if number == 0:
            metadata = values
        if len(paths) > 1 and (values.get("split.no"), values.get("split.count")) != (number, len(paths)):
            raise CheckpointError(
                f"{part}: says it is part {values.get('split.no')!r} of {values.get('split.count')!r}"
                f" (counted from 0), expected {number} of {len(paths)}"
            )
        twice = sorted(sources.keys() & blocks.keys())
        if twice:
            raise CheckpointError(f"{part}: these tensors are also in another part: {listing(twice)}")
        sources |= blocks
    _check_split(path, metadata, len(paths), len(sources))
    return GGUFCheckpoint(path, sources, metadata)


def _check_split(path: Path, metadata: Mapping[str, Any], num_parts: int, num_tensors: int) -> None:
    if metadata.get("split.count", num_parts) not in (0, num_parts):
        raise CheckpointError(
            f"{path}: is one of {metadata['split.count']!r} parts; name the parts *-00001-of-0000N.gguf in one folder"
        )
    if num_parts > 1 and metadata.get("split.tensors.count", num_tensors) != num_tensors:
        raise CheckpointError(
            f"{path}: its parts hold {num_tensors} tensors, expected {metadata['split.tensors.count']!r}"
        )


def _parts(path: Path) -> list[Path]:
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    total = int(match[3])
    if not 1 <= int(match[2]) <= total:
        raise CheckpointError(f"{path}: the name says part {int(match[2])} of {total}; rename it as it was published")
    paths = [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, total + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path}: these parts of the model are missing, download them: {listing(missing)}")
    return paths


@functools.cache
def _block_size(kind: int) -> tuple[str, int, int] | None:
    """(name, elements, bytes) of one block of tensor type `kind`; None when it cannot be turned into numbers."""
    try:
        known = gguf.GGMLQuantizationType(kind)
        elements, num_bytes = gguf.GGML_QUANT_SIZES[known]
        if known.name not in _PLAIN:
            gguf.quants.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return known.name, elements, num_bytes


class _Header:
    """A cursor over the header. Every take checks the bytes that remain, with Python's unbounded integers."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._position = 0
        self._num_elements = 0
        self._what = "the header"

    def parse(self) -> tuple[dict[str, Any], dict[str, _Blocks]]:
        """The key/values and the tensors of one file."""
        if self._file.data[:4] != b"GGUF":
            self._fail("does not start with 'GGUF'; this is not a GGUF file")
        self._position = 4
        self._check_version(self._scalar("I"))
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self._check_room(num_keys, _MIN_KEY_BYTES, "keys")
        self._check_room(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            self._what = f"the key after {quote(next(reversed(metadata), 'the header'))}"
            key = self._string(MAX_NAME_BYTES)
            self._what = f"the key {quote(key)}"
            if key in metadata:
                self._fail("appears twice; the file is damaged")
            metadata[key] = self._value(self._scalar("I"))
        return metadata, self._tensors(num_tensors, self._alignment(metadata))

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._file.path}: {self._what} {problem}")

    def _check_version(self, version: int) -> None:
        self._what = "the file"
        if version & 0xFFFF == 0:
            self._fail("is a big-endian GGUF, which is not supported; convert the model for little-endian machines")
        if version == 1:
            self._fail("is GGUF version 1 of August 2023, which is not supported; convert the model again")
        if version not in (2, 3):
            self._fail(f"is GGUF version {version}, expected 2 or 3")
        self._what = "the header"

    def _check_room(self, count: int, each: int, noun: str) -> None:
        room = self._file.size - self._position
        if count * each > room:
            self._fail(f"announces {count} {noun} but the file has {room} bytes left; {_TRUNCATED}")

    def _take(self, num_bytes: int) -> int:
        """Moves on by `num_bytes` and returns where they start."""
        begin = self._position
        if num_bytes > self._file.size - begin:
            self._fail(f"ends at byte {begin + num_bytes} but the file has {self._file.size} bytes; {_TRUNCATED}")
        self._position = begin + num_bytes
        return begin

    def _scalar(self, code: str) -> Any:
        begin = self._take(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._file.data, begin)[0]

    def _string(self, max_bytes: int = MAX_STRING_BYTES) -> str:
        return self._strings(1, max_bytes)[0]

    def _strings(self, count: int, max_bytes: int = MAX_STRING_BYTES) -> list[str]:
        """Written for speed: a vocabulary has 10**5 of them."""
        data, size, position = self._file.data, self._file.size, self._position
        unpack, result = struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + unpack(data, position)[0]
                if position > size or position - begin > max_bytes:
                    self._fail(f"holds a string of {position - begin} bytes, but {size - begin} are left; {_TRUNCATED}")
                result.append(str(data[begin:position], "utf-8"))
        except struct.error:
            self._fail(f"ends after the file's {size} bytes; {_TRUNCATED}")
        except UnicodeDecodeError as error:
            self._fail(f"holds a string that is not UTF-8 text (byte {begin + error.start}); the file is damaged")
        self._position = position
        return result

    def _value(self, kind: int) -> Any:
        if kind not in _MIN_ELEMENT_BYTES:
            self._fail(f"has a value of type {kind}, expected 0 to 12; the file is damaged")
        if kind == _BOOL:
            return self._bools(1)[0]
        if kind == _STRING:
            return self._string()
        return self._array(1) if kind == _ARRAY else self._scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        if depth > MAX_NESTING:
            self._fail(f"holds arrays nested more than {MAX_NESTING} deep; the file is damaged")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind not in _MIN_ELEMENT_BYTES:
            self._fail(f"is an array of type {kind}, expected 0 to 12; the file is damaged")
        self._check_room(count, _MIN_ELEMENT_BYTES[kind], "array elements")
        self._num_elements += count
        if self._num_elements > MAX_ARRAY_ELEMENTS:
            self._fail(f"brings the arrays to {self._num_elements} elements, more than {MAX_ARRAY_ELEMENTS}")
        if kind == _STRING:
            return self._strings(count)
        if kind == _BOOL:
            return self._bools(count)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        dtype = np.dtype("<" + _SCALARS[kind])
        begin = self._take(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._file.data, dtype, count, begin).tolist() if count else []
        return values

    def _bools(self, count: int) -> list[bool]:
        begin = self._take(count)
        values = bytes(self._file.data[begin : begin + count])
        if values.strip(b"\0\1"):
            self._fail("holds a boolean that is neither 0 nor 1; the file is damaged")
        return [byte == 1 for byte in values]

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if type(value) is not int or value <= 0 or value & (value - 1):
            self._what = "the key 'general.alignment'"
            self._fail(f"is {quote(value)}, expected a power of two; the file is damaged")
        return value

    def _tensors(self, count: int, alignment: int) -> dict[str, _Blocks]:
        table: dict[str, tuple[TensorInfo, int, int]] = {}
        for _ in range(count):
            self._what = f"the tensor after {quote(next(reversed(table), 'the keys'))}"
            name = self._string(MAX_NAME_BYTES)
            self._what = f"tensor {quote(name)}"
            if name in table:
                self._fail("appears twice; the file is damaged")
            table[name] = self._tensor(name, alignment)
        start = -(-self._position // alignment) * alignment
        position = start
        for name, (info, _, offset) in sorted(table.items(), key=lambda item: (item[1][2], item[1][0].num_bytes)):
            self._what = f"tensor {quote(name)}"
            begin, end = start + offset, start + offset + info.num_bytes
            if end > self._file.size:
                self._fail(f"ends at byte {end} but the file has {self._file.size} bytes; {_TRUNCATED}")
            if begin < position:
                self._fail(f"starts at byte {begin}, inside the tensor before it; the file is damaged")
            position = end
        return {
            name: _Blocks(info, self._file, start + offset, row_bytes)
            for name, (info, row_bytes, offset) in table.items()
        }

    def _tensor(self, name: str, alignment: int) -> tuple[TensorInfo, int, int]:
        """(info, bytes of a row, offset in the data)"""
        num_dims = self._scalar("I")
        if num_dims > 4:
            self._fail(f"has {num_dims} dimensions, more than 4; the file is damaged")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        block = _block_size(kind)
        if block is None:
            self._fail(f"has the type {_type_name(kind)}, which cannot be read; use another quantization")
        dtype, elements, num_bytes = block
        total = num_elements(shape, f"{self._file.path}: {self._what}")
        row = shape[-1] if shape else 1
        if row % elements:
            self._fail(f"has rows of {row} numbers, expected a multiple of {dtype}'s block of {elements}")
        if offset % alignment:
            self._fail(f"starts at offset {offset}, expected a multiple of {alignment}; the file is damaged")
        info = TensorInfo(name, shape, dtype, total // elements * num_bytes)
        return info, row // elements * num_bytes, offset


def _type_name(kind: int) -> str:
    try:
        return str(gguf.GGMLQuantizationType(kind).name)
    except ValueError:
        return f"{kind} (unknown)"
