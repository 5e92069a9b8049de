"""Snapshots of weights, buffers and optimizer state.

:class:`Snapshots` has numbered slots. :meth:`Snapshots.keep` copies what is there now into one, and
:meth:`Snapshots.roll_back_` restores it. Which slot is used for what is decided in :mod:`hdet.rule.judge`, and
:mod:`hdet.rollback.storage` carries the copies out: on the device if it has room, else in pinned host memory, beside
training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.copies import copy_all_, refuse_other_shapes, write_
from hdet.optimizer import hook_steps, parameters_at, parts_of, places_of, trained_parameters
from hdet.ranks.shards import PLAIN, local, refresh, reshard, reshard_all, rewrapped
from hdet.rollback.storage import HOST, Slabs, Storage, exchanged, has_room, leaves

START = -1
"""The slot of the snapshot from before the first step."""


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
        also: averages of the weights, whose parameters and buffers are copied with the model's buffers.
    """

    def __init__(self, host: Collection[int] = (1,), also: Sequence[nn.Module] = ()) -> None:
        self._storage = Storage()
        self._retiring = Storage()
        """For copies of copies: training need not wait for them, but what overwrites the latter must."""
        self._copies: dict[int, _Copy] = {}
        self._host = host
        self._also = also
        self._slabs = Slabs()
        self._own = OwnNumbers()

    def watch(self, optimizer: Optimizer) -> None:
        """Notice from now on what the optimizer's steps change in its param groups. To be called between steps."""
        self._own.watch(optimizer)

    def keep(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Copy what is there now into a slot. Does not synchronise."""
        self.wait()
        self._retiring.wait()
        parameters, buffers = trained_parameters(optimizer), self._buffers(model)
        ids, states = [id(p) for p in parameters], [dict(optimizer.state.get(p, {})) for p in parameters]
        if not all(type(p) in PLAIN for p in parameters):  # sharded: a copy holds this rank's part
            every = [parameters, buffers, states]
            parameters, buffers, states = exchanged(every, {id(tensor): local(tensor) for tensor in leaves(every)})
        old = self._reusable(slot)
        if old is not None and old.parameters != ids:
            old = None
        stays = slot not in self._host if old is None else old.on_device
        if stays and old is None:  # before the first step, two moments per parameter are expected as state
            stays = has_room(leaves([parameters, buffers, states if any(states) else [parameters, parameters]]))
        # anyone may change weights and buffers, and only the next step changes the optimizer's state
        earlier = old and [old.weights, old.buffers]
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

    def retire(self, slot: int, host: int) -> None:
        """Copy a snapshot into a slot of the host, beside training: it will be overwritten after some more steps."""
        copy, old = self._copies[slot], self._reusable(host)
        tensors = [copy.weights, copy.buffers, copy.states]
        if all(tensor.device == HOST for tensor in leaves(tensors)):
            self._copies[host] = copy  # it is on the host already: the next one gets memory of its own
            return
        earlier = old and [old.weights, old.buffers, old.states]
        weights, buffers, states = self._retiring.copied(tensors, earlier, False, self._slabs, beside=True)
        self._copies[host] = copy._replace(weights=weights, buffers=buffers, states=states, on_device=False)

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
        self._storage.finish()
        self._retiring.finish()

    def roll_back_(self, slot: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Restore a copy in place, and refresh what was derived from the weights, such as FSDP2's gathered ones.

        Parameters that were added since stay as they are, and so does their optimizer state.
        """
        self._finish()
        copy, known = self._copies[slot], _by_id(optimizer)
        rows = [row for row in zip(copy.parameters, copy.weights, copy.states, strict=True) if row[0] in known]
        pairs = [(known[one], weights) for one, weights, _ in rows]
        for name, buffer in self._buffers(model).items():
            kept = copy.buffers.get(name)
            if kept is not None and kept.shape == local(buffer).shape:  # no cache that was added since, or made longer
                pairs.append((buffer, kept))
        write_([target for target, _ in pairs], [value for _, value in pairs])
        _remember_(optimizer, [(known[one], state) for one, _, state in rows])
        self._own.put_back(optimizer, copy.numbers)
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
                tensors = {"weights": copy.weights, "buffers": copy.buffers, "states": copy.states}
                rows.append([slot, {"places": places, **tensors, "numbers": numbers}])
        return rows

    @classmethod
    def loaded(cls, saved: Sequence[Sequence[Any]], optimizer: Optimizer, *made: Any) -> Snapshots:
        """New snapshots from :meth:`saved`, in host memory until they are made again. Raises if they do not fit.

        ``made``: how :class:`Snapshots` is made.
        """
        found = cls(*made)
        for slot, row in saved:
            parameters = parameters_at(row["places"], optimizer)
            refuse_other_shapes(parameters, row["weights"])
            numbers = {id(parameters_at([place], optimizer)[0]): dict(numbers) for place, numbers in row["numbers"]}
            weights, buffers, states = _cloned([row["weights"], row["buffers"], row["states"]], HOST)
            ids = [id(p) for p in parameters]
            found._copies[int(slot)] = _Copy(ids, weights, buffers, states, numbers, on_device=False, is_loaded=True)
            found._own.names.update(*numbers.values())
        return found


class OwnNumbers:
    """Names of the numbers in param groups that an optimizer's own step changes, such as Prodigy's ``d``.

    They are part of its state, and are rolled back with the weights. All other numbers in a group belong to the user
    and to schedules, and are left alone.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._is_watching = False
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def watch(self, optimizer: Optimizer) -> None:
        """Compare each group before and after every step, from now on. The hooks go when this object does.

        To be called between steps: a step that raised an error has not called its last hook.
        """
        self._before = []
        for part in [] if self._is_watching else parts_of(optimizer):
            hook_steps(part, self, OwnNumbers._note, OwnNumbers._compare)
        self._is_watching = True

    def _note(self, stepped: Optimizer, *_: Any) -> None:
        if not self._before:  # a step that calls its base class's calls hooks twice
            self._before = [(group, dict(group)) for group in stepped.param_groups]

    def _compare(self, *_: Any) -> None:
        for group, was in self._before:
            if len(group) != len(was) or not all(map(is_, group.values(), was.values())):
                self.names |= {name for name, v in group.items() if v is not was.get(name) and _is_number(name, v)}
        self._before = []

    def put_back(self, optimizer: Optimizer, rows: Mapping[int, dict[str, Any]]) -> None:
        """Restore these numbers from :func:`_numbers`; remove those that steps have added since."""
        for group in optimizer.param_groups:
            numbers = rows.get(id(group["params"][0])) if group["params"] else None
            if numbers is not None:  # else the group was added since
                group.update({name: numbers[name] for name in self.names & numbers.keys()})
                for name in self.names - numbers.keys():
                    group.pop(name, None)


def _by_id(optimizer: Optimizer) -> dict[int, Tensor]:
    """All of the optimizer's parameters, also those that are frozen now."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def _numbers(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The numbers in each parameter group, by the id of its first parameter."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    return {id(group["params"][0]): {name: v for name, v in group.items() if _is_number(name, v)} for group in groups}


def _is_number(name: str, value: object) -> bool:
    """Whether it is a number that may be the optimizer's own. The rate belongs to a schedule, even if steps change
    it."""
    return name != "lr" and isinstance(value, (int, float)) and not isinstance(value, bool)


def _counts_on_host(group: Mapping[str, Any]) -> bool:
    """Whether torch's optimizers keep the ``step`` of a group's parameters on the host, wherever these are."""
    return not (group.get("capturable") or group.get("fused"))


@torch.no_grad()
def _remember_(optimizer: Optimizer, states: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
    """Restore the optimizer's state of some parameters."""
    counted = {id(p) for group in optimizer.param_groups if _counts_on_host(group) for p in group["params"]}
    pairs: list[tuple[Tensor, Tensor]] = []
    for p, state in states:
        if not state:
            optimizer.state.pop(p, None)
            continue
        now = optimizer.state[p]
        for name, value in state.items():
            current = now.get(name)
            if isinstance(value, Tensor) and isinstance(current, Tensor) and local(current).shape == value.shape:
                pairs.append((local(current), value))
            else:
                now[name] = _cloned(value, HOST if name == "step" and id(p) in counted else p.device, p)
        for name in set(now) - set(state):
            del now[name]
    copy_all_(pairs)


def _cloned(value: Any, device: torch.device, like: Tensor | None = None) -> Any:
    """A copy, its tensors on ``device``; also of lists and dicts, as some optimizers keep them.

    ``like``: the parameter that they belong to, if copies are to be sharded as it is.
    """
    copies = {id(tensor): tensor.detach().to(device, copy=True) for tensor in leaves(value)}
    if like is not None:
        copies = {one: rewrapped(copy, like) for one, copy in copies.items()}
    return exchanged(value, copies)
