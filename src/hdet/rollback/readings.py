"""Numbers of single steps, such as losses and gradient norms, that are read off a device without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.rollback.losses import scalar_of


class _UnderWay(NamedTuple):
    """A number that is copied to the host while training goes on."""

    host: Tensor
    """In pinned memory; if the device is not a CUDA GPU, a copy on that device."""
    arrived: torch.cuda.Event | None

    def read(self) -> float:
        if self.arrived is not None:
            self.arrived.synchronize()
        return float(self.host.item())


class Readings:
    """Named numbers of each step. A tensor is copied at once, since the caller may use it again.

    To read a step waits for that step alone. If some more were made since, the device has work to do meanwhile.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, float | _UnderWay]] = {}

    def add(self, step: int, **values: float | Tensor | None) -> None:
        """Note the numbers of a step that are known; a loss must be a number or a tensor of one element."""
        found = {name: scalar_of(value) for name, value in values.items() if value is not None}
        row = self._steps.setdefault(step, {})
        row.update({name: _under_way(value) if isinstance(value, Tensor) else value for name, value in found.items()})

    def at(self, step: int) -> dict[str, float]:
        """The numbers of a step, by name."""
        row = self._steps.get(step, {})
        return {name: value.read() if isinstance(value, _UnderWay) else value for name, value in row.items()}

    def forget(self, until: int) -> None:
        """Forget all steps before ``until``."""
        self._steps = {step: row for step, row in self._steps.items() if step >= until}

    def saved(self) -> list[list[Any]]:
        """For a checkpoint: step, name and number of each. Waits for all of them."""
        return [[step, name, value] for step in self._steps for name, value in self.at(step).items()]

    @classmethod
    def loaded(cls, rows: Iterable[Sequence[Any]]) -> Readings:
        """New readings from :meth:`saved`; of several ranks the last one counts. What does not fit raises."""
        found = cls()
        for step, name, value in rows:
            found.add(int(step), **{str(name): float(value)})
        return found


def _under_way(value: Tensor) -> _UnderWay:
    wide = value.detach().reshape(()).to(torch.promote_types(value.dtype, torch.float32))
    if not value.is_cuda:
        return _UnderWay(wide.clone(), None)
    host = torch.empty((), dtype=wide.dtype, pin_memory=True)
    host.copy_(wide, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(value.device))
    return _UnderWay(host, arrived)
