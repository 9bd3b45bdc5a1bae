"""What every kernel backend computes: the operations, their shapes, what they write and how exact they are.

Letters: B sequences, T tokens in a step, L context length, H query heads, K key/value heads, G = H / K query heads that
share one of them, D head size, M model width, F feed-forward width, V vocabulary. `reference.py` defines correct;
another backend may differ by its stated tolerance and nothing else. Outputs are new tensors unless it says "writes".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from writehead.kernels.packed import PackedWeight

Rotation = tuple[Tensor, Tensor]
"""cos and sin of a step's positions, as `rotate` takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """What is fixed for one layer. Scores are `scale * q.k + alibi`; softmax is computed in fp32."""

    scale: float
    window: int | None = None
    """A query at position p sees keys in (p - window, p]."""
    alibi: Tensor | None = None
    """[H] slopes. The bias is slope * key position, in bf16 as Falcon-RW was trained, times `alibi_scale`."""
    alibi_scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Sequences that bring the same number of new tokens in a step: one batched product serves them all.

    A step's tokens are the groups' tokens one after the other, each group sequence by sequence.
    """

    num_new: int
    rows: slice | Tensor
    """The cache row of each sequence: a slice if they are adjacent (nothing is copied), else int64 [B]."""
    lengths: tuple[int, ...]
    """Tokens that each sequence has in the cache after this step stores its own."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step that belong to this group."""
        return self.num_new * len(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheView:
    """One step's view of the key/value cache. The cache owns the tensors; the step writes its new tokens into them."""

    keys: tuple[Tensor, ...]
    """A tensor [rows, K, capacity, slot_size] a layer (slots.py): D floats, or D int8 numbers and their scale."""
    values: tuple[Tensor, ...]
    rows: Tensor
    """int64 [T]: the cache row of each token of the step."""
    slots: Tensor
    """int64 [T]: the place in that row, which is the token's position."""
    groups: tuple[Group, ...]


Blocks = Callable[[Tensor, Rotation | None, CacheView], Tensor]
"""Layers of a decoder in an engine's step: [T, M] -> [T, M]."""


class Kernels(Protocol):
    """The operations of a decoder. A backend is chosen once, by `kernels.load`, and passed to what needs it."""

    name: str

    packs_floats: bool
    """Whether floating-point weights are packed too, not only integers."""

    def pack(self, weight: Tensor, into: PackedWeight) -> None:
        """Writes [out, in], rounded, into `into`."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        bias: Tensor | None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[..., in] x [out, in] -> activation([..., out] + bias) + residual. Integer weights round x (packed.py)."""

    def embed(self, ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
        """int64 [...] and [rows, M] -> [..., M]."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """[..., M] -> [..., M] (arXiv 1607.06450)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """[..., M] -> [..., M]: x / rms(x) * (weight + offset), in fp32 (arXiv 1910.07467)."""

    def activate(self, x: Tensor, name: str, *, gated: bool) -> Tensor:
        """[..., F] -> [..., F]; gated: [..., 2F] = gate | up -> activation(gate) * up [..., F] (arXiv 2002.05202)."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., heads, D], cos and sin [..., 1, R / 2] in fp32 -> the first R <= D values of each head rotated."""

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]; no cache; differentiable."""

    def store(self, cache: CacheView, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes k and v [T, K, D] into the layer's cache at (rows, slots)."""

    def cached_attention(self, q: Tensor, cache: CacheView, layer: int, spec: AttentionSpec) -> Tensor:
        """q [T, H, D] -> [T, H, D], each token over its own row up to its own slot (stored before).

        Slots past a row's length must hold finite numbers; they have no influence.
        """

    def run(self, owner: nn.Module, blocks: Blocks, x: Tensor, rotation: Rotation | None, cache: CacheView) -> Tensor:
        """blocks(x, rotation, cache): x [T, M] -> [T, M].

        `blocks` consists of these operations and depends on nothing but its arguments and what belongs to `owner`. A
        backend may repeat the operations of an earlier step of the same shape without calling it, while `owner` is as
        it was then.
        """
