"""The loss as a sum and a count, so that passes and, later, ranks add up exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from writehead.train.data import Batch


def loss_sum(model: nn.Module, batch: Batch, *, dtype: torch.dtype) -> Tensor:
    """Summed cross-entropy in nats over all targets of a batch, a scalar in fp32. The caller divides by the count."""
    with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits: Tensor = model(batch.inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
