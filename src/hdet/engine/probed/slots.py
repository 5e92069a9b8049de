"""Slots: copies of weights, buffers and optimizer state in host memory, for going back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.copies import put_back, write_
from hdet.engine.weights import trained_parameters

__all__ = ["Slots"]

_SCHEDULED = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum", "weight_decay")
)
"""Numbers of a parameter group that schedules and users write. Others are the optimizer's own memory: Schedule-Free's
``weight_sum``, Prodigy's ``d``."""


class _Copy(NamedTuple):
    """Everything that training changes, at one moment."""

    parameters: list[int]
    """Their ids: layers may be frozen and thawed."""
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    memory: _OptimizerMemory


class _OptimizerMemory(NamedTuple):
    """What the optimizer remembers."""

    states: list[dict[str, Any]]
    """Of each parameter; mostly empty before the first step, but not with every optimizer."""
    numbers: list[dict[str, Any]]
    """Of each parameter group."""


class Slots:
    """Numbered copies. Which to keep and where to go back to is the pilot's to say.

    Not saved with a checkpoint: a resumed run begins to remember anew.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._start: tuple[_OptimizerMemory, dict[str, Tensor]] | None = None

    def present(self, optimizer: Optimizer) -> frozenset[int]:
        """Slots that can be put back. Layers may have been frozen or thawed since a copy was made."""
        trained = [id(p) for p in trained_parameters(optimizer)]
        return frozenset(slot for slot, copy in self._copies.items() if copy.parameters == trained)

    def keep(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Copy this moment into a slot."""
        parameters = trained_parameters(optimizer)
        weights, buffers = [_copied(p) for p in parameters], _copied(_buffers(model))
        self._copies[slot] = _Copy([id(p) for p in parameters], weights, buffers, _remembered(optimizer, parameters))

    def keep_only(self, slots: frozenset[int]) -> None:
        """Free all other slots."""
        self._copies = {slot: copy for slot, copy in self._copies.items() if slot in slots}

    def keep_start(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Before the first step: what the optimizer remembers, and the buffers. The weights are the round's anchor."""
        if self._start is None:
            self._start = _remembered(optimizer, trained_parameters(optimizer)), _copied(_buffers(model))

    def forget_start(self) -> None:
        """The first step is behind."""
        self._start = None

    def restart_(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """What the optimizer remembers, and the buffers, are as before the first step."""
        if self._start is not None:
            memory, buffers = self._start
            write_(*_fitting(_buffers(model), buffers))
            _restore_(optimizer, trained_parameters(optimizer), memory)

    @contextmanager
    def shown(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> Iterator[None]:
        """Inside, weights, buffers and what the optimizer remembers are as at that moment."""
        copy, parameters = self._copies[slot], trained_parameters(optimizer)
        buffers, values = _fitting(_buffers(model), copy.buffers)
        tensors, own = [*parameters, *buffers], _remembered(optimizer, parameters)
        with put_back(tensors):
            write_(tensors, [*copy.weights, *values])
            _restore_(optimizer, parameters, copy.memory)  # Schedule-Free makes the evaluated weights from it
            try:
                yield
            finally:
                _restore_(optimizer, parameters, own)

    def restore_(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Put a moment back, in place."""
        copy, parameters = self._copies[slot], trained_parameters(optimizer)
        buffers, values = _fitting(_buffers(model), copy.buffers)
        write_([*parameters, *buffers], [*copy.weights, *values])
        _restore_(optimizer, parameters, copy.memory)


def _remembered(optimizer: Optimizer, parameters: Sequence[Tensor]) -> _OptimizerMemory:
    states = [{name: _copied(value) for name, value in optimizer.state.get(p, {}).items()} for p in parameters]
    own = [{name: v for name, v in group.items() if _is_own_number(name, v)} for group in optimizer.param_groups]
    return _OptimizerMemory(states, own)


@torch.no_grad()
def _restore_(optimizer: Optimizer, parameters: Sequence[Tensor], memory: _OptimizerMemory) -> None:
    for p, state in zip(parameters, memory.states, strict=True):
        _restore_state_(optimizer, p, state)
    for group, numbers in zip(optimizer.param_groups, memory.numbers, strict=False):  # groups may have been added
        group.update(numbers)


def _restore_state_(optimizer: Optimizer, p: Tensor, state: dict[str, Any]) -> None:
    if not state:
        optimizer.state.pop(p, None)
        return
    now = optimizer.state[p]
    for name, value in state.items():
        if isinstance(value, Tensor) and isinstance(now.get(name), Tensor):
            now[name].copy_(value)
        else:
            now[name] = _copied(value, p.device)
    for name in set(now) - set(state):
        del now[name]


def _is_own_number(name: str, value: object) -> bool:
    return name not in _SCHEDULED and isinstance(value, (int, float)) and not isinstance(value, bool)


def _buffers(model: nn.Module | None) -> dict[str, Tensor]:
    return dict(model.named_buffers()) if model is not None else {}


def _fitting(now: dict[str, Tensor], kept: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers with their kept values. Caches that a forward pass has put there since, or made longer, stay."""
    pairs = [(b, kept[name]) for name, b in now.items() if name in kept and kept[name].shape == b.shape]
    return [b for b, _ in pairs], [value for _, value in pairs]


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    """A copy with tensors on ``device``, also of lists and dicts, as some optimizers keep them."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item, device) for item in value)
    return value
