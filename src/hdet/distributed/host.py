"""Numbers that lie on devices, read on the host: few transfers, and no float64 on a device that may not have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

__all__ = ["read", "to_host"]


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


def read(named: Mapping[str, Sequence[Tensor]]) -> dict[str, list[float]]:
    """The numbers of tensors, by name. Synchronises as :func:`to_host` does.

    >>> read({"loss": [torch.tensor([0.5, 0.25])], "sound": [torch.tensor(True)], "none": []})
    {'loss': [0.5, 0.25], 'sound': [True], 'none': []}
    """
    values = iter(to_host([tensor for tensors in named.values() for tensor in tensors]))
    return {name: list(islice(values, sum(t.numel() for t in tensors))) for name, tensors in named.items()}
