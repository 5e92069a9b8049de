"""Arms: replicas of several ranks, isolated from each other's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hdet.checks import is_int, items_of, must_be

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Arms:
    """The ranks, split into gradient-isolated replicas. Made by :func:`arms`; give it as ``group=``.

    Attributes:
        members: ``members[a]``: the ranks of arm a.
        index: this rank's arm.
        gradients: the process group of this rank's arm, for ``DistributedDataParallel(process_group=...)``.
    """

    def __init__(self, members: list[list[int]]) -> None:
        self.members = members
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        rank = 0 if world is None else dist.get_rank()
        self.index = next(a for a, ranks in enumerate(members) if rank in ranks)
        self.gradients: dist.ProcessGroup | None = None
        if world is not None:
            groups = [new_group(ranks, world) for ranks in members]  # every rank takes part in making every group
            self.gradients = groups[self.index]

    def __getstate__(self) -> dict[str, object]:
        """A process group cannot be copied or pickled: a copy has the arms, and no ``gradients``."""
        return {**vars(self), "gradients": None}

    def __repr__(self) -> str:
        return f"Arms({self.members})"


def arms(n: int | Sequence[int] | DeviceMesh, dim: str | int | Sequence[str | int] | None = None) -> Arms:
    """Split the ranks into gradient-isolated replicas. Every rank calls it, after the process group exists.

    ``n`` = world size means no gradient synchronisation at all (local SGD); ``n`` = 1 shares gradients among all.

    Args:
        n: how many arms of equal size, of consecutive ranks; or the size of each arm; or a DeviceMesh.
        dim: with a mesh, the dimension or dimensions along which replicas differ: ranks with the same coordinates in
            them are one arm. For a sharded model give the dimensions along which it is not sharded.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if hasattr(n, "mesh"):
        return Arms(_along_mesh(n, dim, world))  # type: ignore[arg-type]
    must_be("left out without a DeviceMesh, of which it is a dimension", dim is None, "for instance arms(2)", dim=dim)
    sizes = list(n) if isinstance(n, (list, tuple)) else []
    if is_int(n) and 1 <= n <= world:  # type: ignore[operator]  # a number
        sizes = [world // n] * n  # type: ignore[operator]
    fits = all(is_int(size) and size >= 1 for size in sizes) and sum(sizes) == world
    rule = f"a number that divides the {world} ranks, sizes of arms that add up to the {world} ranks, or a DeviceMesh"
    must_be(rule, fits, "every rank belongs to one arm; call it after init_process_group", n=n)
    ranks = iter(range(world))
    return Arms([list(islice(ranks, size)) for size in sizes])


def _along_mesh(mesh: DeviceMesh, dim: str | int | Sequence[str | int] | None, world: int) -> list[list[int]]:
    ranks = mesh.mesh
    cure = f"this one has {ranks.numel()}: give the mesh that it is a part of"
    must_be(f"a mesh of all {world} ranks", ranks.numel() == world, cure, n=mesh)
    wanted = [dim] if isinstance(dim, (str, int)) else items_of(dim) or []
    names = list(mesh.mesh_dim_names or ())
    axes: list[Any] = [names.index(one) if isinstance(one, str) and one in names else one for one in wanted]
    fits = axes and all(is_int(axis) and 0 <= axis < ranks.ndim for axis in axes) and len(set(axes)) == len(axes)
    must_be("a dimension of the mesh, or several", fits, f"the mesh has {tuple(names) or ranks.ndim}", dim=dim)
    rest = [axis for axis in range(ranks.ndim) if axis not in axes]
    arms_of_ranks = ranks.permute(*axes, *rest).flatten(0, len(axes) - 1)
    return [sorted(part.flatten().tolist()) for part in arms_of_ranks]


def new_group(ranks: Sequence[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of some ranks, with the backend and time-out of ``parent``. A collective of all ranks of the world."""
    timeouts: list[timedelta] = []
    for device in backend_of_device(parent):
        with suppress(AttributeError, RuntimeError):  # if torch does not show the user's time-out, its default counts
            timeouts.append(parent._get_backend(torch.device(device)).options._timeout)
    backend, timeout = str(dist.get_backend_config(parent)), timeouts[0] if timeouts else None
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return made


def backend_of_device(group: dist.ProcessGroup) -> dict[str, str]:
    """For instance {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
