"""The witness: sees every step of training, and measures at the end of a round what the steps have come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.algorithm.auto.evidence import Fan
from hdet.comm.group import ReplicaGroup, arriving
from hdet.engine.probe import ProbeFn
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.line import Line
from hdet.engine.probed.watch import Watch
from hdet.engine.rates import Rate, copy_rate
from hdet.engine.weights import trained_parameters
from hdet.errors import ArgumentError

__all__ = ["Measured", "Witness", "gathered"]

Owner = TypeVar("Owner")


class Measured(NamedTuple):
    """What one rank measures at the end of a round; equal on all ranks but for the losses."""

    losses: list[float]
    """Of this rank's points; NaN for the others'."""
    displacement: float = math.nan
    reach: float = 0.0
    """The rate that the gradients ask for; 0 where they say nothing, or nobody asks."""


class Witness:
    """The line of the round, the gradients of take-off, and a count of steps.

    Nothing of it is saved or copied: a round's displacement begins anew.

    Args:
        knob_of_group: the knob that is each parameter group's rate.
    """

    def __init__(self, knob_of_group: Mapping[int, int]) -> None:
        self.steps = 0
        """Steps of the optimizer in this round."""
        self._knob_of_group = dict(knob_of_group)
        self._line = Line()
        self._gradients = Gradients()
        self._watch = Watch()
        self._moved_before = 0.0
        """The displacement at the end of the round before."""
        self._weights_before: list[Tensor] = []
        """Where steps are replayed from a graph and not heard of: the weights from before the one to come."""

    def watch(self, optimizer: Optimizer, owner: Owner, before_step: Callable[[Owner, Optimizer], None]) -> None:
        """Have ``before_step`` called before each step, if that has not begun. It calls :meth:`before_step`."""
        self._watch.begin(optimizer, owner, before_step)

    def grow(self, knobs: int, more: int) -> None:
        """Further parameter groups, each with a knob of its own."""
        first = max(self._knob_of_group, default=-1) + 1
        self._knob_of_group |= {first + i: knobs + i for i in range(more)}

    def fresh(self) -> Witness:
        """One of the same knobs that has seen nothing."""
        return Witness(self._knob_of_group)

    def end_round(self, *, anew: bool) -> None:
        """The next round begins; ``anew``: with a displacement of its own."""
        self.steps = 0
        if anew:
            self.begin_anew()

    def begin_anew(self) -> None:
        """The displacement, and what was seen along it, begin with the next step."""
        self._line.reset()
        self._gradients.reset()
        self.steps, self._moved_before = 0, 0.0

    def before_step(self, optimizer: Optimizer, rising: bool) -> None:
        """The anchor is taken just before the first step of a round; in take-off gradients are seen."""
        self._line.anchor_at(optimizer)
        if rising:
            self._see_gradients(optimizer, trained_parameters(optimizer))
        self.steps += 1

    def after_step(self, optimizer: Optimizer, rising: bool) -> None:
        """A step has been made, perhaps one that no hook told of: replayed from a graph, or made by a wrapper."""
        if not self._watch.sees_steps and self._line.anchor_of(trained_parameters(optimizer)) is not None:
            self.steps += 1
            if rising and self._weights_before:
                self._see_gradients(optimizer, self._weights_before)
        self._line.anchor_at(optimizer)

    def take_snapshot(self, optimizer: Optimizer, step: int, length: int) -> None:
        """Step 1..length of the round has been made: part of the round's mean, where that is due."""
        self._line.add(optimizer, step, length)

    def expect_step(self, optimizer: Optimizer, rising: bool) -> None:
        """Where the next step will not be heard of: remember what it begins from."""
        if self._watch.sees_steps:
            return
        self._line.anchor_at(optimizer)
        needed = self._watch.captured and rising
        self._weights_before = [p.detach().clone() for p in trained_parameters(optimizer)] if needed else []

    def notice_unseen_steps(self, displacement: float, length: int) -> None:
        """Weights that moved without a step: a graph was captured before anybody watched."""
        if self.steps == 0 and displacement not in (0.0, self._moved_before):
            self._watch.was_captured()
            self.steps = length
        self._moved_before = displacement

    def restart_(self, optimizer: Optimizer) -> None:
        """Weights as at the beginning of the round."""
        self._line.back_to_anchor_(optimizer)

    def measure(self, optimizer: Optimizer, fan: Fan, group: ReplicaGroup, probe: ProbeFn) -> Measured:
        """This rank's share of the points; and in take-off, or where something seems wrong, how far it went."""
        mine = range(group.rank, len(fan.rho), group.seat.size)
        losses = self._line.losses(optimizer, self._by_group(fan.rho, optimizer), mine, probe, at_mean=not fan.fixed)
        suspicious = len({losses[point] for point in mine}) == 1 or self.steps == 0
        moved = math.nan
        if fan.fixed or suspicious:
            moved = self._line.displacement(optimizer, self._knob_of_group)
        return Measured(losses, moved, self._reach(optimizer) if fan.fixed else 0.0)

    @staticmethod
    def resolution(optimizer: Optimizer) -> float:
        """The coarsest relative distance of neighbouring numbers among the types of the weights."""
        return max((torch.finfo(p.dtype.to_real()).eps for p in trained_parameters(optimizer)), default=0.0)

    def _see_gradients(self, optimizer: Optimizer, weights: list[Tensor]) -> None:
        """Part of the reach. Parameters that were frozen or thawed since make it begin anew."""
        parameters = trained_parameters(optimizer)
        start = self._line.anchor_of(parameters)
        if start is None or len(weights) != len(start):
            self.begin_anew()
        else:
            self._gradients.add(start, weights, parameters, self._rate(optimizer))

    def _rate(self, optimizer: Optimizer) -> Rate:
        """The first knob's learning rate; a tensor stays on its device."""
        group = next((g for g, knob in self._knob_of_group.items() if knob == 0), 0)
        return copy_rate(optimizer.param_groups[group]["lr"])

    def _reach(self, optimizer: Optimizer) -> float:
        parameters = trained_parameters(optimizer)
        start = self._line.anchor_of(parameters)
        return self._gradients.reach(start, parameters) if start is not None else 0.0

    def _by_group(self, rho: list[list[float]], optimizer: Optimizer) -> list[list[float]]:
        """``rho[point][group]``: 1 for groups whose rate is no knob."""
        knob_of, groups = self._knob_of_group, range(len(optimizer.param_groups))
        return [[row[knob_of[g]] if g in knob_of else 1.0 for g in groups] for row in rho]


def gathered(
    group: ReplicaGroup, device: torch.device, what: str, points: int, measure: Callable[[], Measured]
) -> list[Measured]:
    """What every rank has measured. Whatever the user's probe raises on one rank, the others hear of it."""
    failure, mine = None, Measured([math.nan] * points)
    try:
        mine = measure()
    except Exception as error:
        failure = error
    with arriving(what):
        row = [*mine.losses, mine.displacement, mine.reach, float(failure is not None)]
        rows = group.gather(row, device)
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[-1]]
    if failed:
        raise ArgumentError(f"the probe raised an error on the ranks {failed}; see their messages")
    return [Measured(row[:points], *row[points:-1]) for row in rows]
