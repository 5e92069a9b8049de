"""Slots: copies of weights, buffers and optimizer state, for going back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.copies import copy_all_, put_back, write_
from hdet.distributed.partitions import refresh
from hdet.distributed.shards import local, rewrapped
from hdet.engine.probed.evaluated import evaluates_others
from hdet.engine.probed.places import parameters_at, places_of, refuse_other_shapes
from hdet.parameters import trained_parameters
from hdet.rollback.storage import Storage, copied, leaves

__all__ = ["Slots"]

_SCHEDULED = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum", "weight_decay")
)
"""Numbers of a parameter group that schedules and users write. Others are the optimizer's own memory: Schedule-Free's
``weight_sum``, Prodigy's ``d``."""


class _Memory(NamedTuple):
    """What the optimizer remembers."""

    states: list[dict[str, Any]]
    """Of each parameter; mostly empty before the first step, but not with every optimizer."""
    numbers: list[dict[str, Any]]
    """Of each parameter group."""


class _Copy(NamedTuple):
    """Everything that training changes, at one moment."""

    parameters: list[int]
    """Their ids: layers may be frozen and thawed."""
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    memory: _Memory
    on_device: bool
    """Whether what is of a device lies there."""

    @property
    def tensors(self) -> list[Tensor]:
        return leaves([self.weights, self.buffers, self.memory.states])


class Slots:
    """Numbered copies. Which to keep and where to go back to is the pilot's to say.

    Args:
        limit: bytes of a device that they may take; None: half of what is free. What does not fit lies on the host.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._storage = Storage(limit)
        self._copies: dict[int, _Copy] = {}
        self._spare: _Copy | None = None
        """A copy that is no longer needed: the next one uses its memory."""
        self._start: tuple[list[int], _Memory, dict[str, Tensor]] | None = None

    def emptied(self) -> Slots:
        """New ones with the same limit."""
        return Slots(self._storage.limit)

    def saved(self, optimizer: Optimizer) -> dict[str, Any]:
        """All copies, for a checkpoint: the tensors themselves."""
        self._storage.finish()
        copies = [[slot, _saved(copy, optimizer)] for slot, copy in self._copies.items()]
        start = None
        if self._start is not None:
            ids, memory, buffers = self._start
            start = _saved(_Copy(ids, [], buffers, memory, True), optimizer)
        return {"copies": [row for row in copies if row[1] is not None], "start": start}

    def loaded(self, saved: Mapping[str, Any], optimizer: Optimizer) -> Slots:
        """New ones with the same limit and the copies of :meth:`saved`. What does not fit raises."""
        found = self.emptied()
        for slot, row in saved["copies"]:
            refuse_other_shapes(parameters_at(row["places"], optimizer), row["weights"])
            found._copies[int(slot)] = found._placed(row, optimizer)
        if saved["start"] is not None:
            start = found._placed(saved["start"], optimizer)
            found._start = start.parameters, start.memory, start.buffers
        return found

    def _placed(self, row: Mapping[str, Any], optimizer: Optimizer) -> _Copy:
        """A saved copy, on the devices of the parameters if they have room."""
        parameters = parameters_at(row["places"], optimizer)
        held = [tensor for copy in self._copies.values() for tensor in copy.tensors]
        stays = self._storage.has_room(leaves([parameters, _states(optimizer, parameters)]), held)
        devices = [p.device if stays else torch.device("cpu") for p in parameters]
        any_device = devices[0] if devices else torch.device("cpu")
        return _Copy(
            [id(p) for p in parameters],
            [_cloned(value, device) for value, device in zip(row["weights"], devices, strict=False)],
            _cloned(row["buffers"], any_device),
            _Memory(
                [_cloned(state, device) for state, device in zip(row["states"], devices, strict=True)],
                [dict(numbers) for numbers in row["numbers"]],
            ),
            stays,
        )

    def present(self, optimizer: Optimizer) -> frozenset[int]:
        """Slots that can be put back. Layers may have been frozen or thawed since a copy was made."""
        trained = [id(p) for p in trained_parameters(optimizer)]
        return frozenset(slot for slot, copy in self._copies.items() if copy.parameters == trained)

    def keep(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Copy this moment into a slot. Synchronises nothing."""
        self.wait()
        parameters = trained_parameters(optimizer)
        ids, buffers, states = [id(p) for p in parameters], _buffers(model), _states(optimizer, parameters)
        old, self._spare = self._copies.pop(slot, None) or self._spare, None
        if old is None or old.parameters != ids:  # nothing whose memory could be used again
            held = [tensor for copy in self._copies.values() for tensor in copy.tensors]
            stays = self._storage.has_room(leaves([parameters, buffers, states]), held)
            old = _Copy(ids, [], {}, _Memory([], []), stays)
        at_once: list[tuple[Tensor, Tensor]] = []
        beside: list[tuple[Tensor, Tensor]] = []
        stays = old.on_device
        weights = copied(parameters, old.weights, stays, at_once)
        own_buffers = copied(buffers, old.buffers, stays, at_once)
        memory = _Memory(copied(states, old.memory.states, stays, beside), _numbers(optimizer))
        self._storage.fill_(at_once)
        self._storage.fill_(beside, beside=True)  # only the next step changes what the optimizer remembers
        self._copies[slot] = _Copy(ids, weights, own_buffers, memory, stays)

    def keep_only(self, slots: frozenset[int]) -> None:
        """Free all other slots; the memory of one is used again, unless there will be no more copies."""
        for slot in self._copies.keys() - slots:
            self._spare = self._copies.pop(slot)
        if not slots:
            self._spare = None

    def wait(self) -> None:
        """Before the optimizer's memory changes: copies of it that are under way come first."""
        self._storage.wait()

    def keep_start(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Before the first step: what the optimizer remembers, and the buffers. The weights are the origin."""
        parameters = trained_parameters(optimizer)
        ids = [id(p) for p in parameters]
        if self._start is None or self._start[0] != ids:
            states = _states(optimizer, parameters)
            pairs: list[tuple[Tensor, Tensor]] = []
            stays = self._storage.has_room(leaves(states), ())
            own = copied(states, None, stays, pairs)
            buffers = copied(_buffers(model), None, stays, pairs)
            self._storage.fill_(pairs)
            self._start = ids, _Memory(own, _numbers(optimizer)), buffers

    def forget_start(self) -> None:
        """The first step is behind."""
        self._start = None

    def restart_(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """What the optimizer remembers, and the buffers, are as before the first step."""
        parameters = trained_parameters(optimizer)
        if self._start is not None and self._start[0] == [id(p) for p in parameters]:  # none was thawed since
            _, memory, buffers = self._start
            write_(*_fitting(_buffers(model), buffers))
            _restore_(optimizer, parameters, memory)

    @contextmanager
    def shown(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> Iterator[None]:
        """Inside, weights and buffers are as at that moment; what the optimizer remembers only where that shows."""
        self.wait()
        copy, parameters = self._copies[slot], trained_parameters(optimizer)
        buffers, values = _fitting(_buffers(model), copy.buffers)
        tensors = [*parameters, *buffers]
        try:
            with put_back(tensors), _remembering(optimizer, parameters, copy.memory):
                write_(tensors, [*copy.weights, *values])
                refresh(optimizer)
                yield
        finally:
            refresh(optimizer)

    def restore_(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Put a moment back, in place."""
        self.wait()
        copy, parameters = self._copies[slot], trained_parameters(optimizer)
        buffers, values = _fitting(_buffers(model), copy.buffers)
        write_([*parameters, *buffers], [*copy.weights, *values])
        _restore_(optimizer, parameters, copy.memory)
        refresh(optimizer)


def _saved(copy: _Copy, optimizer: Optimizer) -> dict[str, Any] | None:
    """A copy, for a checkpoint; None if parameters of it are gone."""
    places = places_of(copy.parameters, optimizer)
    if places is None:
        return None
    return {"places": places, "weights": copy.weights, "buffers": copy.buffers, **copy.memory._asdict()}


@contextmanager
def _remembering(optimizer: Optimizer, parameters: Sequence[Tensor], memory: _Memory) -> Iterator[None]:
    """Inside, the optimizer remembers something else, if it makes the evaluated weights from that: Schedule-Free."""
    if not evaluates_others(optimizer):
        yield
        return
    pairs: list[tuple[Tensor, Tensor]] = []
    own = _Memory(copied(_states(optimizer, parameters), None, True, pairs), _numbers(optimizer))
    copy_all_(pairs)
    _restore_(optimizer, parameters, memory)
    try:
        yield
    finally:
        _restore_(optimizer, parameters, own)


def _states(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [dict(optimizer.state.get(p, {})) for p in parameters]


def _numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: v for name, v in group.items() if _is_own_number(name, v)} for group in optimizer.param_groups]


@torch.no_grad()
def _restore_(optimizer: Optimizer, parameters: Sequence[Tensor], memory: _Memory) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for p, state in zip(parameters, memory.states, strict=True):
        if not state:
            optimizer.state.pop(p, None)
            continue
        now = optimizer.state[p]
        for name, value in state.items():
            current = now.get(name)
            if isinstance(value, Tensor) and isinstance(current, Tensor) and local(current).shape == value.shape:
                pairs.append((current, value))
            else:
                now[name] = _cloned(value, p.device, p)
        for name in set(now) - set(state):
            del now[name]
    copy_all_(pairs)
    for group, numbers in zip(optimizer.param_groups, memory.numbers, strict=False):  # groups may have been added
        for name in [name for name, value in group.items() if name not in numbers and _is_own_number(name, value)]:
            del group[name]
        group.update(numbers)


def _is_own_number(name: str, value: object) -> bool:
    return name not in _SCHEDULED and isinstance(value, (int, float)) and not isinstance(value, bool)


def _buffers(model: nn.Module | None) -> dict[str, Tensor]:
    return dict(model.named_buffers()) if model is not None else {}


def _fitting(now: dict[str, Tensor], kept: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers with their kept values. Caches that a forward pass has put there since, or made longer, stay."""
    pairs = [(b, kept[name]) for name, b in now.items() if name in kept and kept[name].shape == local(b).shape]
    return [b for b, _ in pairs], [value for _, value in pairs]


def _cloned(value: Any, device: torch.device, like: Tensor | None = None) -> Any:
    """A copy, its tensors on ``device``; also of lists and dicts, as some optimizers keep them.

    ``like``: the parameter that they belong to, where copies are to be shared out over ranks as it is.
    """
    if isinstance(value, Tensor):
        own = value.detach().to(device, copy=True)
        return own if like is None else rewrapped(own, like)
    if isinstance(value, dict):
        return {key: _cloned(item, device, like) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cloned(item, device, like) for item in value)
    return value
