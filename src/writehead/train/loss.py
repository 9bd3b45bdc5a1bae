"""The loss as a sum and a count, so that passes and, later, ranks add up exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from writehead.models.decoder import Decoder
from writehead.train.data import Batch

CHUNK_TOKENS = 512
"""Tokens whose logits exist at once; they stay in the processor's cache."""


def loss_sum(model: Decoder, batch: Batch, *, dtype: torch.dtype) -> Tensor:
    """Summed cross-entropy in nats over all targets of a batch, a scalar in fp32. The caller divides by the count."""
    positions = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
    with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        hidden = model.hidden(batch.inputs, positions)
    assert model.lm_head is None, "the loss reads the tied head"
    loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden.float().flatten(0, 1), model.embed.weight, batch.targets.flatten()
    )
    return loss


class _HeadLoss(torch.autograd.Function):
    """Head and cross-entropy in one: gradients are made chunk by chunk while the logits are there, never all at once.

    hidden [N, M], weight [V, M], targets int64 [N] -> the sum of -log softmax(hidden weight^T)[target].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        buffer = hidden.new_empty(min(CHUNK_TOKENS, len(hidden)), len(weight))
        for h, t, g in zip(*(x.split(CHUNK_TOKENS) for x in (hidden, targets, grad_hidden)), strict=True):
            logits = torch.mm(h, weight.t(), out=buffer[: len(h)])
            picked = logits.gather(1, t[:, None])
            normalizer = logits.logsumexp(1, keepdim=True)
            total += (normalizer - picked).sum()
            grad = logits.sub_(normalizer).exp_()  # softmax; minus one at the target
            grad.scatter_add_(1, t[:, None], -torch.ones_like(picked))
            torch.mm(grad, weight, out=g)
            grad_weight.addmm_(grad.t(), h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None
