"""The native kernels behind the contract.

Weights are packed; numbers between the products are fp32. What requires gradients, another dtype or another device
takes the reference's path. A row's result does not depend on the rows beside it (native/linear.cpp,
native/attention.cpp), so a sequence gets the same bytes alone and in any batch.
"""

from __future__ import annotations

import threading
from ctypes import Structure, addressof, byref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from writehead.errors import UsageError
from writehead.kernels.contract import AttentionSpec, Blocks, CacheView, Rotation
from writehead.kernels.cpu.library import Activate, Attention, Library, Linear, Norm, Rotate, Store, open_library
from writehead.kernels.cpu.program import MAX_TOKENS, Program, Programs, sequences_of, step_key
from writehead.kernels.packed import FLOATS, KINDS, PackedWeight
from writehead.kernels.reference import ReferenceKernels, position_bias
from writehead.kernels.slots import DTYPES

ACTIVATIONS = ("none", "gelu_tanh", "gelu", "silu", "relu")
_FLOAT_KINDS = {dtype: KINDS.index(name) for name, dtype in FLOATS.items()}
_CACHE_KINDS = {dtype: KINDS.index(name) for name, dtype in DTYPES.items()}


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
        self._programs: WeakKeyDictionary[nn.Module, Programs] = WeakKeyDictionary()
        self._busy = threading.Lock()  # of the programs: a second thread's steps are not kept
        self._recording = _Recording()
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
        arguments = Linear(
            addressof(weight.record), x.numel() // x.shape[-1], x.data_ptr(), _pointer(bias), _pointer(residual),
            out.data_ptr(), kind,
        )  # fmt: skip
        self._call(self._ops.linear, arguments, weight, x, bias, residual, out)
        return out

    def embed(self, ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
        if not isinstance(weight, PackedWeight):
            return super().embed(ids, weight)
        ids = ids.contiguous()
        out = torch.empty((*ids.shape, weight.shape[1]))
        if not self._ops.embed(byref(weight.record), ids.numel(), ids.data_ptr(), out.data_ptr()):
            raise IndexError(f"a token id is outside the vocabulary of {weight.shape[0]}")
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
        arguments = Activate(rows, size, x.data_ptr(), out.data_ptr(), ACTIVATIONS.index(name), gated)
        self._call(self._ops.activate, arguments, x, out)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not _native(x) or x.ndim != 3:
            return super().rotate(x, cos, sin)
        tokens, heads, dim = x.shape
        x, cos, sin = _heads(x), cos.contiguous(), sin.contiguous()
        out = x.new_empty(x.shape)
        arguments = Rotate(
            tokens, heads, dim, x.stride(0), cos.shape[-1], x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        self._call(self._ops.rotate, arguments, x, cos, sin, out)
        return out

    def store(self, cache: CacheView, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = cache.keys[layer], cache.values[layer]
        if not _native(k) or keys.dtype not in _CACHE_KINDS:
            return super().store(cache, layer, k, v)
        k, v = _heads(k), _heads(v)
        tokens, kv_heads, dim = k.shape
        arguments = Store(
            tokens, kv_heads, dim, k.stride(0), v.stride(0), keys.shape[2], k.data_ptr(), v.data_ptr(),
            cache.rows.data_ptr(), cache.slots.data_ptr(), keys.data_ptr(), values.data_ptr(), _CACHE_KINDS[keys.dtype],
        )  # fmt: skip
        self._call(self._ops.store, arguments, k, v, cache.rows, cache.slots)
        return None

    def cached_attention(self, q: Tensor, cache: CacheView, layer: int, spec: AttentionSpec) -> Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        if not _native(q) or keys.dtype not in _CACHE_KINDS:
            return super().cached_attention(q, cache, layer, spec)
        q = _heads(q)
        _, heads, dim = q.shape
        out = q.new_empty(q.shape)
        first, new, rows, lengths = self._step(cache)
        bias = None if spec.alibi is None else position_bias(spec, int(lengths.max()), q.device).contiguous()
        arguments = Attention(
            q.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(), first.data_ptr(), new.data_ptr(),
            rows.data_ptr(), lengths.data_ptr(), _pointer(bias), len(first), heads, keys.shape[1], dim, q.stride(0),
            keys.shape[2], spec.window or 0, 0 if bias is None else bias.shape[1], spec.scale, _CACHE_KINDS[keys.dtype],
        )  # fmt: skip
        self._call(self._ops.attention, arguments, q, out, first, new, rows, lengths, bias)
        return out

    def run(self, owner: nn.Module, blocks: Blocks, x: Tensor, rotation: Rotation | None, cache: CacheView) -> Tensor:
        """The contract's; a step of few tokens that comes again is kept (program.py)."""
        small = len(x) <= MAX_TOKENS and _native(x) and torch.is_inference_mode_enabled()
        if not small or not self._busy.acquire(blocking=False):
            return blocks(x, rotation, cache)
        try:
            programs = self._programs.get(owner)
            if programs is None or not programs.state.holds():
                programs = self._programs[owner] = Programs(owner)
            key = step_key(x, rotation, cache)
            program, again = programs.find(key)
            if program is not None:
                return program.replay(self._library, x, rotation, cache)
            if not again:
                return blocks(x, rotation, cache)
            program = Program(x, rotation, cache)
            out, repeatable = self._record(program, blocks)
            programs.keep(key, program if repeatable else None)
            return out
        finally:
            self._busy.release()

    def _record(self, program: Program, blocks: Blocks) -> tuple[Tensor, bool]:
        self._sequences = program.cache.groups, program.sequences
        self._recording.program = program
        try:
            return program.record(blocks)
        finally:
            self._recording.program = None

    def _call(self, operation: Any, arguments: Structure, *operands: Tensor | PackedWeight | None) -> None:
        """Every operation of a step comes through here. The cache is not among the operands: it is not kept."""
        operation(byref(arguments))
        if self._recording.program is not None:
            self._recording.program.add(operation, arguments, operands)

    def _norm(self, rms: int, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Tensor:
        x = _heads(x) if x.ndim == 3 else x.contiguous()
        out = x.new_empty(x.shape)
        size = x.shape[-1]
        tokens, heads, stride = (*x.shape[:2], x.stride(0)) if x.ndim == 3 else (x.numel() // size, 1, size)
        arguments = Norm(
            tokens,
            heads,
            size,
            stride,
            x.data_ptr(),
            weight.data_ptr(),
            _pointer(bias),
            out.data_ptr(),
            eps,
            offset,
            rms,
        )
        self._call(self._ops.norm, arguments, x, weight, bias, out)
        return out

    def _step(self, cache: CacheView) -> tuple[Tensor, ...]:
        """`sequences_of`, the same for all layers of a step."""
        found = self._sequences
        if found[0] is not cache.groups:
            found = self._sequences = cache.groups, sequences_of(cache)
        return found[1]


class _Recording(threading.local):
    """The program that this thread records, if any."""

    program: Program | None = None


def _native(x: Tensor) -> bool:
    plain = x.dtype is torch.float32 and x.device.type == "cpu"
    return plain and not (x.requires_grad and torch.is_grad_enabled())


def _heads(x: Tensor) -> Tensor:
    """[T, heads, D] with the heads of a token side by side; tokens may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
