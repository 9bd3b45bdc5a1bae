"""Our side of a comparison: a decoder run in every way that the engine can run it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from writehead import kernels as kernel_backends
from writehead.build import make_cache, make_decoder
from writehead.cache import KVCache
from writehead.engine.batch import build_batch
from writehead.engine.engine import Engine
from writehead.engine.request import Request, SamplingParams
from writehead.engine.scheduler import Grant, Step
from writehead.engine.sequence import Sequence
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.text import Tokenizer

Ids = list[int]


class Subject:
    """A decoder, with the tokenizer that the engine's sequences need. It owns no cache between calls."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer

    @torch.inference_mode()
    def whole(self, text: Ids) -> Tensor:
        """fp32 logits [T, V] of one sequence, computed at once without a cache."""
        return self.decoder(torch.tensor([text]))[0].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def stepwise(self, texts: Seq[Ids], prompts: Seq[int]) -> list[Tensor]:
        """fp32 logits [T, V] of each sequence as the engine computes them: first `prompts[i]` tokens, then one a step.

        All sequences share each step, ragged, and drop out as they end.
        """
        cache = self._cache(len(texts), max(map(len, texts)))
        sequences = [self._sequence(i, text) for i, text in enumerate(texts)]
        found: list[list[Tensor]] = [[] for _ in texts]
        while open_ := [s for s in sequences if s.num_pending]:
            grants = [Grant(s, 1 if s.num_computed else prompts[s.request.id]) for s in open_]
            step = Step(tuple(sorted(grants, key=lambda g: (g.num_new, g.sequence.request.id))))
            batch = build_batch(step, cache)
            logits = self.decoder.logits(self.decoder.hidden(batch.token_ids, batch.positions, batch.view)).float()
            for grant, part in zip(step.grants, logits.split([g.num_new for g in step.grants]), strict=True):
                found[grant.sequence.request.id].append(part)
                grant.sequence.num_computed += grant.num_new
        return [torch.cat(parts) for parts in found]

    def greedy(self, prompts: Seq[Ids], max_new_tokens: int) -> list[Ids]:
        """What the engine generates for these prompts in one batch, past any end token.

        Steps are too small for all prompts at once, so that the longer ones are read in chunks.
        """
        capacity = max(map(len, prompts)) + max_new_tokens
        step = max(len(prompts), sum(map(len, prompts)) // 2)
        engine = Engine(self.decoder, self.tokenizer, self._cache(len(prompts), capacity), max_step_tokens=step)
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
        requests = [
            Request(id=i, prompt_ids=tuple(p), params=params, max_length=capacity) for i, p in enumerate(prompts)
        ]
        sequences = [s for request in requests for s in engine.add(request)]
        while any(s.finish_reason is None for s in sequences):
            engine.step()
        return [s.output_ids for s in sequences]

    @property
    def num_sampleable(self) -> int:
        """Rows of the vocabulary that the engine may choose; the rest is padding."""
        return min(self.tokenizer.vocab_size, self.decoder.config.vocab_size)

    def _cache(self, num_rows: int, capacity: int) -> KVCache:
        dtype = next(self.decoder.norm.parameters()).dtype
        return make_cache(self.decoder.config, num_rows=num_rows, capacity=capacity, dtype=dtype)

    def _sequence(self, row: int, text: Ids) -> Sequence:
        request = Request(id=row, prompt_ids=tuple(text), params=SamplingParams(), max_length=len(text))
        sequence = Sequence(request, 0, self.tokenizer)
        sequence.row = row
        return sequence


def with_kernels(decoder: Decoder, kernels: str) -> Decoder:
    """The same weights (shared, not copied) under another kernel backend."""
    return _assign(decoder.config, kernels, decoder.state_dict())


def tile_heads(decoder: Decoder, kernels: str) -> Decoder:
    """The multi-head model that computes the same: each key/value head repeated for all query heads that share it.

    Only the fused projections are new memory. The idea is the equivalence test of bigcode/transformers PR #11.
    """
    config = decoder.config
    state = {
        name: _tile(value, config) if ".attn.qkv." in name else value for name, value in decoder.state_dict().items()
    }
    return _assign(replace(config, num_kv_heads=config.num_heads), kernels, state)


def _tile(qkv: Tensor, config: ModelConfig) -> Tensor:
    """Rows q | k | v of K heads -> the same of H heads."""
    q, k, v = qkv.split((config.q_size, config.kv_size, config.kv_size))
    share = config.num_heads // config.num_kv_heads
    heads = [t.unflatten(0, (-1, config.head_dim)).repeat_interleave(share, dim=0).flatten(0, 1) for t in (k, v)]
    return torch.cat([q, *heads])


def _assign(config: ModelConfig, kernels: str, state: dict[str, Tensor]) -> Decoder:
    decoder = make_decoder(config, kernel_backends.load(kernels))
    decoder.load_state_dict(state, strict=True, assign=True)
    return decoder.eval().requires_grad_(False)
