"""The paper's warm noisy start: replicas begin from trained weights, each with noise of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn

from hdet.checks import is_finite, is_int, must_be
from hdet.errors import ArgumentError, ShardedParametersError
from hdet.optimizer import check_model
from hdet.ranks.group import Group, check_group, find_replica_index
from hdet.ranks.shards import is_sharded
from hdet.ranks.weights import real_of


def perturb_(model: nn.Module, nu: float = 0.01, *, seed: int = 0, group: Group = None) -> None:
    r"""Add this replica's noise to the trainable parameters, in place.

    .. math:: \theta_r = \theta_0 + \epsilon_r, \qquad \epsilon_r \sim N(0,\; \nu^2 \|\theta_0\|^2 / d)

    Every rank calls it, with the same weights, after ``DistributedDataParallel(model)``, which sends the first rank's
    parameters to the others and would overwrite the noise, and before ``fully_shard``. It communicates nothing. The
    noise is a function of ``seed`` and the replica alone: the global generators are neither read nor seeded, and ranks
    of one arm get the same noise, on any device.

    Args:
        model: the model, wrapped or not. Frozen parameters and buffers stay as they are, and do not count in d and in
            the norm. A complex number counts as two real ones.
        nu: the size of the noise, relative to that of the weights; 0 leaves them as they are.
        seed: together with the replica it determines the noise.
        group: as in :class:`hdet.OneCycleLR`. None: every rank is a replica, with noise of its own; ``hdet.arms(n)``:
            the arms are; ``hdet.arms(1)``: all ranks get the same noise, for training without replicas.

    References:
        [HDET](https://arxiv.org/abs/2604.24708), Cheng, Huang, Zhu, Alonso, 2026.

    >>> model = nn.Linear(2, 1)
    >>> before = model.weight.clone()
    >>> perturb_(model, nu=0.01)
    >>> bool((model.weight != before).all())
    True
    """
    check_model(model, needed=True)
    must_be("a finite number, at least 0", is_finite(nu) and nu >= 0, "the published value is 0.01", nu=nu)
    must_be("an integer", is_int(seed), "leave it out for 0", seed=seed)
    check_group(group)
    parts = [_whole(name, p) for name, p in model.named_parameters() if p.requires_grad]
    add_noise_(parts, nu, seed, find_replica_index(group).replica)


@torch.no_grad()
def add_noise_(parts: Sequence[Tensor], nu: float, seed: int, replica: int) -> None:
    """Add the noise of one replica to real tensors, which are all of its trainable parameters, in place."""
    squares = [torch.linalg.vector_norm(part, dtype=_wide(part)).item() ** 2 for part in parts]
    if not math.isfinite(math.fsum(squares)):
        raise ArgumentError("model must have finite weights to start from, but their norm is not finite; load others")
    level = nu * math.sqrt(math.fsum(squares) / max(1, sum(part.numel() for part in parts)))
    unrelated = sha256(f"perturb:{seed}:{replica}".encode()).digest()  # also for neighbouring seeds and replicas
    generator = torch.Generator().manual_seed(int.from_bytes(unrelated[:8], "big") >> 1)
    for part in parts:  # drawn on the host in float64, so that the noise does not depend on the device
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        part.copy_(part + level * noise.to(part.device, _wide(part)))


def _whole(name: str, p: Tensor) -> Tensor:
    """The real numbers of a parameter, in the same memory. Raises if this rank does not hold all of them."""
    if is_sharded(p) or hasattr(p, "ds_id"):
        raise ShardedParametersError(
            f"perturb_() needs whole weights, but the parameter {name} is sharded over the ranks; call it before "
            "fully_shard, parallelize_module or a framework shards it, with group=hdet.arms(...) if several ranks hold "
            "a replica"
        )
    return real_of(p)


def _wide(tensor: Tensor) -> torch.dtype:
    """At least fp32: norm and noise of half precision are computed in it."""
    return torch.promote_types(tensor.dtype, torch.float32)
