"""Decoders of noise under the native kernels, and what they say when texts are read in steps."""

from __future__ import annotations

import torch
from torch import Tensor

from writehead.build import make_cache, make_decoder
from writehead.cache import KVCache
from writehead.engine.batch import build_batch
from writehead.engine.request import Request, SamplingParams
from writehead.engine.scheduler import Grant, Step
from writehead.engine.sequence import Sequence
from writehead.kernels import Format, Kernels, PackedWeight
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.models.layers import Embedding, LayerNorm, Linear, RMSNorm
from writehead.text import Tokenizer


def random_decoder(config: ModelConfig, format: Format, kernels: Kernels, *, seed: int = 7) -> Decoder:
    """Noise in the format."""
    generator = torch.Generator().manual_seed(seed)
    model = make_decoder(config, kernels)
    for name, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            value = torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim == 2 else 1.0)
            if isinstance(module, Linear | Embedding) and parameter.ndim == 2 and name != "positions":
                del module._parameters[key]
                setattr(module, key, PackedWeight.pack(value, format))
            else:
                assert isinstance(module, Linear | Embedding | LayerNorm | RMSNorm)
                setattr(module, key, torch.nn.Parameter(value, requires_grad=False))
    return model.eval()


def random_texts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """Token ids, a text of each length."""
    return [torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


class Reader:
    """Texts in the rows of a cache, read step by step."""

    def __init__(
        self,
        decoder: Decoder,
        texts: list[list[int]],
        cache: KVCache | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = decoder.config
        self.decoder, self.texts = decoder, texts
        self.cache = cache or make_cache(config, num_rows=len(texts), capacity=400, dtype=dtype)
        self.found: list[list[Tensor]] = [[] for _ in texts]
        self._sequences = []
        for row, text in enumerate(texts):
            request = Request(id=row, prompt_ids=tuple(text), params=SamplingParams(), max_length=400)
            self._sequences.append(Sequence(request, 0, Tokenizer.stand_in(config.vocab_size)))
            self._sequences[-1].row = row

    def step(self, counts: list[int]) -> None:
        """So many tokens of each text, or what is left of it."""
        pairs = zip(self._sequences, counts, strict=True)
        given = [Grant(s, min(n, s.num_pending)) for s, n in pairs if n and s.num_pending]
        if not given:
            return
        step = Step(tuple(sorted(given, key=lambda g: (g.num_new, g.sequence.request.id))))
        batch = build_batch(step, self.cache)
        out = self.decoder.logits(self.decoder.hidden(batch.token_ids, batch.positions, batch.view))
        for grant, part in zip(step.grants, out.split([g.num_new for g in step.grants]), strict=True):
            self.found[grant.sequence.request.id].append(part)
            grant.sequence.num_computed += grant.num_new

    def rest(self) -> list[Tensor]:
        """Read what is left of all at once -> the logits [T, V] of each text."""
        self.step(list(map(len, self.texts)))
        return [torch.cat(parts) for parts in self.found]


def logits(
    decoder: Decoder, texts: list[list[int]], schedule: list[list[int]], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Logits [T, V] of each text, read in steps that give each of them so many tokens, then the rest of all at once."""
    with torch.inference_mode():
        reader = Reader(decoder, texts, dtype=dtype)
        for counts in schedule:
            reader.step(counts)
        return reader.rest()
