"""The operations in plain torch: differentiable, on any device, the definition of correct.

`mqa` selects how query heads meet the key/value head that they share (G = H / K of them; MHA has G = 1):

    "queries"    heads are rows: [B*K, T*G, D] x [B*K, D, L], one real matrix product for each key/value head
    "broadcast"  heads are batches: the shared head is expanded to all query heads, [B*H, T, D] x [B*H, D, L]

Both are the published computations of Shazeer 2019 (arXiv 1911.02150) as engines implement them, and equal in exact
arithmetic. Heads-as-queries reads each key once; broadcast reads, and in torch copies, it G times.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from writehead.kernels.contract import AttentionSpec, Blocks, CacheView, Group, Rotation
from writehead.kernels.packed import FLOATS, PackedWeight, round_rows
from writehead.kernels.slots import read_slots, write_slots

MAX_SCORES = 1 << 24
"""Scores that attention materializes at once (64 MB in fp32); a longer chunk of queries is cut: memory stays flat."""


class ReferenceKernels:
    """Pure torch."""

    name = "reference"
    packs_floats = False

    def __init__(self, mqa: Literal["queries", "broadcast"] = "queries") -> None:
        self.mqa = mqa

    def pack(self, weight: Tensor, into: PackedWeight) -> None:
        into.write(weight)

    def linear(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        bias: Tensor | None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        y = self._product(x, weight, bias)
        if activation is not None:
            y = _activation(y, activation)
        return y if residual is None else residual + y

    def _product(self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, PackedWeight):
            x = x if weight.format.kind in FLOATS else round_rows(x)
            weight = weight.unpack()
        return F.linear(x, weight, bias)

    def embed(self, ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
        return F.embedding(ids, weight.unpack() if isinstance(weight, PackedWeight) else weight)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * (weight.float() + offset)).to(x.dtype)

    def activate(self, x: Tensor, name: str, *, gated: bool) -> Tensor:
        if gated:
            gate, up = x.chunk(2, dim=-1)
            return _activation(gate, name) * up
        return _activation(x, name)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        wide = x.float()
        first, second = wide[..., :half], wide[..., half : 2 * half]
        turned = (first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :])
        return torch.cat(turned, dim=-1).to(x.dtype)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        length = q.shape[1]
        bias = None
        if spec.window is not None or spec.alibi is not None:
            positions = torch.arange(length, device=q.device)
            visible = _visible(positions, length, spec.window)
            bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
            if spec.alibi is not None:
                bias = bias + position_bias(spec, length, q.device).unsqueeze(1).to(q.dtype)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=bias, is_causal=bias is None, scale=spec.scale, enable_gqa=k.shape[2] != q.shape[2],
        )  # fmt: skip
        return out.transpose(1, 2)

    def store(self, cache: CacheView, layer: int, k: Tensor, v: Tensor) -> None:
        for tensor, x in ((cache.keys[layer], k), (cache.values[layer], v)):
            tensor[cache.rows, :, cache.slots] = write_slots(x, tensor.dtype)

    def cached_attention(self, q: Tensor, cache: CacheView, layer: int, spec: AttentionSpec) -> Tensor:
        out = torch.empty_like(q)
        first = 0
        for group in cache.groups:
            last = first + group.num_tokens
            longest = max(group.lengths)
            keys, values = (read_slots(t[group.rows, :, :longest]) for t in (cache.keys[layer], cache.values[layer]))
            shape = (len(group.lengths), group.num_new, *q.shape[1:])
            self._attend(q[first:last].view(shape), keys, values, group, spec, out[first:last].view(shape))
            first = last
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, group: Group, spec: AttentionSpec, out: Tensor) -> None:
        """q and out [B, T, H, D], keys and values [B, K, longest, D]; writes out, some queries at a time."""
        num_seqs, num_new, num_heads, _ = q.shape
        longest = max(group.lengths)
        step = max(1, min(num_new, MAX_SCORES // (num_seqs * num_heads * longest)))
        lengths = torch.tensor(group.lengths, device=q.device)
        product = heads_as_queries if self.mqa == "queries" else broadcast_heads
        for first in range(0, num_new, step):
            last = min(first + step, num_new)
            length = longest - num_new + last  # later keys are invisible to these queries
            bias = None
            if last - first > 1 or min(group.lengths) != longest or spec.window is not None:
                positions = (lengths - num_new)[:, None] + torch.arange(first, last, device=q.device)
                bias = _visible(positions, length, spec.window)
            out[:, first:last] = product(q[:, first:last], keys[:, :, :length], values[:, :, :length], bias, spec)

    def run(
        self,
        owner: nn.Module,  # noqa: ARG002
        blocks: Blocks,
        x: Tensor,
        rotation: Rotation | None,
        cache: CacheView,
    ) -> Tensor:
        return blocks(x, rotation, cache)


def heads_as_queries(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttentionSpec) -> Tensor:
    """q [B, T, H, D], k and v [B, K, L, D], visible [B, T, L] or None -> [B, T, H, D], the shared head read once."""
    num_seqs, num_new, num_heads, dim = q.shape
    shared, length = k.shape[1], k.shape[2]
    share = num_heads // shared
    rows = (
        q.view(num_seqs, num_new, shared, share, dim).transpose(1, 2).reshape(num_seqs * shared, num_new * share, dim)
    )
    scores = torch.bmm(rows, k.flatten(0, 1).to(q.dtype).transpose(1, 2))
    scores = scores.view(num_seqs, shared, num_new, share, length)
    if spec.alibi is not None:
        scores = scores * spec.scale + position_bias(spec, length, q.device).view(shared, 1, share, length)
    mask = None if visible is None else visible[:, None, :, None]
    weights = _softmax(scores, 1.0 if spec.alibi is not None else spec.scale, mask).to(q.dtype)
    mixed = torch.bmm(weights.view(num_seqs * shared, num_new * share, length), v.flatten(0, 1).to(q.dtype))
    return mixed.view(num_seqs, shared, num_new, share, dim).transpose(1, 2).reshape(q.shape)


def broadcast_heads(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttentionSpec) -> Tensor:
    """The same result with the shared head expanded to every query head, as most engines compute it."""
    num_seqs, _, num_heads, dim = q.shape
    shared, length = k.shape[1], k.shape[2]
    expanded = (num_seqs, shared, num_heads // shared, length, dim)
    k = k.to(q.dtype).unsqueeze(2).expand(expanded).reshape(num_seqs, num_heads, length, dim)
    v = v.to(q.dtype).unsqueeze(2).expand(expanded).reshape(num_seqs, num_heads, length, dim)
    scores = torch.matmul(q.transpose(1, 2), k.transpose(2, 3))
    if spec.alibi is not None:
        scores = scores * spec.scale + position_bias(spec, length, q.device).unsqueeze(1)
    mask = None if visible is None else visible[:, None]
    weights = _softmax(scores, 1.0 if spec.alibi is not None else spec.scale, mask).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2)


def _softmax(scores: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    scores = scores.float()
    if scale != 1.0:
        scores = scores.mul_(scale)
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf)
    return torch.softmax(scores, dim=-1)


def _visible(positions: Tensor, length: int, window: int | None) -> Tensor:
    """positions [..., T] of the queries -> bool [..., T, length]: which keys each of them sees."""
    keys = torch.arange(length, device=positions.device)
    visible = keys <= positions.unsqueeze(-1)
    if window is not None:
        visible &= keys > positions.unsqueeze(-1) - window
    return visible


def position_bias(spec: AttentionSpec, length: int, device: torch.device) -> Tensor:
    """ALiBi [H, length] in fp32. The product is rounded to bf16 like the models were trained (transformers' Falcon)."""
    assert spec.alibi is not None
    slopes, keys = spec.alibi.to(device, torch.bfloat16), torch.arange(length, device=device).bfloat16()
    return (slopes[:, None] * keys).float() * spec.alibi_scale


def _activation(x: Tensor, name: str) -> Tensor:
    match name:
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
    raise AssertionError(f"unknown activation {name}")
