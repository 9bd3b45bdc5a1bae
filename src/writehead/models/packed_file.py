"""Packed weights in a file, ready to be mapped: the start reads nothing but a header.

A safetensors file whose tensors have the decoder's own names. Packed matrices are uint8 tensors in the layout of
kernels/packed.py, padded to whole cache lines; all others are fp32. `__metadata__` holds `writehead.weights`, the name
of the format, and `writehead.layout`, the version of the layout. config.json beside it is the model's usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from writehead.checkpoint import Checkpoint
from writehead.errors import CheckpointError
from writehead.kernels import Format, parse_format
from writehead.kernels.packed import aligned
from writehead.models.decoder import Decoder
from writehead.models.weights import Spec, place, weight_specs

LAYOUT = "2"
_LINE = 64


def metadata(format: Format) -> dict[str, str]:
    """What `__metadata__` of a packed file says."""
    return {"writehead.weights": str(format), "writehead.layout": LAYOUT}


def stored(spec: Spec) -> Tensor:
    """The tensor of the file for a parameter, on the meta device."""
    if spec.packed is None:
        return torch.empty(spec.shape, device="meta")
    return torch.empty(-(-spec.num_bytes // _LINE) * _LINE, dtype=torch.uint8, device="meta")


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


def adopt(decoder: Decoder, checkpoint: Checkpoint, format: Format, *, proceed: Callable[[], object]) -> None:
    """Give a meta decoder the weights of a packed checkpoint, where they lie.

    Raises CheckpointError if tensors are missing, surplus, or not of the decoder's sizes.
    """
    specs = weight_specs(decoder, format)
    _check(checkpoint, specs)
    for name, spec in specs.items():
        proceed()
        checkpoint.prefetch(name)
        tensor = checkpoint.read(name)
        if spec.packed is not None:
            memory = tensor[: spec.num_bytes]
            if memory.data_ptr() % _LINE:
                memory = aligned(spec.num_bytes).copy_(memory)
            place(decoder, name, spec.over(memory))
        else:
            place(decoder, name, tensor)


def _check(checkpoint: Checkpoint, specs: Mapping[str, Spec]) -> None:
    expected = {name: stored(spec) for name, spec in specs.items()}
    wrong = [f"'{name}' is missing" for name in expected.keys() - checkpoint.tensors.keys()]
    wrong += [f"'{name}' does not belong there" for name in checkpoint.tensors.keys() - expected.keys()]
    for name in expected.keys() & checkpoint.tensors.keys():
        info, wanted = checkpoint.tensors[name], expected[name]
        if info.shape != tuple(wanted.shape) or info.dtype != ("U8" if wanted.dtype is torch.uint8 else "F32"):
            wrong.append(f"'{name}' is {info.dtype} {list(info.shape)}, expected {wanted.dtype} {list(wanted.shape)}")
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(sorted(wrong)[:8])}; convert the original model again")
