"""The published warm noisy start: each replica begins from trained weights with noise of its own."""

from __future__ import annotations

import math
from hashlib import sha256

import torch
from torch import Tensor, nn

__all__ = ["perturb_"]


@torch.no_grad()
def perturb_(model: nn.Module, nu: float, seed: int, replica: int) -> None:
    r"""Add a replica's noise to the trainable parameters, in place.

    .. math:: \theta_r = \theta_0 + \epsilon_r, \qquad \epsilon_r \sim N(0,\; \nu^2 \|\theta_0\|^2 / d)

    Call it after the DDP wrap: wrapping sends rank 0's parameters to everybody and would overwrite the noise. The noise
    depends on ``seed`` and the replica alone; the global RNG is neither read nor seeded.

    Args:
        model: the model, wrapped or not.
        nu: relative size of the noise; 0 leaves the weights as they are.
        seed: together with ``replica`` it determines the noise.
        replica: which replica this is.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(_seed_of(seed, replica))
    squares = [torch.linalg.vector_norm(p, dtype=_wide(p)).item() ** 2 for p in trained]
    level = nu * math.sqrt(math.fsum(squares) / sum(p.numel() for p in trained))
    for p in trained:
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.copy_(p + level * noise.to(p.device, _wide(p)))


def _wide(tensor: Tensor) -> torch.dtype:
    """At least fp32: norm and noise of half precision are computed in it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _seed_of(seed: int, replica: int) -> int:
    """One 63-bit seed for a pair of numbers; neighbours are unrelated."""
    return int.from_bytes(sha256(f"perturb:{seed}:{replica}".encode()).digest()[:8], "big") >> 1
