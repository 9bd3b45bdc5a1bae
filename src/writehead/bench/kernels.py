"""Each operation of the loaded kernels, in GB/s and GOP/s, as a share of what the machine can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from writehead import kernels as kernel_backends
from writehead.bench import cost, machine
from writehead.bench.limits import Limits
from writehead.bench.plot import Plot
from writehead.bench.report import Report
from writehead.bench.subject import random_engine
from writehead.bench.timing import at_least, median
from writehead.build import make_cache
from writehead.kernels import CacheView, Group, write_slots
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder

COLUMNS = {
    "op": "operation of the kernels' contract",
    "of": "where in the model, or batch x context for attention",
    "rows": "tokens of the step",
    "us": "microseconds of one call, median",
    "mbytes": "millions of bytes that it must read and write: weights, inputs, outputs, cache",
    "gb_s": "those bytes in a second",
    "gop_s": "operations in a second, in thousands of millions; a multiply-add is two",
    "bandwidth": "gb_s as a share of the measured read bandwidth",
    "arithmetic": "gop_s as a share of the measured arithmetic of the weights' type",
    "limit": "which of the two bounds it here",
    "share": "the least time that this limit allows / the time measured",
}

PLOT = Plot(x="rows", y="share", by=("op", "of"), kind="line", label="share of the limit")

Call = Callable[[int], tuple[Seq[Any], Tensor]]
"""A layer's number -> the arguments of the operation and its result."""


@torch.inference_mode()
def measure(
    report: Report, config: ModelConfig, limits: Limits, *, weights: str, kernels: str, kv_cache_dtype: str = "auto",
    rows: Seq[int], attention: Seq[tuple[int, int]], seconds: float,
) -> None:  # fmt: skip
    """Rows for the matrix products and norms at each number of rows, and for attention at each (batch, context)."""
    config = replace(config, num_layers=_layers(config), windowed_layers=None)
    backend = kernel_backends.load(kernels)
    engine = random_engine(
        config, weights=weights, kernels=backend, kv_cache_dtype=kv_cache_dtype, num_seqs=1, length=1
    )
    decoder = engine.decoder
    for name, call in _products(decoder).items():
        for count in rows:
            _row(report, limits, "linear", name, count, call(count), config.num_layers, seconds)
    for count in rows:
        norm = "layer_norm" if config.norm == "layer" else "rms_norm"
        _row(report, limits, norm, "norm", count, _norm(decoder, count), 1, seconds)
    for batch, context in attention:
        call_attention = _attention(decoder, engine.cache.keys[0].dtype, batch, context)
        name = f"{batch} x {context}"
        _row(report, limits, "cached_attention", name, batch, call_attention, config.num_layers, seconds)


def _layers(config: ModelConfig) -> int:
    """So many layers that the weights of one have left every cache when its turn comes again."""
    each = 4 * config.hidden_size * (2 * config.q_size + 2 * config.intermediate_size)
    return max(2, min(config.num_layers, -(-2 * machine.last_cache() // each)))


def _products(decoder: Decoder) -> dict[str, Callable[[int], Call]]:
    """Place of a matrix product -> for a number of rows, the call on a layer."""

    def at(path: str) -> Callable[[int], Call]:
        modules: list[Any] = [layer.get_submodule(path) for layer in decoder.layers]

        def for_rows(rows: int) -> Call:
            width = decoder.config.hidden_size
            size = {"attn.out": decoder.config.q_size, "mlp.down": decoder.config.intermediate_size}.get(path, width)
            x = _input(decoder, rows, size)

            def call(layer: int) -> tuple[Seq[Any], Tensor]:
                module = modules[layer]
                arguments = (x, module.weight, module.bias)
                return arguments, decoder.kernels.linear(*arguments)

            return call

        return for_rows

    def head(rows: int) -> Call:
        x = _input(decoder, rows, decoder.config.hidden_size)
        weight = decoder.embed.weight if decoder.lm_head is None else decoder.lm_head.weight
        return lambda _: ((x, weight, None), decoder.kernels.linear(x, weight, None))

    return {path: at(path) for path in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")} | {"lm_head": head}


def _input(decoder: Decoder, *shape: int) -> Tensor:
    weight: Any = decoder.norm.weight
    return torch.randn(*shape, dtype=weight.dtype)


def _norm(decoder: Decoder, rows: int) -> Call:
    x, norm = _input(decoder, rows, decoder.config.hidden_size), decoder.norm
    return lambda _: ((x, norm.weight, getattr(norm, "bias", None)), norm(x))


def _attention(decoder: Decoder, dtype: torch.dtype, batch: int, context: int) -> Call:
    """One new token for each of `batch` sequences of that length."""
    config = decoder.config
    cache = make_cache(config, num_rows=batch, capacity=context, dtype=dtype)
    noise = write_slots(torch.randn(context, config.head_dim), dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor[:] = noise
    view = CacheView(
        keys=cache.keys,
        values=cache.values,
        rows=torch.arange(batch),
        slots=torch.full((batch,), context - 1),
        groups=(Group(num_new=1, rows=slice(0, batch), lengths=(context,) * batch),),
    )
    q = _input(decoder, batch, config.num_heads, config.head_dim)
    layers: list[Any] = list(decoder.layers)

    def call(layer: int) -> tuple[Seq[Any], Tensor]:
        arguments = (q, view, layer, layers[layer].attn.spec)
        return arguments, decoder.kernels.cached_attention(*arguments)

    return call


def _row(
    report: Report, limits: Limits, op: str, place: str, rows: int, call: Call, num_layers: int, seconds: float
) -> None:
    turn = itertools.cycle(range(num_layers))
    needs = cost.of(op, *call(0))
    took = median(at_least(lambda: call(next(turn)), seconds=seconds, rounds=2 * num_layers))
    least, limit = limits.seconds(needs)
    report.add(
        op=op, of=place, rows=rows, us=1e6 * took, mbytes=needs.bytes / 1e6, gb_s=needs.bytes / took / 1e9,
        gop_s=needs.ops / took / 1e9, bandwidth=needs.bytes / took / 1e9 / limits.read_gb_s,
        arithmetic=needs.ops / took / 1e9 / limits.gop_s(needs.dtype), limit=limit, share=least / took,
    )  # fmt: skip
