"""Steering: the values at which replicas train, and how a round moves the base values."""

from __future__ import annotations

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
from hdet.optimizer.groups import direction
from hdet.optimizer.rates import Rate
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


def controller_saved(controller: Controller | None, state: Any) -> dict[str, Any]:
    """A controller and its state, as plain values for a checkpoint."""
    ours = isinstance(controller, tuple(_OURS.values()))
    arguments = dataclasses.asdict(controller) if ours else {}  # type: ignore[call-overload]
    return {
        "controller": type(controller).__name__ if controller is not None else None,
        "controller_arguments": in_pairs(arguments),
        "controller_state": in_pairs(state._asdict() if state is not None else {}),
    }


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

    def floors(self) -> list[float]:
        """The lowest rate of each group of a OneCycle, to which the exponential decay goes down."""
        return [float(group["min_lr"]) for group in self.optimizer.param_groups]

    def ratios(self) -> list[float]:
        """f_div / f_final of each group of a OneCycle: (max / initial) / (initial / min)."""
        rates = [
            [float(group[name]) for name in ("max_lr", "initial_lr", "min_lr")] for group in self.optimizer.param_groups
        ]
        return [(most / first) / (first / least) for most, first, least in rates]


class Decision(NamedTuple):
    """What all replicas conclude at the end of a round."""

    end: Ending
    roll: Agreement
    place: ReplicaIndex
    """This replica's place in the round."""
    bases: Bases
    """The new base values."""
    update: Update | None
    """What the controller says, if it was asked and could compare signals."""


class Outcome(NamedTuple):
    """What has become of a round: the replicas are averaged, and the base values have moved."""

    end: Ending
    """The step may be another one: replicas of torchft may have loaded a peer's state."""
    record: dict[str, Any] | None
    """For the journal, if this rank writes it."""
    keeps_state: bool
    """Whether this replica's optimizer state is still of use."""


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

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Add knobs: the rates of parameter groups that were added to the optimizer."""
        self.columns += range(len(self.specs), len(self.specs) + len(more))
        self.specs += more
        self.known = None
        state = self.controller.init(len(self.specs)) if self.controller is not None else None
        self.bases = self.bases.grown(len(more), state)

    # -- moving the base values -----------------------------------------------------------------------------------

    def _is_controlled(self, end: int) -> bool:
        """Whether a controller is asked at the end of a round, at step ``end``."""
        start = self.settings.start
        if self.controller is None or start is None or end < start:
            return False
        return not isinstance(self.controller, AsPrinted) or end % self.rounds.length == 0  # not at S - 1 and S

    def decide(self, end: Ending, roll: Agreement, place: ReplicaIndex) -> Decision:
        """The new base values. They follow from the agreement alone, so that all replicas decide the same.

        Args:
            end: the round.
            roll: what the replicas have agreed on.
            place: this replica's place.
        """
        before, after = end.span
        if self.controller is None or not self._is_controlled(after):
            return Decision(end, roll, place, self.bases, None)
        sign = direction(end.optimizer.param_groups)  # 0: some groups maximise the loss, and there is no common sign
        spreads, rates = [spec.spread for spec in self.specs], list[float]()
        if isinstance(self.controller, AsPrinted):  # its offsets are in units of the rate that the step just made had
            rates = self.bases.all_values(end.schedule(before), self.specs, self.settings, before)
            spreads = list(map(mul, spreads, rates))
        places = self.standing(before, place).places
        update = self._consult(self.controller, roll, places, spreads, sign) if sign else None
        if self.settings.decay == "schedule":
            bases = self.bases if update is None else self.bases.moved(update, self.specs)
        else:
            bases = self._decayed(self.controller, end, update, rates)
        return Decision(end, roll, place, bases, update)

    def _decayed(self, controller: Controller, end: Ending, update: Update | None, rates: Sequence[float]) -> Bases:
        """The base values after a round if they decay by themselves. ``rates``: those of the step just made."""
        bases = self.bases if update is None else self.bases._replace(controller=update.state)
        moves = [0.0] * len(self.specs) if update is None else update.moves
        start = self.settings.start or 0
        if not isinstance(controller, AsPrinted):
            return bases.after_round(moves, end.schedule(end.span[1]), end.floors(), self.rounds.left_from(start))
        left = ((self.rounds.total_steps or 0) - start) / self.rounds.length
        return bases.as_printed(moves, rates, [controller.gamma(ratio, left) for ratio in end.ratios()])

    def _consult(
        self, controller: Controller, roll: Agreement, places: list[list[float]], spreads: list[float], sign: float
    ) -> Update | None:
        """Ask the controller, with signals of which lower is better. None unless two signals can be compared."""
        live = [(sign * s, row) for s, row, lives in zip(roll.signals, places, roll.live, strict=True) if lives]
        signals = comparable([signal for signal, _ in live])
        if signals is None:
            return None
        offsets = [list(map(mul, spreads, row)) for _, row in live]
        update = controller.update(self.bases.controller, signals, offsets)
        if len(update.moves) != len(self.specs) or not all(map(math.isfinite, update.moves)):
            raise ArgumentError(
                f"a controller must return one finite move per knob, here {len(self.specs)}, but {shown(controller)} "
                f"returned {update.moves} for the signals {signals}; correct its update()"
            )
        return update

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state, as plain numbers, lists and strings."""
        return {
            **self.settings.state(),
            "learned": list(self.bases.learned),
            "starts": list(self.bases.starts),
            "bases": list(self.bases.decayed),
            **controller_saved(self.controller, self.bases.controller),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load` can go on from it. Changes nothing."""
        with reading(STATE_WORDS):
            self._read(state, None)

    def load(self, state: Mapping[str, Any], total_steps: int | None) -> None:
        """Go on from a state that :meth:`check` has accepted."""
        self.settings, self.controller, self.bases, self.specs = self._read(state, total_steps)
        self.known = None

    def _read(
        self, state: Mapping[str, Any], total_steps: int | None
    ) -> tuple[Settings, Controller | None, Bases, list[KnobSpec]]:
        rows = zip(self.specs, state["spreads"], strict=True)
        specs = [dataclasses.replace(spec, spread=float(spread)) for spec, spread in rows]
        controller, memory = controller_from(state, self.controller, len(specs))
        bases = Bases(list(state["learned"]), list(state["starts"]), list(state["bases"]), memory)
        return Settings.from_state(state, total_steps), controller, bases, specs

    def adopt(self, total_steps: int) -> None:
        """Give the run another length."""
        rounds = dataclasses.replace(self.rounds, total_steps=total_steps)
        self.settings, self.known = dataclasses.replace(self.settings, rounds=rounds), None
