"""The witness: sees every step of a search, and measures at the end of a round what the steps have come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.algorithm.auto.reach import Tally, estimate, straightness
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.origin import Origin
from hdet.engine.probed.watch import Watch
from hdet.engine.rates import Rate, copy_rate
from hdet.engine.weights import grouped_parameters, trained_parameters

__all__ = ["Measured", "Witness"]

Owner = TypeVar("Owner")


class Measured(NamedTuple):
    """What the steps have come to; equal on all ranks."""

    displacement: float
    """How far the weights are from the origin, over its norm."""
    reach: float
    """The rate that the gradients ask for; 0 where they say nothing."""
    straightness: float
    """Of the way; 1: nothing has turned yet."""


class Witness:
    """The origin, the gradients since, and a count of steps.

    Nothing of it is saved or copied: a search goes on with an origin of its own.

    Args:
        knob_of_group: the knob that is each parameter group's rate.
    """

    def __init__(self, knob_of_group: Mapping[int, int]) -> None:
        self.steps = 0
        """Steps of the optimizer in this round."""
        self._knob_of_group = dict(knob_of_group)
        self._origin = Origin()
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
        """The next round begins; ``anew``: with an origin of its own."""
        self.steps = 0
        if anew:
            self.begin_anew()

    def begin_anew(self) -> None:
        """The way that is measured begins with the next step."""
        self._origin.forget()
        self._gradients.reset()
        self._weights_before = []
        self.steps, self._moved_before = 0, 0.0

    def before_step(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """A step is about to be made; the first one sets the origin."""
        self._origin.set(optimizer)
        if hears_gradients:
            self._see_gradients(optimizer, trained_parameters(optimizer))
        self.steps += 1

    def after_step(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """A step has been made, perhaps one that no hook told of: replayed from a graph, or made by a wrapper."""
        if not self._watch.sees_steps and self._origin.of(trained_parameters(optimizer)) is not None:
            self.steps += 1
            if hears_gradients and self._weights_before:
                self._see_gradients(optimizer, self._weights_before)
        self._origin.set(optimizer)

    def expect_step(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """Where the next step will not be heard of: remember what it begins from."""
        if self._watch.sees_steps:
            return
        self._origin.set(optimizer)
        needed = self._watch.captured and hears_gradients
        self._weights_before = [p.detach().clone() for p in trained_parameters(optimizer)] if needed else []

    def notice_unseen_steps(self, displacement: float, length: int) -> None:
        """Weights that moved without a step: a graph was captured before anybody watched."""
        if self.steps == 0 and displacement not in (0.0, self._moved_before):
            self._watch.was_captured()
            self.steps = length
        self._moved_before = displacement

    def restart_(self, optimizer: Optimizer) -> None:
        """Weights as at the origin."""
        self._origin.go_back_(optimizer)

    def measure(self, optimizer: Optimizer) -> Measured:
        """What the steps since the origin have come to. Synchronises host and device."""
        parameters = trained_parameters(optimizer)
        origin, own = self._origin.of(parameters), self._searched(optimizer)
        tally = self._gradients.tally(own(origin), own(parameters)) if origin is not None else Tally(0.0, 0.0, 0.0)
        far = self._origin.distance(optimizer, self._knob_of_group)
        return Measured(far, estimate(tally), straightness(tally))

    @staticmethod
    def resolution(optimizer: Optimizer) -> float:
        """The coarsest relative distance of neighbouring numbers among the types of the weights."""
        return max((torch.finfo(p.dtype.to_real()).eps for p in trained_parameters(optimizer)), default=0.0)

    def _see_gradients(self, optimizer: Optimizer, weights: list[Tensor]) -> None:
        """Part of the reach. Parameters that were frozen or thawed since make it begin anew."""
        parameters = trained_parameters(optimizer)
        origin = self._origin.of(parameters)
        if origin is None or len(weights) != len(origin):
            self.begin_anew()
        else:
            own = self._searched(optimizer)
            self._gradients.add(own(origin), own(weights), own(parameters), self._rate(optimizer))

    def _searched(self, optimizer: Optimizer) -> Callable[[list[Tensor]], list[Tensor]]:
        """Picks what belongs to groups whose rate is searched: the steps of others are not the rate's."""
        chosen = [group in self._knob_of_group for _, group in grouped_parameters(optimizer)]
        return lambda tensors: list(compress(tensors, chosen))

    def _rate(self, optimizer: Optimizer) -> Rate:
        """The first knob's learning rate; a tensor stays on its device."""
        group = next((g for g, knob in self._knob_of_group.items() if knob == 0), 0)
        return copy_rate(optimizer.param_groups[group]["lr"])
