"""The child of a benchmark that runs writehead: `python -m writehead.bench.child`, see worker.py.

Requests: load (model, heads, weights, kernels, kv_cache_dtype), open (batch, context, capacity), decode (steps),
prefill (batch, tokens, capacity), close.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from writehead import kernels as kernel_backends
from writehead.api import LLM
from writehead.bench import shapes
from writehead.bench.peer_process import serve
from writehead.bench.subject import Run, Subject, random_engine, with_cache
from writehead.build import cache_bytes_per_token, free_memory
from writehead.engine.engine import Engine
from writehead.errors import UsageError, WriteheadError
from writehead.kernels import Kernels
from writehead.models.config import ModelConfig

OWN, MULTI_HEAD, BROADCAST, QUERIES = "own", "multi-head", "broadcast", "queries"
"""What to load: the checkpoint's own weights, or noise in its shape with heads of that kind."""


def broadcasting(kernels: Kernels) -> Kernels:
    """The same kernels, but attention expands the shared head to every query head, as most engines compute it."""
    changed = copy.copy(kernels)
    changed.cached_attention = kernel_backends.load("reference-broadcast").cached_attention  # type: ignore[method-assign]
    return changed


class Child:
    """Holds a model, and one set of sequences at a time."""

    def __init__(self) -> None:
        self._loaded: Subject | None = None
        self._run: Run | None = None

    def load(
        self, *, model: str | None, heads: str, weights: str, kernels: str, kv_cache_dtype: str, seed: int
    ) -> dict[str, Any]:
        """Make the model."""
        self._seed, self._expands = seed, heads == BROADCAST
        if heads == OWN:
            engine = _own_engine(model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
        else:
            config = shapes.structure(model)
            config = replace(config, num_kv_heads=config.num_heads if heads == MULTI_HEAD else 1)
            backend = kernel_backends.load(kernels)
            backend = broadcasting(backend) if heads == BROADCAST else backend
            engine = random_engine(
                config, weights=weights, kernels=backend, kv_cache_dtype=kv_cache_dtype, num_seqs=1, length=1
            )
        self._loaded = Subject(model=str(model), engine=engine, load_seconds=0.0)
        return {"weight_bytes": self._loaded.weight_bytes}

    def open(self, *, batch: int, context: int, capacity: int) -> dict[str, Any]:
        """Sequences that decode from `context` tokens on, in a cache of `capacity` tokens for each of them."""
        self.close()
        engine = self._engine(batch, capacity)
        subject = Subject(model="", engine=engine, load_seconds=0.0)
        self._run = Run(engine, subject.prompts([context] * batch, self._seed), capacity - context)
        self._run.assume_prompts()
        return {"cache_bytes": engine.cache.num_bytes}

    def decode(self, *, steps: int) -> dict[str, Any]:
        """Seconds of a step: the mean of `steps`."""
        assert self._run is not None, "open comes first"
        return {"seconds": fmean(self._run.decode(steps))}

    def prefill(self, *, batch: int, tokens: int, capacity: int) -> dict[str, Any]:
        """Seconds until all sequences have their first token."""
        self.close()
        engine = self._engine(batch, capacity)
        subject = Subject(model="", engine=engine, load_seconds=0.0)
        return {"seconds": Run(engine, subject.prompts([tokens] * batch, self._seed), 2).read_prompts()}

    def close(self) -> dict[str, Any]:
        """Forget the sequences and their cache."""
        self._run = None
        gc.collect()
        return {}

    def _engine(self, batch: int, capacity: int) -> Engine:
        """An engine with that cache. Raises UsageError, with the numbers, if it does not fit what is free."""
        assert self._loaded is not None, "load comes first"
        config = self._loaded.config
        dtype = self._loaded.engine.cache.keys[0].dtype
        cache = cache_bytes_per_token(config, dtype) * batch * capacity
        working = working_bytes(config, batch, capacity, expands=self._expands)
        weights, free = self._loaded.weight_bytes, free_memory()
        if cache + working > free:
            raise UsageError(
                f"{batch} sequences of {capacity} tokens need a cache of {cache / 1e9:.1f} GB, and {working / 1e9:.1f} "
                f"GB more to compute in, beside the weights of {weights / 1e9:.1f} GB; {free / 1e9:.1f} GB are free"
            )
        if capacity > config.max_positions:
            raise UsageError(f"{capacity} tokens are more than the model's {config.max_positions} positions")
        return with_cache(self._loaded.engine, batch, capacity)


def working_bytes(config: ModelConfig, batch: int, length: int, *, expands: bool) -> int:
    """Roughly what one decoding step holds beside weights and cache: logits, scores, and keys and values expanded."""
    logits = 3 * batch * config.vocab_size * 4
    scores = 2 * batch * config.num_heads * length * 4
    return logits + scores + expands * 2 * batch * config.q_size * length * 4


def _own_engine(model: str | None, *, weights: str, kernels: str, kv_cache_dtype: str) -> Engine:
    if model is not None and model.startswith(shapes.PREFIX):
        backend = kernel_backends.load(kernels)
        config = shapes.structure(model)
        return random_engine(
            config, weights=weights, kernels=backend, kv_cache_dtype=kv_cache_dtype, num_seqs=1, length=1
        )
    return LLM(
        model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, max_num_seqs=1, max_model_len=16
    ).engine


def prefer_to_be_killed() -> None:
    """Let the system end this process before any other when memory runs out: its parent will report it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


if __name__ == "__main__":
    prefer_to_be_killed()
    serve(Child(), refusals=(WriteheadError,))
