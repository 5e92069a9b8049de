"""Small real models and data, made without the global RNG."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["batch", "come_apart_", "groups_of", "make_optimizer", "two_layer"]


def two_layer(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A two-layer network with weights drawn from ``seed`` alone."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def batch(t: int, rank: int, n: int = 16) -> tuple[Tensor, Tensor]:
    """The batch of step ``t`` on ``rank``: a noisy nonlinear function of six numbers."""
    generator = torch.Generator().manual_seed(1000 * t + rank)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3] + 0.3 * noise


@torch.no_grad()
def come_apart_(model: nn.Module, rank: int) -> None:
    """Noise in the weights, other on each rank."""
    generator = torch.Generator().manual_seed(rank)
    for p in model.parameters():
        p += 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def groups_of(model: nn.Sequential) -> list[list[Tensor]]:
    """Three parameter groups: first layer, last layer's weight, last layer's bias."""
    return [list(model[0].parameters()), [model[2].weight], [model[2].bias]]


def make_optimizer(kind: str, groups: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """ "adam" or "sgd" (with momentum) over the groups; rates come from the scheduler."""
    rows = [{"params": list(group)} for group in groups]
    if kind == "adam":
        return torch.optim.Adam(rows, lr=0.1)
    return torch.optim.SGD(rows, lr=0.1, momentum=0.9)
