"""Weight rules invert bit by bit, cover both sides exactly once, and report everything that is wrong at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from writehead.checkpoint.rules import (
    Grouped,
    Interleaved,
    Layout,
    Rule,
    RuleSet,
    Same,
    Shape,
    Stacked,
    Transposed,
    check,
    stacked,
)
from writehead.errors import CheckpointError

sizes = st.integers(1, 4)


@st.composite
def simple_layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout of one source, and a number of rows of a target that it fits."""
    kind = draw(st.sampled_from([Same, Transposed, Grouped, Interleaved]))
    if kind is Grouped:
        shared, share, dim = draw(sizes), draw(sizes), draw(sizes)
        return Grouped(shared, share, dim), shared * (share + 2) * dim
    if kind is Interleaved:
        dim = 2 * draw(sizes)
        return Interleaved(dim), dim * draw(sizes)
    return kind(), draw(sizes)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Shape]:
    """Any layout, and the shape of a matrix or vector that it fits."""
    tail: Shape = draw(st.sampled_from([(), (3,), (5,)]))
    if draw(st.booleans()):
        parts = draw(st.lists(simple_layouts(), min_size=1, max_size=3))
        return Stacked(tuple((rows, layout) for layout, rows in parts)), (sum(rows for _, rows in parts), *tail)
    layout, rows = draw(simple_layouts())
    return layout, (rows, *tail)


def numbered(shapes: Sequence[Shape]) -> list[Tensor]:
    """Tensors whose elements are all different."""
    tensors, first = [], 1.0
    for shape in shapes:
        size = math.prod(shape)
        tensors.append(torch.arange(first, first + size).reshape(shape))
        first += size
    return tensors


def make_rule(layout: Layout, num_sources: int) -> Rule:
    return Rule(target="target", sources=tuple(f"source.{i}" for i in range(num_sources)), layout=layout)


@given(layouts())
def test_a_layout_covers_both_sides_exactly_once(case: tuple[Layout, Shape]) -> None:
    layout, shape = case
    shapes = layout.shapes(shape)
    sources, target = [torch.zeros(s) for s in shapes], torch.zeros(shape)
    for source, part in layout.pairs(sources, target):
        assert source.shape == part.shape
        source += 1
        part += 1
    assert all((side == 1).all() for side in (*sources, target))
    assert sum(s.numel() for s in sources) == target.numel()


@given(layouts(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_export_and_load_invert_each_other(case: tuple[Layout, Shape], dtype: torch.dtype) -> None:
    layout, shape = case
    sources = [t.to(dtype) for t in numbered(layout.shapes(shape))]
    rule, target = make_rule(layout, len(sources)), torch.full(shape, torch.nan, dtype=dtype)
    rule.load(sources, target)
    exported = rule.export(target)
    assert list(exported) == list(rule.sources)
    for source, back in zip(sources, exported.values(), strict=True):
        assert back.is_contiguous()
        assert torch.equal(source, back)
    again = torch.empty_like(target)
    rule.load(list(exported.values()), again)
    assert torch.equal(again, target)


def test_load_casts_to_the_target() -> None:
    target = torch.empty(2, 2, dtype=torch.bfloat16)
    Rule(target="t", sources=("s",)).load([torch.tensor([[1.001, 2.0], [3.0, 4.0]])], target)
    assert torch.equal(target, torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16))


def test_a_shift_is_added_on_the_way_in_and_taken_off_on_the_way_out() -> None:
    rule, target = Rule(target="t", sources=("s",), shift=-1.0), torch.empty(3)
    rule.load([torch.tensor([1.5, 2.0, 0.0])], target)
    assert target.tolist() == [0.5, 1.0, -1.0]
    assert rule.export(target)["s"].tolist() == [1.5, 2.0, 0.0]
    assert target.tolist() == [0.5, 1.0, -1.0]


def test_grouped_takes_the_heads_apart() -> None:
    """Two key/value heads of one row, each after the two query heads that share it."""
    source = torch.tensor([[10.0], [11.0], [20.0], [30.0], [12.0], [13.0], [21.0], [31.0]])
    target = torch.empty(8, 1)
    Rule(target="t", sources=("s",), layout=Grouped(2, 2, 1)).load([source], target)
    assert target.flatten().tolist() == [10, 11, 12, 13, 20, 21, 30, 31]


def test_interleaved_puts_pairs_half_after_half() -> None:
    target = torch.empty(8)
    Rule(target="t", sources=("s",), layout=Interleaved(4)).load([torch.arange(8.0)], target)
    assert target.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_transposed_turns_matrices_and_leaves_vectors() -> None:
    assert Transposed().shapes((2, 3)) == [(3, 2)]
    assert Transposed().shapes((2,)) == [(2,)]
    target = torch.empty(2, 3)
    Rule(target="t", sources=("s",), layout=Transposed()).load([torch.arange(6.0).reshape(3, 2)], target)
    assert target.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_stacked_gives_every_part_its_rows_and_layout() -> None:
    layout = stacked(2, 1, each=Transposed())
    assert layout.shapes((3, 4)) == [(4, 2), (4, 1)]
    assert layout.shapes((3,)) == [(2,), (1,)]
    target = torch.empty(3, 2)
    sources = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0]])]
    Rule(target="t", sources=("a", "b"), layout=layout).load(sources, target)
    assert target.tolist() == [[1, 3], [2, 4], [5, 6]]


RULES = RuleSet(
    rules=(
        Rule(target="embed.weight", sources=("wte.weight",)),
        Rule(target="layers.{i}.up.weight", sources=("h.{i}.gate.weight", "h.{i}.up.weight"), layout=stacked(2, 2)),
        Rule(target="lm_head.weight", sources=("lm_head.weight",)),
    ),
    prefixes=("model.", ""),
    unprefixed=("lm_head.weight",),
    ignored=("h.{i}.mask",),
    aliases={"copy.weight": "wte.weight"},
)
TARGETS = {"embed.weight": (5, 3), "layers.0.up.weight": (4, 3), "layers.1.up.weight": (4, 3), "lm_head.weight": (5, 3)}
FOUND: dict[str, Shape] = {
    "wte.weight": (5, 3),
    "h.0.gate.weight": (2, 3),
    "h.0.up.weight": (2, 3),
    "h.1.gate.weight": (2, 3),
    "h.1.up.weight": (2, 3),
}


def compare(found: dict[str, Shape]) -> None:
    """What a build does with the names and shapes of a file."""
    prefix = RULES.prefix_of(found)
    rules = RULES.expand(2, prefix=prefix)
    check(rules, TARGETS, found, RULES.surplus(rules, found, 2, prefix), "model.safetensors")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_complete_file_passes_with_and_without_the_prefix(prefix: str) -> None:
    explained = ["h.0.mask", f"{prefix}h.1.mask", "copy.weight", f"{prefix}copy.weight"]
    compare({prefix + n: s for n, s in FOUND.items()} | {"lm_head.weight": (5, 3)} | dict.fromkeys(explained, (1,)))


def test_expand_writes_the_first_prefix() -> None:
    assert [s for rule in RULES.expand(1) for s in rule.sources] == [
        "model.wte.weight",
        "model.h.0.gate.weight",
        "model.h.0.up.weight",
        "lm_head.weight",
    ]


def test_check_lists_everything_that_is_wrong_at_once() -> None:
    found: dict[str, Shape] = {f"model.{name}": shape for name, shape in FOUND.items()}
    del found["model.h.0.up.weight"]
    found |= {"model.h.1.gate.weight": (3, 2), "model.h.2.up.weight": (2, 3), "model.h.2.mask": (1,)}
    with pytest.raises(CheckpointError) as error:
        compare(found)
    assert str(error.value) == (
        "model.safetensors: the tensors do not match the config (2 missing: 'model.h.0.up.weight' [2, 3], "
        "'lm_head.weight' [5, 3]; 1 of the wrong shape: 'model.h.1.gate.weight' is [3, 2], expected [2, 3]; "
        "2 unknown: 'model.h.2.mask', 'model.h.2.up.weight'); check that config and weights belong together"
    )


def test_a_parameter_without_a_rule_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"no rule for \['norm.weight'\]"):
        check(RULES.expand(2), {**TARGETS, "norm.weight": (3,)}, FOUND, [], "x")
