"""Packed weights in a file, ready to be mapped: the start reads nothing but a header.

A safetensors file whose tensors have the decoder's own names. Packed matrices are uint8 tensors in the layout of
kernels/packed.py, padded to whole cache lines; all others are fp32. `__metadata__` holds `writehead.weights`, the name
of the format, and `writehead.layout`, the version of the layout. config.json beside it is the model's usual one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from writehead.checkpoint import Checkpoint
from writehead.errors import CheckpointError
from writehead.kernels import Format, PackedWeight, parse_format
from writehead.kernels.packed import aligned, packed_bytes
from writehead.models.decoder import Decoder

LAYOUT = "1"
_LINE = 64


def metadata(format: Format) -> dict[str, str]:
    """What `__metadata__` of a packed file says."""
    return {"writehead.weights": str(format), "writehead.layout": LAYOUT}


def spec(shape: tuple[int, ...], format: Format | None) -> Tensor:
    """The tensor of the file for a parameter of this shape, on the meta device."""
    if format is None:
        return torch.empty(shape, device="meta")
    return torch.empty(_padded(shape, format), dtype=torch.uint8, device="meta")


def format_of(checkpoint: Checkpoint) -> Format | None:
    """The format of a packed checkpoint; None if it is an ordinary one. Raises CheckpointError for another layout."""
    name = checkpoint.metadata.get("writehead.weights") if checkpoint.format == "safetensors" else None
    if name is None:
        return None
    layout = checkpoint.metadata.get("writehead.layout")
    if layout != LAYOUT:
        raise CheckpointError(
            f"{checkpoint.path}: its weights are packed in layout {layout!r}, and this version of writehead reads "
            f"layout {LAYOUT!r}; convert the original model again"
        )
    try:
        return parse_format(name, packs_floats=True)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None


def adopt(
    decoder: Decoder, checkpoint: Checkpoint, format: Format, products: set[str], *, proceed: Callable[[], object]
) -> None:
    """Give a meta decoder the weights of a packed checkpoint, where they lie.

    Raises CheckpointError if tensors are missing, surplus, or not of the decoder's sizes.
    """
    specs = {
        name: (tuple(p.shape), format.at(name) if name in products else None) for name, p in decoder.named_parameters()
    }
    _check(checkpoint, specs)
    for name, (shape, packed) in specs.items():
        proceed()
        checkpoint.prefetch(name)
        tensor = checkpoint.read(name)
        owner, _, attribute = name.rpartition(".")
        module = decoder.get_submodule(owner)
        if packed is None:
            setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
            continue
        delattr(module, attribute)
        size = packed_bytes((shape[0], shape[1]), packed)
        memory = tensor[:size]
        if memory.data_ptr() % _LINE:
            memory = aligned(size).copy_(memory)
        setattr(module, attribute, PackedWeight((shape[0], shape[1]), packed, memory))


def _check(checkpoint: Checkpoint, specs: Mapping[str, tuple[tuple[int, ...], Format | None]]) -> None:
    expected = {name: spec(shape, packed) for name, (shape, packed) in specs.items()}
    wrong = [f"'{name}' is missing" for name in expected.keys() - checkpoint.tensors.keys()]
    wrong += [f"'{name}' does not belong there" for name in checkpoint.tensors.keys() - expected.keys()]
    for name in expected.keys() & checkpoint.tensors.keys():
        info, wanted = checkpoint.tensors[name], expected[name]
        if info.shape != tuple(wanted.shape) or info.dtype != ("U8" if wanted.dtype is torch.uint8 else "F32"):
            wrong.append(f"'{name}' is {info.dtype} {list(info.shape)}, expected {wanted.dtype} {list(wanted.shape)}")
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(sorted(wrong)[:8])}; convert the original model again")


def _padded(shape: tuple[int, ...], format: Format) -> int:
    assert math.prod(shape[:2]) == math.prod(shape)
    return -(-packed_bytes((shape[0], shape[1]), format) // _LINE) * _LINE
