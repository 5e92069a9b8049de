"""Snapshots of weights, buffers and optimizer state, for rolling back, and where these copies live."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.distributed.shards import local, refresh, reshard, reshard_all, rewrapped
from hdet.parameters import copy_all_, parameters_at, places_of, refuse_other_shapes, trained_parameters, write_

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


# -- where copies live: on their device while it has room, else in pinned host memory ---------------------------------


class Storage:
    """Carries copies out, and knows whether a device has room for them.

    A copy to the host goes through pinned memory and makes nobody wait: weights on the stream that trains, what the
    optimizer remembers on a stream beside it. :meth:`wait` must be called before the optimizer changes the latter.
    """

    def __init__(self) -> None:
        self._beside: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: dict[torch.device, torch.cuda.Event] = {}

    def fill_(self, pairs: Sequence[tuple[Tensor, Tensor]], *, beside: bool = False) -> None:
        """Carry copies out; ``beside``: those from a GPU to the host on a stream beside training."""
        at_once: list[tuple[Tensor, Tensor]] = []
        aside: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for target, source in pairs:
            leaves_gpu = source.is_cuda and target.is_cpu
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
        """Whatever the GPU does from here on comes after the copies under way. Does not synchronise."""
        for device, event in self._under_way.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._under_way = {}

    def finish(self) -> None:
        """Wait until copies to the host are there, to be read."""
        if torch.cuda.is_initialized():
            for device in {torch.device("cuda", torch.cuda.current_device()), *self._beside}:
                torch.cuda.synchronize(device)
        self._under_way = {}

    @staticmethod
    def has_room(needed: Iterable[Tensor]) -> bool:
        """Whether copies of some tensors fit on their devices: into half of what is free."""
        return all(size <= _free(device) // 2 for device, size in _bytes(needed).items())


def copied(value: Any, old: Any, on_device: bool, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """A copy's structure; what is still to be copied is added to ``pairs``, for :meth:`Storage.fill_`.

    Of a tensor that is shared out over ranks, a copy holds this rank's part.

    Args:
        value: tensors in lists and dicts, as optimizers keep them.
        old: an earlier copy, whose memory is used again where it fits.
        on_device: whether tensors of a device stay there.
        pairs: (copy, source).
    """
    if isinstance(value, Tensor):
        source = local(value).detach()
        target = old if _fits(old, source, on_device) else _memory_for(source, on_device)
        pairs.append((target, source))
        return target
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        return {key: copied(item, before.get(key), on_device, pairs) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        earlier = old if isinstance(old, (list, tuple)) and len(old) == len(value) else [None] * len(value)
        return type(value)(copied(item, one, on_device, pairs) for item, one in zip(value, earlier, strict=True))
    return value


def leaves(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in leaves(item)]


def _fits(old: Any, source: Tensor, on_device: bool) -> bool:
    """Whether an earlier copy's memory serves again."""
    return (
        isinstance(old, Tensor)
        and (old.shape, old.dtype) == (source.shape, source.dtype)
        and old.device == (source.device if on_device else torch.device("cpu"))
    )


def _memory_for(source: Tensor, on_device: bool) -> Tensor:
    if on_device or source.is_cpu:
        return torch.empty_like(source)
    try:
        return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
    except RuntimeError:  # pages cannot be locked without end
        return torch.empty_like(source, device="cpu")


def _bytes(tensors: Iterable[Tensor]) -> dict[torch.device, int]:
    """What this rank holds, by device; the host does not count."""
    found: dict[torch.device, int] = {}
    for tensor in map(local, tensors):
        if not tensor.is_cpu:
            found[tensor.device] = found.get(tensor.device, 0) + tensor.nbytes
    return found


def _free(device: torch.device) -> int:
    """Bytes that nobody has taken yet; those that torch has cached will be needed by the next step."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
