"""The first form of Falcon equals transformers' Falcon, and converts to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.parity.harness import TOLERANCE, difference, load_decoder, make_oracle, read
from writehead.convert import convert

WIDTHS = {"vocab_size": 97, "hidden_size": 64, "bos_token_id": None, "eos_token_id": 3}
OLD = WIDTHS | {"n_layer": 2, "n_head": 4}
NEW = WIDTHS | {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 4}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "7b": (
        {"model_type": "RefinedWebModel", "multi_query": True, "parallel_attn": True},
        {"multi_query": True, "parallel_attn": True},
    ),
    "40b": (
        {"model_type": "RefinedWeb", "n_head_kv": 2, "parallel_attn": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True},
    ),
    "rw": (
        {"model_type": "RefinedWebModel", "alibi": True, "bias": True},
        {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_first_form(name: str, tmp_path: Path) -> None:
    old, new = VARIANTS[name]
    oracle = make_oracle(NEW | new)
    state = {key: tensor for key, tensor in oracle.state_dict().items() if key != "lm_head.weight"}
    family, config = read(OLD | old)
    texts = torch.arange(40).view(2, 20) * 7 % 97
    expected = oracle(texts).logits
    assert difference(load_decoder(config, family.rules(config), state, "reference")(texts), expected) <= TOLERANCE
    save_file(state, tmp_path / "model.safetensors")
    code = {"auto_map": {"AutoModelForCausalLM": "modelling_RW.RWForCausalLM"}, "architectures": ["RWForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(OLD | old | code))
    convert(tmp_path, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("falcon", ["FalconForCausalLM"])
    assert "auto_map" not in written
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    assert torch.equal(loaded(texts).logits, expected)
