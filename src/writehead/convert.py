"""Writes what any checkpoint holds as a Hugging Face safetensors checkpoint, one parameter in memory at a time.

A parameter of the decoder is loaded through the rules of the form that it is stored in and exported through the rules
of the form that is written. Both are views, so whatever is not cast comes out bit for bit.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor

from writehead.build import ModelSource, check_aliases, make_decoder, open_source, parameter_shapes, stored_rules
from writehead.checkpoint import Checkpoint, write_safetensors
from writehead.checkpoint.contract import DTYPES as STORED_DTYPES
from writehead.checkpoint.rules import Rule, Shape
from writehead.checkpoint.writer import TOKENIZER_FILES
from writehead.errors import CheckpointError, UsageError
from writehead.kernels import Format, Kernels, PackedWeight, parse_format
from writehead.kernels import load as load_kernels
from writehead.kernels.packed import FLOATS, aligned
from writehead.models import packed_file
from writehead.models.config import ConfigReader
from writehead.models.families import FAMILIES, Family
from writehead.models.weights import Spec, weight_specs
from writehead.text.gguf import read_gguf
from writehead.text.source import Source

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}

CLASSES = {
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""What `architectures` says in the config of each family that is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What was written."""

    family: str
    files: list[Path]
    num_tensors: int
    num_bytes: int
    dtypes: list[str]
    has_tokenizer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """One parameter's way from the tensors that are read to the tensors that are written."""

    read: Rule
    write: Rule
    shape: Shape
    stored: torch.dtype
    written: torch.dtype

    def specs(self) -> dict[str, Tensor]:
        """Name, shape and dtype of what is written, as meta tensors."""
        shapes = self.write.layout.shapes(self.shape)
        made = [torch.empty(shape, dtype=self.written, device="meta") for shape in shapes]
        return dict(zip(self.write.sources, made, strict=True))

    def tensors(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What is written. Raises CheckpointError where a number does not fit the dtype."""
        parameter = torch.empty(self.shape, dtype=self.stored)
        self.read.load([checkpoint.read(name) for name in self.read.sources], parameter)
        return {name: _cast(name, tensor, self.written) for name, tensor in self.write.export(parameter).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pack:
    """One parameter's way into a packed file."""

    read: Rule
    spec: Spec
    kernels: Kernels

    def specs(self) -> dict[str, Tensor]:
        """Name, shape and dtype of what is written, as a meta tensor."""
        return {self.read.target: packed_file.stored(self.spec)}

    def tensors(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What is written."""
        whole = self.read.whole([checkpoint.read(name) for name in self.read.sources], self.spec.shape)
        if self.spec.packed is None:
            return {self.read.target: whole.float()}
        memory = aligned(packed_file.stored(self.spec).numel()).zero_()
        weight = PackedWeight(self.spec.matrix, self.spec.packed, memory[: self.spec.num_bytes])
        self.kernels.pack(whole, weight)
        return {self.read.target: memory}


def convert(
    model: str | Path | None,
    out: Path,
    *,
    dtype: str = "keep",
    weights: str | None = None,
    overwrite: bool = False,
    accept_config_keys: Collection[str] = (),
    on_bytes: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write `model` (as in `LLM`) to the directory `out`, in a form that transformers loads.

    `dtype` is fp32, bf16, fp16 or keep: each tensor stays as stored, and what is quantized becomes fp32, which holds it
    exactly. With `weights` (int8, int4 and the like, as in `LLM`) they are rounded and packed, in a form that `LLM`
    maps without reading it and transformers does not load. `on_bytes(done, total)` is called after each parameter.
    Raises CheckpointError; nothing is left then.
    """
    if dtype != "keep" and dtype not in FLOATS:
        raise UsageError(f"dtype: '{dtype}' is not a dtype; choose keep, {', '.join(FLOATS)}")
    source = open_source(model, accept_config_keys=accept_config_keys)
    if source.packed is not None:
        raise UsageError(f"{source.path}: its weights are rounded and packed already; convert the original model")
    check_aliases(source)
    moves, config = _plan(source, None if dtype == "keep" else FLOATS[dtype], accept_config_keys)
    format = None
    if weights is not None:
        format = parse_format(weights, packs_floats=True)
        moves = _pack_all(source, moves, format)
    specs = {name: tensor for move in moves for name, tensor in move.specs().items()}
    total = sum(tensor.nbytes for tensor in specs.values())
    stream = _stream(moves, source.checkpoint, lambda done: on_bytes and on_bytes(done, total))
    with _tokenizer_files(source) as folder:
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES if "config" not in name)
        files = write_safetensors(
            out, specs, stream, config=config, tokenizer_from=folder, overwrite=overwrite,
            metadata=None if format is None else packed_file.metadata(format),
        )  # fmt: skip
    return Conversion(
        family=config["model_type"],
        files=files,
        num_tensors=len(specs),
        num_bytes=total,
        dtypes=[str(format)] if format else sorted({_DTYPE_NAMES[tensor.dtype] for tensor in specs.values()}),
        has_tokenizer=has_tokenizer,
    )


def _stream(
    moves: Iterable[_Move | _Pack], checkpoint: Checkpoint, on_bytes: Callable[[int], object]
) -> Iterator[tuple[str, Tensor]]:
    """What is written, one parameter in memory at a time; `on_bytes` hears how much it was so far."""
    done = 0
    for move in moves:
        tensors = move.tensors(checkpoint)
        yield from tensors.items()
        done += sum(tensor.nbytes for tensor in tensors.values())
        on_bytes(done)


def _plan(
    source: ModelSource, dtype: torch.dtype | None, accept: Collection[str]
) -> tuple[list[_Move | _Pack], dict[str, Any]]:
    """How each parameter moves, and the config that is written."""
    family = FAMILIES[source.family.export_as or source.family.name]
    values = _config_values(source, family)
    reader = ConfigReader(values, source="the config to be written", accept=accept)
    config = family.read(reader)
    assert replace(config, family=source.config.family) == source.config, f"{family.name} does not write what it reads"
    shapes = parameter_shapes(source)
    write = {rule.target: rule for rule in family.rules(config).expand(config.num_layers)}
    moves: list[_Move | _Pack] = []
    dtypes = []
    for rule in stored_rules(source, shapes):
        stored = _stored_dtype(source.checkpoint, rule)
        written = stored if dtype is None else dtype
        shape = shapes[rule.target]
        moves.append(_Move(read=rule, write=write[rule.target], shape=shape, stored=stored, written=written))
        dtypes.append(written)
    widest = functools.reduce(torch.promote_types, dtypes)
    if dtype is not None or source.checkpoint.format in ("gguf", "megatron"):
        values = {key: value for key, value in values.items() if key != "dtype"} | {"torch_dtype": _DTYPE_NAMES[widest]}
    return moves, values


def _pack_all(source: ModelSource, moves: Sequence[_Move | _Pack], format: Format) -> list[_Move | _Pack]:
    """The same parameters on their way into a packed file."""
    kernels = load_kernels("auto")
    specs = weight_specs(make_decoder(source.config, kernels), format)
    return [_Pack(read=move.read, spec=specs[move.read.target], kernels=kernels) for move in moves]


def _config_values(source: ModelSource, family: Family) -> dict[str, Any]:
    """config.json: the model's own keys where the family is kept, else written from the config."""
    values = dict(source.values)
    if family is not source.family:
        assert family.write is not None
        kept = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        values = family.write(source.config) | {key: values[key] for key in kept if key in values}
    values.pop("auto_map", None)  # names code of the old repository
    ends = values.get("eos_token_id")
    if source.checkpoint.format == "gguf" and isinstance(ends, list):
        values["eos_token_id"] = ends[0] if ends else None
    return {**values, "architectures": [CLASSES[family.name]]}


def _stored_dtype(checkpoint: Checkpoint, rule: Rule) -> torch.dtype:
    """The narrowest of torch's wide float types that holds what the rule reads."""
    dtypes = [STORED_DTYPES.get(checkpoint.tensors[name].dtype, torch.float32) for name in rule.sources]
    widest = dtypes[0]
    for dtype in dtypes:
        if dtype not in _DTYPE_NAMES:
            return torch.float32
        widest = torch.promote_types(widest, dtype)
    return widest


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if torch.isinf(cast).sum() > torch.isinf(tensor).sum():
        raise CheckpointError(f"'{name}' holds numbers beyond the range of {_DTYPE_NAMES[dtype]}; choose bf16 or fp32")
    return cast


@contextmanager
def _tokenizer_files(source: ModelSource) -> Iterator[Path]:
    """A folder with the tokenizer's files: the checkpoint's own, or one made from a GGUF file's metadata."""
    if source.checkpoint.format != "gguf":
        yield source.path if source.path.is_dir() else source.path.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(read_gguf(source.checkpoint.metadata, origin=str(source.path)), source, Path(folder))
        yield Path(folder)


def write_tokenizer(tokenizer: Source, model: ModelSource, folder: Path) -> None:
    """The tokenizer of GGUF metadata as tokenizer.json, its config, the chat template and generation_config.json."""
    backend = tokenizer.backend
    opening = {i: backend.id_to_token(i) for i in tokenizer.prefix_ids}
    if opening:
        backend.post_processor = processors.TemplateProcessing(
            single=[*opening.values(), "$A"],
            pair=[*opening.values(), "$A", "$B"],
            special_tokens=[(token, i) for i, token in opening.items()],
        )
    backend.save(str(folder / "tokenizer.json"))
    ends = sorted(tokenizer.eos_ids)
    named = {
        "bos_token": tokenizer.bos_id,
        "eos_token": next(iter(model.config.eos_ids), None),
        "pad_token": tokenizer.pad_id,
    }
    settings: dict[str, Any] = {key: backend.id_to_token(i) for key, i in named.items() if i is not None}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {"model_max_length": model.config.max_positions}
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends, "pad_token_id": tokenizer.pad_id}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value not in (None, [])}
    )
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
