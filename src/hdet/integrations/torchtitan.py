"""hdet in torchtitan, in the place of its container of schedulers.

``AutoLR`` has one scheduler, which finds the learning rate; ``Guard`` has torchtitan's own, and guards the steps.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer

from hdet.errors import ArgumentError
from hdet.integrations.checkpoints import GUARD, SEARCH, AccumulatingGuard, name_on_rank, search_state
from hdet.optimizer import as_one
from hdet.schedulers.auto_scheduler import auto

__all__ = ["AutoLR", "Guard"]


class AutoLR(LRSchedulersContainer):  # type: ignore[misc]  # the type of an optional package
    """Finds one factor on the rates of all optimizers of a torchtitan run.

    In a trainer's config it replaces torchtitan's own container:

    .. code-block:: python

        config.lr_scheduler = AutoLR.Config()

    The rates in the optimizers' config are guesses that may be far off. A checkpoint has the whole search;
    torchtitan's own container saves only the number of steps. If weights are sharded, each rank saves its part under a
    name with its rank and the number of ranks: only the same number of ranks can load it.

    torchtitan's trainer steps it without a loss. In a trainer of your own, call ``lr_schedulers.observe(loss)`` after
    the forward pass.

    Args:
        optimizers: torchtitan's ``OptimizersContainer``.
        total_steps: steps of the run.
        keep_search: whether a checkpoint has the tensors of the search. Without them a resumed run makes them again,
            on any number of ranks.
        options: further arguments of :func:`hdet.auto`, as ``schedule`` or ``journal``; in a ``Config`` ``auto={...}``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):  # type: ignore[misc]
        """The trainer builds the container from it; of torchtitan's own fields only ``total_steps`` is used."""

        auto: dict[str, Any] = field(default_factory=dict)
        """Further arguments of :func:`hdet.auto`."""
        keep_search: bool = True
        """Whether a checkpoint has the tensors of the search."""

        def build(self, *, optimizers: Any, training_steps: int) -> AutoLR:
            """Build the container, for ``training_steps`` steps unless ``total_steps`` is given."""
            steps = training_steps if self.total_steps is None else self.total_steps
            return AutoLR(optimizers, total_steps=steps, keep_search=self.keep_search, **self.auto)

    def __init__(self, optimizers: Any, *, total_steps: int, keep_search: bool = True, **options: Any) -> None:
        self.optimizers = list(optimizers)
        known = {"model": _whole(optimizers.model_parts), **options}
        self.scheduler = auto(self.optimizers, total_steps=total_steps, **known)
        self.schedulers = [self.scheduler]
        self.keep_search = keep_search

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
        """The scheduler's state, and the search as bytes, since torch.distributed.checkpoint must know shapes before.

        Collective if the search is kept.
        """
        state = self.scheduler.state_dict()
        if not self.keep_search:
            return state
        return {**state, name_on_rank(self.scheduler.optimizer, SEARCH): _packed(search_state(self.scheduler))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the search. Load the optimizers before, as torchtitan does."""
        if "hdet" not in state_dict:
            raise ArgumentError(
                f"the checkpoint's scheduler is torchtitan's own, with {sorted(state_dict)}: nothing was searched "
                'there; set exclude_from_loading=["lr_scheduler"] in the checkpoint config to search from here on'
            )
        state = dict(state_dict)
        packed = state.pop(name_on_rank(self.scheduler.optimizer, SEARCH), None)
        self.scheduler.load_state_dict(state)
        self.scheduler.load_search_state_dict(_unpacked(packed))


class Guard(LRSchedulersContainer):  # type: ignore[misc]  # the type of an optional package
    """:class:`hdet.Guard` in a torchtitan run, with torchtitan's own schedule.

    In a trainer's config it replaces torchtitan's own container, and has the same fields:

    .. code-block:: python

        config.lr_scheduler = Guard.Config(warmup_steps=200, guard={"check_every": 50})

    All optimizers are guarded as one. torchtitan's trainer passes no loss, so gradients and weights are judged. In a
    trainer of your own, call ``lr_schedulers.observe(loss)`` after the forward pass. A checkpoint has the guard; if
    weights are sharded, each rank saves its part, and only the same number of ranks resumes it.

    Args:
        optimizers: torchtitan's ``OptimizersContainer``.
        schedulers: torchtitan's container, which sets their rates.
        options: further arguments of :class:`hdet.Guard`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):  # type: ignore[misc]
        """The trainer builds the container from it."""

        guard: dict[str, Any] = field(default_factory=dict)
        """Arguments of :class:`hdet.Guard`: ``check_every``, ``factor``, ``recover``, ``max_rollbacks``."""

        def build(self, *, optimizers: Any, training_steps: int) -> Guard:
            """Build the container, with torchtitan's schedule for ``training_steps`` steps."""
            schedulers = LRSchedulersContainer.Config.build(self, optimizers=optimizers, training_steps=training_steps)
            return Guard(optimizers, schedulers, **self.guard)

    def __init__(self, optimizers: Any, schedulers: Any, **options: Any) -> None:
        self.schedulers = list(schedulers)
        self.optimizer = as_one(list(optimizers))
        self.guard = AccumulatingGuard(self.optimizer, _whole(optimizers.model_parts), **options)

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss towards the step."""
        self.guard.observe(loss)

    def step(self) -> None:
        """Count a step, and step the schedule. Every fourth call is a collective."""
        self.guard.end_step()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state, and the guard's as bytes. Collective."""
        return {**super().state_dict(), name_on_rank(self.optimizer, GUARD): _packed(self.guard.state_of_all())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume schedule and guard. Load the optimizers before, as torchtitan does."""
        super().load_state_dict(state_dict)
        name = name_on_rank(self.optimizer, GUARD)
        self.guard.resume(_unpacked(state_dict.get(name)), name)


def _packed(state: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    torch.save(state, packed)
    return packed.getvalue()


def _unpacked(packed: bytes | None) -> dict[str, Any]:
    """What was packed; empty if nothing was."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True) if packed is not None else {}


def _whole(parts: Sequence[nn.Module]) -> nn.Module:
    """The model as one module; pipeline stages have several parts."""
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)
