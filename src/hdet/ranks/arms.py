"""Arms: replicas of several ranks, isolated from each other's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hdet.checks import is_int, shown
from hdet.errors import ArgumentError

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arms) and self.members == other.members

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key

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
    if dim is not None and not hasattr(n, "mesh"):
        raise ArgumentError(f"dim is a dimension of a DeviceMesh, but got dim={shown(dim)} without one; leave it out")
    if hasattr(n, "mesh"):
        return Arms(_along_mesh(n, dim, world))  # type: ignore[arg-type]
    if isinstance(n, int) and not isinstance(n, bool):
        if n < 1 or world % n:
            raise ArgumentError(
                f"arms(n) needs n to divide the {world} ranks, but got n={shown(n)}; use a divisor, give the sizes as "
                "a list, or call it after init_process_group"
            )
        sizes = [world // n] * n
    elif isinstance(n, Sequence) and not isinstance(n, str):
        sizes = list(n)
    else:
        raise ArgumentError(
            f"n must be a number of arms, their sizes, or a DeviceMesh, but got n={shown(n)}; for instance arms(2)"
        )
    if not all(is_int(size) and size >= 1 for size in sizes) or sum(sizes) != world:
        raise ArgumentError(
            f"n must be sizes of arms, integers above 0 that add up to the {world} ranks, but got n={shown(sizes)}; "
            "every rank belongs to one arm"
        )
    starts = [sum(sizes[:a]) for a in range(len(sizes))]
    return Arms([list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)])


def _along_mesh(mesh: DeviceMesh, dim: str | int | Sequence[str | int] | None, world: int) -> list[list[int]]:
    ranks = mesh.mesh
    if ranks.numel() != world:
        raise ArgumentError(
            f"arms(mesh, dim) needs a mesh of all {world} ranks, but got one of {ranks.numel()}; give the whole mesh "
            'and a name: arms(mesh, "replicate")'
        )
    wanted = list(dim) if isinstance(dim, Sequence) and not isinstance(dim, str) else [dim]
    names = list(mesh.mesh_dim_names or ())
    known: dict[str | int | None, int] = {axis: axis for axis in range(ranks.ndim)}
    known.update((name, axis) for axis, name in enumerate(names))
    axes = [known[one] for one in wanted if one in known]
    if not axes or len(set(axes)) < len(wanted):
        raise ArgumentError(
            f"arms(mesh, dim) needs a dimension of the mesh, or several, but got dim={shown(dim)}; "
            f"the mesh has {tuple(names) or ranks.ndim}"
        )
    rest = [axis for axis in range(ranks.ndim) if axis not in axes]
    arms_of_ranks = ranks.permute(*axes, *rest).flatten(0, len(axes) - 1)
    return [sorted(part.flatten().tolist()) for part in arms_of_ranks]


def new_group(ranks: Sequence[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of some ranks, with the backend and time-out of ``parent``. A collective of all ranks of the world."""
    backend, timeout = str(dist.get_backend_config(parent)), _timeout_of(parent)
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return made


def backend_of_device(group: dist.ProcessGroup) -> dict[str, str]:
    """For instance {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (part.split(":", 1) for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return {device.strip(): backend.strip() for device, backend in pairs}


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The user's time-out; None (torch's default) if torch does not show it."""
    for device in backend_of_device(group):
        try:
            options = group._get_backend(torch.device(device)).options
            return timedelta(seconds=options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return None
