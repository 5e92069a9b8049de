"""Numbers that lie on devices, read on the host: few transfers, and no float64 on a device that may not have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["to_host"]


def to_host(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalar tensors. Synchronises once per device and kind of number.

    >>> to_host([torch.tensor(0.5), torch.tensor(True), torch.tensor(2**40)])
    [0.5, True, 1099511627776]
    """
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, scalar in enumerate(scalars):
        places.setdefault((scalar.device, scalar.dtype), []).append(place)
    found: list[float] = [0.0] * len(scalars)
    for together in places.values():
        values = torch.stack([scalars[place].detach().reshape(()) for place in together]).tolist()
        for place, value in zip(together, values, strict=True):
            found[place] = value
    return found
