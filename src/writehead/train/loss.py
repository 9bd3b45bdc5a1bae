"""The loss as a sum and a count, so that passes and, later, ranks add up exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from writehead.models.decoder import Decoder
from writehead.train.data import Batch

CHUNK_TOKENS = 512
"""Tokens whose logits exist at once; they stay in the processor's cache."""


REPETITION_WINDOW = 16
"""Tokens back that a wrong repetition is looked for: a line or so, the loops that small models fall into."""


def loss_sum(model: Decoder, batch: Batch, *, dtype: torch.dtype, repetition: float = 0.0) -> Tensor:
    """Summed cross-entropy in nats over all targets of a batch, a scalar in fp32. The caller divides by the count.

    `repetition` adds, in the gradient alone, the unlikelihood of the last tokens that are not the target (arXiv
    1908.04319) with this weight: a greedy completion leaves its loops.
    """
    positions = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
    with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        hidden = model.hidden(batch.inputs, positions)
    assert model.lm_head is None, "the loss reads the tied head"
    loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), model.embed.weight, batch.targets.flatten(), _recent(batch.inputs), repetition, dtype
    )
    return loss


def _recent(inputs: Tensor) -> Tensor:
    """int64 [B, T] -> [B * T, W]: each token and those before it; the first one stands in where there are none."""
    window = min(REPETITION_WINDOW, inputs.shape[1])
    padded = torch.cat([inputs[:, :1].expand(-1, window - 1), inputs], dim=1)
    return padded.unfold(1, window, 1).flatten(0, 1)


class _HeadLoss(torch.autograd.Function):
    """Head and cross-entropy in one: gradients are made chunk by chunk while the logits are there, never all at once.

    hidden [N, M], weight [V, M], targets int64 [N], recent int64 [N, W]
    -> the sum of -log softmax(hidden weight^T)[target]. Products run in `dtype`, everything else in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        recent: Tensor,
        repetition: float,
        dtype: torch.dtype,
    ) -> Tensor:
        grad_hidden = torch.empty_like(hidden, dtype=dtype)
        grad_weight = torch.zeros_like(weight)
        hidden, head = hidden.to(dtype), weight.to(dtype)
        total = weight.new_zeros(())
        parts = (x.split(CHUNK_TOKENS) for x in (hidden, targets, recent, grad_hidden))
        for h, t, r, g in zip(*parts, strict=True):
            logits = torch.mm(h, head.t()).float()
            picked = logits.gather(1, t[:, None])
            normalizer = logits.logsumexp(1, keepdim=True)
            total += (normalizer - picked).sum()
            grad = logits.sub_(normalizer).exp_()  # softmax; minus one at the target
            if repetition:
                _add_unlikelihood(grad, t, r, repetition)
            grad.scatter_add_(1, t[:, None], -torch.ones_like(picked))
            grad = grad.to(dtype)
            torch.mm(grad, head, out=g)
            grad_weight += torch.mm(grad.t(), h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0].to(grad_hidden.dtype), grad_weight * grads[0], None, None, None, None


def _add_unlikelihood(probabilities: Tensor, targets: Tensor, recent: Tensor, weight: float) -> None:
    """Turn softmax [N, V] into the gradient of its log-normalizer plus `weight` times -log(1 - p) of each wrong token.

    p / (1 - p) is the gradient's size; it is bounded where p is near one.
    """
    earlier = torch.ones(recent.shape[1], recent.shape[1], dtype=torch.bool).tril(-1)
    again = ((recent[:, :, None] == recent[:, None, :]) & earlier).any(-1)  # a token counts once
    p = probabilities.gather(1, recent)
    odds = (p / (1 - p).clamp_min(0.1)).masked_fill_(again | (recent == targets[:, None]), 0.0).mul_(weight)
    probabilities.mul_(1 - odds.sum(1, keepdim=True))
    probabilities.scatter_add_(1, recent, odds)
