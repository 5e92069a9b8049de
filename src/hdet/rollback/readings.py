"""Readings: what a guard measures in each step, which stays on the device until it can be read without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.rollback.guard_state import Step
from hdet.rollback.losses import copied_scalar, scalar_of

__all__ = ["Readings"]


class _Sent(NamedTuple):
    """A number that is copied to the host, together with others, while training goes on."""

    host: Tensor
    """In pinned memory."""
    place: int
    arrived: torch.cuda.Event

    def read(self) -> float:
        self.arrived.synchronize()
        return float(self.host[self.place].item())


class Readings:
    """Named numbers of each step. A tensor is copied at once, since the caller may use it again.

    :meth:`send` lets all that are on a GPU travel to the host, in one copy. Who reads them waits for that copy alone:
    if some more steps were made since, the device has work to do meanwhile.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, float | Tensor | _Sent]] = {}

    def add(self, t: int, **values: float | Tensor | None) -> None:
        """Note those numbers of step ``t`` that are known. Raises if one is no number and no tensor of one element."""
        found = {name: scalar_of(value) for name, value in values.items() if value is not None}
        row = self._steps.setdefault(t, {})
        row.update(
            {name: copied_scalar(value) if isinstance(value, Tensor) else value for name, value in found.items()}
        )

    def send(self) -> None:
        """Begin to copy what is on GPUs to the host. Does not synchronise."""
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, Tensor]]] = {}
        for row in self._steps.values():
            for name, value in row.items():
                if isinstance(value, Tensor) and value.is_cuda:
                    alike.setdefault((value.device, value.dtype), []).append((row, name, value))
        for (device, dtype), own in alike.items():
            host = torch.empty(len(own), dtype=dtype, pin_memory=True)
            host.copy_(torch.stack([value for *_, value in own]), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
            for place, (row, name, _) in enumerate(own):
                row[name] = _Sent(host, place, arrived)

    def at(self, t: int) -> dict[str, float]:
        """The numbers of step ``t``, by name. Waits for those that are still on a device."""
        row = self._steps.get(t, {})
        return {name: value.read() if isinstance(value, _Sent) else float(value) for name, value in row.items()}

    def step(self, t: int) -> Step:
        """What this rank knows of step ``t``: its ``loss``, its ``norm``, and whether it was left out.

        The gradients of a step that a GradScaler has left out (``scaler`` is above 0) say nothing. The optimizer's
        kernels have left out a step whose norm is above the ``limit`` that they were given.
        """
        found = self.at(t)
        if found.get("scaler", 0.0) > 0:
            return Step(found.get("loss"))
        is_above = "limit" in found and not found["norm"] <= found["limit"]
        return Step(found.get("loss"), found.get("norm"), is_above or "left_out" in found)

    def forget(self, until: int) -> None:
        """Forget all steps before step ``until``."""
        self._steps = {t: row for t, row in self._steps.items() if t >= until}

    def saved(self) -> list[list[Any]]:
        """For a checkpoint: step, name and number of each. Waits for all of them."""
        return [[t, name, value] for t in self._steps for name, value in self.at(t).items()]

    @classmethod
    def loaded(cls, rows: Iterable[Sequence[Any]]) -> Readings:
        """New readings from :meth:`saved`; of several ranks the last one counts. Raises if they are anything else."""
        found = cls()
        for t, name, value in rows:
            found.add(int(t), **{str(name): float(value)})
        return found
