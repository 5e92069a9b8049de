"""Snapshots of weights, buffers and optimizer state, for rolling back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.distributed.shards import local, refresh, reshard, reshard_all, rewrapped
from hdet.parameters import copy_all_, parameters_at, places_of, refuse_other_shapes, trained_parameters, write_
from hdet.rollback.storage import Storage, copied, leaves

START = -1
"""The slot for what was there before the first step."""
_ON_HOST = 1
"""The slot that lies in host memory: a device holds one snapshot, not two."""
_SCHEDULED = frozenset(
    ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum", "weight_decay")
)
"""Numbers of a parameter group that schedules and users write. Others are the optimizer's own memory: Schedule-Free's
``weight_sum``, Prodigy's ``d``."""


class _Copy(NamedTuple):
    """Everything that training changes, as it was after a step."""

    parameters: list[int]
    """Their ids: layers may be frozen and thawed."""
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    states: list[dict[str, Any]]
    """What the optimizer remembers of each parameter; mostly nothing before the first step."""
    numbers: list[dict[str, Any]]
    """What it remembers in its parameter groups."""
    on_device: bool
    """Whether what is of a device lies there."""


class Snapshots:
    """Numbered copies. Which to keep and which to put back is the caller's to say.

    Of two slots that are used in turn, 0 lies on the device if it has room for it, 1 in host memory. A copy to the host
    is made beside training.
    """

    def __init__(self) -> None:
        self._storage = Storage()
        self._copies: dict[int, _Copy] = {}

    def keep(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Copy what is there now into a slot. Synchronises nothing."""
        self.wait()
        parameters = trained_parameters(optimizer)
        ids, buffers, states = [id(p) for p in parameters], _buffers(model), _states(optimizer, parameters)
        old = self._copies.pop(slot, None)
        if old is None or old.parameters != ids:  # no memory that could be used again
            on_device = slot != _ON_HOST and self._storage.has_room(leaves([parameters, buffers, states]))
            old = _Copy(ids, [], {}, [], [], on_device)
        at_once: list[tuple[Tensor, Tensor]] = []
        beside: list[tuple[Tensor, Tensor]] = []
        own = copied(parameters, old.weights, old.on_device, at_once)
        own_buffers = copied(buffers, old.buffers, old.on_device, at_once)
        own_states = copied(states, old.states, old.on_device, beside)
        self._storage.fill_(at_once)
        self._storage.fill_(beside, beside=True)  # only the next step changes what the optimizer remembers
        self._copies[slot] = _Copy(ids, own, own_buffers, own_states, _numbers(optimizer), old.on_device)

    def keep_only(self, slots: Collection[int]) -> None:
        """Free all other slots."""
        self._copies = {slot: copy for slot, copy in self._copies.items() if slot in slots}

    def present(self, optimizer: Optimizer) -> frozenset[int]:
        """Slots that can be put back. Layers may have been frozen or thawed since a copy was made."""
        trained = [id(p) for p in trained_parameters(optimizer)]
        return frozenset(slot for slot, copy in self._copies.items() if copy.parameters == trained)

    def wait(self) -> None:
        """Before the optimizer makes a step: copies under way come first. Does not synchronise."""
        self._storage.wait()

    def restore_(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Put a copy back, in place, and tell whoever holds copies of the weights."""
        self.wait()
        copy, parameters = self._copies[slot], trained_parameters(optimizer)
        buffers, values = _fitting(_buffers(model), copy.buffers)
        write_([*parameters, *buffers], [*copy.weights, *values])
        _remember_(optimizer, parameters, copy)
        refresh(optimizer)
        if model is None:
            reshard_all()
        else:
            reshard(model)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def saved(self, optimizer: Optimizer) -> list[list[Any]]:
        """All copies as pairs of slot and content: the tensors themselves."""
        self._storage.finish()
        rows = [[slot, _saved(copy, optimizer)] for slot, copy in self._copies.items()]
        return [row for row in rows if row[1] is not None]

    @classmethod
    def loaded(cls, saved: Sequence[Sequence[Any]], optimizer: Optimizer) -> Snapshots:
        """New ones from :meth:`saved`. What does not fit raises."""
        found = cls()
        for slot, row in saved:
            parameters = parameters_at(row["places"], optimizer)
            refuse_other_shapes(parameters, row["weights"])
            found._copies[int(slot)] = found._placed(int(slot), row, parameters, _states(optimizer, parameters))
        return found

    def _placed(
        self, slot: int, row: Mapping[str, Any], parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> _Copy:
        """A saved copy where :meth:`keep` would have put it."""
        stays = slot != _ON_HOST and self._storage.has_room(leaves([parameters, states]))
        devices = [p.device if stays else torch.device("cpu") for p in parameters]
        any_device = devices[0] if devices else torch.device("cpu")
        return _Copy(
            [id(p) for p in parameters],
            [_cloned(value, device) for value, device in zip(row["weights"], devices, strict=True)],
            _cloned(row["buffers"], any_device),
            [_cloned(state, device) for state, device in zip(row["states"], devices, strict=True)],
            [dict(numbers) for numbers in row["numbers"]],
            stays,
        )


def _saved(copy: _Copy, optimizer: Optimizer) -> dict[str, Any] | None:
    """A copy, for a checkpoint; None if parameters of it are gone."""
    places = places_of(copy.parameters, optimizer)
    if places is None:
        return None
    parts = ("weights", "buffers", "states", "numbers")
    return {"places": places, **{name: getattr(copy, name) for name in parts}}


def _states(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [dict(optimizer.state.get(p, {})) for p in parameters]


def _numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: v for name, v in group.items() if _is_own_number(name, v)} for group in optimizer.param_groups]


def _is_own_number(name: str, value: object) -> bool:
    return name not in _SCHEDULED and isinstance(value, (int, float)) and not isinstance(value, bool)


@torch.no_grad()
def _remember_(optimizer: Optimizer, parameters: Sequence[Tensor], copy: _Copy) -> None:
    """What the optimizer remembers is as in the copy."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for p, state in zip(parameters, copy.states, strict=True):
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
    for group, numbers in zip(optimizer.param_groups, copy.numbers, strict=False):  # groups may have been added
        for name in [name for name, value in group.items() if name not in numbers and _is_own_number(name, value)]:
            del group[name]
        group.update(numbers)


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
