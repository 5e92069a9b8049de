"""Numbers that lie on devices, read on the host: few transfers, and no float64 on a device that may not have it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor

__all__ = ["to_host"]


def to_host(tensors: Sequence[Tensor]) -> list[float]:
    """All numbers of some tensors, one after the other. Synchronises once per device and kind of number.

    >>> to_host([torch.tensor(0.5), torch.tensor(True), torch.tensor([2**40, 1])])
    [0.5, True, 1099511627776, 1]
    """
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: list[list[float]] = [[] for _ in tensors]
    for together in places.values():
        values = iter(torch.cat([tensors[place].detach().reshape(-1) for place in together]).tolist())
        for place in together:
            found[place] = list(islice(values, tensors[place].numel()))
    return list(chain.from_iterable(found))
