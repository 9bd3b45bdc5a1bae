"""Optimizers and the learning rate.

`adamw` is the usual one. `muon` orthogonalizes the update of every matrix inside the layers and leaves embeddings,
norms and biases to AdamW; a small model needs clearly fewer tokens with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from writehead.train.config import TrainConfig

MUON_RMS = 0.2
"""Typical size of an AdamW update at a learning rate of one; Muon's is scaled to it, so one rate serves both."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The config's optimizer. Matrices decay, norms and biases do not."""
    hidden: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        kind = vectors if parameter.ndim < 2 else hidden if name.startswith("layers.") else tables
        kind.append(parameter)
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    if config.optimizer == "muon":
        return Muon(
            hidden, tables, vectors, lr=config.lr, betas=betas, weight_decay=decay, dtype=getattr(torch, config.dtype)
        )
    groups = [{"params": hidden + tables, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def learning_rate(config: TrainConfig, *, step: int, progress: float) -> float:
    """Linear warmup over the first steps, then half a cosine from lr to min_lr as `progress` goes from 0 to 1."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.min_lr + (config.lr - config.min_lr) * cosine


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for the next step of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, scaled as in arXiv 2502.16982) for `hidden`, AdamW (arXiv 1711.05101) for the rest."""

    def __init__(
        self,
        hidden: list[nn.Parameter],
        tables: list[nn.Parameter],
        vectors: list[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": hidden, "orthogonal": True, "weight_decay": weight_decay},
            {"params": tables, "orthogonal": False, "weight_decay": weight_decay},
            {"params": vectors, "orthogonal": False, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": lr, "betas": betas, "momentum": momentum, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = _muon if group["orthogonal"] else _adam
                update(parameter, parameter.grad, self.state[parameter], group)


def _muon(parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
    momentum.lerp_(grad, 1 - group["momentum"])
    direction = orthogonalize(grad.lerp(momentum, group["momentum"]), group["dtype"])  # Nesterov
    parameter.add_(direction, alpha=-group["lr"] * MUON_RMS * math.sqrt(max(parameter.shape)))


def _adam(parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["mean"].lerp_(grad, 1 - beta1)
    state["square"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (state["square"] / (1 - beta2 ** state["step"])).sqrt_().add_(1e-8)
    parameter.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - beta1 ** state["step"]))


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bring all singular values of a matrix near one (0.7 to 1.2): five steps of a quintic Newton-Schulz iteration.

    The iteration forgives the rounding of bfloat16 (its own authors run it so); the result is in `dtype`.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = (x / (x.norm() + 1e-7)).to(dtype)
    for _ in range(5):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x
