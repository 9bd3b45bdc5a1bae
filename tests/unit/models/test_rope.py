"""Rotary frequencies equal those of transformers to the last bit, and their keys are read as it reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from writehead.errors import ConfigError
from writehead.models.config import ConfigReader, RopeConfig
from writehead.models.rope import inverse_frequencies, read_rope

MAX_POSITIONS = 4096
HEAD_DIM = 128
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3 large theta": {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0},
    "yarn": YARN,
    "yarn large theta": {**YARN, "rope_theta": 1e6},
    "yarn without factor": {**YARN, "factor": None},
    "yarn, both mscales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, one mscale": {**YARN, "mscale": 1.5},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, equal bounds": {**YARN, "beta_fast": 1e-3, "beta_slow": 1e-3},
    "yarn, factor 1": {**YARN, "factor": 1.0},
}


def read(values: dict[str, Any], **options: Any) -> RopeConfig:
    """Read rope keys and nothing else."""
    reader = ConfigReader(values)
    rope = read_rope(reader, HEAD_DIM, max_positions=MAX_POSITIONS, **options)
    reader.finish()
    return rope


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    given = {"rope_theta": 10000.0, **parameters}
    theirs = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(given),
    )
    kind = parameters["rope_type"]
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, factor = (default if kind == "default" else ROPE_INIT_FUNCTIONS[kind])(theirs)
    frequencies, ours = inverse_frequencies(read({"rope_parameters": given}))
    assert torch.equal(frequencies, expected)
    assert ours == factor


def test_the_keys_of_transformers_4_and_5_mean_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}
    new = {"rope_parameters": {**YARN, "rope_theta": 5e5}}
    assert read(old) == read(new)
    assert read({"rope_scaling": None, "rope_theta": 7.0}) == read({"rope_parameters": {"rope_theta": 7.0}})


def test_rope_type_goes_before_type_and_scaling_before_parameters() -> None:
    both = {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_parameters": YARN}
    assert read(both).scaling == "linear"


def test_the_outer_trained_length_wins() -> None:
    assert read({"rope_scaling": YARN, "original_max_position_embeddings": 512}).original_max_positions == 512


def test_yarn_takes_its_factor_from_the_lengths() -> None:
    assert read({"rope_scaling": {**YARN, "factor": None}}).factor == 4.0


def test_a_part_of_the_head_is_rotated_where_the_family_can() -> None:
    values = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}
    assert read(values, partial=True).dim == 32
    assert read({}, partial=True, fraction=0.5, theta=99.0) == read(
        {"partial_rotary_factor": 0.5, "rope_theta": 99.0}, partial=True
    )
    with pytest.raises(ConfigError, match=r"'partial_rotary_factor' is 0.25; expected 1.0"):
        read(values)
    with pytest.raises(ConfigError, match=r"'partial_rotary_factor' is 1.5; expected 0 to 1.0"):
        read({"partial_rotary_factor": 1.5}, partial=True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "longrope"}, "rope scaling 'longrope' is not supported; supported are default, linear, dynamic,"),
        ({"rope_type": "mrope", "mrope_section": [1]}, "rope scaling 'mrope' is not supported"),
        ({"type": 3}, "rope scaling: 'type' is 3; expected a string"),
        ({"type": "linear"}, "rope scaling: the key 'factor' is missing"),
        ({"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "the key 'low_freq_factor' is missing"),
        ({"type": "linear", "factor": "2"}, "rope scaling: 'factor' is '2'; expected a number"),
        ({"type": "linear", "factor": -2}, "factor is -2.0; it must be positive"),
        ({**YARN, "truncate": 1}, "'truncate' is 1; expected true or false"),
        ({**YARN, "long_factor": [1.0]}, "rope scaling: unknown key 'long_factor'"),
        ({**YARN, "original_max_position_embeddings": 0}, "'original_max_position_embeddings' is 0"),
        ({"full_attention": {"rope_type": "default"}}, "unknown key 'full_attention'"),
        ({"rope_theta": "big"}, "'rope_theta' is 'big'; expected a number"),
    ],
)
def test_what_is_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({"rope_scaling": parameters})


def test_a_rope_key_can_be_accepted() -> None:
    values = {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}
    reader = ConfigReader(values, accept=["finetuned"])
    assert read_rope(reader, HEAD_DIM, max_positions=MAX_POSITIONS).factor == 2.0
