"""What a request returns depends on the request alone: the native kernels under schedules that hypothesis draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.native import logits, random_decoder, random_texts
from tests.unit.kernels.native import threads
from writehead.kernels import Format
from writehead.kernels.cpu.kernels import CPUKernels
from writehead.models.config import ModelConfig

CONFIG = ModelConfig(
    family="gpt_bigcode", vocab_size=300, hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=32,
    intermediate_size=200, max_positions=400, positions="learned", activation="gelu_tanh", attention_scale=0.25,
    bos_id=0, eos_ids=(0,),
)  # fmt: skip
FORMATS = [Format("int8", packed=True), Format("int4", 32, packed=True), Format("fp32", packed=True)]
LENGTHS = (330, 70, 9, 1)


DECODERS = {str(format): random_decoder(CONFIG, format, CPUKernels()) for format in FORMATS}
TEXTS = random_texts(LENGTHS, CONFIG.vocab_size)
CACHES = {"bf16": torch.bfloat16, "int8": torch.int8}
ALONE = {
    (name, cache): [logits(decoder, [text], [], dtype)[0] for text in TEXTS]
    for name, decoder in DECODERS.items()
    for cache, dtype in CACHES.items()
}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=50)
@given(
    schedule=st.lists(
        st.tuples(st.lists(st.integers(0, 40) | st.integers(0, 1), min_size=4, max_size=4), st.integers(1, 5)),
        max_size=9,
    ),
    cache=st.sampled_from(list(CACHES)),
    mates=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    count=st.integers(1, 4),
)
def test_logits_have_the_same_bytes_under_any_schedule(
    name: str, schedule: list[tuple[list[int], int]], cache: str, mates: list[int], count: int
) -> None:
    steps = [counts[: len(mates)] for counts, times in schedule for _ in range(times)]  # some repeated natively
    with threads(count):
        found = logits(DECODERS[name], [TEXTS[i] for i in mates], steps, CACHES[cache])
    for i, ours in zip(mates, found, strict=True):
        assert torch.equal(ours, ALONE[name, cache][i])
