"""The only place where config, weights, rules and kernels meet.

A checkpoint becomes a decoder in this order: read the config, make the decoder on the meta device (names and shapes, no
memory), compare its parameters with the file's tensors, take the memory, and stream the weights into it one tensor at a
time, cast on the way. Nothing is initialized, and nothing is held twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from writehead import kernels as kernel_backends
from writehead.cache import KVCache
from writehead.checkpoint import Checkpoint, open_checkpoint, resolve
from writehead.checkpoint.contract import DTYPES as STORED_DTYPES
from writehead.checkpoint.files import listing, quantization
from writehead.checkpoint.rules import Rule, RuleSet, Shape, check
from writehead.checkpoint.writer import TOKENIZER_FILES
from writehead.errors import CheckpointError, ConfigError, TokenizerError, UsageError
from writehead.kernels import Format, Kernels, PackedWeight, parse_format, slot_size
from writehead.models import gguf, megatron, packed_file
from writehead.models.config import ConfigReader, ModelConfig
from writehead.models.decoder import Decoder
from writehead.models.families import Family, family_of
from writehead.models.weights import place, weight_specs
from writehead.text import Tokenizer

BOX = Path(__file__).parent / "box"
"""The model in the box."""

_NO_WEIGHTS = {name for name, dtype in STORED_DTYPES.items() if not dtype.is_floating_point}

_MAX_TOKENIZER_BYTES = 256 << 20  # the largest public ones are below 40 MB

NUM_LOADERS = min(4, os.cpu_count() or 1)

_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
_GATHER_AFTER, _GATHER_PAUSE = 2.0, 0.001  # seconds
_GATHER_FROM = 32  # pages: less stays where it is

_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "int8": 8.1, "int4": 4.7}
"""Bits of a weight with its share of the scales, widest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """An opened checkpoint and what it was understood to be."""

    path: Path
    checkpoint: Checkpoint
    values: Mapping[str, Any]
    """The model's config in Hugging Face's keys, whatever the format was."""
    family: Family
    config: ModelConfig
    rules: RuleSet
    packed: Format | None = None
    """The format of a checkpoint whose weights are packed already (`writehead convert --weights`)."""


def open_source(model: str | Path | None, *, accept_config_keys: Collection[str] = ()) -> ModelSource:
    """Open a model: a path, a Hub id, or None for the one in the box. Reads headers, no weights."""
    path = BOX if model is None else resolve(str(model))
    checkpoint = open_checkpoint(path)
    name = _config_name(path, checkpoint)
    try:
        values = _hf_config(checkpoint, name, accept_config_keys)
        family = family_of(values, source=name)
        reader = ConfigReader(values, source=name, accept=accept_config_keys)
        config = family.read(reader)
        reader.finish()
    except ConfigError as error:  # a structure that contradicts itself does not know which file it is of
        raise ConfigError(f"{name}: {error}" if not str(error).startswith(name) else str(error)) from None
    match checkpoint.format:
        case "gguf":
            rules = gguf.rules(config, checkpoint.metadata["general.architecture"], checkpoint.tensors)
        case "megatron":
            rules = megatron.rules(config)
        case _:
            rules = family.rules(config)
    packed = packed_file.format_of(checkpoint)
    return ModelSource(
        path=path, checkpoint=checkpoint, values=values, family=family, config=config, rules=rules, packed=packed
    )


def _config_name(path: Path, checkpoint: Checkpoint) -> str:
    """What the config is read from, for errors."""
    if checkpoint.format in ("gguf", "megatron"):
        return str(path)
    return str((path if path.is_dir() else path.parent) / "config.json")


def _hf_config(checkpoint: Checkpoint, name: str, accept: Collection[str]) -> dict[str, Any]:
    """The config in Hugging Face's keys."""
    match checkpoint.format:
        case "gguf":
            read, tensors = checkpoint.read, checkpoint.tensors
            return gguf.hf_config(checkpoint.metadata, tensors, read=read, accept=accept, source=name)
        case "megatron":
            return megatron.hf_config(checkpoint.config, source=name)
    if not checkpoint.config:
        raise CheckpointError(f"{name} is missing or empty; the weights beside it cannot be read without it")
    return dict(checkpoint.config)


def make_decoder(config: ModelConfig, kernels: Kernels) -> Decoder:
    """A decoder on the meta device: every name and shape, no memory."""
    with torch.device("meta"):
        return Decoder(config, kernels)


def parameter_shapes(source: ModelSource) -> dict[str, Shape]:
    """The name and shape of each parameter of the decoder; tied ones once."""
    decoder = make_decoder(source.config, kernel_backends.load("reference"))
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


@torch.inference_mode(mode=False)  # the mode belongs to a thread; the loading threads would not share the caller's
def build(
    source: ModelSource,
    *,
    weights: str = "auto",
    kernels: Kernels,
    cache_bytes: int = 0,
    proceed: Callable[[], object] = bool,
) -> Decoder:
    """The decoder with its weights, for inference; `weights` is a name of `parse_format`.

    Raises CheckpointError that lists every tensor that is amiss, and UsageError if the memory does not hold the
    weights and `cache_bytes` beside them. `proceed` is called before each tensor; what it raises ends the loading.
    """
    decoder = make_decoder(source.config, kernels)
    format = weight_format(source, weights, kernels)
    if source.packed is not None:
        _check_memory(0, cache_bytes, format, source.path)  # weights are pages of the file, which can be dropped
        packed_file.adopt(decoder, source.checkpoint, format, proceed=proceed)
    else:
        load_weights(decoder, source, format, cache_bytes=cache_bytes, proceed=proceed)
    return decoder.eval().requires_grad_(False)


def weight_format(source: ModelSource, weights: str, kernels: Kernels) -> Format:
    """What `weights` means for this checkpoint under these kernels. Raises UsageError if it is packed otherwise."""
    if source.packed is None:
        return parse_format(weights, packs_floats=kernels.packs_floats)
    if weights not in ("auto", str(source.packed)):
        raise UsageError(
            f"{source.path}: holds weights packed as {source.packed}, not {weights}; choose auto, or the original model"
        )
    return source.packed


def load_weights(
    decoder: Decoder, source: ModelSource, format: Format, *, cache_bytes: int, proceed: Callable[[], object]
) -> None:
    """Give a meta decoder memory and stream the checkpoint into it, rounded and packed on the way."""
    rules = stored_rules(source, {name: tuple(p.shape) for name, p in decoder.named_parameters()})
    check_aliases(source)
    memory, parameters = _allocate(decoder, format, source.path, cache_bytes)
    checkpoint = source.checkpoint

    def load(rule: Rule) -> None:
        proceed()
        for name in rule.sources:
            checkpoint.prefetch(name)
        sources, target = [checkpoint.read(name) for name in rule.sources], parameters[rule.target]
        with torch.no_grad():
            if isinstance(target, PackedWeight):
                decoder.kernels.pack(rule.whole(sources, target.shape), target)
            else:
                rule.load(sources, target)

    # Most of the time goes to first touches of memory, which threads of their own overlap better than torch's.
    with ThreadPoolExecutor(NUM_LOADERS) as pool:
        for _ in pool.map(load, rules):
            pass
    block = (weakref.ref(decoder), memory.data_ptr(), memory.numel())
    if memory.numel() < _GATHER_FROM * _HUGE_PAGE:
        return
    threading.Thread(target=_gather_pages, args=block, name="gather pages", daemon=True).start()


def stored_rules(source: ModelSource, shapes: Mapping[str, Shape]) -> list[Rule]:
    """The rules under which the checkpoint serves parameters of these shapes.

    Raises CheckpointError that lists every tensor that is missing, surplus or of the wrong shape, or holds no weights.
    """
    tensors, num_layers = source.checkpoint.tensors, source.config.num_layers
    packed = next((name for name in tensors if name.endswith(".qweight")), None)
    if packed is not None:
        folder = source.path if source.path.is_dir() else source.path.parent
        method = quantization(file.name for file in folder.iterdir()) or "GPTQ or AWQ"
        raise CheckpointError(
            f"{source.path}: '{packed}' is quantized by {method}, which writehead does not read; use the original "
            "model, or a GGUF file of it"
        )
    prefix = source.rules.prefix_of(tensors)
    rules = source.rules.named(source.rules.expand(num_layers, prefix=prefix), tensors, prefix)
    found = {name: info.shape for name, info in tensors.items()}
    check(rules, shapes, found, source.rules.surplus(rules, tensors, num_layers, prefix), str(source.path))
    integers = [f"'{n}' {tensors[n].dtype}" for rule in rules for n in rule.sources if tensors[n].dtype in _NO_WEIGHTS]
    if integers:
        raise CheckpointError(
            f"{source.path}: these weights are no floating-point numbers: {listing(integers)}; they may be quantized "
            "in a way that writehead does not read, so use the original model, or a GGUF file of it"
        )
    return rules


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of the checkpoint's own files. Raises TokenizerError if there is none, or another model's.

    Tokens that were added later may have no row in the model (Code Llama 34B); prompts that hold them are refused.
    """
    if source.checkpoint.format == "gguf":
        return Tokenizer.from_gguf(source.checkpoint.metadata, origin=str(source.path))
    directory = source.path if source.path.is_dir() else source.path.parent
    for file in (directory / name for name in TOKENIZER_FILES):
        if file.is_file() and file.stat().st_size > _MAX_TOKENIZER_BYTES:
            raise TokenizerError(
                f"{file}: {file.stat().st_size} bytes are too many for a tokenizer's file; the limit is "
                f"{_MAX_TOKENIZER_BYTES}, so fetch the file again"
            )
    tokenizer = Tokenizer.from_directory(directory)
    if tokenizer.base_vocab_size > source.config.vocab_size:
        raise TokenizerError(
            f"{directory}: the tokenizer has {tokenizer.base_vocab_size} tokens but the model only "
            f"{source.config.vocab_size}; use the tokenizer that belongs to these weights"
        )
    return tokenizer


def _allocate(
    decoder: Decoder, format: Format, path: Path, cache_bytes: int
) -> tuple[Tensor, dict[str, Tensor | PackedWeight]]:
    """Replace the meta parameters by slices of one block of memory, which lives as long as a slice does."""
    specs = weight_specs(decoder, format)
    total = -(-sum(_whole_lines(spec.num_bytes) for spec in specs.values()) // _HUGE_PAGE) * _HUGE_PAGE
    _check_memory(total, cache_bytes, format, path)
    memory = torch.frombuffer(mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    parameters: dict[str, Tensor | PackedWeight] = {}
    start = 0
    for name, spec in specs.items():
        parameters[name] = spec.over(memory[start : start + spec.num_bytes])
        place(decoder, name, parameters[name])
        start += _whole_lines(spec.num_bytes)
    return memory, parameters


def _gather_pages(owner: weakref.ref[Decoder], address: int, size: int) -> None:
    """Ask the system to make huge pages of a block that is in use, page by page: fewer TLB misses in every product.

    Not while loading: on a virtual machine the first touch of a huge page costs several times that of its parts
    (docs/decisions/0004). And not at once: the first tokens come before. Ends with the owner; systems without
    MADV_COLLAPSE (Linux 6.1) refuse the first page.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise  # mmap's own keeps the interpreter's lock
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    time.sleep(_GATHER_AFTER)
    for page in range(-(-address // _HUGE_PAGE), (address + size) // _HUGE_PAGE):
        keep = owner()
        if keep is None or madvise(page * _HUGE_PAGE, _HUGE_PAGE, _MADV_COLLAPSE):
            return
        del keep
        time.sleep(_GATHER_PAUSE)


def _whole_lines(size: int) -> int:
    """Bytes of the cache lines that hold `size` bytes."""
    return -(-size // 64) * 64


def num_weight_bytes(source: ModelSource, format: Format) -> int:
    """Bytes of the weights in memory, up to padding."""
    specs = weight_specs(make_decoder(source.config, kernel_backends.load("reference")), format)
    return sum(spec.num_bytes for spec in specs.values())


def make_cache(config: ModelConfig, *, num_rows: int, capacity: int, dtype: torch.dtype) -> KVCache:
    """An empty cache for sequences of this model. Raises UsageError if the system does not grant the memory."""
    return KVCache(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, slot_size=slot_size(config.head_dim, dtype),
        num_rows=num_rows, capacity=capacity, dtype=dtype,
    )  # fmt: skip


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that a cache of that dtype takes for each token, over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * slot_size(config.head_dim, dtype) * dtype.itemsize


def _check_memory(weights: int, cache: int, format: Format, path: Path) -> None:
    """Raise UsageError if this does not fit: Linux would promise the memory, then kill whoever touches it."""
    free = free_memory()
    if weights + cache > free:
        smaller = (name for name, bits in _BITS.items() if weights * bits / _BITS[format.kind] + cache <= free)
        choices = [f"weights {name}" for name in list(smaller)[:1]]
        choices += ["a lower max_model_len"] if cache and weights < free else []
        beside = f" and the cache of one sequence {cache / 1e9:,.1f} GB" if cache else ""
        raise UsageError(
            f"{path}: the weights need {weights / 1e9:,.1f} GB of memory in {format}{beside}, but "
            f"{free / 1e9:,.1f} GB are free; choose {' or '.join(choices or ['a smaller model'])}, or free memory"
        )


def free_memory() -> int:
    """Bytes that the system can still give, swap included, within its control group; where it does not say, all."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError, IndexError):
        table = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        limits = [sum(int(table[key].split()[0]) for key in ("MemAvailable", "SwapFree")) << 10]
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    return min(limits)


def check_aliases(source: ModelSource) -> None:
    """A tensor that repeats a tied one must hold the same numbers; if not, the config's tie is wrong."""
    read, prefix = source.checkpoint.read, source.rules.prefix_of(source.checkpoint.tensors)
    for alias, original in (source.rules.aliases or {}).items():
        for name in {alias, prefix + alias} & source.checkpoint.tensors.keys():
            if prefix + original in source.checkpoint.tensors and not torch.equal(read(name), read(prefix + original)):
                raise CheckpointError(
                    f"{source.path}: '{name}' differs from '{prefix + original}' although the config ties them; "
                    "set tie_word_embeddings to false in config.json if the weights were trained apart"
                )
