"""torchtitan: ``AutoLR``, its container of schedulers with one that finds the learning rate."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hdet.errors import ArgumentError
from hdet.schedulers.several import auto

__all__ = ["AutoLR"]

_INSTALLED = importlib.util.find_spec("torchtitan") is not None
_Container: Any = (
    importlib.import_module("torchtitan.components.optimizer").LRSchedulersContainer if _INSTALLED else object
)
_Config: Any = _Container.Config if _INSTALLED else object


class AutoLR(_Container):  # type: ignore[misc]  # the type of an optional package
    """Finds one factor on the rates of all optimizers of a torchtitan run.

    In a trainer's config it stands where torchtitan's own does:

    .. code-block:: python

        config.lr_scheduler = AutoLR.Config()

    The rates in the optimizers' config are guesses that may be far off. A checkpoint holds all that the
    search has found, where torchtitan's own container saves the number of steps alone.

    torchtitan's trainer steps it without a loss. In a trainer of your own, ``lr_schedulers.observe(loss)`` after the
    forward pass gives it.

    Args:
        optimizers: torchtitan's ``OptimizersContainer``.
        total_steps: steps of the run.
        onecycle: further arguments of :func:`hdet.auto`: ``schedule``, ``journal``, ``go_back``, those of
            :class:`hdet.OneCycleLR`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Config):  # type: ignore[misc]  # of an optional package
        """What the trainer builds the container from; of torchtitan's own fields only ``total_steps`` is used."""

        onecycle: dict[str, Any] = field(default_factory=dict)
        """Further arguments of :func:`hdet.auto`."""

        def build(self, *, optimizers: Any, training_steps: int) -> AutoLR:
            """The container, for so many steps if ``total_steps`` does not say otherwise."""
            steps = training_steps if self.total_steps is None else self.total_steps
            return AutoLR(optimizers, total_steps=steps, **self.onecycle)

    def __init__(self, optimizers: Any, *, total_steps: int, **onecycle: Any) -> None:
        if not _INSTALLED:
            raise ModuleNotFoundError("AutoLR needs torchtitan, which is not installed: pip install torchtitan")
        self.optimizers = list(optimizers)
        known = {"model": _whole(getattr(optimizers, "model_parts", ())), **onecycle}
        self.scheduler = auto(self.optimizers, total_steps=total_steps, **known)
        self.schedulers = [self.scheduler]

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the round."""
        self.scheduler.observe(loss)

    def get_metrics(self) -> dict[str, float]:
        """The rates by optimizer and parameter group, under torchtitan's own names."""
        found = {}
        for optimizer in self.optimizers:
            name, groups = f"lr/{type(optimizer).__name__}", optimizer.param_groups
            for i, group in enumerate(groups):
                found[name if len(groups) == 1 else f"{name}/{i}"] = float(group["lr"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own; the same on every rank."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the search. Optimizers are to be loaded before, as torchtitan does."""
        if "hdet" not in state_dict:
            raise ArgumentError(
                f"the checkpoint's scheduler is torchtitan's own, with {sorted(state_dict)}: nothing was searched "
                'there; set exclude_from_loading=["lr_scheduler"] in the checkpoint config to search from here on'
            )
        self.scheduler.load_state_dict(state_dict)


def _whole(parts: Sequence[nn.Module]) -> nn.Module | None:
    """The model from its parts; pipeline stages have several."""
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts) if parts else None
