"""torch's own files (pytorch_model.bin): read with the weights-only unpickler, which builds tensors and nothing else.

A pickle is a program. torch's weights-only mode refuses every global outside its list of tensor builders; what it
refuses is reported by name. Zip files (torch >= 1.6) are memory-mapped, older ones are read whole.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from writehead.checkpoint.contract import DTYPE_NAMES, OpenCheckpoint, TensorInfo
from writehead.checkpoint.files import MappedFile, listing, quote, read_config, read_index
from writehead.errors import CheckpointError

_WRAPPERS = ("model", "state_dict", "module")


@dataclass(frozen=True)
class _Loaded:
    """A tensor whose bytes torch has mapped (or, for old files, read)."""

    info: TensorInfo
    tensor: torch.Tensor

    def load(self) -> torch.Tensor:
        return self.tensor.contiguous()

    def prefetch(self) -> None:
        """torch's mapping takes no hints."""


def open_torch(path: Path) -> OpenCheckpoint:
    """One .bin (or .pt, .pth) file that holds a state dict."""
    return OpenCheckpoint(path, "torch", _open_file(path), config=read_config(path.parent))


def open_sharded_torch(index: Path) -> OpenCheckpoint:
    """All shards that pytorch_model.bin.index.json names.

    A tensor that only the index has is none: savers drop the second name of a tied one from the shards alone.
    """
    weight_map = read_index(index, ".bin")
    sources: dict[str, _Loaded] = {}
    for shard in sorted(set(weight_map.values())):
        found = _open_file(index.parent / shard)
        twice = sorted(sources.keys() & found.keys())
        if twice:
            raise CheckpointError(f"{index.parent / shard}: these tensors are also in another shard: {listing(twice)}")
        sources |= found
    return OpenCheckpoint(index.parent, "torch", sources, config=read_config(index.parent))


def load_archive(path: Path, allowed: Sequence[Callable[..., Any] | tuple[Callable[..., Any], str]] = ()) -> Any:
    """What `torch.save` wrote, weights only, on the CPU.

    allowed: further harmless callables, or (stand-in, "module.name") pairs that replace a global by a stand-in.
    """
    try:
        mapped = MappedFile(path)
        if not mapped.size:
            raise CheckpointError(f"{path}: is empty; download it again")
        is_zip = mapped.data[:4] == b"PK\x03\x04"
        if is_zip:
            _check_zip(path)
        # An old file is given as memory: unlike a file, that never allocates what a length in the pickle asks for.
        source: Any = path if is_zip else mapped.data
        with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings(action="ignore"):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # the unpickler meets hostile bytes: any exception there means a bad file
        raise CheckpointError(f"{path}: {_explain(error)}") from None


def _check_zip(path: Path) -> None:
    """torch never compresses; a compressed member is a bomb or another program's file."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.filename.endswith("/constants.pkl") for member in members):
        raise CheckpointError(f"{path}: is a TorchScript program, expected a file of weights")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(f"{path}: is a compressed zip file, expected one written by torch.save")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise CheckpointError(f"{path}: its members are larger than the file; the file is damaged")


def _explain(error: Exception) -> str:
    """torch wraps the unpickler's reason in advice to switch the protection off; that is not passed on."""
    cause = error.__context__ if type(error.__context__) is type(error) else error
    text = " ".join(str(cause).encode("ascii", "backslashreplace").decode().split())
    if blocked := re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", text):
        return (
            f"asks for the Python object {quote(blocked[1])}; only weights are loaded, never code from a pickle:"
            " use the model's safetensors files, or convert it where you trust it"
        )
    return f"is not a file of weights that torch can load ({type(error).__name__}: {text[:200]}); download it again"


def _open_file(path: Path) -> dict[str, _Loaded]:
    content = _unwrap(load_archive(path), path)
    return {name: _Loaded(describe(name, tensor, path), tensor.detach()) for name, tensor in content.items()}


def _unwrap(content: object, path: Path) -> Mapping[str, Any]:
    """The state dict itself; a dict whose only entry is {'model': state dict} counts as one."""
    if (
        isinstance(content, dict)
        and len(content) == 1
        and next(iter(content)) in _WRAPPERS
        and isinstance(next(iter(content.values())), dict)
    ):
        content = next(iter(content.values()))
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a dict of named tensors")
    odd = [quote(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CheckpointError(
            f"{path}: these entries are not tensors: {listing(odd)};"
            " expected a flat dict of named tensors, save the model's state_dict alone"
        )
    return content


def describe(name: str, tensor: torch.Tensor, path: Path) -> TensorInfo:
    """The tensor's TensorInfo; CheckpointError unless it is a plain dense CPU tensor backed by bytes of the file."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{path}: tensor {quote(name)} ({tensor.dtype}) is not a plain dense tensor of numbers")
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path}: tensor {quote(name)} of shape {quote(list(tensor.shape))} has only"
            f" {tensor.untyped_storage().nbytes()} bytes of data; the file is damaged"
        )
    return TensorInfo(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], num_bytes)
