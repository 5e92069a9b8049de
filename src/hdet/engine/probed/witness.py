"""The witness: sees every step of a search, and measures at the end of a round what the steps have come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.algorithm.auto.reach import estimate, straightness
from hdet.algorithm.auto.rounds import heard
from hdet.distributed import fingerprint
from hdet.distributed.partitions import is_continued, refresh, stepping_now
from hdet.distributed.shards import counted_once, local
from hdet.engine.probed.evaluated import evaluated
from hdet.engine.probed.gradients import Gradients, Reading
from hdet.engine.probed.origin import Origin, relative
from hdet.engine.probed.places import parameters_at, places_of, refuse_other_shapes
from hdet.engine.probed.watch import Watch
from hdet.parameters import direction, grouped_parameters, trained_parameters
from hdet.rates import Rate, copy_rate
from hdet.state_rules import check_state, count, integer, maybe

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
    gradient: float = 0.0
    """The largest number of the round's gradients; 0: there were none."""
    rates: float = 0.0
    """The sum of the rates of all steps since the origin."""
    stretch: int = 0
    """How many these were."""


class _Start(NamedTuple):
    """Where the way that is measured begins."""

    parameters: list[int]
    """Ids of all that train: layers may be frozen and thawed."""
    chosen: list[bool]
    """Which of them belong to groups whose rate is searched: the steps of others are not the rate's."""
    searched: Origin
    others: Origin

    @classmethod
    def at(
        cls, parameters: Sequence[Tensor], chosen: list[bool], searched: Sequence[Tensor], others: Sequence[Tensor]
    ) -> _Start:
        """Where the way began, from a checkpoint."""
        own = list(compress(parameters, chosen))
        rest = [p for p, ours in zip(parameters, chosen, strict=True) if not ours]
        refuse_other_shapes([*own, *rest], [*searched, *others])
        return cls([id(p) for p in parameters], list(chosen), Origin(own, searched), Origin(rest, others))

    def own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those whose rate is searched."""
        return list(compress(tensors, self.chosen))

    def rest(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor, chosen in zip(tensors, self.chosen, strict=True) if not chosen]


class Witness:
    """The origin, the gradients since, and a count of steps.

    Nothing of it is copied: a copy goes on with an origin of its own.

    Args:
        knob_of_group: the knob that is each parameter group's rate.
    """

    def __init__(self, knob_of_group: Mapping[int, int]) -> None:
        self.steps = 0
        """Steps of the optimizer in this round."""
        self.length: int | None = None
        """Steps of the scheduler in this round; None: not known yet, and every step is heard."""
        self._knob_of_group = dict(knob_of_group)
        self._start: _Start | None = None
        self._gradients = Gradients()
        self._watch = Watch()
        self._moved_before = 0.0
        """The displacement at the end of the round before."""
        self._weights_before: list[Tensor] = []
        """Where steps are replayed from a graph and not heard of: the weights from before the one to come."""

    def watch(self, optimizer: Optimizer, owner: Owner, before_step: Callable[[Owner, Optimizer], None]) -> None:
        """Have ``before_step`` called before each step, if that has not begun. It calls :meth:`before_step`."""
        self._watch.begin(optimizer, owner, before_step)

    def sleep(self, asleep: bool) -> None:
        """Whether steps are of no interest: then they cost nothing."""
        self._watch.asleep = asleep

    @property
    def sees_steps(self) -> bool:
        """Whether we are called before every step."""
        return self._watch.sees_steps

    def grow(self, knobs: int, more: int) -> None:
        """Further parameter groups, each with a knob of its own, as all before have."""
        self._knob_of_group |= {i: i for i in range(knobs, knobs + more)}

    def fresh(self) -> Witness:
        """One of the same knobs that has seen nothing."""
        return Witness(self._knob_of_group)

    def begin_round(self, length: int, *, anew: bool) -> None:
        """A round of so many steps begins; ``anew``: with an origin of its own."""
        self.steps, self.length = 0, length
        self._gradients.begin_round()
        if anew:
            self.begin_anew()

    def begin_anew(self) -> None:
        """The way that is measured begins with the next step."""
        self._start = None
        self._gradients.reset()
        self._weights_before = []
        self.steps, self._moved_before = 0, 0.0

    def before_step(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """A step is about to be made, or a further part of one; the first step sets the origin."""
        if is_continued(optimizer):
            self._see_part(optimizer, hears_gradients)
            return
        if not hears_gradients and self._origin(trained_parameters(optimizer)) is None:
            self.begin_anew()  # a layer has thawed before the first step whose length is known
        self._set_origin(optimizer)
        if hears_gradients:
            self._see_gradients(optimizer)
        else:
            self._notice_gradients(optimizer)
        self.steps += 1

    def after_step(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """A step has been made, perhaps one that no hook told of: replayed from a graph."""
        if not self._watch.sees_steps and self._origin(trained_parameters(optimizer)) is not None:
            if not hears_gradients:
                self._notice_gradients(optimizer)
            elif self._weights_before or not self._listens:
                self._see_gradients(optimizer, self._weights_before)
            self.steps += 1
        self._set_origin(optimizer)

    def expect_step(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """Where the next step will not be heard of: remember what it begins from."""
        if self._watch.sees_steps:
            return
        self._set_origin(optimizer)
        needed = self._watch.captured and hears_gradients and self._listens
        self._weights_before = [local(p).detach().clone() for p in trained_parameters(optimizer)] if needed else []

    def notice_unseen_steps(self, displacement: float, length: int) -> None:
        """Weights that moved without a step: a graph was captured before anybody watched."""
        if self.steps == 0 and displacement not in (0.0, self._moved_before):
            self._watch.was_captured()
            self.steps = length
        self._moved_before = displacement

    def restart_(self, optimizer: Optimizer) -> None:
        """Weights as at the origin."""
        parameters = trained_parameters(optimizer)
        start = self._origin(parameters)
        if start is not None:
            start.searched.write_(start.own(parameters))
            start.others.write_(start.rest(parameters))
            torch.clear_autocast_cache()
            refresh(optimizer)

    def scalars(self, optimizer: Optimizer) -> list[Tensor]:
        """What the steps since the origin have come to, on the device: :meth:`shown` reads the values."""
        parameters = trained_parameters(optimizer)
        start = self._origin(parameters)
        if start is None:
            return []
        weights = start.own(parameters)
        with evaluated(optimizer):
            norms = start.searched.norms(weights)
        return [*norms, *self._gradients.sizes(start.searched), *self._gradients.sums(start.searched, weights)]

    def shown(self, values: Sequence[float]) -> list[float]:
        """What this rank shows the others, from the values of :meth:`scalars`: a block for each part of the weights.

        In it: which part, the lengths of way and origin, the size of gradients and, if these were heard, what they
        asked and gained.
        """
        if self._start is None or not values:
            return []
        origin = self._start.searched
        places, norms = origin.pieces.places, origin.number_of_norms
        lengths, sums = origin.lengths(values[:norms]), values[norms:]
        blocks = [[fingerprint.words([p]), *lengths[i], *sums[i :: len(places)]] for i, p in enumerate(places)]
        return [number for block in blocks for number in block]

    def measured(self, rows: Sequence[Sequence[float]]) -> Measured:
        """From what all ranks have shown: what several of them hold counts once."""
        if self._start is None or not rows[0]:
            return Measured(0.0, 0.0, 0.0)
        width = len(rows[0]) // len(self._start.searched.pieces.places)
        ways, origins, sizes, *heard = counted_once(rows, width)
        moved, sums = relative(ways, origins), [sum(values) for values in heard]
        if not all(map(math.isfinite, sums)):  # some gradient was not finite: the way begins anew
            self._start = None
            self._gradients.reset()
        tally = self._gradients.tally(sums)
        way = self._gradients.rates, self._gradients.stretch
        return Measured(moved, estimate(tally), straightness(tally), sum(sizes), *way)

    def direction(self, optimizer: Optimizer) -> float:
        """What becomes of the loss in the groups whose rate is searched: 1, -1, or 0 where they differ."""
        return direction(optimizer.param_groups[g] for g in self._knob_of_group)

    @staticmethod
    def resolution(optimizer: Optimizer) -> float:
        """The coarsest relative distance of neighbouring numbers among the types of the weights."""
        return max((torch.finfo(p.dtype.to_real()).eps for p in trained_parameters(optimizer)), default=0.0)

    def saved(self, optimizer: Optimizer) -> dict[str, Any]:
        """Everything that was measured, for a checkpoint."""
        start = self._start
        places = places_of(start.parameters, optimizer) if start is not None else None
        found = {"steps": self.steps, "length": self.length, "moved": self._moved_before, "origin": None}
        if start is None or places is None:
            return found
        parameters = parameters_at(places, optimizer)
        origin = {
            "places": places,
            "chosen": start.chosen,
            "searched": start.searched.tensors(start.own(parameters)),
            "others": start.others.tensors(start.rest(parameters)),
            "gradients": self._gradients.saved(start.searched, start.own(parameters)),
        }
        return {**found, "origin": origin}

    def load(self, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
        """From :meth:`saved`. What does not fit raises before anything is changed."""
        check_state(saved, {"steps": count(0), "length": maybe(integer)}, "what was measured of it")
        steps, length, moved, origin = (saved[name] for name in ("steps", "length", "moved", "origin"))
        start, gradients = None, Gradients()
        if origin is not None:
            parameters = parameters_at(origin["places"], optimizer)
            start = _Start.at(parameters, origin["chosen"], origin["searched"], origin["others"])
            gradients = Gradients.loaded(origin["gradients"], start.searched)
        self.steps, self.length, self._moved_before = steps, length, moved
        self._start, self._gradients, self._weights_before = start, gradients, []

    def _origin(self, parameters: Sequence[Tensor]) -> _Start | None:
        """The origin, if it is of these parameters."""
        start = self._start
        return start if start is not None and start.parameters == list(map(id, parameters)) else None

    def _set_origin(self, optimizer: Optimizer) -> None:
        """It is here, unless it is somewhere already."""
        if self._start is None:
            pairs = grouped_parameters(optimizer)
            chosen = [group in self._knob_of_group for _, group in pairs]
            own = [p for (p, _), ours in zip(pairs, chosen, strict=True) if ours]
            rest = [p for (p, _), ours in zip(pairs, chosen, strict=True) if not ours]
            with evaluated(optimizer):
                self._start = _Start([id(p) for p, _ in pairs], chosen, Origin(own), Origin(rest))

    @property
    def _listens(self) -> bool:
        """Whether the next step's gradient is listened to."""
        return self._hears_step(self.steps)

    def _hears_step(self, step: int) -> bool:
        return self.length is None or heard(step, self.length)

    def _see_gradients(self, optimizer: Optimizer, weights: Sequence[Tensor] = ()) -> None:
        """Part of the reach. Parameters that were frozen or thawed since make it begin anew.

        ``weights``: at which the gradients were taken, if not those of now.
        """
        if not self._listens:
            self._gradients.pass_by(self._rate(optimizer))
            return
        parameters = trained_parameters(optimizer)
        start = self._origin(parameters)
        if start is None or len(weights) not in (0, len(parameters)):
            self.begin_anew()
            return
        own = start.own(parameters)
        holding = own if weights else stepping_now(optimizer, own)
        at, rate = start.own(weights) if weights else own, self._rate(optimizer)
        self._gradients.add(start.searched, at, holding, rate, Reading.of(optimizer))

    def _notice_gradients(self, optimizer: Optimizer) -> None:
        """Whether there are any: before the first step whose length is known, they ask for nothing yet."""
        self._gradients.pass_by(self._rate(optimizer))
        parameters = trained_parameters(optimizer)
        start = self._origin(parameters)
        if start is not None and self._listens:
            holding = stepping_now(optimizer, start.own(parameters))
            self._gradients.notice(start.searched, holding, Reading.of(optimizer))

    def _see_part(self, optimizer: Optimizer, hears_gradients: bool) -> None:
        """The gradients of a further part of the step that was counted last: its weights have not moved yet."""
        parameters = trained_parameters(optimizer)
        start = self._origin(parameters)
        if start is None or not self._hears_step(self.steps - 1):
            return
        own, reading = start.own(parameters), Reading.of(optimizer)
        if hears_gradients:
            self._gradients.add_part(start.searched, own, stepping_now(optimizer, own), reading)
        else:
            self._gradients.notice(start.searched, stepping_now(optimizer, own), reading)

    def _rate(self, optimizer: Optimizer) -> Rate:
        """That of the first knob that is not left alone; a tensor stays on its device."""
        group = min(self._knob_of_group, key=lambda g: self._knob_of_group[g])
        return copy_rate(optimizer.param_groups[group]["lr"])
