"""What is measured: a model in its engine, driven a step at a time from token ids.

A step is all that a user waits for: scheduling, the forward pass, sampling and the text of the token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from writehead import kernels as kernel_backends
from writehead.api import LLM
from writehead.bench import shapes
from writehead.bench.cost import num_bytes
from writehead.build import build, make_cache
from writehead.engine.engine import Engine
from writehead.engine.request import Request, SamplingParams
from writehead.errors import UsageError
from writehead.kernels import Kernels, cache_dtype, parse_format, write_slots
from writehead.models.config import ModelConfig
from writehead.text import Tokenizer

Ids = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine and what it was made from."""

    model: str
    engine: Engine
    load_seconds: float

    @property
    def config(self) -> ModelConfig:
        """The model's structure."""
        return self.engine.decoder.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are held, tied ones once."""
        modules = self.engine.decoder.modules()
        held = {id(v): v for m in modules for v in (*m.parameters(recurse=False), *vars(m).values())}
        return sum(num_bytes(value) for value in held.values() if not isinstance(value, dict))

    def resized(self, num_seqs: int, length: int) -> Subject:
        """The same model with another cache. The old one lives until the old subject goes."""
        engine = with_cache(self.engine, num_seqs, length)
        return replace(self, engine=engine)

    def prompts(self, lengths: Seq[int], seed: int) -> list[Ids]:
        """Random token ids, a prompt of each length; the same for the same seed, whatever the model's dtype."""
        generator = torch.Generator().manual_seed(seed)
        low = min(5, self.engine.num_sampleable - 1)  # the first ids are control tokens in most vocabularies
        return [torch.randint(low, self.engine.num_sampleable, (n,), generator=generator).tolist() for n in lengths]


def open_subject(
    model: str | None, *, weights: str, kernels: str, kv_cache_dtype: str = "auto", num_seqs: int, length: int
) -> Subject:
    """A model with room for `num_seqs` sequences of `length` tokens.

    `model` is what `LLM` takes, or `random:SHAPE`. Raises UsageError, with the numbers, if there is no such room.
    """
    start = time.perf_counter()
    if model is not None and model.startswith(shapes.PREFIX):
        config = shapes.structure(model)
        backend = kernel_backends.load(kernels)
        engine = random_engine(
            config, weights=weights, kernels=backend, kv_cache_dtype=kv_cache_dtype, num_seqs=num_seqs, length=length
        )
    else:
        engine = LLM(
            model, weights=weights, kernels=kernels, kv_cache_dtype=kv_cache_dtype, max_model_len=length,
            max_num_seqs=num_seqs,
        ).engine  # fmt: skip
    if engine.cache.num_rows < num_seqs:
        raise UsageError(
            f"{num_seqs} sequences of {length} tokens do not fit the memory: the cache has room for "
            f"{engine.cache.num_rows} ({engine.cache.num_bytes / 1e9:.1f} GB); use a smaller batch or a shorter context"
        )
    return Subject(model=model or "the model in the box", engine=engine, load_seconds=time.perf_counter() - start)


def random_engine(
    config: ModelConfig, *, weights: str, kernels: Kernels, kv_cache_dtype: str = "auto", num_seqs: int, length: int
) -> Engine:
    """An engine around weights that are noise. Raises UsageError if weights or cache find no memory."""
    if length > config.max_positions:
        raise UsageError(f"{length} tokens are more than the {config.max_positions} positions of the model; use fewer")
    dtype = cache_dtype(kv_cache_dtype, parse_format(weights, packs_floats=kernels.packs_floats))
    decoder = build(shapes.noise_source(config), weights=weights, kernels=kernels)
    cache = make_cache(config, num_rows=num_seqs, capacity=length, dtype=dtype)
    tokenizer = Tokenizer.stand_in(config.vocab_size)
    return Engine(decoder, tokenizer, cache)


def with_cache(engine: Engine, num_seqs: int, length: int) -> Engine:
    """An engine around the same decoder, with a cache of that size."""
    dtype = engine.cache.keys[0].dtype
    cache = make_cache(engine.decoder.config, num_rows=num_seqs, capacity=length, dtype=dtype)
    return Engine(engine.decoder, engine.tokenizer, cache)


class Run:
    """Greedy sequences in flight, for exactly `new` tokens each. `close` leaves the engine empty."""

    def __init__(self, engine: Engine, prompts: Seq[Ids], new: int) -> None:
        self.engine = engine
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        self.sequences = [
            sequence
            for i, ids in enumerate(prompts)
            for sequence in engine.add(
                Request(id=i, prompt_ids=tuple(ids), params=params, max_length=len(ids) + new, stop_ids=frozenset())
            )
        ]

    def read_prompts(self) -> float:
        """Step until every sequence has its first token -> seconds."""
        start = time.perf_counter()
        while any(s.num_output == 0 for s in self.sequences):
            self.engine.step()
        return time.perf_counter() - start

    def assume_prompts(self) -> None:
        """Fill the cache with noise instead of reading the prompts, so that the next step decodes at that length.

        Memory that was never written reads faster than any cache: every slot is written. Call it on an empty engine,
        where the sequences will take the first rows.
        """
        cache = self.engine.cache
        for row, sequence in enumerate(self.sequences):
            sequence.num_computed = sequence.num_prompt - 1
            cache.reserve(row, sequence.num_computed)
        longest = max(s.num_computed for s in self.sequences)
        noise = write_slots(torch.randn(longest, self.engine.decoder.config.head_dim), cache.keys[0].dtype)
        for tensor in (*cache.keys, *cache.values):
            tensor[: len(self.sequences), :, :longest] = noise

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of the next steps."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - start)
        return times

    def close(self) -> None:
        """End what still runs and free its rows."""
        for sequence in self.sequences:
            self.engine.cancel(sequence)
        assert self.engine.step() == []
