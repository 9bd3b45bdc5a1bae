"""The reference operations against formulas written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from writehead.errors import UsageError
from writehead.kernels import AttentionSpec, CacheView, Group, load, reference
from writehead.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
COMPUTATIONS: tuple[Literal["queries", "broadcast"], ...] = ("queries", "broadcast")
CAPACITY = 40
HEADS = [(4, 4), (4, 2), (6, 1)]
SPECS = {
    "plain": AttentionSpec(scale=0.5),
    "window": AttentionSpec(scale=0.3, window=3),
    "window of itself": AttentionSpec(scale=0.3, window=1),
    "alibi": AttentionSpec(scale=0.4, alibi=torch.tensor([0.5, 0.3, 0.11, 0.07, 0.9, 0.2]), alibi_scale=0.7),
}


def spec_for(name: str, num_heads: int) -> AttentionSpec:
    """A spec with as many slopes as heads."""
    spec = SPECS[name]
    slopes = None if spec.alibi is None else spec.alibi[:num_heads]
    return AttentionSpec(scale=spec.scale, window=spec.window, alibi=slopes, alibi_scale=spec.alibi_scale)


def attend(q: Tensor, k: Tensor, v: Tensor, position: int, spec: AttentionSpec) -> Tensor:
    """One token's heads [H, D] over the keys and values [K, L, D] of its text, in float64, a head at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    share = q.shape[0] // k.shape[0]
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    for head, query in enumerate(q.double()):
        keys, values = (t[head // share, first : position + 1].double() for t in (k, v))
        scores = spec.scale * keys @ query
        if spec.alibi is not None:
            slope = spec.alibi[head].bfloat16()
            biases = [float(slope * torch.tensor(p).bfloat16()) for p in range(first, position + 1)]
            scores = scores + spec.alibi_scale * torch.tensor(biases, dtype=torch.float64)
        out[head] = torch.softmax(scores, dim=0) @ values
    return out


def random_cache(shared: int, num_rows: int = 5, dim: int = 8) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, K, capacity, D]."""
    shape = (num_rows, shared, CAPACITY, dim)
    return torch.randn(shape), torch.randn(shape)


def view_of(keys: Tensor, values: Tensor, *groups: Group) -> CacheView:
    """A view of one layer whose tokens are the last of every sequence."""
    rows: list[int] = []
    slots: list[int] = []
    for group in groups:
        owners = torch.arange(keys.shape[0])[group.rows]
        for row, length in zip(owners.tolist(), group.lengths, strict=True):
            rows += [row] * group.num_new
            slots += range(length - group.num_new, length)
    return CacheView(keys=(keys,), values=(values,), rows=torch.tensor(rows), slots=torch.tensor(slots), groups=groups)


def expected(q: Tensor, view: CacheView, spec: AttentionSpec) -> Tensor:
    """`attend` for every token of a step."""
    tokens = zip(q, view.rows.tolist(), view.slots.tolist(), strict=True)
    return torch.stack([attend(x, view.keys[0][row], view.values[0][row], slot, spec) for x, row, slot in tokens])


RAGGED = (
    Group(num_new=1, rows=torch.tensor([4, 1]), lengths=(9, 17)),
    Group(num_new=5, rows=slice(2, 4), lengths=(5, 11)),
    Group(num_new=13, rows=torch.tensor([0]), lengths=(30,)),
)
GROUPS = {
    "one token each": (Group(num_new=1, rows=slice(0, 5), lengths=(7, 7, 7, 7, 7)),),
    "one token, ragged": (Group(num_new=1, rows=slice(1, 4), lengths=(1, 40, 7)),),
    "whole texts": (Group(num_new=11, rows=slice(0, 2), lengths=(11, 11)),),
    "chunks of a text": (Group(num_new=4, rows=torch.tensor([3, 0]), lengths=(4, 19)),),
    "everything": RAGGED,
}


@pytest.mark.parametrize("mqa", COMPUTATIONS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_cached_attention(
    heads: int, shared: int, spec: str, groups: tuple[Group, ...], mqa: Literal["queries", "broadcast"]
) -> None:
    keys, values = random_cache(shared)
    view = view_of(keys, values, *groups)
    q = torch.randn(len(view.rows), heads, 8)
    exact = expected(q, view, spec_for(spec, heads))
    ours = ReferenceKernels(mqa).cached_attention(q, view, 0, spec_for(spec, heads))
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_causal_attention_and_its_gradients(heads: int, shared: int, spec: str) -> None:
    q, k, v = (torch.randn(2, 9, n, 8, requires_grad=True) for n in (heads, shared, shared))
    rule = spec_for(spec, heads)
    ours = KERNELS.causal_attention(q, k, v, rule)
    texts = [
        torch.stack([attend(q[b, t], k[b].transpose(0, 1), v[b].transpose(0, 1), t, rule) for t in range(9)])
        for b in range(2)
    ]
    exact = _differentiable(q, k, v, rule)
    torch.testing.assert_close(ours.double(), torch.stack(texts), rtol=0, atol=2e-6)
    weights = torch.randn(ours.shape)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), (q, k, v)),
        torch.autograd.grad((exact * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


def _differentiable(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The same formula on whole tensors, so that autograd can follow it."""
    share, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (t.double().repeat_interleave(share, dim=2) for t in (k, v))
    scores = spec.scale * torch.einsum("bthd,blhd->bhtl", q.double(), k)
    if spec.alibi is not None:
        scores = scores + spec.alibi_scale * (spec.alibi.bfloat16()[:, None, None] * torch.arange(length)).double()
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (spec.window or length))
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return torch.einsum("bhtl,blhd->bthd", weights, v)


@pytest.mark.parametrize("mqa", COMPUTATIONS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("limit", [1, 200, 1000])
def test_a_cut_chunk_equals_the_whole(
    monkeypatch: pytest.MonkeyPatch, spec: str, limit: int, mqa: Literal["queries", "broadcast"]
) -> None:
    """However few scores fit at once (1: a query at a time), the result is the one of all at once."""
    kernels, rule = ReferenceKernels(mqa), spec_for(spec, 4)
    keys, values = random_cache(2)
    view = view_of(keys, values, *RAGGED)
    q = torch.randn(len(view.rows), 4, 8)
    whole = kernels.cached_attention(q, view, 0, rule)
    sizes: list[int] = []
    softmax: Callable[..., Tensor] = reference._softmax

    def counting(scores: Tensor, *rest: object) -> Tensor:
        sizes.append(scores.numel())
        return softmax(scores, *rest)

    monkeypatch.setattr(reference, "_softmax", counting)
    monkeypatch.setattr(reference, "MAX_SCORES", limit)
    torch.testing.assert_close(kernels.cached_attention(q, view, 0, rule), whole, rtol=0, atol=1e-6)
    assert len(sizes) > len(RAGGED)
    assert max(sizes) <= max(limit, 2 * 4 * 17)  # one query of each sequence is the least


@pytest.mark.parametrize("mqa", COMPUTATIONS)
def test_slots_past_the_length_have_no_influence(mqa: Literal["queries", "broadcast"]) -> None:
    """Other rows may hold anything, NaN too; free slots of the rows in use any finite number."""
    keys, values = random_cache(2)
    groups = (
        Group(num_new=3, rows=torch.tensor([3, 1]), lengths=(4, 20)),
        Group(num_new=1, rows=slice(4, 5), lengths=(9,)),
    )
    view = view_of(keys, values, *groups)
    q = torch.randn(len(view.rows), 4, 8)
    kernels, spec = ReferenceKernels(mqa), AttentionSpec(scale=0.3)
    before = kernels.cached_attention(q, view, 0, spec)
    for tensor in (keys, values):
        tensor[0], tensor[2] = torch.nan, torch.inf
        tensor[3, :, 4:], tensor[1, :, 20:], tensor[4, :, 9:] = 1e30, -1e30, 1e30
    assert torch.equal(kernels.cached_attention(q, view, 0, spec), before)
    assert before.isfinite().all()


@pytest.mark.parametrize("mqa", COMPUTATIONS)
def test_rows_as_a_tensor_equal_rows_as_a_slice(mqa: Literal["queries", "broadcast"]) -> None:
    keys, values = random_cache(2)
    q = torch.randn(6, 4, 8)
    kernels, spec = ReferenceKernels(mqa), AttentionSpec(scale=0.3, window=4)
    sliced = view_of(keys, values, Group(num_new=2, rows=slice(1, 4), lengths=(2, 30, 9)))
    indexed = view_of(keys, values, Group(num_new=2, rows=torch.tensor([1, 2, 3]), lengths=(2, 30, 9)))
    assert torch.equal(kernels.cached_attention(q, sliced, 0, spec), kernels.cached_attention(q, indexed, 0, spec))


@pytest.mark.parametrize("mqa", COMPUTATIONS)
def test_a_cache_of_16_bits_serves_queries_of_32(mqa: Literal["queries", "broadcast"]) -> None:
    keys, values = (t.bfloat16() for t in random_cache(1))
    view = view_of(keys, values, *RAGGED)
    q = torch.randn(len(view.rows), 4, 8)
    ours = ReferenceKernels(mqa).cached_attention(q, view, 0, SPECS["plain"])
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected(q, view, SPECS["plain"]), rtol=0, atol=2e-6)


def test_store_writes_the_tokens_slots_and_nothing_else() -> None:
    layers = [torch.full((3, 2, 6, 4), 7.0, dtype=torch.bfloat16) for _ in range(4)]
    view = CacheView(
        keys=(layers[0], layers[1]),
        values=(layers[2], layers[3]),
        rows=torch.tensor([2, 0, 0]),
        slots=torch.tensor([5, 1, 2]),
        groups=(),
    )
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    KERNELS.store(view, 1, k, v)
    assert (layers[0] == 7).all()
    assert (layers[2] == 7).all()
    for written, layer in ((k, layers[1]), (v, layers[3])):
        for token, (row, slot) in enumerate([(2, 5), (0, 1), (0, 2)]):
            assert torch.equal(layer[row, :, slot], written[token].bfloat16())
            layer[row, :, slot] = 7
        assert (layer == 7).all()


def test_alibi_is_rounded_as_the_checkpoints_were_trained() -> None:
    """Positions beyond 256 are not exact in bf16, so the order of the roundings shows."""
    slopes = torch.tensor([0.5, 0.2973, 0.0625])
    ours = reference.position_bias(AttentionSpec(scale=1.0, alibi=slopes), 3000, torch.device("cpu"))
    exact = slopes.bfloat16()[:, None] * torch.arange(3000)
    assert torch.equal(ours, exact.float())
    whole = build_alibi_tensor(torch.ones(1, 3000, dtype=torch.int64), 4, torch.float32)[:, 0]
    powers = AttentionSpec(scale=1.0, alibi=torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    assert torch.equal(reference.position_bias(powers, 3000, torch.device("cpu")), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + offset)
    ours = KERNELS.rms_norm(x, weight, 1e-3, offset)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, exact.to(dtype), rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_and_linear(bias: bool) -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    shift = torch.randn(16) if bias else None
    wide = x.double()
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True, unbiased=False) + 1e-3).sqrt() * weight
    exact = normed + (0 if shift is None else shift)
    torch.testing.assert_close(KERNELS.layer_norm(x, weight, shift, 1e-3).double(), exact, rtol=1e-5, atol=1e-5)
    matrix = torch.randn(7, 16)
    shift = torch.randn(7) if bias else None
    exact = wide @ matrix.double().t() + (0 if shift is None else shift)
    torch.testing.assert_close(KERNELS.linear(x, matrix, shift).double(), exact, rtol=1e-5, atol=1e-5)


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": _tanh_gelu,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str) -> None:
    x = torch.linspace(-6, 6, 200)
    exact = FORMULAS[name](x.double())
    torch.testing.assert_close(KERNELS.activate(x, name, gated=False).double(), exact, rtol=0, atol=1e-6)
    gated = KERNELS.activate(x, name, gated=True).double()
    torch.testing.assert_close(gated, FORMULAS[name](x[:100].double()) * x[100:], rtol=0, atol=1e-5)


def test_an_unknown_activation_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="unknown activation swish"):
        KERNELS.activate(torch.ones(2), "swish", gated=False)


@pytest.mark.parametrize("rotated", [4, 8])
def test_rotate_turns_pairs_in_the_complex_plane(rotated: int) -> None:
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(5, 1, rotated // 2)
    ours = KERNELS.rotate(x, angles.cos(), angles.sin())
    half = rotated // 2
    turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.polar(torch.ones_like(angles), angles)
    exact = torch.cat([turned.real, turned.imag, x[..., rotated:]], dim=-1)
    torch.testing.assert_close(ours, exact)
    assert torch.equal(ours[..., rotated:], x[..., rotated:])


def test_rotate_computes_in_fp32_and_returns_the_dtype_of_its_input() -> None:
    x, angles = torch.randn(5, 3, 8).bfloat16(), torch.randn(5, 1, 4)
    ours = KERNELS.rotate(x, angles.cos(), angles.sin())
    assert torch.equal(ours, KERNELS.rotate(x.float(), angles.cos(), angles.sin()).bfloat16())


def test_sdpa_agrees_where_it_can_do_the_same() -> None:
    """One token of each text over a full cache: exactly the call that other engines make."""
    keys, values = random_cache(1)
    view = view_of(keys, values, Group(num_new=1, rows=slice(0, 5), lengths=(CAPACITY,) * 5))
    q = torch.randn(5, 4, 8)
    theirs = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, scale=0.5, enable_gqa=True).squeeze(2)
    torch.testing.assert_close(KERNELS.cached_attention(q, view, 0, SPECS["plain"]), theirs, rtol=0, atol=1e-6)


def test_load_knows_its_backends_and_names_them() -> None:
    assert load("reference-broadcast").name == load("reference").name == "reference"
    with pytest.raises(UsageError, match=r"no backend 'magic'; choose one of .*reference-broadcast"):
        load("magic")
