"""A decoder of random weights and an engine around it, made in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models

from writehead import kernels
from writehead.build import make_decoder
from writehead.cache import KVCache
from writehead.engine.engine import Engine, Event
from writehead.engine.request import Request, SamplingParams
from writehead.engine.sequence import Sequence
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.text import Tokenizer
from writehead.text.source import Source

NUM_TOKENS = 60
"""Tokens of the tokenizer: `<0>` to `<59>`. The model has four rows more: padding."""

NUM_POSITIONS = 64

POISON = 61
"""The embedding of this token, a padding row, is NaN."""

CONFIG = ModelConfig(
    family="test", vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=4,
    intermediate_size=32, max_positions=NUM_POSITIONS, positions="learned", attention_scale=0.5, tie_embeddings=False,
)  # fmt: skip


@cache
def decoder() -> Decoder:
    """The one decoder, with weights far enough apart that its texts are not one token."""
    made = make_decoder(CONFIG, kernels.load("reference")).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    made.get_parameter("embed.weight").data[POISON] = torch.nan
    return made.eval().requires_grad_(False)


@cache
def tokenizer() -> Tokenizer:
    """A vocabulary that spells every id."""
    backend = tokenizers.Tokenizer(models.BPE({f"<{i}>": i for i in range(NUM_TOKENS)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(Source(origin="a test", backend=backend))


class DirtyCache(KVCache):
    """Free slots hold large numbers instead of zeros: a result that reads one is far off."""

    def _clear(self, row: int, start: int) -> None:
        end = self._used[row]
        super()._clear(row, start)
        for tensor in (*self.keys, *self.values):
            tensor[row, :, start:end] = 1e4


def make_engine(
    *, num_rows: int = 4, max_step_tokens: int = 64, dirty: bool = True, model: Decoder | None = None
) -> Engine:
    """An engine with an empty cache."""
    storage = (DirtyCache if dirty else KVCache)(
        num_layers=CONFIG.num_layers, num_kv_heads=1, slot_size=4, num_rows=num_rows, capacity=NUM_POSITIONS,
        dtype=torch.float32,
    )  # fmt: skip
    return Engine(model or decoder(), tokenizer(), storage, max_step_tokens=max_step_tokens)


def request(
    prompt: Iterable[int],
    *,
    id: int = 0,
    stop_ids: Iterable[int] = (),
    max_length: int = NUM_POSITIONS,
    **params: Any,
) -> Request:
    """A request, greedy unless told otherwise."""
    asked = SamplingParams(**{"temperature": 0.0, **params})
    stops = frozenset(stop_ids) | asked.stop_ids
    return Request(id=id, prompt_ids=tuple(prompt), params=asked, max_length=max_length, stop_ids=stops)


def run(engine: Engine, *requests: Request) -> list[list[Sequence]]:
    """Run these requests to their end, together."""
    sequences = [engine.add(r) for r in requests]
    finish(engine)
    return sequences


def finish(engine: Engine, *, max_steps: int = 10_000) -> list[Event]:
    """Step until nothing is left, and a step more."""
    events: list[Event] = []
    for _ in range(max_steps):
        events += engine.step()
        if not engine.scheduler.waiting and all(s.finish_reason for s in engine.scheduler.running):
            assert engine.step() == []
            return events
    raise AssertionError(f"not done after {max_steps} steps")


def alone(asked: Request) -> list[Sequence]:
    """The sequences of a request that has an engine for itself."""
    return run(make_engine(), asked)[0]


@torch.inference_mode()
def naive_greedy(prompt: Iterable[int], count: int) -> list[int]:
    """What whole forward passes without a cache say, one a token."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(count):
        tokens.append(int(decoder()(torch.tensor([tokens]))[0, -1, :NUM_TOKENS].argmax()))
    return tokens[start:]
