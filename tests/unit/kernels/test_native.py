"""The native kernels against the reference, for each instruction set that this machine runs, and against themselves."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.native import FORMATS, attend, library, packed, sets, threads
from writehead.errors import UsageError
from writehead.kernels import AttentionSpec, CacheView, Format, PackedWeight, load
from writehead.kernels.cpu import kernels as module
from writehead.kernels.cpu.kernels import ACTIVATIONS, CPUKernels
from writehead.kernels.reference import ReferenceKernels
from writehead.kernels.slots import DTYPES, read_slots, slot_size, write_slots

REFERENCE = ReferenceKernels()
SHAPES = [(1, 1), (5, 7), (16, 64), (33, 100), (100, 320), (257, 1000)]
ROWS = [1, 2, 3, 5, 8, 12, 13, 16, 17, 33, 70]


@pytest.fixture(params=sets())
def kernels(request: pytest.FixtureRequest) -> CPUKernels:
    """The kernels of one instruction set."""
    return CPUKernels(request.param)


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is within a share of the largest number."""
    return bool((ours.double() - theirs.double()).abs().max() <= tolerance * theirs.double().abs().max())


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_packing_gives_the_references_bytes(kernels: CPUKernels, format: Format) -> None:
    for shape in SHAPES:
        weight = torch.randn(shape) * 0.02
        weight[0, 0] = 1.5
        weight[-1] = 0
        theirs = PackedWeight.pack(weight, format)
        assert torch.equal(packed(kernels, weight, format).memory, theirs.memory), shape
        strided = torch.randn(shape[0], shape[1] + 3)[:, :-3]
        assert torch.equal(packed(kernels, strided, format).memory, PackedWeight.pack(strided, format).memory)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_references(kernels: CPUKernels, format: Format, shape: tuple[int, int]) -> None:
    weight = PackedWeight.pack(torch.randn(shape) * 0.02, format)
    bias, kinds = torch.randn(shape[0]), [a for a in ACTIVATIONS if a != "none"]
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        assert close(kernels.linear(x, weight, None), REFERENCE.linear(x, weight, None), 2e-5)
        residual = torch.randn(rows, shape[0])
        kind = random.choice(kinds)
        ours, theirs = (k.linear(x, weight, bias, kind, residual) for k in (kernels, REFERENCE))
        assert close(ours, theirs, 2e-5), (rows, kind)


def test_strided_operands_live_as_long_as_the_call(kernels: CPUKernels) -> None:
    """A copy that only a pointer remembers would be overwritten by the output."""
    weight = PackedWeight.pack(torch.randn(48, 64), FORMATS[0])
    x, residual = torch.randn(64, 40).t(), torch.randn(48, 40).t()
    assert close(
        kernels.linear(x, weight, None, None, residual), REFERENCE.linear(x, weight, None, None, residual), 1e-5
    )
    heads, angles = torch.randn(9, 2, 16), torch.randn(8, 1, 9).permute(2, 1, 0)
    ours, theirs = (k.rotate(heads, angles.cos(), angles.sin()) for k in (kernels, REFERENCE))
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_row_has_the_same_bytes_in_any_batch_and_on_any_threads(kernels: CPUKernels, format: Format) -> None:
    weight = PackedWeight.pack(torch.randn(300, 520) * 0.02, format)
    x, bias = torch.randn(70, 520), torch.randn(300)
    x[3, 17] = 400.0
    alone = torch.cat([kernels.linear(row[None], weight, bias, "gelu_tanh") for row in x])
    for count in (1, 2, 3, 7):
        with threads(count):
            for rows in ROWS:
                first = random.randrange(0, 70 - rows + 1)
                together = kernels.linear(x[first : first + rows], weight, bias, "gelu_tanh")
                assert torch.equal(together, alone[first : first + rows]), (count, rows)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_no_rows(kernels: CPUKernels, format: Format) -> None:
    """A step that completes no prompt asks for no logits; an empty tensor has no memory."""
    weight = PackedWeight.pack(torch.randn(100, 64), format)
    assert kernels.linear(torch.empty(0, 64), weight, torch.randn(100), "gelu_tanh").shape == (0, 100)
    assert kernels.layer_norm(torch.empty(0, 64), torch.randn(64), None, 1e-5).shape == (0, 64)
    assert kernels.embed(torch.empty(0, dtype=torch.int64), weight).shape == (0, 64)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.kind.startswith("int")], ids=str)
def test_extreme_rows(kernels: CPUKernels, format: Format) -> None:
    """A huge value does not drown the others; what is no number makes its own row none, and no other."""
    weight = torch.randn(64, 256) * 0.05
    ours = PackedWeight.pack(weight, format)
    x = torch.randn(6, 256)
    x[1, 7], x[2, 100], x[3, 5], x[4] = 1e4, torch.nan, torch.inf, 0
    x[5] = 1e30
    y = kernels.linear(x, ours, None)
    assert torch.isfinite(y[[0, 1, 4, 5]]).all()
    assert not torch.isfinite(y[2]).any()
    assert not torch.isfinite(y[3]).any()
    assert (y[4] == 0).all()
    exact = x[1].double() @ ours.unpack().double().t()
    without = exact - x[1, 7].double() * ours.unpack()[:, 7].double()
    assert (y[1].double() - exact).abs().max() < 0.02 * without.abs().max()  # as good as if the value were not there


@pytest.mark.parametrize("format", [f for f in FORMATS if f.kind.startswith("int")], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_that_there_can_be(kernels: CPUKernels, format: Format, sign: int) -> None:
    """Every weight at its end, 8 values as far out as they may be and all others at 127 steps: 32 bits hold it."""
    weight = PackedWeight.pack(torch.full((32, 1 << 16), 0.5), format)
    x = torch.full((13, 1 << 16), sign * 127.0)
    x[:, :: 1 << 13] = sign * 2.0**20
    exact = 0.5 * x.double().sum(1, keepdim=True)
    for rows in (1, 13):
        assert close(kernels.linear(x[:rows], weight, None).double(), exact[:rows].expand(-1, 32), 1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_embedding_rows(kernels: CPUKernels, format: Format) -> None:
    weight = PackedWeight.pack(torch.randn(37, 100), format)
    ids = torch.tensor([[0, 36, 5], [17, 5, 1]])
    assert torch.equal(kernels.embed(ids, weight), REFERENCE.embed(ids, weight))
    for outside in (37, -1, 1 << 40):
        with pytest.raises(IndexError, match="outside the vocabulary of 37"):
            kernels.embed(torch.tensor([5, outside]), weight)


@pytest.mark.parametrize("size", [1, 3, 16, 64, 100, 2048])
def test_norms(kernels: CPUKernels, size: int) -> None:
    weight, bias = torch.randn(size), torch.randn(size)
    for rows in (1, 2, 9):
        x = torch.randn(rows, 2, size) * 3 + 1
        for b in (None, bias):
            ours, theirs = (k.layer_norm(x, weight, b, 1e-5) for k in (kernels, REFERENCE))
            assert close(ours, theirs, 5e-6) or size == 1
            if rows > 1:
                apart = torch.randn(rows, 5, size)[:, 1:3].copy_(x)  # heads of a fused product
                assert torch.equal(kernels.layer_norm(apart, weight, b, 1e-5), ours)
        for offset in (0.0, 1.0):
            ours, theirs = (k.rms_norm(x[:, 1], weight, 1e-6, offset) for k in (kernels, REFERENCE))
            assert close(ours, theirs, 5e-6)


@pytest.mark.parametrize("name", [a for a in ACTIVATIONS if a != "none"])
def test_activations(kernels: CPUKernels, name: str) -> None:
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-4, 0.6249, 0.626, 5.0, -12.0, 88.0, -104.0, 1e4, -1e4, 3e38, -3e38])
    x = torch.cat([edges, torch.randn(2033) * 4]).view(23, 89)
    ours, theirs = kernels.activate(x, name, gated=False), REFERENCE.activate(x.double(), name, gated=False)
    assert ((ours - theirs).abs() <= 1e-6 * theirs.abs().clamp_min(0.3)).all()
    gated = torch.randn(5, 2 * 75)
    assert close(kernels.activate(gated, name, gated=True), REFERENCE.activate(gated, name, gated=True), 2e-6)
    assert kernels.activate(torch.full((1, 20), torch.nan), name, gated=False).isnan().all()


@pytest.mark.parametrize(("dim", "half"), [(8, 4), (64, 32), (80, 16), (128, 64), (6, 1)])
def test_rotation(kernels: CPUKernels, dim: int, half: int) -> None:
    fused, angles = torch.randn(9, 5, dim), torch.randn(9, 1, half)
    part = fused[:, 1:4]
    ours, theirs = (k.rotate(part, angles.cos(), angles.sin()) for k in (kernels, REFERENCE))
    assert ours.is_contiguous()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 5, 16, 20, 64, 131])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_the_cache_gets_the_references_bytes(kernels: CPUKernels, dtype: torch.dtype, dim: int) -> None:
    """Numbers of all sizes, zeros, and what is no number; 40 tokens in a cache of 2 rows of 60."""
    x = torch.randn(40, 3, dim) * torch.randn(40, 3, 1).mul(3).exp()
    x[1], x[2, 0], x[3, 1, 0], x[4, 2, -1], x[5, 0, 0], x[6] = 0, 1e-31, torch.inf, -torch.inf, torch.nan, 3e38
    x[7] = torch.arange(dim) - 0.5  # ties
    fused, rows, slots = torch.cat([x, -x], dim=1), torch.randint(2, (40,)), torch.randperm(60)[:40]
    found = []
    for backend in (kernels, REFERENCE):
        memory = torch.full((2, 2, 3, 60, slot_size(dim, dtype)), 7, dtype=dtype)
        view = CacheView(keys=(memory[0],), values=(memory[1],), rows=rows, slots=slots, groups=())
        backend.store(view, 0, fused[:, :3], fused[:, 3:])
        found.append(memory.nan_to_num(5.0) if dtype.is_floating_point else memory)
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])


SPECS = {
    "plain": AttentionSpec(scale=0.11),
    "window": AttentionSpec(scale=0.2, window=70),
    "window of itself": AttentionSpec(scale=0.2, window=1),
    "alibi": AttentionSpec(scale=0.2, alibi=torch.tensor([0.5, 0.3, 0.11, 0.07, 0.9, 0.2]), alibi_scale=0.7),
}


def random_texts(lengths: list[int], heads: int, shared: int, dim: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(torch.randn(n, heads, dim), torch.randn(n, shared, dim), torch.randn(n, shared, dim)) for n in lengths]


def on_tiles(kernels: CPUKernels, dtype: torch.dtype, dim: int) -> bool:
    """Whether attention is computed in bf16, on tile registers."""
    return kernels.instructions == "amx" and dtype is torch.bfloat16 and dim % 32 == 0


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("heads", "shared", "dim"), [(6, 6, 8), (6, 2, 20), (6, 1, 64), (20, 1, 128), (1, 1, 5)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_attention_equals_float64(
    kernels: CPUKernels, name: str, heads: int, shared: int, dim: int, dtype: torch.dtype
) -> None:
    """Ragged sequences, a prompt and then two tokens each, across the cuts of the context.

    Tile registers take queries and weights as bf16, to 1 part in 512 each. A score is a sum of `dim` products, so its
    error is about 1 / 512 of a typical score, here up to 4; a weight's is its own and that of its score.
    """
    spec = SPECS[name]
    if spec.alibi is not None:
        spec = AttentionSpec(scale=spec.scale, alibi=torch.rand(heads), alibi_scale=0.7)
    texts = random_texts([300, 67, 3], heads, shared, dim)
    steps = [[298, 65, 1], [1, 1, 1], [1, 1, 1]]
    for (q, k, v), ours in zip(texts, attend(kernels, texts, steps, spec, dtype=dtype), strict=True):
        keys, values = (read_slots(write_slots(t, dtype)).double()[None] for t in (k, v))
        theirs = REFERENCE.causal_attention(q.double()[None], keys, values, spec)[0]
        exact = 3e-6 if spec.alibi is None else 3e-5  # a bias of hundreds costs digits
        assert close(ours, theirs, 1e-2 if on_tiles(kernels, dtype, dim) else exact)


@pytest.mark.parametrize(("heads", "shared", "dim"), [(4, 4, 16), (16, 1, 64), (6, 2, 23)])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_attention_has_the_same_bytes_however_it_is_cut(
    kernels: CPUKernels, heads: int, shared: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    spec = AttentionSpec(scale=dim**-0.5, window=window)
    texts = random_texts([700, 40], heads, shared, dim)
    (first,) = attend(kernels, texts[:1], [[700]], spec, dtype=dtype)
    (second,) = attend(kernels, texts[1:], [[1]] * 40, spec, dtype=dtype, capacity=999)
    for count, steps in [
        (1, [[1, 40], [699, 0]]),
        (2, [[513, 3], [100, 30], [86, 0], [1, 7]]),
        (3, [[690, 39], *[[1, 0]] * 9, [1, 1]]),
    ]:
        with threads(count):
            ours = attend(kernels, texts, steps, spec, dtype=dtype)
        assert torch.equal(ours[0], first)
        assert torch.equal(ours[1], second)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("heads", "shared", "dim"), [(3, 3, 64), (16, 1, 128), (12, 2, 32), (20, 1, 48)])
def test_attention_over_bf16_has_the_same_bytes_however_it_is_cut(
    kernels: CPUKernels, name: str, heads: int, shared: int, dim: int
) -> None:
    """One by one, at once, in pieces and beside another sequence: whole and part tiles, whatever the threads."""
    spec = SPECS[name]
    alibi = None if spec.alibi is None else torch.rand(heads)
    spec = AttentionSpec(scale=dim**-0.5, window=spec.window, alibi=alibi)
    texts = random_texts([600, 45], heads, shared, dim)
    (alone,) = attend(kernels, texts[:1], [[1]] * 600, spec, dtype=torch.bfloat16)
    (short,) = attend(kernels, texts[1:], [[45]], spec, dtype=torch.bfloat16, capacity=777)
    assert alone.isfinite().all()
    for count, steps in [
        (1, [[600, 1], [0, 44]]),
        (2, [[5, 3], [252, 30], [1, 1], [42, 1], [300, 10]]),
        (4, [[33, 45], [31, 0], [64, 0], [131, 0], [341, 0]]),
    ]:
        with threads(count):
            ours = attend(kernels, texts, steps, spec, dtype=torch.bfloat16)
        assert torch.equal(ours[0], alone)
        assert torch.equal(ours[1], short)


def test_a_mix_of_equal_values_is_that_value(kernels: CPUKernels) -> None:
    """Weights are divided by the sum of what they were rounded to."""
    q, k, _ = random_texts([90], 16, 1, 64)[0]
    (ours,) = attend(kernels, [(q, k, torch.full_like(k, 0.7109375))], [[90]], SPECS["plain"], dtype=torch.bfloat16)
    assert (ours - 0.7109375).abs().max() < 1e-6


def test_gradients_and_plain_weights_take_the_references_path() -> None:
    kernels = CPUKernels()
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    (grad,) = torch.autograd.grad(kernels.linear(x, weight, None, "silu").sum(), x)
    assert grad.shape == x.shape
    assert kernels.layer_norm(x, torch.ones(8), None, 1e-5).requires_grad
    wide = torch.randn(3, 8, dtype=torch.float64)
    assert kernels.layer_norm(wide, torch.ones(8).double(), None, 1e-5).dtype is torch.float64


def test_a_fork_has_threads_of_its_own() -> None:
    kernels = CPUKernels()
    weight, x = PackedWeight.pack(torch.randn(400, 400), Format("int8", packed=True)), torch.randn(64, 400)
    with threads(3):
        expected = kernels.linear(x, weight, None)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(kernels.linear(x, weight, None), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(kernels.linear(x, weight, None), expected)


def test_load_takes_the_native_library_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("auto").name == f"cpu ({sets()[0]})"
    assert load("auto", packed=False).name == "onednn"
    assert load("cpu-generic").name == "cpu (generic)"
    with pytest.raises(UsageError, match="'cpu-mmx' cannot be used, the library has no instruction set 'mmx'"):
        load("cpu-mmx")
    monkeypatch.setattr(module, "open_library", lambda: "the native library was not built: install a compiler")
    assert load("auto").name == "onednn"
    with pytest.raises(UsageError, match="'cpu' cannot be used, the native library was not built"):
        load("cpu")


def test_every_set_says_whether_it_runs() -> None:
    names = [s.name for s in library().sets]
    assert names[-1] == "generic"
    assert all(s.missing is None or s.missing.startswith("the ") for s in library().sets)
