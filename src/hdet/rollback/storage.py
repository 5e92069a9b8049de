"""Storage: where copies of tensors live. On their device if it has room, else in pinned memory of the host.

:class:`Storage` makes copies, and :class:`Slabs` hands out pinned memory for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hdet.copies import copy_all_
from hdet.ranks.shards import local

__all__ = ["HOST", "Slabs", "Storage", "leaves", "mapped"]

HOST = torch.device("cpu")
_Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
"""Copies and their sources."""
_SLAB = 1 << 26
"""Bytes of pinned memory that are allocated at once: a GB takes 0.4 s this way, and 0.9 s tensor by tensor."""
_ALIGNED = 512
"""Copies begin at multiples of this many bytes."""


class Storage:
    """Makes copies, and knows whether a device has room for them.

    A copy to the host goes through pinned memory and is not waited for: weights on the stream that trains, optimizer
    state on a stream beside it. :meth:`wait` must be called before the optimizer changes the latter.
    """

    def __init__(self) -> None:
        self._beside: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: dict[torch.device, torch.cuda.Event] = {}
        self._left: set[torch.device] = set()
        """Devices from which copies to the host may still be under way."""

    def copied(self, value: Any, old: Any, on_device: bool, slabs: Slabs, *, beside: bool = False) -> Any:
        """A copy of the same structure. Does not synchronise.

        Args:
            value: tensors in lists and dicts, as optimizers keep them.
            old: an earlier copy, whose memory is used again if its tensors are of the same shapes, in the same order.
            on_device: whether tensors of a device stay there.
            slabs: where copies that leave a GPU get their memory.
            beside: whether training goes on meanwhile, as in :meth:`fill_`.
        """
        earlier, pairs = iter(leaves(old)), list[tuple[Tensor, Tensor]]()

        def copy(tensor: Tensor) -> Tensor:
            pairs.append((_memory_for(tensor, next(earlier, None), on_device, slabs), tensor.detach()))
            return pairs[-1][0]

        own = mapped(value, copy)
        self.fill_(pairs, beside=beside)
        return own

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
        sizes: Counter[torch.device] = Counter()
        for tensor in map(local, needed):
            sizes[tensor.device] += 0 if tensor.is_cpu else tensor.nbytes
        return all(size <= _free(device) // 2 for device, size in sizes.items())


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


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same lists and dicts, with other tensors in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return type(value)(mapped(item, change) for item in value) if isinstance(value, (list, tuple)) else value


def leaves(value: Any) -> list[Tensor]:
    """All tensors in lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in leaves(item)]


def _memory_for(source: Tensor, old: Tensor | None, on_device: bool, slabs: Slabs) -> Tensor:
    """Memory for a copy of a tensor: that of an earlier copy, if it fits."""
    device = source.device if on_device else HOST
    if old is not None and (old.shape, old.dtype, old.device) == (source.shape, source.dtype, device):
        return old
    return slabs.like(source) if source.is_cuda and not on_device else torch.empty_like(source, device=device)


def _free(device: torch.device) -> int:
    """Free bytes, without those that torch has cached: the next step will need them."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
