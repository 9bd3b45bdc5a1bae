"""What an operation must move and compute at least, whatever kernel runs it: the other half of a share of the limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from writehead.kernels import AttentionSpec, CacheView


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that are read or written once, operations (a multiply-add is two), and the type of the operands."""

    bytes: int
    ops: int
    dtype: str = "fp32"
    """fp32, bf16 or int8: which arithmetic limits it. int4 weights are multiplied as int8."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.ops + other.ops, self.dtype if self.ops else other.dtype)


NOTHING = Cost(0, 0)


def of(name: str, arguments: Seq[Any], out: Any) -> Cost:
    """The cost of one call of an operation of the kernels' contract. An operation that is not known here moves its
    arguments and its result."""
    match name:
        case "linear":
            x, weight = arguments[:2]
            return Cost(num_bytes((*arguments, out)), 2 * out.numel() * x.shape[-1], arithmetic(weight))
        case "cached_attention":
            q, cache, layer, spec = arguments
            return _cached(q, cache, layer, spec)
        case "causal_attention":
            q, k = arguments[:2]
            batch, tokens, heads, dim = q.shape
            pairs = tokens * (tokens + 1) // 2
            return Cost(2 * num_bytes(q) + 2 * num_bytes(k), 4 * batch * heads * dim * pairs, arithmetic(k))
        case "embed":
            ids, weight = arguments[:2]
            return Cost(num_bytes((ids, out)) + num_bytes(weight) * ids.numel() // weight.shape[0], 0)
        case "store":
            return Cost(2 * num_bytes(arguments[2:]), 0)
    return Cost(num_bytes((*arguments, out)), 0)


def _cached(q: Tensor, cache: CacheView, layer: int, spec: AttentionSpec) -> Cost:
    """Each sequence's keys and values once, and each visible pair of a query and a key twice: scores and mixing."""
    keys = cache.keys[layer]
    slot = 2 * keys.shape[1] * keys.shape[-1] * keys.itemsize  # a key and a value of all shared heads
    slots = pairs = 0
    for group in cache.groups:
        for length in group.lengths:
            seen = [_visible(length - i, spec.window) for i in range(group.num_new)]
            pairs += sum(seen)
            slots += _visible(length, None if spec.window is None else spec.window + group.num_new - 1)
    return Cost(slots * slot + 2 * num_bytes(q), 4 * pairs * q.shape[-2] * q.shape[-1])


def _visible(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)


def arithmetic(weight: Any) -> str:
    """In what arithmetic a product with this weight is computed at best."""
    kind = weight.dtype if isinstance(weight, Tensor) else weight.format.kind
    return {torch.float32: "fp32", torch.float16: "fp32", torch.bfloat16: "bf16", "fp32": "fp32", "fp16": "fp32",
            "bf16": "bf16"}.get(kind, "int8")  # fmt: skip


def num_bytes(value: Any) -> int:
    """Bytes of a tensor, of all in a sequence, or of a packed weight."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return num_bytes(getattr(value, "memory", ()))
