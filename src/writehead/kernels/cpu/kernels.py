"""The native kernels behind the contract.

Weights are packed; numbers between the products are fp32. What requires gradients, another dtype or another device
takes the reference's path. A row's result does not depend on the rows beside it (native/linear.cpp,
native/attention.cpp), so a sequence gets the same bytes alone and in any batch.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from writehead.errors import UsageError
from writehead.kernels.contract import AttentionSpec, CacheView
from writehead.kernels.cpu.library import Attention, Library, open_library
from writehead.kernels.packed import FLOATS, KINDS, PackedWeight
from writehead.kernels.reference import ReferenceKernels, position_bias

ACTIVATIONS = ("none", "gelu_tanh", "gelu", "silu", "relu")
_FLOAT_KINDS = {dtype: KINDS.index(name) for name, dtype in FLOATS.items()}


def unavailable(instructions: str | None = None) -> str | None:
    """Why these kernels, or those of one instruction set, cannot run here; None if they can."""
    library = open_library()
    if isinstance(library, str):
        return library
    if instructions is None:
        return None
    found = [s for s in library.sets if s.name == instructions]
    return found[0].missing if found else f"the library has no instruction set '{instructions}'"


class CPUKernels(ReferenceKernels):
    """The library's operations under one instruction set; the fastest that runs here unless one is named."""

    packs_floats = True

    def __init__(self, instructions: str | None = None) -> None:
        super().__init__("queries")
        library = open_library()
        reason = unavailable(instructions)
        if reason is not None:
            name = "cpu" if instructions is None else f"cpu-{instructions}"
            raise UsageError(f"kernels: '{name}' cannot be used, {reason}; choose auto or reference")
        assert isinstance(library, Library)
        self.instructions = instructions or next(s.name for s in library.sets if s.missing is None)
        self.name = f"cpu ({self.instructions})"
        self._ops = library.ops(self.instructions)
        self._library = library
        self._sequences: tuple[object, tuple[Tensor, ...]] = (None, ())
        library.handle.writehead_threads(torch.get_num_threads())

    def pack(self, weight: Tensor, into: PackedWeight) -> None:
        source = weight if weight.dtype in _FLOAT_KINDS else weight.float()
        if source.stride(1) != 1:
            source = source.contiguous()
        self._ops.pack(byref(into.record), source.data_ptr(), _FLOAT_KINDS[source.dtype], source.stride(0))

    def linear(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        bias: Tensor | None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(weight, PackedWeight) or not _native(x):
            return super().linear(x, weight, bias, activation, residual)
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        kind = ACTIVATIONS.index(activation or "none")
        self._ops.linear(
            byref(weight.record), x.numel() // x.shape[-1], x.data_ptr(), _pointer(bias), kind,
            _pointer(residual), out.data_ptr(),
        )  # fmt: skip
        return out

    def embed(self, ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
        if not isinstance(weight, PackedWeight):
            return super().embed(ids, weight)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
            raise IndexError(f"a token id is outside the vocabulary of {weight.shape[0]}")
        ids = ids.contiguous()
        out = torch.empty((*ids.shape, weight.shape[1]))
        self._ops.embed(byref(weight.record), ids.numel(), ids.data_ptr(), out.data_ptr())
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if not _native(x):
            return super().layer_norm(x, weight, bias, eps)
        return self._norm(0, x, weight, bias, eps, 0.0)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        if not _native(x):
            return super().rms_norm(x, weight, eps, offset)
        return self._norm(1, x, weight, None, eps, offset)

    def activate(self, x: Tensor, name: str, *, gated: bool) -> Tensor:
        if not _native(x):
            return super().activate(x, name, gated=gated)
        x = x.contiguous()
        size = x.shape[-1] // (2 if gated else 1)
        out = x.new_empty((*x.shape[:-1], size))
        rows = out.numel() // size
        self._ops.activate(ACTIVATIONS.index(name), gated, rows, size, x.data_ptr(), out.data_ptr())
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not _native(x) or x.ndim != 3:
            return super().rotate(x, cos, sin)
        tokens, heads, dim = x.shape
        x, cos, sin = _heads(x), cos.contiguous(), sin.contiguous()
        out = x.new_empty(x.shape)
        self._ops.rotate(
            tokens, heads, dim, x.stride(0), cos.shape[-1], x.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def store(self, cache: CacheView, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = cache.keys[layer], cache.values[layer]
        if not _native(k) or keys.dtype not in _FLOAT_KINDS:
            return super().store(cache, layer, k, v)
        k, v = _heads(k), _heads(v)
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        tokens, kv_heads, dim = k.shape
        self._ops.store(
            tokens, kv_heads, dim, k.stride(0), k.data_ptr(), v.data_ptr(), cache.rows.data_ptr(),
            cache.slots.data_ptr(), keys.shape[2], _FLOAT_KINDS[keys.dtype], keys.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return None

    def cached_attention(self, q: Tensor, cache: CacheView, layer: int, spec: AttentionSpec) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        if not _native(q) or keys.dtype not in _FLOAT_KINDS:
            return super().cached_attention(q, cache, layer, spec)
        q = _heads(q)
        _, heads, dim = q.shape
        out = q.new_empty(q.shape)
        first, new, rows, lengths = self._step(cache)
        bias = None if spec.alibi is None else position_bias(spec, int(lengths.max()), q.device).contiguous()
        call = Attention(
            q.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(), first.data_ptr(), new.data_ptr(),
            rows.data_ptr(), lengths.data_ptr(), _pointer(bias), len(first), heads, keys.shape[1], dim, q.stride(0),
            keys.shape[2], spec.window or 0, 0 if bias is None else bias.shape[1], spec.scale, _FLOAT_KINDS[keys.dtype],
        )  # fmt: skip
        self._ops.attention(byref(call))
        return out

    def _norm(self, rms: int, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        size = x.shape[-1]
        self._ops.norm(
            rms, x.numel() // size, size, x.data_ptr(), weight.data_ptr(), _pointer(bias), eps, offset, out.data_ptr()
        )
        return out

    def _step(self, cache: CacheView) -> tuple[Tensor, ...]:
        """int64: first token, new tokens, cache row and length of each sequence; the same for all layers of a step."""
        if self._sequences[0] is not cache.groups:
            new = [g.num_new for g in cache.groups for _ in g.lengths]
            lengths = [n for g in cache.groups for n in g.lengths]
            counts = torch.tensor(new)
            first = counts.cumsum(0) - counts
            self._sequences = cache.groups, (first, counts, cache.rows[first], torch.tensor(lengths))
        return self._sequences[1]


def _native(x: Tensor) -> bool:
    plain = x.dtype is torch.float32 and x.device.type == "cpu"
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def _heads(x: Tensor) -> Tensor:
    """[T, heads, D] with the heads of a token side by side; tokens may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
