"""Where copies of weights and optimizer state live: on their device while it has room, else in pinned host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.distributed.shards import local
from hdet.parameters import copy_all_


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
        return all(size <= _free(device) // 2 for device, size in _bytes(map(local, needed)).items())


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
    """By device; the host does not count."""
    found: dict[torch.device, int] = {}
    for tensor in tensors:
        if not tensor.is_cpu:
            found[tensor.device] = found.get(tensor.device, 0) + tensor.nbytes
    return found


def _free(device: torch.device) -> int:
    """Bytes that nobody has taken yet; those that torch has cached will be needed by the next step."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
