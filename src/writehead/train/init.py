"""The start of training: weights drawn as GPT-2 draws them. Inference never comes here."""

from __future__ import annotations

import math

import torch
from torch import nn

STD = 0.02


@torch.no_grad()
def initialize(model: nn.Module, *, num_layers: int, seed: int) -> None:
    """Write every parameter: matrices normal(0, 0.02), norms one, biases zero.

    Projections that write into the residual stream (`out`, `down`) are scaled by 1/sqrt(2 * num_layers), so that its
    variance does not grow with depth (Radford et al. 2019, section 2.3). The seed alone decides the result.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
            std = STD / math.sqrt(2 * num_layers) if residual else STD
            parameter.normal_(0.0, std, generator=generator)
