"""The warm noisy start: replicas leave a checkpoint in slightly different directions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor, nn

from hdet.checks import is_finite, is_int, is_one_of, shown
from hdet.distributed.group import find_seat
from hdet.distributed.shards import refuse_sharded
from hdet.errors import ArgumentError
from hdet.parameters import check_model

__all__ = ["perturb_"]


@torch.no_grad()
def perturb_(
    model: nn.Module,
    nu: float = 0.01,
    seed: int = 0,
    replica: int | None = None,
    scope: Literal["model", "tensor"] = "model",
) -> None:
    r"""Add this replica's noise to the trainable parameters, in place.

    .. math:: \theta_r = \theta_0 + \epsilon_r, \qquad \epsilon_r \sim N(0,\; \nu^2 \|\theta_0\|^2 / d)

    Call it after the DDP wrap: wrapping sends rank 0's parameters to everybody and would overwrite the noise. The noise
    depends on ``seed`` and the replica alone; the global RNG is neither read nor seeded.

    Args:
        model: the model, wrapped or not.
        nu: relative size of the noise; 0 leaves the weights as they are.
        seed: together with ``replica`` it determines the noise.
        replica: which replica this is. None: this process's rank, 0 without torch.distributed. With ``hdet.arms`` give
            ``arms.index``, so that the ranks of an arm stay equal.
        scope: "model": one noise level, from the norm and the number d of all trainable parameters, as published;
            "tensor": each tensor by its own norm and size, so that small tensors are not drowned.
    """
    check_model(model, needed=True)
    if not (is_finite(nu) and nu >= 0):
        raise ArgumentError(f"nu must be a finite number, at least 0, but got nu={nu!r}; the published value is 0.01")
    for name, value in (("seed", seed), ("replica", 0 if replica is None else replica)):
        if not is_int(value):
            raise ArgumentError(f"{name} must be an integer, but got {name}={shown(value)}; leave it out")
    if not is_one_of(scope, ("model", "tensor")):
        raise ArgumentError(f'scope must be "model" or "tensor", but got scope={scope!r}; leave it out for "model"')
    parameters = [p for p in model.parameters() if p.requires_grad and (p.is_floating_point() or p.is_complex())]
    refuse_sharded(parameters, "perturb_()")
    number = find_seat(None).replica if replica is None else replica
    generator = torch.Generator().manual_seed(_seed_of(seed, number))
    tensors = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    for tensor, level in zip(tensors, _levels(tensors, nu, scope), strict=True):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.copy_(tensor + level * noise.to(tensor.device, _wide(tensor)))


def _levels(tensors: list[Tensor], nu: float, scope: str) -> Iterator[float]:
    """Standard deviation of the noise for each tensor."""
    squares = [torch.linalg.vector_norm(t, dtype=_wide(t)).item() ** 2 for t in tensors]
    sizes = [t.numel() for t in tensors]
    if scope == "model":
        squares, sizes = [math.fsum(squares)] * len(tensors), [sum(sizes)] * len(tensors)
    for square, size in zip(squares, sizes, strict=True):
        yield nu * math.sqrt(square / size) if size else 0.0


def _wide(tensor: Tensor) -> torch.dtype:
    """At least fp32: norm and noise of half precision are computed in it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _seed_of(seed: int, replica: int) -> int:
    """One 63-bit seed for a pair of numbers; neighbours are unrelated."""
    return int.from_bytes(sha256(f"perturb:{seed}:{replica}".encode()).digest()[:8], "big") >> 1
