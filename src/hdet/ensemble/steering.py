"""Steering: the values at which replicas train, and how a round moves the base values."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from operator import mul
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.checks import shown
from hdet.ensemble.bases import Bases, Settings
from hdet.ensemble.controller import AsPrinted, Controller, Corrected, Update, comparable
from hdet.ensemble.design import Design, Rounds
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.normalised import Normalised
from hdet.errors import ArgumentError
from hdet.optimizer import Rate, direction
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import ReplicaIndex
from hdet.state import STATE_WORDS, in_pairs, reading

_OURS = {kind.__name__: kind for kind in (Corrected, AsPrinted, Normalised)}


class Standing(NamedTuple):
    """Where the replicas stand in a round."""

    steps: range
    """The steps for which this was computed."""
    replica_index: ReplicaIndex
    places: list[list[float]]
    """x in [-1, 1]: ``places[replica][knob]``"""
    rho: list[float]
    """This replica's multiplier per knob."""


def controller_from(saved: Mapping[str, Any], here: Controller | None, knobs: int) -> tuple[Controller | None, Any]:
    """The controller of a checkpoint, and its state. A controller of the user's own must have been given: ``here``."""
    name, arguments = saved["controller"], dict(saved["controller_arguments"])
    if name is None:
        return None, None
    controller = _OURS[name](**arguments) if name in _OURS else here
    if controller is None or type(controller).__name__ != name:
        raise ArgumentError(
            f"the checkpoint was written with a controller {name}, but here it is {shown(here)}; "
            f"build it with auto_lr={name}(...) or controller={name}(...) before loading"
        )
    return controller, controller.init(knobs)._replace(**dict(saved["controller_state"]))


class Ending(NamedTuple):
    """A round that ends."""

    optimizer: Optimizer
    span: tuple[int, int]
    """The step in the round, and the step to come."""
    schedule: Callable[[int], list[float]]
    """Gives the plain rate of each knob at either step; any number for knobs without a schedule."""


class Outcome(NamedTuple):
    """What has become of a round in which the replicas were averaged."""

    end: Ending
    """Its step may be another one than was asked for: replicas of torchft may have loaded a peer's state."""
    roll: Agreement
    place: ReplicaIndex
    """This replica's place in the round."""
    bases: Bases
    """The new base values."""
    update: Update | None
    """What the controller says, if it was asked and could compare signals."""
    divergence: list[float] | None
    """How far each replica was from the mean; None: there is only one, or no rank has a journal."""
    keeps_state: bool
    """Whether this replica's optimizer state is still of use."""
    writes: bool
    """Whether this rank writes the round into the journal."""
    told: Mapping[str, Any] = {}
    """What else the journal says of it."""


@dataclass(eq=False)
class Steering:
    """The knobs of all replicas, where each stands, and the controller.

    Args:
        settings: rounds, seed, decay, and when the controller begins.
        specs: the knobs.
        design: places the replicas on them, a function of seed and round.
        columns: the column of the design that each knob takes: its own, unless two share one value.
        controller: moves the base values, or None.
        learned: what is learned of each knob before the first round: a value, or 1 for a factor on a schedule.
    """

    settings: Settings
    specs: list[KnobSpec]
    design: Design
    columns: list[int]
    controller: Controller | None
    learned: InitVar[Sequence[float]]
    bases: Bases = field(init=False)
    known: Standing | None = field(default=None, init=False)

    def __post_init__(self, learned: Sequence[float]) -> None:
        self.bases = Bases.begin(learned, self.controller)

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> Rounds:
        """Where rounds end."""
        return self.settings.rounds

    @property
    def has_spread(self) -> bool:
        """Whether replicas differ at all."""
        return any(spec.spread != 0 for spec in self.specs)

    def name_of(self, end: Ending) -> str:
        """A round in messages."""
        return f"round {self.rounds.index(end.span[0])}, at step {end.span[1]}"

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """The shared base values of scheduled knobs at step ``t``; each keeps the type of its schedule."""
        return self.bases.scheduled(schedule, self.settings, t)

    def rates(self, schedule: Sequence[Rate], t: int, replica_index: ReplicaIndex) -> list[Rate]:
        """A replica's values of scheduled knobs at step ``t``: base times rho."""
        rho, learned = self.standing(t, replica_index).rho, self.bases.learned
        if self.settings.decay != "schedule":
            return list(map(mul, self.base(schedule, t), rho))
        rates = []
        for g, value in enumerate(schedule):  # every step comes here, and a comprehension is slower
            rates.append(value * learned[g] * rho[g])
        return rates

    def standing(self, t: int, replica_index: ReplicaIndex) -> Standing:
        """Where the replicas stand at step ``t``. It is remembered for the rest of the round, since every step asks."""
        known, whole = self.known, int(t)  # torch allows fractions of an epoch
        if known is None or whole not in known.steps or known.replica_index != replica_index:
            seed, k = self.settings.seed, self.rounds.index(whole)
            design = self.design.places(replica_index.size, len(self.specs), seed, k)
            rows = [[row[column] for column in self.columns] for row in design]
            rho = [spec.factor(x) for spec, x in zip(self.specs, rows[replica_index.replica], strict=True)]
            known = self.known = Standing(range(whole, self.rounds.next_end(whole + 1)), replica_index, rows, rho)
        return known

    def values(self, t: int, replica_index: ReplicaIndex) -> list[float]:
        """A replica's value of each knob that has no schedule; a scheduled knob has any number there."""
        places = self.standing(t, replica_index).places[replica_index.replica]
        return [spec.value(base, x) for spec, base, x in zip(self.specs, self.bases.learned, places, strict=True)]

    def _base_values(self, bases: Bases, schedule: Sequence[float], t: int) -> list[float]:
        """The base values of all knobs at step ``t``, with a schedule or without."""
        rows = zip(self.specs, bases.scheduled(schedule, self.settings, t), bases.learned, strict=True)
        return [float(value) if spec.scheduled else m for spec, value, m in rows]

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Add knobs: the rates of parameter groups that were added to the optimizer."""
        self.columns += range(len(self.specs), len(self.specs) + len(more))
        self.specs += more
        self.known = None
        state = self.controller.init(len(self.specs)) if self.controller is not None else None
        self.bases = self.bases.grown(len(more), state)

    # -- moving the base values -----------------------------------------------------------------------------------

    def decide(self, end: Ending, roll: Agreement, place: ReplicaIndex) -> tuple[Bases, Update | None]:
        """The new base values, and what the controller says, if it was asked and could compare signals.

        They follow from the agreement alone, so that all replicas decide the same.

        Args:
            end: the round.
            roll: what the replicas have agreed on.
            place: this replica's place.
        """
        (before, after), controller, start = end.span, self.controller, self.settings.start
        printed = isinstance(controller, AsPrinted)
        is_asked = start is not None and after >= start and not (printed and after % self.rounds.length)  # not at S - 1
        if controller is None or not is_asked:
            return self.bases, None
        spreads, rates = [spec.spread for spec in self.specs], list[float]()
        if printed:  # its offsets are in units of the rate that the step just made had
            rates = self._base_values(self.bases, end.schedule(before), before)
            spreads = list(map(mul, spreads, rates))
        sign = direction(end.optimizer.param_groups)  # 0: some groups maximise the loss, and there is no common sign
        offsets = [list(map(mul, spreads, row)) for row in self.standing(before, place).places]
        update = self._consult(controller, roll, offsets, sign) if sign else None
        return self._moved(controller, end, update, rates), update

    def _moved(self, controller: Controller, end: Ending, update: Update | None, rates: Sequence[float]) -> Bases:
        """The base values after a round. ``rates``: those of the step just made, for the controller as printed."""
        if self.settings.decay == "schedule":
            return self.bases if update is None else self.bases.moved(update, self.specs)
        bases = self.bases if update is None else self.bases._replace(controller=update.state)
        moves = [0.0] * len(self.specs) if update is None else update.moves
        start, groups = self.settings.start or 0, end.optimizer.param_groups
        if not isinstance(controller, AsPrinted):
            floors = [float(group["min_lr"]) for group in groups]
            return bases.after_round(moves, end.schedule(end.span[1]), floors, self.rounds.left_from(start))
        left = ((self.rounds.total_steps or 0) - start) / self.rounds.length
        return bases.as_printed(moves, rates, [controller.gamma(_ratio(group), left) for group in groups])

    def _consult(self, rule: Controller, roll: Agreement, offsets: list[list[float]], sign: float) -> Update | None:
        """Ask the controller, with signals of which lower is better. None unless two signals can be compared."""
        live = [r for r, lives in enumerate(roll.live) if lives]
        signals = comparable([sign * roll.signals[r] for r in live])
        if signals is None:
            return None
        update = rule.update(self.bases.controller, signals, [offsets[r] for r in live])
        if len(update.moves) != len(self.specs) or not all(map(math.isfinite, update.moves)):
            raise ArgumentError(
                f"a controller must return one finite move per knob, here {len(self.specs)}, but {shown(rule)} "
                f"returned {update.moves} for the signals {signals}; correct its update()"
            )
        return update

    def record_of(self, outcome: Outcome, seconds: Mapping[str, float]) -> dict[str, Any]:
        """A round that ends, for the journal; docs/journal.md says what each key means. Call it before the bases move.

        ``seconds``: how long each phase of the round's end took.
        """
        end, roll, place, bases, update, divergence, *_ = outcome
        (before, after), specs = end.span, self.specs
        base, places = self._base_values(self.bases, end.schedule(before), before), self.standing(before, place).places
        weights = iter(() if update is None else update.weights)  # none for replicas that are left out
        rows = zip(roll.losses, roll.signals, places, divergence or [0.0] * len(places), strict=True)
        return {
            "kind": "round",
            "round": self.rounds.index(before),
            "step": after,
            "replicas": [
                {
                    "loss": loss if roll.has_losses else None,
                    "signal": signal,
                    "values": [spec.value(b, x) for spec, b, x in zip(specs, base, row, strict=True)],
                    "multipliers": [spec.factor(x) for spec, x in zip(specs, row, strict=True)],
                    "divergence": distance,
                }
                for loss, signal, row, distance in rows
            ],
            "excluded": [r for r, live in enumerate(roll.live) if not live],
            "weights": None if update is None else [next(weights) if live else 0.0 for live in roll.live],
            "delta": None if update is None else update.deltas,
            "velocity": getattr(bases.controller, "velocity", None),
            "error": getattr(bases.controller, "error", None),
            "learned": bases.learned,
            "base_before": base,
            "base": self._base_values(bases, end.schedule(after), after),
            "seconds": seconds,
            **outcome.told,
        }

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state, as plain numbers, lists and strings."""
        controller, memory = self.controller, self.bases.controller
        arguments = dataclasses.asdict(controller) if isinstance(controller, (Corrected, AsPrinted, Normalised)) else {}
        return {
            **self.settings.state(),
            "learned": list(self.bases.learned),
            "starts": list(self.bases.starts),
            "bases": list(self.bases.decayed),
            "controller": type(controller).__name__ if controller is not None else None,
            "controller_arguments": in_pairs(arguments),
            "controller_state": in_pairs(memory._asdict() if memory is not None else {}),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load` can go on from it. Changes nothing."""
        with reading(STATE_WORDS):
            copy.copy(self).load(state, None)

    def load(self, state: Mapping[str, Any], total_steps: int | None) -> None:
        """Go on from a state that :meth:`check` has accepted."""
        rows = zip(self.specs, state["spreads"], strict=True)
        self.specs = [dataclasses.replace(spec, spread=float(spread)) for spec, spread in rows]
        self.controller, memory = controller_from(state, self.controller, len(self.specs))
        self.bases = Bases(list(state["learned"]), list(state["starts"]), list(state["bases"]), memory)
        self.settings, self.known = Settings.from_state(state, total_steps), None

    def adopt(self, total_steps: int) -> None:
        """Give the run another length."""
        rounds = dataclasses.replace(self.rounds, total_steps=total_steps)
        self.settings, self.known = dataclasses.replace(self.settings, rounds=rounds), None


def _ratio(group: Mapping[str, Any]) -> float:
    """f_div / f_final of a group of a OneCycle: (max / initial) / (initial / min); 1 for a group at rate 0."""
    most, first, least = (float(group[name]) for name in ("max_lr", "initial_lr", "min_lr"))
    return (most / first) / (first / least) if first > 0 and least > 0 else 1.0
