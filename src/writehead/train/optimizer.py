"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from writehead.train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) that decays matrices and leaves norms and biases alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


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
