"""Snapshots of weights, buffers and optimizer state.

:class:`Snapshots` has numbered slots. :meth:`Snapshots.keep` copies what is there now into one, and
:meth:`Snapshots.roll_back_` restores it. Which slot is used for what is decided in :mod:`hdet.rule.judge`, and
:mod:`hdet.rollback.storage` carries the copies out: on the device if it has room, else in pinned host memory, beside
training.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.copies import copy_all_, refuse_other_shapes, write_
from hdet.optimizer.groups import parameters_at, parts_of, places_of, trained_parameters
from hdet.optimizer.hooks import hook_steps
from hdet.ranks.shards import PLAIN, local, refresh, reshard, reshard_all, rewrapped
from hdet.rollback.storage import HOST, Slabs, Storage, leaves, mapped

__all__ = ["START", "Snapshots"]

START = -1
"""The slot of the snapshot from before the first step."""
_PARTS = ("weights", "buffers", "states")


class OwnNumbers:
    """Names of the numbers in param groups that an optimizer's own step changes, such as Prodigy's ``d``.

    They are part of its state, and are rolled back with the weights. All other numbers in a group belong to the user
    and to schedules, and are left alone.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = set(names)
        self._watched = False
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Compare each group before and after every step, from now on. The hooks go when this object does.

        To be called between steps: a step that raised an error has not called its last hook.
        """
        self._before = []
        for part in [] if self._watched else parts_of(optimizer):
            hook_steps(part, self, OwnNumbers._note, OwnNumbers._compare)
        self._watched = True

    def _note(self, stepped: Optimizer, *_: Any) -> None:
        if not self._before:  # a step that calls its base class's calls hooks twice
            self._before = [(group, dict(group)) for group in stepped.param_groups]

    def _compare(self, *_: Any) -> None:
        for group, was in self._before:
            if len(group) != len(was) or not all(map(is_, group.values(), was.values())):
                self.names |= {name for name, v in group.items() if v is not was.get(name) and _is_number(name, v)}
        self._before = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of an optimizer has no hooks."""
        return {"names": set(self.names), "_watched": False, "_before": []}


class _Copy(NamedTuple):
    """Everything that training changes, as it was after a step."""

    parameters: list[int]
    """Their ids: layers may be frozen and thawed."""
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    states: list[dict[str, Any]]
    """The optimizer's state of each parameter; mostly nothing before the first step."""
    numbers: dict[int, dict[str, Any]]
    """The numbers of its parameter groups, by the id of the first parameter."""
    on_device: bool
    """Whether copies of tensors on a device are there too."""
    is_loaded: bool = False
    """Whether it is from a checkpoint: its memory is not pinned, and not used again."""


class Snapshots:
    """Numbered copies. The caller decides which to keep and which to restore.

    Slots are on the device if it has room for them, except some, which are in host memory. Training does not wait for a
    copy to the host.

    Args:
        host: the numbers of those slots.
        own: the numbers in param groups that are the optimizer's own.
        also: averages of the weights, whose parameters and buffers are copied with the model's buffers.
    """

    def __init__(
        self, host: Collection[int] = (1,), own: OwnNumbers | None = None, also: Sequence[nn.Module] = ()
    ) -> None:
        self._storage = Storage()
        self._retiring = Storage()
        """For copies of copies: training need not wait for them, but what overwrites the latter must."""
        self._copies: dict[int, _Copy] = {}
        self._host = host
        self._also = also
        self._slabs = Slabs()
        self._own = OwnNumbers() if own is None else own

    def watch(self, optimizer: Optimizer) -> None:
        """Notice from now on what the optimizer's steps change in its param groups. To be called between steps."""
        self._own.watch(optimizer)

    def keep(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Copy what is there now into a slot. Does not synchronise."""
        self.wait()
        self._retiring.wait()
        parameters = trained_parameters(optimizer)
        ids, buffers, states = [id(p) for p in parameters], self._buffers(model), _states(optimizer, parameters)
        if not all(type(p) in PLAIN for p in parameters):  # sharded: a copy holds this rank's part
            parameters, buffers, states = mapped([parameters, buffers, states], local)
        old = self._reusable(slot)
        if old is not None and old.parameters != ids:
            old = None
        stays = old.on_device if old else slot not in self._host and self._has_room(parameters, buffers, states)
        earlier = old and [old.weights, old.buffers]
        # anyone may change weights and buffers, and only the next step changes the optimizer's state
        weights, own_buffers = self._storage.copied([parameters, buffers], earlier, stays, self._slabs)
        own_states = self._storage.copied(states, old and old.states, stays, self._slabs, beside=True)
        self._copies[slot] = _Copy(ids, weights, own_buffers, own_states, _numbers(optimizer), stays)

    def _reusable(self, slot: int) -> _Copy | None:
        """Take the copy out of a slot. None if there is none whose memory can be used again."""
        old = self._copies.pop(slot, None)
        is_shared = any(old is other for other in self._copies.values())
        return None if old is None or old.is_loaded or is_shared else old

    def _buffers(self, model: nn.Module | None) -> dict[str, Tensor]:
        """The model's buffers, and all tensors of the averages of its weights."""
        found = dict(model.named_buffers()) if model is not None else {}
        for number, average in enumerate(self._also):
            named = (*average.named_parameters(), *average.named_buffers())
            found |= {f"also.{number}.{name}": tensor for name, tensor in named}
        return found

    def _has_room(self, parameters: Sequence[Tensor], buffers: Any, states: Sequence[Any]) -> bool:
        """Whether a copy fits on the device. Before the first step, two moments per parameter are expected as state."""
        expected = states if any(states) else [parameters, parameters]
        return self._storage.has_room(leaves([parameters, buffers, expected]))

    def retire(self, slot: int, host: int) -> None:
        """Copy a snapshot into a slot of the host, beside training: it will be overwritten after some more steps."""
        copy, old = self._copies[slot], self._reusable(host)
        tensors = [copy.weights, copy.buffers, copy.states]
        if all(tensor.device == HOST for tensor in leaves(tensors)):
            self._copies[host] = copy  # it is on the host already: the next one gets memory of its own
            return
        earlier = old and [old.weights, old.buffers, old.states]
        weights, buffers, states = self._retiring.copied(tensors, earlier, False, self._slabs, beside=True)
        self._copies[host] = _Copy(copy.parameters, weights, buffers, states, copy.numbers, on_device=False)

    def keep_only(self, slots: Collection[int]) -> None:
        """Free all other slots."""
        self._copies = {slot: copy for slot, copy in self._copies.items() if slot in slots}
        self._slabs = self._slabs if self._copies else Slabs()

    def present(self, optimizer: Optimizer) -> frozenset[int]:
        """Slots with something to restore. Layers may have been added, frozen or thawed since a copy was made."""
        known = _by_id(optimizer)
        return frozenset(slot for slot, copy in self._copies.items() if not known.keys().isdisjoint(copy.parameters))

    def wait(self) -> None:
        """Before the optimizer makes a step: let copies under way come first. Does not synchronise."""
        self._storage.wait()

    def _finish(self) -> None:
        for storage in (self._storage, self._retiring):
            storage.finish()

    def roll_back_(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Restore a copy in place, and refresh what was derived from the weights, such as FSDP2's gathered ones.

        Parameters that were added since stay as they are, and so does their optimizer state.
        """
        self._finish()
        copy, known = self._copies[slot], _by_id(optimizer)
        rows = [row for row in zip(copy.parameters, copy.weights, copy.states, strict=True) if row[0] in known]
        parameters = [known[one] for one, _, _ in rows]
        buffers = [  # without caches that a forward pass has added since, or made longer
            (buffer, kept)
            for name, buffer in self._buffers(model).items()
            if (kept := copy.buffers.get(name)) is not None and kept.shape == local(buffer).shape
        ]
        pairs = [*((known[one], weights) for one, weights, _ in rows), *buffers]
        write_([target for target, _ in pairs], [value for _, value in pairs])
        _remember_(optimizer, parameters, [state for _, _, state in rows])
        _put_numbers(optimizer, copy.numbers, self._own.names)
        refresh(optimizer)
        if model is None:
            reshard_all()
        else:
            reshard(model)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def saved(self, optimizer: Optimizer) -> list[list[Any]]:
        """All copies as pairs of slot and content: the tensors themselves. Without copies whose parameters are gone."""
        self._finish()
        rows: list[list[Any]] = []
        for slot, copy in self._copies.items():
            places, firsts = places_of(copy.parameters, optimizer), places_of(list(copy.numbers), optimizer)
            own = [{name: v for name, v in row.items() if name in self._own.names} for row in copy.numbers.values()]
            numbers = [list(pair) for pair in zip(firsts or (), own, strict=False)]
            if places is not None:
                tensors = {name: getattr(copy, name) for name in _PARTS}
                rows.append([slot, {"places": places, **tensors, "numbers": numbers}])
        return rows

    @classmethod
    def loaded(
        cls,
        saved: Sequence[Sequence[Any]],
        optimizer: Optimizer,
        host: Collection[int] = (1,),
        also: Sequence[nn.Module] = (),
    ) -> Snapshots:
        """New snapshots from :meth:`saved`, in host memory until they are made again. Raises if they do not fit."""
        own = OwnNumbers(name for _, row in saved for _, numbers in row["numbers"] for name in numbers)
        found = cls(host, own, also)
        for slot, row in saved:
            parameters = parameters_at(row["places"], optimizer)
            refuse_other_shapes(parameters, row["weights"])
            numbers = {id(parameters_at([place], optimizer)[0]): dict(numbers) for place, numbers in row["numbers"]}
            weights, buffers, states = (_cloned(row[name], HOST) for name in _PARTS)
            ids = [id(p) for p in parameters]
            found._copies[int(slot)] = _Copy(ids, weights, buffers, states, numbers, on_device=False, is_loaded=True)
        return found


def _by_id(optimizer: Optimizer) -> dict[int, Tensor]:
    """All of the optimizer's parameters, also those that are frozen now."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def _states(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [dict(optimizer.state.get(p, {})) for p in parameters]


def _numbers(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    return {
        id(group["params"][0]): {name: v for name, v in group.items() if _is_number(name, v)}
        for group in optimizer.param_groups
        if group["params"]
    }


def _is_number(name: str, value: object) -> bool:
    """Whether it is a number that may be the optimizer's own. The rate belongs to a schedule, even if steps change
    it."""
    return name != "lr" and isinstance(value, (int, float)) and not isinstance(value, bool)


@torch.no_grad()
def _remember_(optimizer: Optimizer, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """Restore the optimizer's state of some parameters."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for p, state in zip(parameters, states, strict=True):
        if not state:
            optimizer.state.pop(p, None)
            continue
        now = optimizer.state[p]
        for name, value in state.items():
            current = now.get(name)
            if isinstance(value, Tensor) and isinstance(current, Tensor) and local(current).shape == value.shape:
                pairs.append((local(current), value))
            else:
                now[name] = _cloned(value, p.device, p)
        for name in set(now) - set(state):
            del now[name]
    copy_all_(pairs)


def _put_numbers(optimizer: Optimizer, rows: Mapping[int, dict[str, Any]], names: Collection[str]) -> None:
    """Restore the optimizer's own numbers; remove those that its steps have added since."""
    for group in optimizer.param_groups:
        numbers = rows.get(id(group["params"][0])) if group["params"] else None
        for name in names if numbers is not None else ():  # none: the group was added since
            if numbers is not None and name in numbers:
                group[name] = numbers[name]
            else:
                group.pop(name, None)


def _cloned(value: Any, device: torch.device, like: Tensor | None = None) -> Any:
    """A copy, its tensors on ``device``; also of lists and dicts, as some optimizers keep them.

    ``like``: the parameter that they belong to, if copies are to be sharded as it is.
    """

    def clone(tensor: Tensor) -> Tensor:
        own = tensor.detach().to(device, copy=True)
        return own if like is None else rewrapped(own, like)

    return mapped(value, clone)
