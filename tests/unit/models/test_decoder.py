"""What the parity tests do not reach: the slopes of ALiBi, and what making a decoder costs."""

from __future__ import annotations

import pytest
import torch
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from writehead.kernels import load
from writehead.models.config import ConfigReader
from writehead.models.decoder import Decoder, alibi_slopes
from writehead.models.families import FAMILIES, Family


@pytest.mark.parametrize("num_heads", range(1, 129))
def test_alibi_slopes_round_like_those_of_transformers(num_heads: int) -> None:
    """At position 1 the bias of transformers is the slope in bf16."""
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1]
    assert torch.equal(alibi_slopes(num_heads).bfloat16().float(), theirs)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_decoder_on_the_meta_device_takes_no_memory(family: Family) -> None:
    """Billions of parameters of every default config are names and shapes, and the rules serve each of them."""
    config = family.read(ConfigReader({}))
    with torch.device("meta"):
        decoder = Decoder(config, load("reference"))
    parameters = dict(decoder.named_parameters())
    assert all(p.is_meta for p in parameters.values())
    assert {rule.target for rule in family.rules(config).expand(config.num_layers)} == parameters.keys()
