"""Snapshots of weights, buffers and optimizer state, and where these copies live.

:class:`Snapshots` has numbered slots. :meth:`Snapshots.keep` copies what is there now into one, and
:meth:`Snapshots.roll_back_` restores it. Which slot is used for what is decided in :mod:`hdet.rollback.policy`. The
second half of the file carries copies out: on the device if it has room, else in pinned host memory, beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.parameters import (
    copy_all_,
    hook_steps,
    parameters_at,
    parts_of,
    places_of,
    refuse_other_shapes,
    trained_parameters,
    write_,
)
from hdet.ranks.shards import PLAIN, local, refresh, reshard, reshard_all, rewrapped

START = -1
"""The slot of the snapshot from before the first step."""
_HOST = torch.device("cpu")
_SLAB = 1 << 26
"""Bytes of pinned memory that are allocated at once: a GB takes 0.4 s this way, and 0.9 s tensor by tensor."""
_ALIGNED = 512
"""Copies begin at multiples of this many bytes."""
_Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
"""Copies and their sources."""


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
    at_once: _Pairs
    """What :meth:`Snapshots.keep` has copied at once ..."""
    beside: _Pairs
    """... and beside training: optimizer state, which only the next step changes."""


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
            parameters, buffers, states = _mapped([parameters, buffers, states], local)
        old, numbers = self._copies.pop(slot, None), _numbers(optimizer)
        if old is not None and (old.parameters != ids or any(old is other for other in self._copies.values())):
            old = None  # its memory cannot be used again
        if old is not None and self._filled_again(old, [*parameters, *buffers.values()], states):
            self._copies[slot] = old._replace(numbers=numbers)
            return
        stays = old.on_device if old else slot not in self._host and self._has_room(parameters, buffers, states)
        at_once: _Pairs = []
        beside: _Pairs = []
        weights = copied(parameters, old and old.weights, stays, at_once, self._slabs)
        own_buffers = copied(buffers, old and old.buffers, stays, at_once, self._slabs)
        own_states = copied(states, old and old.states, stays, beside, self._slabs)
        new = _Copy(ids, weights, own_buffers, own_states, numbers, stays, at_once, beside)
        self._copies[slot] = new
        self._fill_(new)

    def _buffers(self, model: nn.Module | None) -> dict[str, Tensor]:
        """The model's buffers, and all tensors of the averages of its weights."""
        found = dict(model.named_buffers()) if model is not None else {}
        for number, average in enumerate(self._also):
            named = (*average.named_parameters(), *average.named_buffers())
            found |= {f"also.{number}.{name}": tensor for name, tensor in named}
        return found

    def _fill_(self, copy: _Copy) -> None:
        self._storage.fill_(copy.at_once)
        self._storage.fill_(copy.beside, beside=True)

    def _filled_again(self, old: _Copy, held: list[Tensor], states: Sequence[dict[str, Any]]) -> bool:
        """Copy the same tensors into the same memory as the last time, if they are the same.

        Those of the last time are held, so that no other tensor can have their memory.
        """
        values = [value for state in states for value in state.values()]
        is_same = (
            all(isinstance(value, Tensor) for value in values)
            and _places(source for _, source in old.at_once) == _places(held)
            and _places(source for _, source in old.beside) == _places(values)
        )
        if is_same:
            self._fill_(old)
        return is_same

    def _has_room(self, parameters: Sequence[Tensor], buffers: Any, states: Sequence[Any]) -> bool:
        """Whether a copy fits on the device. Before the first step, two moments per parameter are expected as state."""
        expected = states if any(states) else [parameters, parameters]
        return self._storage.has_room(leaves([parameters, buffers, expected]))

    def retire(self, slot: int, host: int) -> None:
        """Copy a snapshot into a slot of the host, beside training: it will be overwritten after some more steps."""
        copy, old = self._copies[slot], self._copies.pop(host, None)
        sources = leaves([copy.weights, copy.buffers, copy.states])
        if not any(tensor.device != _HOST for tensor in sources):
            self._copies[host] = copy  # it is on the host already: the next one gets memory of its own
            return
        if old is not None and len(old.beside) == len(sources) and all(map(is_, sources, (s for _, s in old.beside))):
            self._retiring.fill_(old.beside, beside=True)  # the same tensors as the last time, into the same memory
            self._copies[host] = old._replace(numbers=copy.numbers)
            return
        pairs: _Pairs = []
        own = {
            name: copied(getattr(copy, name), getattr(old, name, None), False, pairs, self._slabs)
            for name in ("weights", "buffers", "states")
        }
        self._retiring.fill_(pairs, beside=True)
        self._copies[host] = copy._replace(**own, on_device=False, at_once=[], beside=pairs)

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
        buffers, values = _fitting(self._buffers(model), copy.buffers)
        write_([*parameters, *buffers], [*(weights for _, weights, _ in rows), *values])
        _remember_(optimizer, parameters, [state for _, _, state in rows])
        _put_numbers(optimizer, copy.numbers, self._own.names)
        refresh(optimizer)
        if model is None:
            reshard_all()
        else:
            reshard(model)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def saved(self, optimizer: Optimizer) -> list[list[Any]]:
        """All copies as pairs of slot and content: the tensors themselves."""
        self._finish()
        names = self._own.names
        rows = [[slot, _saved(copy, names, optimizer)] for slot, copy in self._copies.items()]
        return [row for row in rows if row[1] is not None]

    @classmethod
    def loaded(
        cls,
        saved: Sequence[Sequence[Any]],
        optimizer: Optimizer,
        host: Collection[int] = (1,),
        also: Sequence[nn.Module] = (),
    ) -> Snapshots:
        """New snapshots from :meth:`saved`. What does not fit raises."""
        own = OwnNumbers(name for _, row in saved for _, numbers in row["numbers"] for name in numbers)
        found = cls(host, own, also)
        for slot, row in saved:
            parameters = parameters_at(row["places"], optimizer)
            refuse_other_shapes(parameters, row["weights"])
            found._copies[int(slot)] = found._placed(int(slot), row, parameters, optimizer)
        return found

    def _placed(self, slot: int, row: Mapping[str, Any], parameters: Sequence[Tensor], optimizer: Optimizer) -> _Copy:
        """A saved copy where :meth:`keep` would have put it."""
        stays = slot not in self._host and self._has_room(parameters, {}, _states(optimizer, parameters))
        devices = [p.device if stays else _HOST for p in parameters]
        any_device = devices[0] if devices else _HOST
        return _Copy(
            [id(p) for p in parameters],
            [_cloned(value, device) for value, device in zip(row["weights"], devices, strict=True)],
            _cloned(row["buffers"], any_device),
            [_cloned(state, device) for state, device in zip(row["states"], devices, strict=True)],
            {id(parameters_at([place], optimizer)[0]): dict(numbers) for place, numbers in row["numbers"]},
            stays,
            [],
            [],
        )


def _saved(copy: _Copy, names: Collection[str], optimizer: Optimizer) -> dict[str, Any] | None:
    """A copy, for a checkpoint; None if parameters of it are gone. ``names``: of the optimizer's own numbers."""
    places = places_of(copy.parameters, optimizer)
    if places is None:
        return None
    own = [{name: value for name, value in row.items() if name in names} for row in copy.numbers.values()]
    numbers = [list(pair) for pair in zip(places_of(list(copy.numbers), optimizer) or (), own, strict=False)]
    parts = {name: getattr(copy, name) for name in ("weights", "buffers", "states")}
    return {"places": places, **parts, "numbers": numbers}


def _places(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


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
    pairs: _Pairs = []
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


def _fitting(now: dict[str, Tensor], kept: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers and their kept values. Caches that a forward pass has added since, or made longer, stay."""
    pairs = [(b, kept[name]) for name, b in now.items() if name in kept and kept[name].shape == local(b).shape]
    return [b for b, _ in pairs], [value for _, value in pairs]


def _cloned(value: Any, device: torch.device, like: Tensor | None = None) -> Any:
    """A copy, its tensors on ``device``; also of lists and dicts, as some optimizers keep them.

    ``like``: the parameter that they belong to, if copies are to be sharded as it is.
    """

    def clone(tensor: Tensor) -> Tensor:
        own = tensor.detach().to(device, copy=True)
        return own if like is None else rewrapped(own, like)

    return _mapped(value, clone)


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same lists and dicts, with other tensors in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if isinstance(value, (list, tuple)) else value


# -- where copies live: on their device while it has room, else in pinned host memory ---------------------------------


class Storage:
    """Carries copies out, and knows whether a device has room for them.

    A copy to the host goes through pinned memory and is not waited for: weights on the stream that trains, optimizer
    state on a stream beside it. :meth:`wait` must be called before the optimizer changes the latter.
    """

    def __init__(self) -> None:
        self._beside: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: dict[torch.device, torch.cuda.Event] = {}
        self._left: set[torch.device] = set()
        """Devices from which copies to the host may still be under way."""

    def fill_(self, pairs: _Pairs, *, beside: bool = False) -> None:
        """Carry copies out; ``beside``: those from a GPU to the host on a stream beside training."""
        at_once: _Pairs = []
        aside: dict[torch.device, _Pairs] = {}
        for target, source in pairs:
            leaves_gpu = source.is_cuda and target.is_cpu
            if target.is_cpu and not source.is_cpu:
                self._left.add(source.device)
            place = aside.setdefault(source.device, []) if beside and leaves_gpu else at_once
            place.append((target, source))
        copy_all_(at_once)
        for device, own in aside.items():
            if device not in self._beside:
                self._beside[device] = torch.cuda.Stream(device)
            stream = self._beside[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy_all_(own)
            for _, source in own:
                source.record_stream(stream)  # if training gives it up now, its memory waits for the copy
            self._under_way[device] = stream.record_event()

    def wait(self) -> None:
        """Let the GPU do everything from here on after the copies under way. Does not synchronise."""
        for device, event in self._under_way.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._under_way = {}

    def finish(self) -> None:
        """Wait until copies to the host can be read."""
        for device in self._left:
            torch.accelerator.synchronize(device)
        self._left, self._under_way = set(), {}

    @staticmethod
    def has_room(needed: Iterable[Tensor]) -> bool:
        """Whether copies of some tensors fit on their devices: into half of what is free."""
        return all(size <= _free(device) // 2 for device, size in _bytes(needed).items())


class Slabs:
    """Pinned memory of the host, handed out of large slabs: locking pages takes long for every single request, and
    torch makes each a power of two bytes long."""

    def __init__(self) -> None:
        self._slab: Tensor | None = None
        self._used = 0

    def like(self, source: Tensor) -> Tensor:
        """Memory for a copy of a tensor on a GPU; not pinned if no more pages can be locked."""
        length = -(-source.nbytes // _ALIGNED) * _ALIGNED
        try:
            if length > _SLAB or not source.is_contiguous():
                return torch.empty_like(source, device=_HOST, pin_memory=True)
            if self._slab is None or self._used + length > _SLAB:
                self._slab, self._used = torch.empty(_SLAB, dtype=torch.uint8, pin_memory=True), 0
        except RuntimeError:
            return torch.empty_like(source, device=_HOST)
        own = self._slab[self._used : self._used + source.nbytes]
        self._used += length
        return own.view(source.dtype).view(source.shape)


def copied(value: Any, old: Any, on_device: bool, pairs: _Pairs, slabs: Slabs) -> Any:
    """A copy's structure; what is still to be copied is added to ``pairs``, for :meth:`Storage.fill_`.

    Args:
        value: tensors in lists and dicts, as optimizers keep them.
        old: an earlier copy, whose memory is used again if its tensors are of the same shapes, in the same order.
        on_device: whether tensors of a device stay there.
        pairs: (copy, source).
        slabs: where copies that leave a GPU get their memory.
    """
    earlier = iter(leaves(old))

    def copy(tensor: Tensor) -> Tensor:
        source, before = tensor.detach(), next(earlier, None)
        target = before if _fits(before, source, on_device) else _memory_for(source, on_device, slabs)
        pairs.append((target, source))
        return target

    return _mapped(value, copy)


def leaves(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in leaves(item)]


def _fits(old: Tensor | None, source: Tensor, on_device: bool) -> TypeGuard[Tensor]:
    """Whether an earlier copy's memory can be used again."""
    return (
        old is not None
        and (old.shape, old.dtype) == (source.shape, source.dtype)
        and old.device == (source.device if on_device else _HOST)
    )


def _memory_for(source: Tensor, on_device: bool, slabs: Slabs) -> Tensor:
    if on_device or source.is_cpu:
        return torch.empty_like(source)
    return slabs.like(source) if source.is_cuda else torch.empty_like(source, device=_HOST)


def _bytes(tensors: Iterable[Tensor]) -> dict[torch.device, int]:
    """What this rank holds, by device; the host does not count."""
    found: dict[torch.device, int] = {}
    for tensor in map(local, tensors):
        if not tensor.is_cpu:
            found[tensor.device] = found.get(tensor.device, 0) + tensor.nbytes
    return found


def _free(device: torch.device) -> int:
    """Free bytes, without those that torch has cached: the next step will need them."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
