"""Initialization, loss, optimizer and schedule, each against its definition."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from writehead import kernels
from writehead.models.decoder import Decoder
from writehead.train import TrainConfig
from writehead.train.data import Batch
from writehead.train.init import initialize
from writehead.train.loss import REPETITION_WINDOW, loss_sum
from writehead.train.optimizer import learning_rate, make_optimizer, orthogonalize, set_learning_rate
from writehead.train.trainer import model_config, optimizer_step

CONFIG = TrainConfig(out=Path("run"), layers=2, width=64, heads=2, context=64, steps=100, warmup=10, lr=1.0, min_lr=0.1)


def make_model(seed: int = 0) -> Decoder:
    model = Decoder(model_config(CONFIG, vocab_size=300), kernels.load("reference"))
    initialize(model, num_layers=2, seed=seed)
    return model


def make_batch(rows: int = 4, length: int = 50) -> Batch:
    ids = torch.randint(0, 300, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1], ids[:, 1:])


def test_initialization_is_gpt2s() -> None:
    parameters = dict(make_model().named_parameters())
    assert all(p.isfinite().all() for p in parameters.values())
    for name, p in parameters.items():
        if name.endswith("bias"):
            assert p.eq(0).all()
        elif "norm" in name:
            assert p.eq(1).all()
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(4) if residual else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name
    again, other = (dict(make_model(s).named_parameters()) for s in (0, 1))
    assert all(torch.equal(p, again[n]) for n, p in parameters.items())
    assert not torch.equal(parameters["embed.weight"], other["embed.weight"])


def test_a_new_model_knows_nothing() -> None:
    batch = make_batch()
    mean = loss_sum(make_model(), batch, dtype=torch.float32).item() / batch.targets.numel()
    assert mean == pytest.approx(math.log(300), abs=0.1)


@pytest.mark.parametrize("rows", [4, 15])  # less and more tokens than one chunk
def test_loss_and_gradients_equal_plain_cross_entropy(rows: int) -> None:
    model, batch = make_model(), make_batch(rows)
    loss_sum(model, batch, dtype=torch.float32).div(7).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), reduction="sum")
    plain.div(7).backward()
    assert loss_sum(model, batch, dtype=torch.float32).item() == pytest.approx(plain.item(), rel=1e-5)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-5 * p.grad.abs().max().item())


def test_repetition_adds_the_unlikelihood_of_recent_wrong_tokens() -> None:
    model, batch = make_model(), make_batch(2, 20)
    with torch.no_grad():
        model.get_parameter("embed.weight").mul_(2)  # so that probabilities are not all alike
    loss = loss_sum(model, batch, dtype=torch.float32, repetition=0.5)
    loss.backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    log_probs = model(batch.inputs).log_softmax(-1)
    expected = -log_probs.gather(2, batch.targets[..., None]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # the value stays the cross-entropy
    for b in range(2):
        for t in range(20):
            for token in set(batch.inputs[b, max(0, t + 1 - REPETITION_WINDOW) : t + 1].tolist()) - {
                batch.targets[b, t].item()
            }:
                expected = expected - 0.5 * torch.log(1 - log_probs[b, t, token].exp())
    expected.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-3, atol=1e-5 * p.grad.abs().max().item())


def test_bfloat16_is_near_float32() -> None:
    model, batch = make_model(), make_batch()
    wide, narrow = (loss_sum(model, batch, dtype=d) for d in (torch.float32, torch.bfloat16))
    assert narrow.dtype is torch.float32
    assert narrow.item() != wide.item()
    assert narrow.item() == pytest.approx(wide.item(), rel=5e-3)


def test_accumulation_equals_one_large_pass() -> None:
    batch = make_batch(4)
    halves = [Batch(batch.inputs[i : i + 2], batch.targets[i : i + 2]) for i in (0, 2)]
    models = [make_model(), make_model()]
    results = []
    for model, passes in zip(models, ([batch], halves), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append(optimizer_step(model, optimizer, passes, clip=1.0, dtype=torch.float32))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == results[1][1] == 200
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_clipping_bounds_the_step() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer_step(model, optimizer, [make_batch()], clip=1e-3, dtype=torch.float32)
    moved = sum((p - q).square().sum().item() for p, q in zip(model.parameters(), before, strict=True))
    assert math.sqrt(moved) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_only_matrices_decay(kind: Literal["adamw", "muon"]) -> None:
    model = make_model()
    optimizer = make_optimizer(model, dataclasses.replace(CONFIG, weight_decay=0.5, optimizer=kind))
    set_learning_rate(optimizer, 0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if p.ndim >= 2 else 1.0))


def test_muon_is_adamw_outside_the_layers_and_orthogonal_inside() -> None:
    ours, theirs = make_model(), make_model()
    muon = make_optimizer(ours, dataclasses.replace(CONFIG, lr=1e-2, min_lr=0.0))
    adamw = make_optimizer(theirs, dataclasses.replace(CONFIG, lr=1e-2, min_lr=0.0, optimizer="adamw"))
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        before = {n: p.detach().clone() for n, p in ours.named_parameters()}
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        muon.step()
        adamw.step()
    others = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if p.ndim < 2 or not name.startswith("layers."):
            torch.testing.assert_close(p, others[name], rtol=1e-5, atol=1e-7)
        else:  # lr * 0.2 * sqrt(longest side) * a matrix whose singular values are near one
            moved = (p.detach() - before[name] * (1 - 1e-2 * 0.1)) / (1e-2 * 0.2 * math.sqrt(max(p.shape)))
            values = torch.linalg.svdvals(moved)
            assert values.max() < 1.25, name
            assert values.median() > 0.6, name


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 24)])
def test_orthogonalize_keeps_directions(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    result = u.t() @ orthogonalize(matrix * 1e-3) @ vh.t()
    diagonal = torch.diagonal(result)
    assert 0.6 < diagonal.min() <= diagonal.max() < 1.25
    assert (result - torch.diag(diagonal)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("step", "progress", "expected"),
    [(0, 0.0, 0.1), (9, 0.09, 1.0), (10, 0.0, 1.0), (50, 0.5, 0.55), (99, 1.0, 0.1), (99, 1.5, 0.1)],
)
def test_learning_rate(step: int, progress: float, expected: float) -> None:
    assert learning_rate(CONFIG, step=step, progress=progress) == pytest.approx(expected)
