"""Rotary frequencies: from a checkpoint's keys to one vector, for every scaling that the families' checkpoints use."""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor

from writehead.errors import ConfigError
from writehead.models.config import ConfigReader, RopeConfig

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""The scaling types, and the keys without which they mean nothing."""


def read_rope(
    config: ConfigReader, head_dim: int, *, max_positions: int, theta: float = 10000.0, fraction: float = 1.0,
    partial: bool = False,
) -> RopeConfig:  # fmt: skip
    """Read `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    `theta` and `fraction`, the share of each head that is rotated, hold where the rope parameters do not say otherwise.
    Only a `partial` family may rotate less than the whole head. Raises ConfigError for an unknown type or key.
    """
    new, old = config.get("rope_parameters", dict, {}), config.get("rope_scaling", dict, {})
    given = ConfigReader(old or new, source=f"{config.source}: rope scaling", accept=config.accept)
    kind = given.get("type", str, "default")
    kind = given.get("rope_type", str, kind)
    if kind not in _NEEDS:
        raise ConfigError(f"{config.source}: rope scaling '{kind}' is not supported; supported are {', '.join(_NEEDS)}")
    for key in _NEEDS[kind]:
        given.get(key, float)
    theta = given.get("rope_theta", float, config.get("rope_theta", float, theta))
    fraction = given.get("partial_rotary_factor", float, config.get("partial_rotary_factor", float, fraction))
    if not (0 < fraction <= 1 if partial else fraction == 1):
        raise ConfigError(f"{config.source}: 'partial_rotary_factor' is {fraction}; expected {'0 to ' * partial}1.0")
    trained = given.size("original_max_position_embeddings", max_positions)
    trained = config.size("original_max_position_embeddings", trained)  # transformers lets the outer key win
    rope = RopeConfig(
        dim=int(head_dim * fraction),
        theta=theta,
        scaling=cast(Literal["default", "linear", "dynamic", "llama3", "yarn"], kind),
        factor=given.get("factor", float, max_positions / trained),
        original_max_positions=trained,
        low_freq_factor=given.get("low_freq_factor", float, 1.0),
        high_freq_factor=given.get("high_freq_factor", float, 4.0),
        beta_fast=given.get("beta_fast", float, 32.0),
        beta_slow=given.get("beta_slow", float, 1.0),
        mscale=given.get("mscale", float, None),
        mscale_all_dim=given.get("mscale_all_dim", float, None),
        attention_factor=given.get("attention_factor", float, None),
        truncate=given.get("truncate", bool, True),
    )
    given.finish()
    return rope


def inverse_frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """[dim / 2] angles per position in fp32, and the factor on cos and sin (yarn's temperature).

    Formulas: linear arXiv 2306.15595; llama3 Llama 3.1's `apply_scaling`; yarn arXiv 2309.00071. "dynamic" equals the
    default up to the trained length, and longer inputs are refused (its angles would depend on the whole batch).
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64, device="cpu").float() / rope.dim
    powers: Tensor = rope.theta**exponents
    base = 1.0 / powers
    match rope.scaling:
        case "linear":
            return base / rope.factor, 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "yarn":
            return _yarn(powers, rope), _yarn_factor(rope)
        case _:
            return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    wavelength = 2 * math.pi / base
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * base / rope.factor + smooth * base
    return torch.where(wavelength > low, base / rope.factor, torch.where(wavelength < high, base, blended))


def _yarn(powers: Tensor, rope: RopeConfig) -> Tensor:
    trained = rope.original_max_positions

    def correction_dim(rotations: float) -> float:
        return rope.dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
