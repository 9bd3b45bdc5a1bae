"""The decoder: every family, training and inference, MHA, GQA and MQA are this one module.

Names of the parameters (the `target` side of every weight rule):

    embed.weight [V, M]   positions.weight [P, M] (learned)   norm.{weight,bias}   lm_head.weight (if not tied)
    layers.{i}.attn_norm.*   layers.{i}.attn.qkv.* (rows q | k | v)   layers.{i}.attn.{q_norm,k_norm}.weight
    layers.{i}.attn.out.*    layers.{i}.mlp_norm.*    layers.{i}.mlp.up.* (rows gate | up)    layers.{i}.mlp.down.*
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from writehead.kernels import AttentionSpec, CacheView, Kernels, Rotation
from writehead.models.config import ModelConfig
from writehead.models.layers import Embedding, LayerNorm, Linear, RMSNorm
from writehead.models.rope import inverse_frequencies


def make_norm(config: ModelConfig, size: int, kernels: Kernels) -> nn.Module:
    """The config's kind of norm over `size` values."""
    if config.norm == "rms":
        return RMSNorm(size, eps=config.norm_eps, offset=config.norm_offset, kernels=kernels)
    return LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias, kernels=kernels)


def alibi_slopes(num_heads: int) -> Tensor:
    """[H] slopes of arXiv 2108.12409: a geometric series, and every second of a finer one beyond a power of two."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, device="cpu")


class Attention(nn.Module):
    """Attention with shared key/value heads. Head counts come from the local weight, so that it may be a shard."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.layer, self.kernels = layer, kernels
        self.head_dim = config.head_dim
        self.share = config.num_heads // config.num_kv_heads
        rows = config.q_size + 2 * config.kv_size
        self.qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias, kernels=kernels)
        self.out = Linear(config.q_size, config.hidden_size, bias=config.attn_out_bias, kernels=kernels)
        self.q_norm = make_norm(config, config.head_dim, kernels) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim, kernels) if config.qk_norm else None
        self.spec = AttentionSpec(
            scale=config.attention_scale / (layer + 1 if config.scale_by_layer else 1),
            window=config.window(layer),
            alibi=alibi_slopes(config.num_heads) if config.positions == "alibi" else None,
            alibi_scale=config.alibi_scale,
        )

    def forward(self, x: Tensor, rotation: Rotation | None, cache: CacheView | None, residual: Tensor | None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [..., H + 2K, D]
        shared = heads.shape[-2] // (self.share + 2)
        q, k, v = heads.split((shared * self.share, shared, shared), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = self.kernels.rotate(q, *rotation), self.kernels.rotate(k, *rotation)
        if cache is None:
            mixed = self.kernels.causal_attention(q, k, v, self.spec)
        else:
            self.kernels.store(cache, self.layer, k, v)
            mixed = self.kernels.cached_attention(q, cache, self.layer, self.spec)
        return self.out(mixed.flatten(-2), residual=residual)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two products with an activation between; gated: the first makes gate and up."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.activation, self.gated = kernels, config.activation, config.gated
        rows = config.intermediate_size * (2 if config.gated else 1)
        self.up = Linear(config.hidden_size, rows, bias=config.mlp_bias, kernels=kernels)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, kernels=kernels)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.gated:
            middle = self.kernels.activate(self.up(x), self.activation, gated=True)
        else:
            middle = self.up(x, activation=self.activation)
        return self.down(middle, residual=residual)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One block.

    sequential:  x -> + attn(norm(x)) -> + mlp(norm(x))          parallel:  x -> + attn(norm(x)) + mlp(norm'(x))
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.parallel, self.multiplier = config.residual == "parallel", config.residual_multiplier
        self.attn_norm = make_norm(config, config.hidden_size, kernels)
        self.attn = Attention(config, layer, kernels)
        self.mlp_norm = None if config.shared_norm else make_norm(config, config.hidden_size, kernels)
        self.mlp = MLP(config, kernels)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: CacheView | None) -> Tensor:
        normed = self.attn_norm(x)
        if self.parallel:
            attended = self._add(x, lambda residual: self.attn(normed, rotation, cache, residual))
            second = normed if self.mlp_norm is None else self.mlp_norm(x)
            return self._add(attended, lambda residual: self.mlp(second, residual))
        assert self.mlp_norm is not None
        x = self._add(x, lambda residual: self.attn(normed, rotation, cache, residual))
        second = self.mlp_norm(x)
        return self._add(x, lambda residual: self.mlp(second, residual))

    def _add(self, x: Tensor, branch: Callable[[Tensor | None], Tensor]) -> Tensor:
        """x + branch; the branch's last product adds it on the way unless there is a multiplier between."""
        return branch(x) if self.multiplier == 1.0 else x + branch(None) * self.multiplier


class Decoder(nn.Module):
    """Token ids to logits. Without a cache: causal over whole sequences, differentiable. With one: an engine step."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.embed = Embedding(config.vocab_size, config.hidden_size, kernels=kernels)
        self.positions = None
        if config.positions == "learned":
            self.positions = Embedding(config.max_positions, config.hidden_size, kernels=kernels)
        self.layers = nn.ModuleList(Layer(config, i, kernels) for i in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size, kernels)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, kernels=kernels)
        self._rope = inverse_frequencies(config.rope) if config.rope is not None else None

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [B, T] -> logits [B, T, V] of whole sequences from position 0."""
        positions = torch.arange(token_ids.shape[-1], device=token_ids.device)
        return self.logits(self.hidden(token_ids, positions))

    def hidden(self, token_ids: Tensor, positions: Tensor, cache: CacheView | None = None) -> Tensor:
        """int64 [B, T] and positions [T] without a cache, both [T] with one -> the last hidden states [..., M]."""
        x = self.embed(token_ids)
        if self.config.embedding_multiplier != 1.0:
            x = x * torch.tensor(self.config.embedding_multiplier, dtype=x.dtype, device=x.device)
        if self.positions is not None:
            x = x + self.positions(positions)
        rotation = self._rotation(positions)
        if cache is None:
            return self._blocks(x, rotation, cache)
        return self.kernels.run(self, self._blocks, x, rotation, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., M] -> [..., V]."""
        head = self.lm_head
        logits: Tensor = self.kernels.linear(hidden, self.embed.weight, None) if head is None else head(hidden)
        return logits / self.config.logits_divisor if self.config.logits_divisor != 1.0 else logits

    def _blocks(self, x: Tensor, rotation: Rotation | None, cache: CacheView | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotation, cache)
        return self.norm(x)  # type: ignore[no-any-return]

    def _rotation(self, positions: Tensor) -> Rotation | None:
        """cos and sin [T, 1, R / 2] in fp32, once a step for all layers."""
        if self._rope is None:
            return None
        frequencies, factor = self._rope
        angles = positions.float()[:, None, None] * frequencies.to(positions.device)
        return angles.cos() * factor, angles.sin() * factor
