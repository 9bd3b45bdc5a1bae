"""The reader accounts for every key, and the config refuses what contradicts itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from writehead.errors import ConfigError
from writehead.models.config import ACTIVATIONS, MAX_SIZE, ConfigReader, ModelConfig, RopeConfig

VALID = ModelConfig(
    family="test",
    vocab_size=10,
    hidden_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    max_positions=32,
    positions="learned",
    attention_scale=1.0,
)


def test_every_key_is_read_harmless_or_an_error_that_names_it() -> None:
    reader = ConfigReader({"width": 3, "model_type": "x", "extra": 1, "colour": None}, source="a/config.json")
    assert reader.get("width", int) == 3
    reader.harmless("extra")
    reader.finish()


def test_an_unknown_key_is_named_with_what_may_have_been_meant() -> None:
    reader = ConfigReader({"tie_word_embedings": True}, source="a/config.json")
    reader.get("tie_word_embeddings", bool, False)
    with pytest.raises(ConfigError) as error:
        reader.finish()
    assert str(error.value) == (
        "a/config.json: unknown key 'tie_word_embedings' (did you mean 'tie_word_embeddings'?); it may change what the "
        "model computes. If it does not, accept it: accept_config_keys=[...] or --accept-config-key"
    )


def test_all_unknown_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown keys 'qqqq', 'zzzz'; it may"):
        ConfigReader({"zzzz": 1, "qqqq": 2}).finish()


def test_a_key_can_be_accepted() -> None:
    ConfigReader({"zzzz": 1}, accept=["zzzz"]).finish()


def test_defaults_fill_absent_keys_and_leave_null() -> None:
    reader = ConfigReader({"window": None, "width": 3})
    reader.defaults(window=4096, width=5, heads=7)
    assert reader.get("window", int, None) is None
    assert (reader.get("width", int), reader.get("heads", int)) == (3, 7)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, "'3'; expected a whole number"),
        (3.0, int, "3.0; expected a whole number"),
        (True, int, "True; expected a whole number"),
        (True, float, "True; expected a number"),
        ("1e-5", float, "'1e-5'; expected a number"),
        (float("nan"), float, "nan; expected a number"),
        (float("-inf"), float, "-inf; expected a number"),
        (10**400, float, "inf; expected a number"),
        (2**53 + 1, int, f"{2**53 + 1}; expected a number of a model's size"),
        (-(2**53) - 1, int, f"{-(2**53) - 1}; expected a number of a model's size"),
        (1, bool, "1; expected true or false"),
        (["a"], str, "['a']; expected a string"),
        ("abc", list, "'abc'; expected a list"),
        ([1], dict, "[1]; expected an object"),
    ],
)
def test_a_value_of_the_wrong_type(value: Any, kind: type[Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConfigReader({"key": value}).get("key", kind)
    assert str(error.value) == f"config.json: 'key' is {expected}"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as error:
        ConfigReader({"key": "x" * 10_000}).get("key", int)
    assert len(str(error.value)) < 100


def test_whole_numbers_are_numbers() -> None:
    value = ConfigReader({"key": 12}).get("key", float)
    assert (value, type(value)) == (12.0, float)


@pytest.mark.parametrize("values", [{}, {"key": None}])
def test_a_missing_key(values: dict[str, Any]) -> None:
    assert ConfigReader(values).get("key", int, 5) == 5
    assert ConfigReader(values).get("key", int, None) is None
    with pytest.raises(ConfigError, match="the key 'key' is missing"):
        ConfigReader(values).get("key", int)


@pytest.mark.parametrize("value", [0, -1, MAX_SIZE + 1, 2**53])
def test_a_size_is_positive_and_fits(value: int) -> None:
    with pytest.raises(ConfigError, match=f"'key' is {value}; expected a number from 1 to {MAX_SIZE}"):
        ConfigReader({"key": value}).size("key")


def test_sizes_within_bounds() -> None:
    reader = ConfigReader({"key": MAX_SIZE})
    assert (reader.size("key"), reader.size("other", 1)) == (MAX_SIZE, 1)


def test_activations() -> None:
    names = ConfigReader({"a": "gelu_new", "b": "quick_gelu"})
    assert names.activation("a") == ACTIVATIONS["gelu_new"] == "gelu_tanh"
    with pytest.raises(ConfigError, match="'b' is 'quick_gelu'; known activations are gelu, "):
        names.activation("b")


def test_require_refuses_by_name() -> None:
    reader = ConfigReader({"a": 1, "b": 3, "c": None})
    reader.require("a", 1, 2)
    reader.require("c", 1)
    reader.require("absent", 1)
    with pytest.raises(ConfigError, match="'b' is 3; writehead supports 1 or 2"):
        reader.require("b", 1, 2)
    reader.finish()


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8)), (-1, ()), ([], ()), (0, (0,))]
)
def test_ids(value: Any, expected: tuple[int, ...]) -> None:
    assert ConfigReader({"eos": value}).ids("eos") == expected


@pytest.mark.parametrize("value", ["7", [7, None], True, 1.0, {"a": 1}, 10**30, [1, -(10**30)]])
def test_ids_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"'eos' is .*; expected a token id or a list of them"):
        ConfigReader({"eos": value}).ids("eos")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "4 query heads cannot share 3 key/value heads evenly"),
        ({"num_kv_heads": 0}, "4 query heads cannot share 0 key/value heads evenly"),
        ({"num_layers": 20_000}, "20000 layers of 4 heads of 2 are beyond any model"),
        ({"head_dim": MAX_SIZE}, "are beyond any model"),
        ({"positions": "rope"}, "rotary settings are given exactly when positions are rotary"),
        ({"rope": RopeConfig(dim=2, original_max_positions=8)}, "exactly when positions are rotary"),
        ({"windowed_layers": (True,), "sliding_window": 4}, "layer_types names 1 layers, but num_layers is 3"),
        ({"windowed_layers": (False, True, False)}, "sliding_window is None; expected a positive number"),
        ({"sliding_window": 0}, "sliding_window is 0; expected a positive number"),
        ({"attention_scale": 0.0}, "must be positive"),
        ({"logits_divisor": -1.0}, "must be positive"),
        ({"norm_eps": -1e-5}, "must be positive"),
    ],
)
def test_a_config_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(VALID, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 3}, "3 values of each head are rotated; expected an even"),
        ({"dim": 0}, "0 values of each head are rotated"),
        ({"theta": 1.0}, "rope_theta is 1.0; expected a number above 1"),
        ({"factor": 0.0}, "factor is 0.0; it must be positive"),
        ({"low_freq_factor": -1.0}, "low_freq_factor is -1.0; it must be positive"),
        ({"beta_fast": 0.0}, "beta_fast is 0.0; it must be positive"),
        ({"high_freq_factor": 1.0}, "high_freq_factor must be above its low_freq_factor"),
    ],
)
def test_rotary_settings_that_mean_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig(**{"dim": 8, "original_max_positions": 64} | changes)


def test_what_a_config_derives() -> None:
    config = dataclasses.replace(VALID, sliding_window=5, windowed_layers=(True, False, True))
    assert (config.q_size, config.kv_size, config.cache_values_per_token()) == (8, 4, 24)
    assert [config.window(i) for i in range(3)] == [5, None, 5]
    assert [dataclasses.replace(VALID, sliding_window=5).window(i) for i in range(3)] == [5, 5, 5]
    assert VALID.window(0) is None
