"""How tensors of a checkpoint become parameters of the decoder, as values that run both ways.

A `Layout` pairs views: `pairs(sources, target)` returns (source view, target view) of equal shape that together cover
both sides exactly once. Loading copies left to right, export right to left; so a layout inverts by construction, casts
on the way, needs no third tensor, and (being views of the target) says where every row of a fused matrix comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from writehead.errors import CheckpointError

Shape = tuple[int, ...]
Pairs = list[tuple[Tensor, Tensor]]


class Layout(Protocol):
    """The arrangement of one target in its sources."""

    def shapes(self, target: Shape) -> list[Shape]:
        """The shape of each source, given the target's."""

    def pairs(self, sources: Sequence[Tensor], target: Tensor) -> Pairs:
        """Views of equal shape that cover sources and target exactly once."""


@dataclass(frozen=True, slots=True)
class Same:
    """One source, as it is."""

    def shapes(self, target: Shape) -> list[Shape]:
        return [target]

    def pairs(self, sources: Sequence[Tensor], target: Tensor) -> Pairs:
        return [(sources[0], target)]


@dataclass(frozen=True, slots=True)
class Transposed:
    """One source stored [in, out] (GPT-2's Conv1D); vectors stay."""

    def shapes(self, target: Shape) -> list[Shape]:
        return [target[::-1]]

    def pairs(self, sources: Sequence[Tensor], target: Tensor) -> Pairs:
        return [(sources[0].t() if target.dim() == 2 else sources[0], target)]


@dataclass(frozen=True, slots=True)
class Grouped:
    """One fused source with rows grouped by key/value head: `share` query heads, then their key, then their value.

    The target has all queries, then all keys, then all values. With share = 1 this is the layout interleaved by head of
    multi-head gpt_bigcode, GPT-NeoX, Megatron and Falcon-RW; with more it is Falcon-40B's.
    """

    num_kv_heads: int
    share: int
    head_dim: int

    def shapes(self, target: Shape) -> list[Shape]:
        return [target]

    def pairs(self, sources: Sequence[Tensor], target: Tensor) -> Pairs:
        shared, share, dim = self.num_kv_heads, self.share, self.head_dim
        source = sources[0].unflatten(0, (shared, share + 2, dim))
        q, k, v = target.split((shared * share * dim, shared * dim, shared * dim))
        return [
            (source[:, :share], q.unflatten(0, (shared, share, dim))),
            (source[:, share], k.unflatten(0, (shared, dim))),
            (source[:, share + 1], v.unflatten(0, (shared, dim))),
        ]


@dataclass(frozen=True, slots=True)
class Interleaved:
    """One source whose heads store rotary pairs side by side (GGUF's llama), the target half after half."""

    head_dim: int

    def shapes(self, target: Shape) -> list[Shape]:
        return [target]

    def pairs(self, sources: Sequence[Tensor], target: Tensor) -> Pairs:
        half = self.head_dim // 2
        source = sources[0].unflatten(0, (-1, half, 2)).transpose(1, 2)
        return [(source, target.unflatten(0, (-1, 2, half)))]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Several sources, one under the other; each part has its number of rows and its own layout."""

    parts: tuple[tuple[int, Layout], ...]

    def shapes(self, target: Shape) -> list[Shape]:
        return [shape for rows, layout in self.parts for shape in layout.shapes((rows, *target[1:]))]

    def pairs(self, sources: Sequence[Tensor], target: Tensor) -> Pairs:
        slices = target.split([rows for rows, _ in self.parts])
        return [
            pair
            for (_, layout), source, part in zip(self.parts, sources, slices, strict=True)
            for pair in layout.pairs([source], part)
        ]


def stacked(*rows: int, each: Layout | None = None) -> Stacked:
    """Sources of these numbers of rows, all in the same layout."""
    return Stacked(tuple((r, each or Same()) for r in rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One parameter of the decoder and the tensors of a checkpoint that hold it. `{i}` stands for the layer."""

    target: str
    sources: tuple[str, ...]
    layout: Layout = Same()
    shift: float = 0.0
    """Added to the source to get the target (GGUF stores Gemma's norms with their 1)."""

    def at(self, layer: int) -> Rule:
        """The rule of one layer."""
        sources = tuple(s.replace("{i}", str(layer)) for s in self.sources)
        return replace(self, target=self.target.replace("{i}", str(layer)), sources=sources)

    def load(self, sources: Sequence[Tensor], target: Tensor) -> None:
        """Writes the target from its sources, casting to the target's dtype."""
        for source, part in self.layout.pairs(sources, target):
            part.copy_(source)
        if self.shift:
            target.add_(self.shift)

    def whole(self, sources: Sequence[Tensor], shape: Shape) -> Tensor:
        """The target: the source itself where that is all of it, in whatever float dtype, else new memory in fp32."""
        if self.layout == Same() and not self.shift and sources[0].is_floating_point():
            return sources[0]
        target = torch.empty(shape)
        self.load(sources, target)
        return target

    def export(self, target: Tensor) -> dict[str, Tensor]:
        """The source tensors that load back to `target`, in its dtype."""
        value = target - self.shift if self.shift else target
        shapes = self.layout.shapes(tuple(target.shape))
        sources = [target.new_empty(shape) for shape in shapes]
        for source, part in self.layout.pairs(sources, value):
            source.copy_(part)
        return dict(zip(self.sources, sources, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSet:
    """All rules of a checkpoint form: complete in both directions, or an error that lists everything wrong."""

    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...] = ("",)
    """Prefixes under which all tensors but the `unprefixed` may stand; the first is the one written."""
    unprefixed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Tensors that carry no weight (mask buffers), as names with `{i}`."""
    aliases: Mapping[str, str] | None = None
    """Surplus copies that a file may hold: name -> the source that it repeats (a tied lm_head)."""

    def expand(self, num_layers: int, *, prefix: str | None = None) -> list[Rule]:
        """A rule for every parameter, with full source names."""
        prefix = self.prefixes[0] if prefix is None else prefix
        rules = []
        for rule in self.rules:
            layers = range(num_layers) if "{i}" in rule.target else [0]
            rules += [rule.at(i) for i in layers]
        return [replace(r, sources=tuple(s if s in self.unprefixed else prefix + s for s in r.sources)) for r in rules]

    def named(self, rules: Sequence[Rule], names: Mapping[str, object], prefix: str) -> list[Rule]:
        """The rules with the names that a checkpoint kept: savers drop either name of a tied tensor."""
        kept = {
            prefix + original: found
            for alias, original in (self.aliases or {}).items()
            for found in (alias, prefix + alias)
            if found in names and prefix + original not in names
        }
        return [replace(rule, sources=tuple(kept.get(s, s) for s in rule.sources)) for rule in rules]

    def prefix_of(self, names: Mapping[str, object]) -> str:
        """The prefix that the checkpoint uses: the one under which most sources are found."""
        sources = [s for rule in self.expand(1, prefix="") for s in rule.sources if s not in self.unprefixed]
        return max(self.prefixes, key=lambda p: sum(p + s in names for s in sources))

    def surplus(self, rules: Sequence[Rule], names: Mapping[str, object], num_layers: int, prefix: str) -> list[str]:
        """Tensors of the checkpoint that no rule reads and nothing explains."""
        known = {s for rule in rules for s in rule.sources}
        for name in (*self.ignored, *(self.aliases or {})):
            layers = range(num_layers) if "{i}" in name else [0]
            known |= {(p + name).replace("{i}", str(i)) for i in layers for p in ("", prefix)}
        return sorted(n for n in names if n not in known)


def check(
    rules: Sequence[Rule], targets: Mapping[str, Shape], found: Mapping[str, Shape], surplus: Sequence[str], source: str
) -> None:
    """Compare rules, parameters and a checkpoint's tensors; raise one CheckpointError that lists every difference."""
    missing, wrong = [], []
    for rule in rules:
        for name, shape in zip(rule.sources, rule.layout.shapes(targets[rule.target]), strict=True):
            if name not in found:
                missing.append(f"'{name}' {list(shape)}")
            elif found[name] != shape:
                wrong.append(f"'{name}' is {list(found[name])}, expected {list(shape)}")
    unserved = sorted(set(targets) - {r.target for r in rules})
    assert not unserved, f"no rule for {unserved}"
    if missing or wrong or surplus:
        parts = [
            f"{len(missing)} missing: {', '.join(missing)}" * bool(missing),
            f"{len(wrong)} of the wrong shape: {', '.join(wrong)}" * bool(wrong),
            f"{len(surplus)} unknown: {', '.join(repr(s) for s in surplus)}" * bool(surplus),
        ]
        raise CheckpointError(
            f"{source}: the tensors do not match the config ({'; '.join(p for p in parts if p)}); "
            f"check that config and weights belong together"
        )
