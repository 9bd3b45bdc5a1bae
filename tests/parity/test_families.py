"""Every family equals transformers: logits, greedy tokens, cached, ragged, and the weights there and back."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tests.parity.cases import CASES, MAX_POSITIONS, VOCAB
from tests.parity.harness import (
    TOLERANCE,
    Pair,
    difference,
    export,
    greedy,
    load_decoder,
    make_cache,
    make_oracle,
    make_pair,
    read,
    run_chunks,
    step,
)
from writehead.kernels import load
from writehead.models.config import ModelConfig
from writehead.models.decoder import Decoder
from writehead.models.families import FAMILIES

COMPUTATIONS = ("reference", "reference-broadcast")
LENGTH = 20
NUM_GREEDY = 32


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Both models of one case, made once for all tests."""
    made = make_pair(CASES[request.param])
    assert request.param.startswith(made.family.name)
    return made


@pytest.fixture
def texts(seed: int) -> Tensor:
    """Two texts of equal length."""
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def with_kernels(pair: Pair, kernels: str) -> Decoder:
    """The decoder of a pair with other kernels."""
    return load_decoder(pair.config, pair.family.rules(pair.config), pair.state, kernels)


def test_logits(pair: Pair, texts: Tensor) -> None:
    assert difference(pair.decoder(texts), pair.oracle(texts).logits) <= TOLERANCE


@pytest.mark.parametrize("kernels", COMPUTATIONS)
def test_cached_logits(pair: Pair, texts: Tensor, kernels: str) -> None:
    expected = pair.oracle(texts).logits
    decoder = with_kernels(pair, kernels)
    for chunks in ((7, 1, 12), (LENGTH,), (1, 1, 18)):
        assert difference(run_chunks(decoder, texts, chunks), expected) <= TOLERANCE


def test_greedy_tokens(pair: Pair, texts: Tensor) -> None:
    prompt = texts[:1]
    theirs = pair.oracle.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_GREEDY,
        do_sample=False,
        pad_token_id=0,
    )
    assert greedy(pair.decoder, prompt[0], NUM_GREEDY) == theirs[0, LENGTH:].tolist()


@pytest.mark.parametrize("kernels", COMPUTATIONS)
def test_a_ragged_batch_equals_single_runs(pair: Pair, kernels: str) -> None:
    """Four texts in one step, then a step in which one text brings five tokens and the others one each."""
    decoder, cache = with_kernels(pair, kernels), make_cache(pair.config, 5)
    lengths, more, rows = (3, 11, 7, 11), (5, 1, 1, 1), (2, 0, 4, 1)
    texts = [torch.randint(0, VOCAB, (n + m,)) for n, m in zip(lengths, more, strict=True)]
    first = step(decoder, cache, [(row, 0, ids[:n]) for row, ids, n in zip(rows, texts, lengths, strict=True)])
    second = step(decoder, cache, [(row, n, ids[n:]) for row, ids, n in zip(rows, texts, lengths, strict=True)])
    for ids, head, tail in zip(texts, first, second, strict=True):
        assert difference(torch.cat([head, tail]), pair.oracle(ids[None]).logits[0]) <= TOLERANCE


def test_weights_return_bit_by_bit(pair: Pair) -> None:
    exported = export(pair.decoder, pair.family.rules(pair.config))
    assert exported.keys() == pair.state.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, pair.state[name]), name


def test_transformers_loads_an_exported_file(pair: Pair, texts: Tensor, tmp_path: Path) -> None:
    """The names are those that transformers writes, and what it reads is the model that it wrote."""
    form = FAMILIES[pair.family.export_as or pair.family.name]
    exported = export(pair.decoder, form.rules(pair.config))
    pair.oracle.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert exported.keys() == theirs.keys()
    pair.oracle.config.save_pretrained(tmp_path)
    save_file(exported, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert torch.equal(loaded(texts).logits, pair.oracle(texts).logits)


def test_old_forms_of_the_file_load(pair: Pair) -> None:
    """Without the prefix, with stale buffers, with a tied head that is stored nevertheless."""
    rules = pair.family.rules(pair.config)
    old = {name.removeprefix(rules.prefixes[0]): tensor for name, tensor in pair.state.items()}
    old |= {buffer.replace("{i}", "1"): torch.ones(1) for buffer in rules.ignored}
    old |= {alias: old[name] for alias, name in (rules.aliases or {}).items()}
    assert len(old) > len(pair.state)
    loaded = load_decoder(pair.config, rules, old, "reference")
    ours = dict(pair.decoder.named_parameters())
    assert all(torch.equal(p, ours[name]) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("kernels", COMPUTATIONS)
def test_shared_heads_equal_tiled_heads(pair: Pair, texts: Tensor, kernels: str) -> None:
    twin = tile(pair.decoder, kernels)
    assert twin.config.num_kv_heads == pair.config.num_heads
    expected = pair.decoder(texts)
    assert difference(twin(texts), expected) <= TOLERANCE
    assert difference(run_chunks(twin, texts, (7, 1, 12)), expected) <= TOLERANCE


def tile(decoder: Decoder, kernels: str) -> Decoder:
    """The multi-head model with each key/value head repeated for every query head that shares it."""
    old = decoder.config
    config = dataclasses.replace(old, num_kv_heads=old.num_heads)
    with torch.device("meta"):
        twin = Decoder(config, load(kernels))
    twin.to_empty(device="cpu").requires_grad_(False)
    parameters = dict(decoder.named_parameters())
    for name, target in twin.named_parameters():
        target.copy_(_tiled(parameters[name], old) if ".attn.qkv." in name else parameters[name])
    return twin


def _tiled(fused: Tensor, config: ModelConfig) -> Tensor:
    q, k, v = fused.split((config.q_size, config.kv_size, config.kv_size))
    share = config.num_heads // config.num_kv_heads
    heads = [part.unflatten(0, (-1, config.head_dim)).repeat_interleave(share, dim=0).flatten(0, 1) for part in (k, v)]
    return torch.cat([q, *heads])


def test_the_multi_head_twin_of_gpt_bigcode_in_transformers(texts: Tensor) -> None:
    """MQA tiled by us, exported as `multi_query: false`, equals MQA when both run in transformers."""
    values: dict[str, Any] = CASES["gpt_bigcode-mqa"]
    pair = make_pair(values)
    twin = tile(pair.decoder, "reference")
    theirs = make_oracle({**values, "multi_query": False})
    theirs.load_state_dict(export(twin, pair.family.rules(twin.config)), strict=False)
    assert difference(theirs(texts).logits, pair.oracle(texts).logits) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("gpt_bigcode", "santacoder"))])
@pytest.mark.parametrize("eos_ids", [(), (2,), (2, 3)])
def test_gpt_bigcode_writes_a_config_that_reads_back(name: str, eos_ids: tuple[int, ...]) -> None:
    write = FAMILIES["gpt_bigcode"].write
    assert write is not None
    config = dataclasses.replace(read(CASES[name])[1], family="gpt_bigcode", bos_id=1, eos_ids=eos_ids)
    assert read(write(config))[1] == config


def test_configs_read_the_same_after_transformers_rewrote_them(pair: Pair) -> None:
    """The keys of transformers 4 and 5, given and completed with defaults, describe one model."""
    values = dict(pair.values)
    head_type = {k: values.pop(k) for k in ("attention_head_type",) if k in values}
    rewritten = AutoConfig.for_model(**copy.deepcopy(values)).to_dict()
    assert read(rewritten | head_type)[1] == pair.config
    assert pair.config.max_positions == MAX_POSITIONS
