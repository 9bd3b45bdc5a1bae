"""oneDNN's product against the reference's, and what `load` says where it is missing."""

from __future__ import annotations

import logging

import pytest
import torch

from writehead.errors import UsageError
from writehead.kernels import load, onednn

ODD = [(1, 1, 1), (1, 33, 7), (2, 64, 96), (5, 127, 31), (16, 96, 200), (67, 40, 40), (130, 257, 129)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "ins", "outs"), ODD)
def test_the_product_equals_the_references(rows: int, ins: int, outs: int, bias: bool) -> None:
    x, weight = torch.randn(rows, ins), torch.randn(outs, ins)
    b = torch.randn(outs) if bias else None
    exact = x.double() @ weight.double().t() + (0 if b is None else b.double())
    scale = (x.double().abs() @ weight.double().abs().t() + 1).max()
    for name in ("onednn", "reference"):
        with torch.inference_mode():
            error = (load(name).linear(x, weight, b).double() - exact).abs().max() / scale
        assert error < ins * 2**-24, name


def test_strided_inputs_and_more_dimensions() -> None:
    x, weight = torch.randn(3, 8, 64)[:, ::2, ::2], torch.randn(24, 64)[::2, :32]
    with torch.inference_mode():
        ours, theirs = (load(name).linear(x, weight, None) for name in ("onednn", "reference"))
    assert ours.shape == (3, 4, 12)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_gradients_take_the_references_path(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, dtype=dtype)
    weight = torch.randn(4, 8, dtype=dtype)
    assert torch.equal(load("onednn").linear(x, weight, None), load("reference").linear(x, weight, None))
    trained = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(load("onednn").linear(x.float(), trained, None).sum(), trained)
    assert torch.allclose(grad, x.float().sum(0).expand(4, 8))


def test_auto_falls_back_and_says_so_and_an_explicit_choice_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load("auto", packed=False).name == "onednn"
    monkeypatch.setattr(onednn, "unavailable", lambda: "this build of torch has no oneDNN")
    with caplog.at_level(logging.WARNING):
        assert load("auto", packed=False).name == "reference"
    assert "no oneDNN" in caplog.text
    with pytest.raises(UsageError, match="'onednn' cannot be used, this build of torch has no oneDNN"):
        load("onednn")
