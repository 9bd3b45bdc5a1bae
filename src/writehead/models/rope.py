"""Rotary frequencies: from a checkpoint's keys to one vector, for every scaling that the families' checkpoints use."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from writehead.errors import ConfigError
from writehead.models.config import ConfigReader, RopeConfig

_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}


def read_rope(
    config: ConfigReader, head_dim: int, *, theta: float = 10000.0, max_positions: int, fraction: float = 1.0,
    theta_key: str = "rope_theta",
) -> RopeConfig:  # fmt: skip
    """Read `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    `fraction` is the default share of each head that is rotated; `partial_rotary_factor` overrides it.
    """
    new = config.get("rope_parameters", dict, {})
    old = config.get("rope_scaling", dict, {})
    given: dict[str, Any] = {**old, **new}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in _SCALINGS:
        raise ConfigError(
            f"{config.source}: rope scaling type '{kind}' is not supported; supported are {', '.join(_SCALINGS)}"
        )
    theta = float(given.pop("rope_theta", config.get(theta_key, float, theta)))
    fraction = float(given.pop("partial_rotary_factor", config.get("partial_rotary_factor", float, fraction)))
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise ConfigError(f"{config.source}: rope scaling has an unknown key '{unknown[0]}'")
    for key, value in given.items():
        if value is not None and not isinstance(value, int | float):
            raise ConfigError(f"{config.source}: rope scaling key '{key}' is {value!r}; expected a number")
    values = {_KEYS[k]: v for k, v in given.items() if v is not None}
    if kind in ("linear", "llama3") and "factor" not in values:
        raise ConfigError(f"{config.source}: rope scaling '{kind}' needs a 'factor'")
    trained = config.get("original_max_position_embeddings", int, max_positions)
    trained = int(values.setdefault("original_max_positions", trained))
    if kind == "yarn":
        values.setdefault("factor", max_positions / trained)
    return RopeConfig(dim=int(head_dim * fraction), theta=theta, scaling=kind, **values)


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """[dim / 2] angles per position in fp32, and the factor on cos and sin (yarn's temperature).

    Formulas: linear arXiv 2306.15595; llama3 Llama 3.1's `apply_scaling`; yarn arXiv 2309.00071. "dynamic" equals the
    default up to the trained length, and longer inputs are refused (its angles would depend on the whole batch).
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64, device="cpu").float() / rope.dim
    base = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case "linear":
            return base / rope.factor, 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "yarn":
            return _yarn(base, rope)
        case _:
            return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    assert rope.original_max_positions is not None
    wavelength = 2 * math.pi / base
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * base / rope.factor + smooth * base
    return torch.where(wavelength > low, base / rope.factor, torch.where(wavelength < high, base, blended))


def _yarn(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    assert rope.original_max_positions is not None
    trained = rope.original_max_positions

    def correction_dim(rotations: float) -> float:
        return rope.dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    extrapolation = 1 - ramp
    frequencies = base / rope.factor * (1 - extrapolation) + base * extrapolation
    return frequencies, _yarn_factor(rope)


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
