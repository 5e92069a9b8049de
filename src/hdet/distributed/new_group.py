"""New process groups that inherit what torch does not hand down: the parent's backend and the user's time-out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["backend_of_device", "new_group"]


def new_group(ranks: Sequence[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of some ranks. A collective of all ranks of the world."""
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=_timeout_of(parent), backend=_backend_text(parent))
    return made


def backend_of_device(group: dist.ProcessGroup) -> dict[str, str]:
    """For instance {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (part.split(":", 1) for part in _backend_text(group).split(",") if ":" in part)
    return {device.strip(): backend.strip() for device, backend in pairs}


def _backend_text(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(group))


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The user's time-out; None (torch's default) where torch hides it."""
    for device in backend_of_device(group):
        try:
            options = group._get_backend(torch.device(device)).options
            return timedelta(seconds=options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return None
