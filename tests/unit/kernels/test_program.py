"""Steps that are kept and repeated give the bytes of steps that are computed, whatever changed in between."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.native import Reader, random_decoder, random_texts
from writehead.build import make_cache
from writehead.engine.engine import Engine
from writehead.engine.request import Request, SamplingParams
from writehead.kernels import Format, PackedWeight
from writehead.kernels.cpu.kernels import CPUKernels
from writehead.models.config import ModelConfig, RopeConfig
from writehead.models.decoder import Decoder, Layer
from writehead.models.layers import LayerNorm
from writehead.text import Tokenizer

MQA = ModelConfig(
    family="test", vocab_size=80, hidden_size=48, num_layers=3, num_heads=4, num_kv_heads=1, head_dim=12,
    intermediate_size=100, max_positions=400, positions="learned", attention_scale=0.3,
)  # fmt: skip
GQA = dataclasses.replace(
    MQA, num_kv_heads=2, positions="rope", rope=RopeConfig(dim=12, original_max_positions=400), norm="rms",
    activation="silu", gated=True, tie_embeddings=False, qkv_bias=False,
)  # fmt: skip
KEPT = {
    "mqa": MQA, "gqa": GQA, "parallel": dataclasses.replace(MQA, residual="parallel"),
    "shared norm": dataclasses.replace(GQA, residual="parallel", shared_norm=True),
    "qk norm": dataclasses.replace(GQA, qk_norm=True),
    "windows": dataclasses.replace(GQA, sliding_window=9, windowed_layers=(True, False, True)),
}  # fmt: skip
NOT_KEPT = {
    "multiplier": dataclasses.replace(GQA, residual_multiplier=0.3, embedding_multiplier=2.0),
    "alibi": dataclasses.replace(MQA, positions="alibi"),
}
INT8 = Format("int8", packed=True)
TEXTS = random_texts((40, 33, 30), MQA.vocab_size)
ONE, THREE = [TEXTS[0]], TEXTS


def make(config: ModelConfig = MQA, kernels: CPUKernels | None = None, seed: int = 7) -> Decoder:
    return random_decoder(config, INT8, kernels or CPUKernels(), seed=seed)


def layer(decoder: Decoder, index: int) -> Any:
    return decoder.layers[index]


def computed(
    decoder: Decoder, texts: list[list[int]], schedule: list[list[int]], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Outside of inference mode no step is kept."""
    with torch.no_grad():
        reader = Reader(decoder, texts, dtype=dtype)
        for counts in schedule:
            reader.step(counts)
        return reader.rest()


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """The layers that ran in Python."""
    found: list[Layer] = []
    forward = Layer.forward

    def noted(self: Layer, *arguments: Any) -> Tensor:
        found.append(self)
        return forward(self, *arguments)

    monkeypatch.setattr(Layer, "forward", noted)
    return found


@pytest.mark.parametrize("texts", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize("name", [*KEPT, *NOT_KEPT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_repeated_steps_have_the_bytes_of_computed_ones(
    name: str, texts: list[list[int]], dtype: torch.dtype, ran: list[Layer]
) -> None:
    decoder = make({**KEPT, **NOT_KEPT}[name])
    schedule = [[5, 3, 2][: len(texts)], *[[1] * len(texts)] * 12, [9] * len(texts), *[[1] * len(texts)] * 5]
    theirs = computed(decoder, texts, schedule, dtype)
    ran.clear()
    with torch.inference_mode():
        reader = Reader(decoder, texts, dtype=dtype)
        for counts in schedule:
            reader.step(counts)
        ours = reader.rest()
    assert same(ours, theirs)
    steps = len(ran) / MQA.num_layers
    # Two prompts, the rest, and of the single tokens the first one and that which is recorded.
    assert steps == (5 if name in KEPT else 20)


def test_several_new_tokens_a_sequence_and_sequences_that_come_and_go(ran: list[Layer]) -> None:
    decoder = make(GQA)
    schedule = [*[[2, 2, 1]] * 4, *[[1, 0, 1]] * 5, *[[1, 1, 0]] * 5, *[[2, 2, 1]] * 4, [0, 0, 3], *[[1, 0, 1]] * 3]
    theirs = computed(decoder, THREE, schedule)
    ran.clear()
    with torch.inference_mode():
        reader = Reader(decoder, THREE)
        for counts in schedule:
            reader.step(counts)
        assert same(reader.rest(), theirs)
    assert len(ran) / MQA.num_layers == 2 + 2 + 1 + 1  # both shapes once and recorded, [0, 0, 3], the rest


def new_weight(decoder: Decoder) -> None:
    layer(decoder, 1).attn.qkv.weight = PackedWeight.pack(torch.randn(72, 48), INT8)


def rewritten_weight(decoder: Decoder) -> None:
    layer(decoder, 1).mlp.up.weight.write(torch.randn(100, 48))


def changed_in_place(decoder: Decoder) -> None:
    layer(decoder, 0).attn_norm.weight.data.mul_(-2)


def new_parameter(decoder: Decoder) -> None:
    layer(decoder, 2).mlp.up.bias = nn.Parameter(torch.randn(100), requires_grad=False)


def other_memory(decoder: Decoder) -> None:
    decoder.norm.bias.data = torch.randn(48)


def moved(decoder: Decoder) -> None:
    decoder.double().float()


def no_bias(decoder: Decoder) -> None:
    layer(decoder, 1).mlp.down.bias = None


def new_module(decoder: Decoder) -> None:
    norm = LayerNorm(48, eps=0.5, bias=False, kernels=decoder.kernels).requires_grad_(False)
    nn.init.ones_(norm.weight)
    layer(decoder, 1).mlp_norm = norm


def other_order(decoder: Decoder) -> None:
    decoder.layers[0], decoder.layers[1] = decoder.layers[1], decoder.layers[0]


def setting(decoder: Decoder) -> None:
    layer(decoder, 1).mlp.activation = "relu"


def hook(decoder: Decoder) -> None:
    layer(decoder, 1).register_forward_hook(lambda *_: torch.ones(1, 48))


CHANGES = [
    new_weight, rewritten_weight, changed_in_place, new_parameter, other_memory, moved, no_bias, new_module,
    other_order, setting, hook,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_decoder_is_computed_again(change: Callable[[Decoder], None]) -> None:
    decoder = make()
    schedule = [[1]] * 6
    before = computed(decoder, ONE, [*schedule, *schedule])
    reader, theirs = Reader(decoder, ONE), Reader(decoder, ONE)
    for counts in schedule:
        with torch.inference_mode():
            reader.step(counts)
        with torch.no_grad():
            theirs.step(counts)
    change(decoder)
    for counts in schedule:
        with torch.inference_mode():
            reader.step(counts)
        with torch.no_grad():
            theirs.step(counts)
    assert same([torch.cat(reader.found[0])], [torch.cat(theirs.found[0])])
    if change is not moved:
        assert not torch.equal(torch.cat(reader.found[0])[6:], before[0][6:12])


@torch.inference_mode()
def test_what_is_kept_goes_with_the_decoder() -> None:
    kernels = CPUKernels()
    decoder = make(kernels=kernels)
    weight = weakref.ref(layer(decoder, 0).attn_norm.weight)
    memory = weakref.ref(layer(decoder, 0).attn.qkv.weight.memory)
    reader = Reader(decoder, ONE)
    for _ in range(5):
        reader.step([1])
    del decoder, reader
    gc.collect()
    assert weight() is None
    assert memory() is None


def test_decoders_that_share_kernels_and_follow_each_other() -> None:
    kernels = CPUKernels()
    for seed in range(6):  # so that objects and memory of one are used again by another
        both = [make(config, kernels, seed) for config in (MQA, KEPT["parallel"])]
        theirs = [computed(decoder, ONE, [[1]] * 8) for decoder in both]
        with torch.inference_mode():
            readers = [Reader(decoder, ONE) for decoder in both]
            for _ in range(8):
                for reader in readers:
                    reader.step([1])
            assert all(same(reader.rest(), expected) for reader, expected in zip(readers, theirs, strict=True))


def test_caches_by_turns_and_after_each_other() -> None:
    decoder = make()
    theirs = [computed(decoder, [text], [[1]] * 8)[0] for text in TEXTS]
    with torch.inference_mode():
        for _ in range(3):
            readers = [Reader(decoder, [text]) for text in TEXTS]
            for _ in range(4):
                for reader in readers:
                    reader.step([1])
                    reader.step([1])
            assert all(torch.equal(reader.rest()[0], t) for reader, t in zip(readers, theirs, strict=True))


def test_results_of_earlier_steps_stay() -> None:
    decoder = make()
    decoder.logits = lambda hidden: hidden  # type: ignore[method-assign]
    reader = Reader(decoder, ONE)
    with torch.inference_mode():
        for _ in range(6):
            reader.step([1])
        rows = [row.clone() for row in reader.found[0]]
        reader.step([1])
    assert all(torch.equal(a, b) for a, b in zip(reader.found[0], rows, strict=False))


def test_threads_that_share_a_decoder() -> None:
    decoder = make()
    theirs = [computed(decoder, [text], [[1]] * 25)[0] for text in TEXTS]

    def read(text: list[int]) -> Tensor:
        with torch.inference_mode():
            reader = Reader(decoder, [text])
            for _ in range(25):
                reader.step([1])
            return reader.rest()[0]

    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            assert same(list(pool.map(read, TEXTS)), theirs)


def test_sequences_that_are_cancelled_and_rows_that_move() -> None:
    decoder = make()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)

    def engine() -> Engine:
        cache = make_cache(MQA, num_rows=3, capacity=80, dtype=torch.bfloat16)
        return Engine(decoder, Tokenizer.stand_in(MQA.vocab_size), cache, max_step_tokens=64)

    def request(i: int) -> Request:
        return Request(id=i, prompt_ids=tuple(TEXTS[i]), params=params, max_length=80, stop_ids=frozenset())

    alone = []
    for i in range(3):
        ours = engine()
        (sequence,) = ours.add(request(i))
        while ours.step():
            pass
        alone.append(sequence.output_ids)
    ours = engine()
    sequences = [ours.add(request(i))[0] for i in range(3)]
    for _ in range(8):
        ours.step()
    ours.cancel(sequences[0])
    for _ in range(5):
        ours.step()
    ours.cancel(sequences[2])
    (again,) = ours.add(request(0))
    while ours.step():
        pass
    assert sequences[0].output_ids == alone[0][: sequences[0].num_output]
    assert sequences[1].output_ids == alone[1]
    assert sequences[2].output_ids == alone[2][: sequences[2].num_output]
    assert again.output_ids == alone[0]
    assert len(set(alone[0])) > 3


def test_recording_imports_no_compiler() -> None:
    """torch's costs a second, in the midst of a text: the third step of every process is recorded."""
    code = (
        "import sys; from writehead import LLM, SamplingParams; "
        "LLM().generate('x', SamplingParams(max_tokens=8, ignore_eos=True)); "
        "print({'sympy', 'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
