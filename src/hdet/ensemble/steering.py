"""Steering: the values at which replicas train, how what a round has shown moves the base values, and what a
checkpoint has of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.checks import STATE_WORDS, in_pairs, reading, shown
from hdet.ensemble.bases import Bases, Settings
from hdet.ensemble.controller import AsPrinted, Controller, Corrected, Update, comparable
from hdet.ensemble.design import Design, Rounds
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.normalised import Normalised
from hdet.errors import ArgumentError
from hdet.journal.writer import round_record
from hdet.parameters import Rate, direction
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import ReplicaIndex

_OURS = {kind.__name__: kind for kind in (Corrected, AsPrinted, Normalised)}


class Standing(NamedTuple):
    """The places of a round."""

    steps: range
    """Steps for which they are known to hold."""
    replica_index: ReplicaIndex
    places: list[list[float]]
    """x in [-1, 1]: ``places[replica][knob]``"""
    rho: list[float]
    """This replica's multiplier per knob."""


def controller_saved(controller: Controller | None, state: Any) -> dict[str, Any]:
    """A controller and its state."""
    ours = isinstance(controller, tuple(_OURS.values()))
    arguments = dataclasses.asdict(controller) if ours else {}  # type: ignore[call-overload]
    return {
        "controller": type(controller).__name__ if controller is not None else None,
        "controller_arguments": in_pairs(arguments),
        "controller_state": in_pairs(state._asdict() if state is not None else {}),
    }


def controller_from(saved: Mapping[str, Any], here: Controller | None, knobs: int) -> tuple[Controller | None, Any]:
    """The controller of a checkpoint with its state. One of the user's own must be ``here``."""
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
    """The plain schedule per knob at a step; anything for knobs that have none."""

    def floors(self) -> list[float]:
        """The lowest rate of each group of a OneCycle, to which the exponential decay goes down."""
        return [float(group["min_lr"]) for group in self.optimizer.param_groups]

    def ratios(self) -> list[float]:
        """f_div / f_final of each group of a OneCycle: (max / initial) / (initial / min)."""
        rates = [
            [float(group[name]) for name in ("max_lr", "initial_lr", "min_lr")] for group in self.optimizer.param_groups
        ]
        return [(most / first) / (first / least) for most, first, least in rates]


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

    def __init__(
        self,
        settings: Settings,
        specs: Sequence[KnobSpec],
        design: Design,
        columns: Sequence[int],
        controller: Controller | None,
        learned: Sequence[float],
    ) -> None:
        self.settings = settings
        self.specs = list(specs)
        self.controller = controller
        self.bases = Bases.begin(learned, controller)
        self._design = design
        self._columns = list(columns)
        self._known: Standing | None = None

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> Rounds:
        """Where rounds end."""
        return self.settings.rounds

    @property
    def has_spread(self) -> bool:
        """Whether replicas differ at all."""
        return any(spec.spread != 0 for spec in self.specs)

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """The shared base values of scheduled knobs at step ``t``; each keeps the type of its schedule."""
        return self.bases.scheduled(schedule, self.settings, t)

    def rates(self, schedule: Sequence[Rate], t: int, replica_index: ReplicaIndex) -> list[Rate]:
        """A replica's values of scheduled knobs at step ``t``: base times rho."""
        rho, learned = self.standing(t, replica_index).rho, self.bases.learned
        if self.settings.decay != "schedule":
            return list(map(mul, self.base(schedule, t), rho))
        rates = []
        for g, value in enumerate(schedule):  # every step comes here: the fastest form
            rates.append(value * learned[g] * rho[g])
        return rates

    def standing(self, t: int, replica_index: ReplicaIndex) -> Standing:
        """The places of all replicas at step ``t``. Remembered for the rest of the round, since every step asks."""
        known, whole = self._known, int(t)  # torch allows fractions of an epoch
        if known is None or whole not in known.steps or known.replica_index != replica_index:
            seed, k = self.settings.seed, self.rounds.index(whole)
            design = self._design.places(replica_index.size, len(self.specs), seed, k)
            rows = [[row[column] for column in self._columns] for row in design]
            rho = [spec.factor(x) for spec, x in zip(self.specs, rows[replica_index.replica], strict=True)]
            known = self._known = Standing(range(whole, self.rounds.next_end(whole + 1)), replica_index, rows, rho)
        return known

    def values(self, t: int, replica_index: ReplicaIndex) -> list[float]:
        """A replica's value of each knob that has no schedule; anything for the others."""
        places = self.standing(t, replica_index).places[replica_index.replica]
        return [spec.value(base, x) for spec, base, x in zip(self.specs, self.bases.learned, places, strict=True)]

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Parameter groups were added to the optimizer: their rates become knobs."""
        self._columns += range(len(self.specs), len(self.specs) + len(more))
        self.specs += more
        self._known = None
        state = self.controller.init(len(self.specs)) if self.controller is not None else None
        self.bases = self.bases.grown(len(more), state)

    # -- moving the base values -----------------------------------------------------------------------------------

    def is_controlled(self, end: int) -> bool:
        """Whether a controller is asked at the end of a round, at step ``end``."""
        start = self.settings.start
        if self.controller is None or start is None or end < start:
            return False
        return not isinstance(self.controller, AsPrinted) or end % self.rounds.length == 0  # not at S - 1 and S

    def decide(self, end: Ending, roll: Agreement, replica_index: ReplicaIndex) -> tuple[Bases, Update | None]:
        """The new base values, and what the controller says: a function of the agreement, so equal on all replicas.

        Args:
            end: the round.
            roll: what the replicas have shown.
            replica_index: this replica's place.
        """
        before, after = end.span
        if self.controller is None or not self.is_controlled(after):
            return self.bases, None
        sign = direction(end.optimizer.param_groups)  # 0: some groups maximise the loss, and there is no common sign
        spreads, rates = [spec.spread for spec in self.specs], list[float]()
        if isinstance(self.controller, AsPrinted):  # its offsets are in units of the rate that the step just made had
            rates = self.bases.all_values(end.schedule(before), self.specs, self.settings, before)
            spreads = list(map(mul, spreads, rates))
        places = self.standing(before, replica_index).places
        update = self._consult(self.controller, roll, places, spreads, sign) if sign else None
        if self.settings.decay == "schedule":
            return self.bases if update is None else self.bases.moved(update, self.specs), update
        bases = self.bases if update is None else self.bases._replace(controller=update.state)
        moves = [0.0] * len(self.specs) if update is None else update.moves
        start = self.settings.start or 0
        if not isinstance(self.controller, AsPrinted):
            rounds = self.rounds.left_from(start)
            return bases.after_round(moves, end.schedule(after), end.floors(), rounds), update
        left = ((self.rounds.total_steps or 0) - start) / self.rounds.length
        return bases.as_printed(moves, rates, [self.controller.gamma(ratio, left) for ratio in end.ratios()]), update

    def _consult(
        self, controller: Controller, roll: Agreement, places: list[list[float]], spreads: list[float], sign: float
    ) -> Update | None:
        """What the controller says, to which lower is better; None unless two signals can be compared."""
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

    def record(
        self,
        end: Ending,
        roll: Agreement,
        replica_index: ReplicaIndex,
        bases: Bases,
        update: Update | None,
        divergence: list[float] | None,
        seconds: dict[str, float],
    ) -> dict[str, Any]:
        """The round for the journal, before it is moved."""
        before, after = end.span
        base = self.bases.all_values(end.schedule(before), self.specs, self.settings, before)
        places = self.standing(before, replica_index).places
        return round_record(
            k=self.rounds.index(before),
            step=after,
            roll=roll,
            base=base,
            values=[[s.value(b, x) for s, b, x in zip(self.specs, base, row, strict=True)] for row in places],
            multipliers=[[s.factor(x) for s, x in zip(self.specs, row, strict=True)] for row in places],
            learned=bases.learned,
            new_base=bases.all_values(end.schedule(after), self.specs, self.settings, after),
            divergence=divergence or [0.0] * len(places),
            seconds=seconds,
            weights=update.weights if update is not None else None,
            deltas=update.deltas if update is not None else None,
            memory=bases.controller,
        )

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings."""
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
        """Go on from what :meth:`check` has seen."""
        self.settings, self.controller, self.bases, self.specs = self._read(state, total_steps)
        self._known = None

    def _read(
        self, state: Mapping[str, Any], total_steps: int | None
    ) -> tuple[Settings, Controller | None, Bases, list[KnobSpec]]:
        rows = zip(self.specs, state["spreads"], strict=True)
        specs = [dataclasses.replace(spec, spread=float(spread)) for spec, spread in rows]
        controller, memory = controller_from(state, self.controller, len(specs))
        bases = Bases(list(state["learned"]), list(state["starts"]), list(state["bases"]), memory)
        return Settings.from_state(state, total_steps), controller, bases, specs

    def adopt(self, total_steps: int) -> None:
        """The run gets another length."""
        rounds = dataclasses.replace(self.rounds, total_steps=total_steps)
        self.settings, self._known = dataclasses.replace(self.settings, rounds=rounds), None
