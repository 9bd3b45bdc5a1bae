"""`writehead inspect`: what a checkpoint is and what it needs, from its headers alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from writehead.cli import options
from writehead.errors import CheckpointError, TokenizerError

if TYPE_CHECKING:
    from writehead.build import ModelSource
    from writehead.checkpoint.rules import Shape
    from writehead.models.config import ModelConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def inspect(
    model: options.ModelArgument = None,
    as_json: options.Json = False,
    accept_config_key: options.AcceptConfigKey = None,
) -> None:
    """Show what a checkpoint is and what it needs, without loading it."""
    from writehead.build import open_source, parameter_shapes, stored_rules

    source = open_source(model, accept_config_keys=accept_config_key or ())
    shapes = parameter_shapes(source)
    problem = None
    try:
        stored_rules(source, shapes)
    except CheckpointError as error:
        problem = error
    facts = describe(source, shapes)
    print(json.dumps(facts) if as_json else _table(facts))
    if problem is not None:
        raise problem


def describe(source: ModelSource, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """All facts, as plain values; sizes in bytes."""
    config, tensors = source.config, source.checkpoint.tensors.values()
    count = sum(math.prod(shape) for shape in shapes.values())
    cache = config.cache_values_per_token()
    stored: dict[str, int] = {}
    for info in tensors:
        stored[info.dtype] = stored.get(info.dtype, 0) + info.num_bytes
    return {
        "path": str(source.path),
        "format": source.checkpoint.format,
        "stored_bytes_by_dtype": stored,
        "family": config.family,
        "architecture": architecture(config),
        "parameters": count,
        "weight_bytes": {name: count * size for name, size in BYTES.items()},
        "cache_bytes_per_token": {name: cache * size for name, size in BYTES.items()},
        "cache_bytes_at_full_context": {name: cache * size * config.max_positions for name, size in BYTES.items()},
        "tokenizer": _tokenizer(source),
    }


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The structure of a decoder, in words where a number says too little."""
    norm = {"layer": "LayerNorm", "rms": "RMSNorm"}[config.norm]
    windows = {config.window(layer) for layer in range(config.num_layers)}
    return {
        "attention": attention_kind(config),
        "layers": config.num_layers,
        "width": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "mlp_width": config.intermediate_size,
        "activation": config.activation + " (gated)" * config.gated,
        "norm": f"{norm}, eps {config.norm_eps:g}" + ", also on queries and keys" * config.qk_norm,
        "residual": config.residual,
        "positions": _positions(config),
        "context": config.max_positions,
        "window": next(iter(windows)) if len(windows) == 1 else f"{config.sliding_window} in some layers",
        "vocabulary": config.vocab_size,
        "tied": config.tie_embeddings,
    }


def attention_kind(config: ModelConfig) -> str:
    """MHA, MQA or GQA, by how many query heads share a key/value head."""
    if config.num_kv_heads == config.num_heads:
        return "multi-head (MHA)"
    if config.num_kv_heads == 1:
        return "multi-query (MQA)"
    return f"grouped-query (GQA, {config.num_heads // config.num_kv_heads} queries share a head)"


def _positions(config: ModelConfig) -> str:
    if config.rope is None:
        return {"learned": "learned", "alibi": "ALiBi"}[config.positions]
    rope = config.rope
    part = "" if rope.dim == config.head_dim else f", {rope.dim} of {config.head_dim} values"
    scaling = "" if rope.scaling == "default" else f", {rope.scaling} scaling by {rope.factor:g}"
    return f"rotary, base {rope.theta:g}{part}{scaling}"


def _tokenizer(source: ModelSource) -> dict[str, Any]:
    from writehead.build import load_tokenizer
    from writehead.text import detect_fim

    try:
        tokenizer = load_tokenizer(source)
    except TokenizerError as error:
        return {"problem": str(error)}
    fim = detect_fim(tokenizer, num_rows=source.config.vocab_size)
    return {
        "vocabulary": tokenizer.vocab_size,
        "special_tokens": len(tokenizer.special_ids),
        "fill_in_the_middle": None if fim is None else f"{fim.name} ({', '.join(fim.modes)})",
        "chat_template": tokenizer.chat_template is not None,
    }


def _table(facts: Mapping[str, Any]) -> str:
    """The facts for people: a line each."""
    shape = facts["architecture"]
    tokenizer = facts["tokenizer"]
    stored = ", ".join(f"{readable(size)} {dtype}" for dtype, size in facts["stored_bytes_by_dtype"].items())
    rows = [
        ("path", facts["path"]),
        ("format", f"{facts['format']} ({stored})"),
        ("family", facts["family"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("attention", f"{shape['attention']}: {shape['heads']} heads, {shape['kv_heads']} for keys and values, "
                      f"of {shape['head_size']}"),
        ("layers", f"{shape['layers']} of width {shape['width']}, {shape['residual']} residual"),
        ("MLP", f"width {shape['mlp_width']}, {shape['activation']}"),
        ("norm", shape["norm"]),
        ("positions", f"{shape['positions']}; {shape['context']} tokens" + _window(shape["window"])),
        ("vocabulary", f"{shape['vocabulary']}, {'tied to' if shape['tied'] else 'apart from'} the output"),
        ("tokenizer", tokenizer.get("problem") or _tokenizer_words(tokenizer)),
        ("weights", _by_dtype(facts["weight_bytes"])),
        ("cache per token", _by_dtype(facts["cache_bytes_per_token"])),
        ("cache at full context", _by_dtype(facts["cache_bytes_at_full_context"])),
    ]  # fmt: skip
    return "\n".join(f"{name:<21}  {value}" for name, value in rows)


def _window(window: int | str | None) -> str:
    return "" if window is None else f", window {window}"


def _tokenizer_words(tokenizer: Mapping[str, Any]) -> str:
    fim = tokenizer["fill_in_the_middle"]
    return (
        f"{tokenizer['vocabulary']} tokens, {tokenizer['special_tokens']} special; "
        + (f"fill in the middle: {fim}; " if fim else "no fill in the middle; ")
        + ("a chat template" if tokenizer["chat_template"] else "no chat template")
    )


def _by_dtype(sizes: Mapping[str, int]) -> str:
    return f"{readable(sizes['fp32'])} in fp32, {readable(sizes['bf16'])} in bf16 or fp16"


def readable(num_bytes: int) -> str:
    """Bytes in the unit that fits, with three digits: 1536 -> 1.5 KB, powers of 1000 as disks are sold."""
    size = float(num_bytes)
    for unit in ("bytes", "KB", "MB", "GB"):
        if float(f"{size:.3g}") < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
