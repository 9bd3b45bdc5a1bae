"""What a request returns depends on the request alone: the native kernels under schedules that hypothesis draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.native import threads
from writehead.build import make_decoder
from writehead.cache import KVCache
from writehead.engine.batch import build_batch
from writehead.engine.request import Request, SamplingParams
from writehead.engine.scheduler import Grant, Step
from writehead.engine.sequence import Sequence
from writehead.kernels import Format, PackedWeight
from writehead.kernels.cpu.kernels import CPUKernels
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.models.layers import Embedding, LayerNorm, Linear
from writehead.text import Tokenizer

CONFIG = ModelConfig(
    family="gpt_bigcode", vocab_size=300, hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=32,
    intermediate_size=200, max_positions=400, positions="learned", activation="gelu_tanh", attention_scale=0.25,
    bos_id=0, eos_ids=(0,),
)  # fmt: skip
FORMATS = [Format("int8", packed=True), Format("int4", 32, packed=True), Format("fp32", packed=True)]
LENGTHS = (330, 70, 9, 1)
TOKENIZER = Tokenizer.stand_in(CONFIG.vocab_size)


def random_decoder(format: Format) -> Decoder:
    """Noise in the format, under the native kernels."""
    generator = torch.Generator().manual_seed(7)
    model = make_decoder(CONFIG, CPUKernels())
    for name, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            value = torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim == 2 else 1.0)
            if isinstance(module, Linear | Embedding) and parameter.ndim == 2 and name != "positions":
                del module._parameters[key]
                setattr(module, key, PackedWeight.pack(value, format))
            else:
                assert isinstance(module, Linear | Embedding | LayerNorm)
                setattr(module, key, torch.nn.Parameter(value, requires_grad=False))
    return model.eval()


DECODERS = {str(format): random_decoder(format) for format in FORMATS}
TEXTS = [torch.randint(300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


@torch.inference_mode()
def logits(decoder: Decoder, texts: list[list[int]], schedule: list[list[int]]) -> list[torch.Tensor]:
    """Logits [T, V] of each text, read in steps that give each of them so many tokens, then the rest of all at once."""
    cache = KVCache(
        num_layers=2, num_kv_heads=1, head_dim=32, num_rows=len(texts), capacity=400, dtype=torch.bfloat16
    )  # fmt: skip
    sequences = []
    for row, text in enumerate(texts):
        request = Request(id=row, prompt_ids=tuple(text), params=SamplingParams(), max_length=400)
        sequences.append(Sequence(request, 0, TOKENIZER))
        sequences[-1].row = row
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in [*schedule, list(map(len, texts))]:
        given = [Grant(s, min(n, s.num_pending)) for s, n in zip(sequences, counts, strict=True) if n and s.num_pending]
        if not given:
            continue
        step = Step(tuple(sorted(given, key=lambda g: (g.num_new, g.sequence.request.id))))
        batch = build_batch(step, cache)
        out = decoder.logits(decoder.hidden(batch.token_ids, batch.positions, batch.view))
        for grant, part in zip(step.grants, out.split([g.num_new for g in step.grants]), strict=True):
            found[grant.sequence.request.id].append(part)
            grant.sequence.num_computed += grant.num_new
    return [torch.cat(parts) for parts in found]


ALONE = {name: [logits(decoder, [text], [])[0] for text in TEXTS] for name, decoder in DECODERS.items()}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=25)
@given(
    schedule=st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), max_size=12),
    mates=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    count=st.integers(1, 4),
)
def test_logits_have_the_same_bytes_under_any_schedule(
    name: str, schedule: list[list[int]], mates: list[int], count: int
) -> None:
    with threads(count):
        found = logits(DECODERS[name], [TEXTS[i] for i in mates], [counts[: len(mates)] for counts in schedule])
    for i, ours in zip(mates, found, strict=True):
        assert torch.equal(ours, ALONE[name][i])
