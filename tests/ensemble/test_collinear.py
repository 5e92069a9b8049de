"""The proposition of docs/the-paper.md: replicas that share gradients lie on a line, and their mean is the base run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

MULTIPLIERS = (8 / 9, 1.0, 10 / 9)


def displacements(optimizer: Callable[..., Optimizer], **settings: float) -> list[torch.Tensor]:
    """How far each replica has gone after 20 steps, over its multiplier."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, dtype=torch.float64, generator=generator)
    replicas = [start.clone().requires_grad_() for _ in MULTIPLIERS]
    optimizers = [optimizer([x], lr=0.01 * rho, **settings) for x, rho in zip(replicas, MULTIPLIERS, strict=True)]
    for _ in range(20):  # each replica's loss at its own weights, on its own batch
        losses = [(x - torch.randn(8, generator=generator)).square().sum() for x in replicas]
        shared = torch.stack([torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, replicas, strict=True)]).mean(
            0
        )
        for x, one in zip(replicas, optimizers, strict=True):
            x.grad = shared.clone()
            one.step()
    return [(x.detach() - start) / rho for x, rho in zip(replicas, MULTIPLIERS, strict=True)]


@pytest.mark.parametrize(("optimizer", "settings"), [(SGD, {}), (SGD, {"momentum": 0.9}), (Adam, {})])
def test_replicas_lie_on_a_line(optimizer: Callable[..., Optimizer], settings: dict[str, float]) -> None:
    low, middle, high = displacements(optimizer, **settings)
    torch.testing.assert_close(low, middle)
    torch.testing.assert_close(high, middle)


def test_weight_decay_leaves_the_line() -> None:
    low, middle, _ = displacements(AdamW, weight_decay=0.5)
    assert not torch.allclose(low, middle)
