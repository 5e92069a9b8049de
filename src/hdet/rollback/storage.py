"""Storage: where copies of tensors live. On their device if it has room, else in pinned memory of the host.

:class:`Storage` makes copies, and :class:`Slabs` hands out pinned memory for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from hdet.copies import copy_all_, remade

HOST = torch.device("cpu")
_SLAB = 1 << 26
"""Bytes of pinned memory that are allocated at once: a GB takes 0.4 s this way, and 0.9 s tensor by tensor."""
_ALIGNED = 512
"""Copies begin at multiples of this many bytes."""


class Storage:
    """Makes copies, and knows which are under way.

    A copy to the host goes through pinned memory and is not waited for: weights on the stream that trains, optimizer
    state on a stream beside it. :meth:`wait` must be called before the optimizer changes the latter.
    """

    def __init__(self) -> None:
        self._under_way: dict[torch.device, torch.cuda.Event] = {}
        self._left: set[torch.device] = set()
        """GPUs from which copies to the host may still be under way."""

    def copied(self, value: Any, old: Any, on_device: bool, slabs: Slabs, *, beside: bool = False) -> Any:
        """A copy of the same structure. Does not synchronise.

        Args:
            value: tensors in lists and dicts, as optimizers keep them.
            old: an earlier copy, whose memory is used again if its tensors are of the same shapes, in the same order.
            on_device: whether tensors of a device stay there.
            slabs: where copies that leave a GPU get their memory.
            beside: whether copies that leave a GPU are made on a stream beside training.
        """
        copies: dict[int, Tensor] = {}
        used: set[int] = set()
        """Ids of the copies: two places of the state may have shared a tensor when the old copy was made."""
        pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for source, own in zip(leaves(value), chain(leaves(old), repeat(None)), strict=False):
            if id(source) in copies:
                continue  # it stands in several places
            device = source.device if on_device else HOST
            is_free = own is not None and id(own) not in used
            if own is None or not is_free or (own.shape, own.dtype, own.device) != (source.shape, source.dtype, device):
                leaves_gpu = source.is_cuda and not on_device
                own = slabs.like(source) if leaves_gpu else torch.empty_like(source.detach(), device=device)
            copies[id(source)] = own
            used.add(id(own))
            pairs.setdefault(source.device, []).append((own, source.detach()))
        for device, found in pairs.items():
            leaves_gpu = device.type == "cuda" and not on_device
            if leaves_gpu:
                self._left.add(device)
            if leaves_gpu and beside:
                self._copy_beside(found, device)
            else:
                copy_all_(found)
        return exchanged(value, copies)

    def _copy_beside(self, pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
        stream = _stream_beside(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_all_(pairs)
        for _, source in pairs:
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
            torch.cuda.synchronize(device)
        self._left, self._under_way = set(), {}


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def has_room(needed: Iterable[Tensor]) -> bool:
    """Whether copies of some tensors fit on their devices: into half of what is free."""
    sizes: Counter[torch.device] = Counter()
    for tensor in needed:
        sizes[tensor.device] += 0 if tensor.is_cpu else tensor.nbytes
    return all(size <= _free(device) // 2 for device, size in sizes.items())


def _free(device: torch.device) -> int:
    """Free bytes, without those that torch has cached: the next step will need them."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


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
                return torch.empty_like(source, device=HOST, pin_memory=True)
            if self._slab is None or self._used + length > _SLAB:
                self._slab, self._used = torch.empty(_SLAB, dtype=torch.uint8, pin_memory=True), 0
        except RuntimeError:
            return torch.empty_like(source, device=HOST)
        own = self._slab[self._used : self._used + source.nbytes]
        self._used += length
        return own.view(source.dtype).view(source.shape)


def leaves(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts, in their order.

    >>> leaves({"a": torch.tensor(1), "more": [(torch.tensor(2), "word"), torch.tensor(3)]})
    [tensor(1), tensor(2), tensor(3)]
    """
    found, left = list[Tensor](), [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (Mapping, list, tuple)):
            left += reversed(list(one.values()) if isinstance(one, Mapping) else one)
    return found


def exchanged(value: Any, others: Mapping[int, Tensor]) -> Any:
    """The same lists and dicts with other tensors in them, by the ids of those whose places they take.

    >>> one, two = torch.tensor(1), torch.tensor(2)
    >>> exchanged({"a": one, "more": [(one, "word")]}, {id(one): two})
    {'a': tensor(2), 'more': [(tensor(2), 'word')]}
    """
    if not isinstance(value, (dict, list, tuple)):
        return others.get(id(value), value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    made = {key: others[id(one)] if isinstance(one, Tensor) else exchanged(one, others) for key, one in items}
    return made if isinstance(value, dict) else remade(value, made.values())
