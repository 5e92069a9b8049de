"""One step of an optimizer under a guard: what is changed while it is made, and what is measured in it.

For the time of the step rates may be lowered, and gradients hidden from the optimizer (:class:`GuardedStep`). Numbers
stay on the device until they can be read without waiting (:class:`Readings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import ArgumentError
from hdet.optimizer import Rate, copy_rate, is_capturing, shared_rates, stands_still
from hdet.ranks.shards import is_continued
from hdet.rollback.guard_state import Step
from hdet.rollback.losses import held_scalar

NO_CAPTURE = (
    "a step that is replayed from a CUDA graph calls no hook, so its rate could not be lowered. Capture forward and "
    "backward only, and call optimizer.step() outside the graph"
)
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of torch whose fused kernels leave a step out, state and all, if a tensor on the device says so."""


class GuardedStep:
    """The step that an optimizer is making, and what is changed until it is over.

    Args:
        optimizer: whose steps they are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._begun = self._withheld = -1
        """The step that is being made, and the last one whose gradients were hidden. -1: none is."""
        self._undo: list[Callable[[], object]] = []
        """What restores each rate and gradient that was changed."""

    def begins(self, t: int, factor: float) -> bool:
        """Lower the rates for step ``t``. Returns whether its gradients are to be measured.

        They are measured once, although a step may call the hooks several times: an optimizer's own step may call that
        of its base class, and an engine may step one part of the parameters after the other.
        """
        if is_capturing(self._optimizer):
            raise ArgumentError(f"optimizer.step() was captured under a hdet.Guard, but {NO_CAPTURE}")
        if stands_still(self._optimizer) or self._undo or self._begun == t:
            return False
        if factor != 1:
            self._lower_rates(factor)
        if is_continued(self._optimizer):
            if self._withheld == t:
                self.withhold(t)
            return False
        self._begun = t
        return True

    @torch.no_grad()
    def _lower_rates(self, factor: float) -> None:
        """Multiply the rates; tensors in place. Groups may share one tensor."""
        first = shared_rates(self._optimizer)
        for group in (group for g, group in enumerate(self._optimizer.param_groups) if first[g] == g):
            own = copy_rate(group["lr"])
            group["lr"] *= factor
            self._undo.append(partial(_restore_rate, group, own, copy_rate(group["lr"])))

    def withhold(self, t: int) -> None:
        """Hide the gradients of step ``t``: every optimizer leaves parameters without gradients alone.

        Also those of parameters that were frozen after the backward pass: an optimizer does not ask for that.
        """
        self._withheld = t
        for p in (p for group in self._optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                self._undo.append(partial(setattr, p, "grad", p.grad))
                p.grad = None

    @property
    def can_be_skipped(self) -> bool:
        """Whether the optimizer's kernels can leave a step out by themselves, as GradScaler has it done.

        A first step has no state yet, and that of SGD would leave its momentum uninitialised (torch 2.13).
        """
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        if not isinstance(optimizer, _FUSED) or not all(group.get("fused") for group in groups):
            return False
        with_momentum = (p for group in groups if group.get("momentum") for p in group["params"] if p.grad is not None)
        return all(p in optimizer.state for p in with_momentum)

    @property
    def skipped_by_scaler(self) -> Tensor | None:
        """Above 0 if a GradScaler has the optimizer's kernels leave this step out. None: it takes no part."""
        return getattr(self._optimizer, "found_inf", None)

    @torch.no_grad()
    def skip_above(self, norm: Tensor, limit: float) -> None:
        """Have the optimizer's kernels leave the step out if the norm is above the limit, NaN or infinite."""
        skip, scaler = (norm <= limit).logical_not().to(torch.float32), self.skipped_by_scaler
        if scaler is None:
            self._undo.append(partial(vars(self._optimizer).pop, "found_inf", None))
        else:
            self._undo.append(partial(setattr, self._optimizer, "found_inf", scaler))
            skip = torch.maximum(skip, scaler.to(skip))
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]

    @torch.no_grad()
    def ends(self) -> None:
        """Restore rates and gradients, bit by bit. A rate that was written by someone else since then stays."""
        for restore in self._undo:
            restore()
        self._undo, self._begun = [], -1


def _restore_rate(group: dict[str, Any], own: Rate, lowered: Rate) -> None:
    if isinstance(own, Tensor):
        group["lr"].copy_(torch.where(group["lr"] == lowered, own, group["lr"]))
    elif group["lr"] == lowered:
        group["lr"] = own


class Readings:
    """Named numbers of each step. A tensor is copied at once, since the caller may use it again.

    :meth:`send` lets all that are on a GPU travel to the host, in one copy. Who reads them waits for that copy alone:
    if some more steps were made since, the device has work to do meanwhile.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, float | Tensor]] = {}
        self._arriving: list[torch.cuda.Event] = []
        """After these, numbers that were sent are on the host."""

    def add(self, t: int, **values: float | Tensor | None) -> None:
        """Note those numbers of step ``t`` that are known. Raises if one is no number and no tensor of one element."""
        found = {name: held_scalar(value) for name, value in values.items() if value is not None}
        self._steps.setdefault(t, {}).update(found)

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
            self._arriving.append(torch.cuda.current_stream(device).record_event())
            for (row, name, _), number in zip(own, host.unbind(), strict=True):
                row[name] = number

    def at(self, t: int) -> dict[str, float]:
        """The numbers of step ``t``, by name. Waits for those that are still on a device."""
        while self._arriving:
            self._arriving.pop().synchronize()
        return {name: float(value) for name, value in self._steps.get(t, {}).items()}

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
