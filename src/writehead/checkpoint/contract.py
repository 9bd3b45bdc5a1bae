"""What a checkpoint is to the rest of writehead: named tensors that are read one at a time.

A reader turns one file format into `Source` objects and hands them to `OpenCheckpoint`; nothing above this package
knows which format it is reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from writehead.checkpoint.files import quote
from writehead.errors import CheckpointError

# Names as safetensors spells them. Types below one byte (F4, F6_*) have no torch counterpart with one element a byte.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the file stores it: `shape` in torch order, `dtype` in the file's own words, size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Source(Protocol):
    """Where one tensor comes from. A source owns a share of its file's mapping, so tensors outlive the checkpoint."""

    @property
    def info(self) -> TensorInfo: ...

    def load(self) -> torch.Tensor: ...

    def prefetch(self) -> None: ...


class Checkpoint(Protocol):
    """An open checkpoint. Opening reads headers only.

    `format` is 'safetensors', 'torch', 'gguf' or 'megatron'. `config` is the parsed config.json ({} without one, and
    for GGUF), for Megatron the training arguments; `metadata` holds GGUF key/values or safetensors' `__metadata__`.
    """

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def prefetch(self, name: str) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OpenCheckpoint:
    """The one implementation of `Checkpoint`: a table of sources."""

    def __init__(
        self,
        path: Path,
        format: str,
        sources: Mapping[str, Source],
        *,
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.config: Mapping[str, Any] = config or {}
        self.metadata: Mapping[str, Any] = metadata or {}
        self.tensors: Mapping[str, TensorInfo] = {name: source.info for name, source in sources.items()}
        self._sources: Mapping[str, Source] | None = sources

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`: memory-mapped (private, so writing to it never reaches the file) or freshly computed."""
        return self._source(name).load()

    def prefetch(self, name: str) -> None:
        """Asks the system to read `name` ahead, where the format can; returns at once."""
        self._source(name).prefetch()

    def close(self) -> None:
        """Lets go of the files; tensors that were read stay valid and keep their mapping alive."""
        self._sources = None

    def _source(self, name: str) -> Source:
        assert self._sources is not None, "the checkpoint is closed"
        if name not in self._sources:
            raise CheckpointError(f"{self.path}: there is no tensor {quote(name)} in this checkpoint")
        return self._sources[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
