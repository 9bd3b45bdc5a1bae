"""BigCode Megatron-LM checkpoints: one file a rank, merged into one logical set of tensors.

    iter_0001000/mp_rank_TT/model_optim_rng.pt         tensor rank TT, no pipeline
    iter_0001000/mp_rank_TT_PPP/model_optim_rng.pt     tensor rank TT, pipeline stage PPP

Column-parallel weights are concatenated on dim 0, row-parallel ones on dim 1; what every rank holds (layer norms, the
biases of row-parallel layers, the key/value head of multi-query attention, positions) is taken from rank 0 after a
check that all ranks agree. Names are those of the newer spelling: `embedding.*`, `layers.{i}.*`, `final_layernorm.*`.
Source: tools/checkpoint_loader_megatron.py of bigcode-project/Megatron-LM, branch multi-query-attention.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from writehead.checkpoint.contract import OpenCheckpoint, TensorInfo
from writehead.checkpoint.files import listing, quote
from writehead.checkpoint.torchbin import describe, load_archive
from writehead.errors import CheckpointError

_MAX_RANKS = 4096
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_WHOLE = None
_SCALARS = (bool, int, float, str, type(None))
_WEIGHT_BIAS = r"(weight|bias)"
_LAYER = r"layers\.[0-9]{1,6}"

# Logical name -> the dim that tensor parallelism cuts, None when every rank holds all of it.
_RULES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), dim)
    for pattern, dim in (
        (r"embedding\.word_embeddings\.weight", 0),
        (r"embedding\.position_embeddings\.weight", _WHOLE),
        (rf"{_LAYER}\.(input|post_attention)_layernorm\.{_WEIGHT_BIAS}", _WHOLE),
        (rf"{_LAYER}\.self_attention\.(query|query_key_value)\.{_WEIGHT_BIAS}", 0),
        (rf"{_LAYER}\.self_attention\.key_value\.{_WEIGHT_BIAS}", _WHOLE),
        (rf"{_LAYER}\.self_attention\.dense\.weight", 1),
        (rf"{_LAYER}\.self_attention\.dense\.bias", _WHOLE),
        (rf"{_LAYER}\.mlp\.dense_h_to_4h\.{_WEIGHT_BIAS}", 0),
        (rf"{_LAYER}\.mlp\.dense_4h_to_h\.weight", 1),
        (rf"{_LAYER}\.mlp\.dense_4h_to_h\.bias", _WHOLE),
        (rf"final_layernorm\.{_WEIGHT_BIAS}", _WHOLE),
        (r"output_layer\.weight", 0),
    )
)


class _Inert:
    """Stands in for numpy's random state in the pickle: takes anything, keeps and does nothing."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _plain_enum(value: object) -> object:
    """Stands in for Megatron's enums among the arguments: the value itself."""
    return value


def _enum_member(kind: object, name: object) -> object:
    """Stands in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle the member of an enum: the member's name."""
    if kind is not _plain_enum or not isinstance(name, str):
        raise ValueError(f"getattr of {quote(name)} is not the member of an enum")
    return name


_ALLOWED: tuple[Callable[..., Any] | tuple[Callable[..., Any], str], ...] = (
    argparse.Namespace,
    _Inert,
    _plain_enum,
    _enum_member,
    (_enum_member, "builtins.getattr"),
    (_enum_member, "__builtin__.getattr"),
    *((_Inert, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    (_Inert, "numpy.ndarray"),
    (_Inert, "numpy.dtype"),
    (_plain_enum, "megatron.enums.PositionEmbeddingType"),
    (_plain_enum, "megatron.model.enums.PositionEmbeddingType"),
)


@dataclass(frozen=True)
class _Merged:
    """One logical tensor: the parts of all tensor ranks, joined when it is read."""

    info: TensorInfo
    parts: tuple[torch.Tensor, ...]
    dim: int | None
    path: Path

    def load(self) -> torch.Tensor:
        first = self.parts[0]
        if self.dim is not None:
            return first.contiguous() if len(self.parts) == 1 else torch.cat(self.parts, dim=self.dim)
        for rank, part in enumerate(self.parts[1:], start=1):
            if not torch.equal(first, part):
                raise CheckpointError(
                    f"{self.path}: tensor {quote(self.info.name)} must be the same on all tensor ranks"
                    f" but differs between rank 0 and rank {rank}"
                )
        return first.contiguous()

    def prefetch(self) -> None:
        """torch's mapping takes no hints."""


def find_megatron(path: Path) -> Path | None:
    """The directory with the mp_rank_* folders: `path`, its parent, or the iteration that `path` points to."""
    if path.name.startswith("mp_rank_") and any((path / name).is_file() for name in _FILES):
        return path.absolute().parent
    if any(path.glob("mp_rank_*")):
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        return path / _iteration_name(tracker)
    iterations = sorted(found for found in path.glob("iter_*") if found.is_dir())
    if len(iterations) > 1:
        names = listing([found.name for found in iterations])
        raise CheckpointError(f"{path}: holds several iterations, name one of them: {names}")
    return iterations[0] if iterations else None


def _iteration_name(tracker: Path) -> str:
    with tracker.open("rb") as file:
        text = file.read(64).strip()
    if text == b"release":
        return "release"
    if not re.fullmatch(rb"[0-9]{1,12}", text):
        raise CheckpointError(f"{tracker}: holds {quote(text)}, expected an iteration number or 'release'")
    return f"iter_{int(text):07d}"


def open_megatron(iteration: Path) -> OpenCheckpoint:
    """All ranks of one iteration directory as one checkpoint; `config` holds the training arguments."""
    files = _rank_files(iteration)
    first = _Rank(files[min(files)])
    tensor_size, pipeline_size = (first.size(f"{axis}_model_parallel_size") for axis in ("tensor", "pipeline"))
    expected = [(tensor, stage) for tensor in range(tensor_size) for stage in range(pipeline_size)]
    missing = [_rank_name(*rank, pipeline_size) for rank in expected if rank not in files]
    if missing:
        raise CheckpointError(
            f"{iteration}: was written by {tensor_size} tensor x {pipeline_size} pipeline ranks,"
            f" these are missing: {listing(missing)}"
        )
    surplus = [files[rank].parent.name for rank in sorted(files.keys() - set(expected))]
    if surplus:
        raise CheckpointError(f"{iteration}: holds ranks beyond {tensor_size} x {pipeline_size}: {listing(surplus)}")
    sources: dict[str, _Merged] = {}
    num_layers = 0
    for stage in range(pipeline_size):
        places = [files[tensor, stage] for tensor in range(tensor_size)]
        ranks = [first if place == first.path else _Rank(place) for place in places]
        merged, count = _merge(ranks, num_layers)
        num_layers += count
        twice = sorted(sources.keys() & merged.keys())
        if twice:
            raise CheckpointError(f"{ranks[0].path}: these tensors are also in an earlier stage: {listing(twice)}")
        sources |= merged
    metadata = {"iteration": iteration.name, "checkpoint_version": first.version}
    return OpenCheckpoint(iteration, "megatron", sources, config=first.args, metadata=metadata)


def _rank_name(tensor: int, stage: int, pipeline_size: int) -> str:
    return f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if pipeline_size > 1 else "")


def _rank_files(iteration: Path) -> dict[tuple[int, int], Path]:
    files: dict[tuple[int, int], Path] = {}
    for folder in iteration.glob("mp_rank_*"):
        match = re.fullmatch(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3}))?", folder.name)
        found = [folder / name for name in _FILES if (folder / name).is_file()]
        if match and found:
            files[int(match[1]), int(match[2] or 0)] = found[0]
    if not files:
        raise CheckpointError(f"{iteration}: holds no mp_rank_*/{_FILES[0]}; expected a Megatron checkpoint")
    return files


class _Rank:
    """One rank's file: arguments, version and tensors under their logical names (layers counted within the stage)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = load_archive(path, _ALLOWED)
        if not isinstance(content, dict) or not isinstance(content.get("args"), argparse.Namespace):
            raise CheckpointError(f"{path}: has no 'args' of a training run; expected a Megatron-LM checkpoint")
        self.args = _plain_args(content["args"])
        self.version = content.get("checkpoint_version", 0)
        if type(self.version) not in (int, float) or not self.version >= 2:
            raise CheckpointError(
                f"{path}: has a checkpoint_version below 2, or none;"
                " older versions order the attention's rows differently"
            )
        self.tensors: dict[str, Any] = {}
        for name, value in self._named_tensors(content):
            if name in self.tensors:
                raise CheckpointError(f"{path}: tensor {quote(name)} is there in two spellings; the file is damaged")
            self.tensors[name] = value

    def size(self, name: str) -> int:
        """A parallel size among the arguments."""
        value = self.args.get(name, 1)
        if type(value) is not int or not 1 <= value <= _MAX_RANKS:
            raise CheckpointError(f"{self.path}: '{name}' must be a number from 1 to {_MAX_RANKS}")
        return value

    def _named_tensors(self, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        if "model0" in content:
            raise CheckpointError(f"{self.path}: interleaved pipeline stages are not supported; save without them")
        model = content.get("model")
        language_model = model.get("language_model") if isinstance(model, dict) else None
        if not isinstance(language_model, dict):
            raise CheckpointError(f"{self.path}: has no model.language_model; expected a Megatron-LM language model")
        for name, value in _flatten(language_model, self.path):
            name = re.sub(r"^(encoder|transformer)\.", "", name)
            yield re.sub(r"^(layers\.[0-9]+)\.attention\.", r"\1.self_attention.", name), value

    def num_layers(self) -> int:
        """Layers of this stage; they must be numbered from 0 without gaps."""
        numbers = {int(match[1]) for name in self.tensors if (match := re.match(r"layers\.([0-9]+)\.", name))}
        if numbers and max(numbers) + 1 != len(numbers):
            raise CheckpointError(f"{self.path}: its layers are numbered {quote(sorted(numbers))}, with gaps")
        return len(numbers)


def _plain_args(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that are plain values or lists of them; dtypes become their names ('float16')."""
    plain: dict[str, Any] = {}
    for name, value in vars(args).items():
        if isinstance(value, torch.dtype):
            plain[name] = str(value).removeprefix("torch.")
        elif isinstance(value, list | tuple) and all(isinstance(item, _SCALARS) for item in value):
            plain[name] = list(value)
        elif isinstance(value, _SCALARS):
            plain[name] = value
    return plain


def _flatten(tree: Mapping[Any, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts, in dotted names. In a pickle a dict may hold itself, so each is entered once."""
    pending: list[tuple[str, Mapping[Any, Any]]] = [("", tree)]
    entered: set[int] = set()
    while pending:
        prefix, branch = pending.pop(0)
        if id(branch) in entered or not all(isinstance(key, str) for key in branch):
            raise CheckpointError(f"{path}: the tree of tensors at {quote(prefix)} is not made of names; it is damaged")
        entered.add(id(branch))
        for key, value in branch.items():
            if isinstance(value, dict):
                pending.append((f"{prefix}{key}.", value))
            else:
                yield f"{prefix}{key}", value


def _merge(ranks: list[_Rank], offset: int) -> tuple[dict[str, _Merged], int]:
    """The tensors of one pipeline stage with `offset` layers before it, and the number of its layers."""
    names = ranks[0].tensors.keys()
    for rank in ranks[1:]:
        differing = sorted(names ^ rank.tensors.keys())
        if differing:
            raise CheckpointError(f"{rank.path}: differs from {ranks[0].path} in these tensors: {listing(differing)}")
    unknown = [quote(name) for name in names if not any(pattern.fullmatch(name) for pattern, _ in _RULES)]
    if unknown:
        raise CheckpointError(f"{ranks[0].path}: these tensors are not part of a known model: {listing(unknown)}")
    merged: dict[str, _Merged] = {}
    for name in names:
        dim = next(dim for pattern, dim in _RULES if pattern.fullmatch(name))
        logical: str = re.sub(r"^layers\.([0-9]+)", lambda match: f"layers.{int(match[1]) + offset}", name)
        if logical in merged:
            raise CheckpointError(f"{ranks[0].path}: tensor {quote(logical)} appears twice; the file is damaged")
        merged[logical] = _merged(logical, ranks, name, dim)
    return merged, ranks[0].num_layers()


def _merged(logical: str, ranks: list[_Rank], name: str, dim: int | None) -> _Merged:
    infos = []
    for rank in ranks:
        tensor = rank.tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{rank.path}: {quote(name)} is a {type(tensor).__name__}, expected a tensor")
        infos.append(describe(name, tensor, rank.path))
    shape, dtype = list(infos[0].shape), infos[0].dtype
    if any((list(info.shape), info.dtype) != (shape, dtype) for info in infos) or (dim or 0) >= len(shape):
        raise CheckpointError(
            f"{ranks[0].path}: tensor {quote(name)} does not fit together over the tensor ranks: "
            + listing([f"{info.dtype} {list(info.shape)}" for info in infos])
        )
    num_bytes = infos[0].num_bytes
    if dim is not None:
        shape[dim] *= len(ranks)
        num_bytes *= len(ranks)
    parts = tuple(rank.tensors[name].detach() for rank in ranks)
    return _Merged(TensorInfo(logical, tuple(shape), dtype, num_bytes), parts, dim, ranks[0].path)
