"""The rounding of weights and activations, in torch: the definition that the native kernels are held to."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.native import FORMATS
from writehead.errors import UsageError
from writehead.kernels import Format, PackedWeight, parse_format
from writehead.kernels.packed import check_packable, packed_bytes, round_rows


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 70), (48, 256)], ids=str)
def test_unpacking_gives_the_weight_within_half_a_step(format: Format, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    back = PackedWeight.pack(weight, format).unpack()
    error = (back - weight).abs()
    match format.kind:
        case "int8":
            assert (error <= weight.abs().amax(1, keepdim=True) / 127 * 0.501).all()
        case "int4":  # 15 steps cover a group's range, in whole units of an int8 weight; the mean is no worse than that
            unit = weight.abs().amax(1, keepdim=True) / 127
            for first in range(0, shape[1], format.group):
                part = weight[:, first : first + format.group]
                if part.shape[1] < format.group:  # padded with zeros
                    part = torch.nn.functional.pad(part, (0, 1))
                step = ((part.amax(1, keepdim=True) - part.amin(1, keepdim=True)) / unit / 15).ceil()
                mean = error[:, first : first + format.group].square().sum(1, keepdim=True).div(format.group).sqrt()
                assert (mean <= unit * (step / 2 + 0.6)).all()
        case kind:
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
            assert torch.equal(back, weight.to(dtype).float())


def test_sizes_are_what_the_formats_promise() -> None:
    bits = {str(f): packed_bytes((2048, 2048), f) * 8 / 2048**2 for f in FORMATS}
    scale = 32 / 2048  # of a channel
    assert bits == {
        "fp32": 32, "bf16": 16, "fp16": 16, "int8": 8 + scale,
        "int4": 4.5 + scale, "int4-64": 4.25 + scale, "int4-128": 4.125 + scale,
    }  # fmt: skip


def test_rows_are_rounded_by_the_ninth_largest_value() -> None:
    x = torch.randn(5, 300)
    x[0, 5], x[1, :9] = 500.0, 77.0
    x[2] = 0
    x[3, 7] = -1e9  # too far from the others: 2^20 steps reach it
    y = round_rows(x)
    assert (y[2] == 0).all()
    step = x.abs().sort(dim=1).values[:, -9] / 127
    step[3] = 1e9 / 2**20
    assert ((y - x).abs() <= step[:, None] * 0.5001 + 1e-6 * x.abs()).all()
    assert torch.allclose(round_rows(torch.tensor([[3.0, -5.0]])), torch.tensor([[3.0, -5.0]]), atol=1e-5)


def test_names_of_formats() -> None:
    assert parse_format("auto", packs_floats=False) == Format("fp32")
    assert parse_format("bf16", packs_floats=True) == Format("bf16", packed=True)
    assert parse_format("int4-128", packs_floats=False) == Format("int4", 128, packed=True)
    assert str(parse_format("int4", packs_floats=False)) == "int4"
    assert Format("int4", 32, packed=True).at("lm_head.weight") == Format("int8", packed=True)
    for bad in ("int3", "int4-16", "int8-32", "fp32-64", ""):
        with pytest.raises(UsageError, match="is not a format; choose auto, fp32"):
            parse_format(bad, packs_floats=False)


def test_sums_that_could_overflow_are_refused() -> None:
    check_packable("up", (8, 1 << 16), Format("int8", packed=True))
    with pytest.raises(UsageError, match="'up' has 65537 inputs, too many for int8 weights"):
        check_packable("up", (8, (1 << 16) + 1), Format("int8", packed=True))
