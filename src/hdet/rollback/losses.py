"""Losses, gradient norms and other numbers of single steps, kept without synchronising host and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.ranks.weights import to_host
from hdet.rollback.judge import mean_of

__all__ = ["Losses", "Readings"]


class Losses:
    """The losses of a round: numbers and CPU tensors on the host, others on their own device until the round ends."""

    def __init__(self) -> None:
        self.ever = False
        """Whether a loss was added in any round."""
        self._losses: list[tuple[int, float | Tensor]] = []
        """The step of the round that each loss belongs to, and the loss."""

    @property
    def count(self) -> int:
        """The number of losses in this round."""
        return len(self._losses)

    def reset(self) -> None:
        """Forget the losses: a new round begins."""
        self._losses = []

    def add(self, loss: float | Tensor, step: int = 0) -> None:
        """Add the loss of a step of the round: a number or a tensor of one element."""
        value = scalar_of(loss)
        self.ever = True
        held = value if isinstance(value, (float, int)) else _copied(value)  # isinstance(value, Tensor) takes longer
        self._losses.append((step, held))

    def on_device(self) -> list[Tensor]:
        """The losses that are on a device, so that they can be read together with other numbers."""
        return [loss for _, loss in self._losses if isinstance(loss, Tensor)]

    def read(self, values: Iterable[float] | None = None) -> list[tuple[int, float]]:
        """Step and loss of each. ``values``: those of :meth:`on_device`; None: host and device are synchronised."""
        held = iter(to_host(self.on_device()) if values is None else values)
        found = [(step, next(held) if isinstance(loss, Tensor) else loss) for step, loss in self._losses]
        self._losses = list(found)
        return found

    def mean(self) -> float:
        """The mean of the round's losses; NaN if there are none. Synchronises if some are on a device."""
        return mean_of([loss for _, loss in self.read()])

    def saved(self) -> list[list[float]]:
        """Pairs of step and loss, for a checkpoint inside a round. Synchronises if some are on a device."""
        return [[step, loss] for step, loss in self.read()]

    @classmethod
    def loaded(cls, rows: Iterable[Sequence[float]]) -> Losses:
        """New losses from pairs of step and loss. What does not fit raises."""
        found = cls()
        for step, loss in rows:
            found.add(_number(loss), int(step))
        return found


class _Sent(NamedTuple):
    """A number that is copied to the host while training goes on, together with others."""

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

    def add(self, step: int, **values: float | Tensor | None) -> None:
        """Note the numbers of a step that are known; a loss must be a number or a tensor of one element."""
        found = {name: scalar_of(value) for name, value in values.items() if value is not None}
        row = self._steps.setdefault(step, {})
        row.update({name: _copied(value) if isinstance(value, Tensor) else value for name, value in found.items()})

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

    def at(self, step: int) -> dict[str, float]:
        """The numbers of a step, by name."""
        row = self._steps.get(step, {})
        return {name: value.read() if isinstance(value, _Sent) else float(value) for name, value in row.items()}

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


def _copied(value: Tensor) -> Tensor:
    """A copy on its device, since the caller may use the tensor again; at least fp32, for sums. One launch."""
    return value.detach().reshape(()).to(torch.promote_types(value.dtype, torch.float32), copy=True)


def scalar_of(loss: object) -> float | Tensor:
    """A loss as a number, or as it is if it is a tensor of one element on a device; anything else raises."""
    if not isinstance(loss, Tensor):
        return _number(loss)
    if loss.numel() != 1 or loss.dtype.is_complex:
        raise ArgumentError(
            f"a loss must be one real number, but got a tensor of shape {tuple(loss.shape)}, {loss.dtype}; "
            "reduce it first, for instance loss.mean()"
        )
    return loss.item() if loss.is_cpu or loss.is_meta else loss


def _number(loss: object) -> float:
    try:
        if isinstance(loss, Real) and not isinstance(loss, bool):
            return float(loss)
    except OverflowError:  # an integer that no float can hold
        pass
    raise ArgumentError(
        f"a loss must be a number or a tensor of one element, but got {shown(loss)}; "
        "pass the loss itself, or call step() without an argument"
    )
