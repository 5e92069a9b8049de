"""Resharding: FSDP2 gathers weights for a forward pass, and may keep them; what is written to the shards must count."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["reshard", "reshard_all", "resharded"]


def reshard(model: nn.Module | None) -> None:
    """Weights that FSDP2 has gathered are given up: the next forward pass gathers what the shards hold then.

    Without gradients nothing else gives them up: the root module keeps its own after its forward pass.
    """
    _reshard([] if model is None else model.modules())


def reshard_all() -> None:
    """The same for every module of this process, where the model is not known: torch has a list of them for itself."""
    composed = sys.modules.get("torch.distributed._composable_state")
    _reshard(list(getattr(composed, "_module_state_mapping", ())))


def _reshard(modules: Iterable[nn.Module]) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has imported it, there is nothing to do
    if fsdp is None:
        return
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def resharded(model: nn.Module | None) -> Iterator[None]:
    """Forward passes inside read the shards as they are, and those afterwards too, whatever is written to them."""
    reshard(model)
    try:
        yield
    finally:
        reshard(model)
