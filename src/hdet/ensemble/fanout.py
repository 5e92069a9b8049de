"""The fan-out: where every replica stands on every knob, round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from hdet.distributed.group import Seat
from hdet.ensemble.design import Design
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.rounds import Rounds

__all__ = ["FanOut", "Standing"]


class Standing(NamedTuple):
    """The places of a round."""

    steps: range
    """Steps for which they are known to hold."""
    seat: Seat
    places: list[list[float]]
    """x in [-1, 1]: ``places[replica][knob]``"""
    rho: list[float]
    """This replica's multiplier per knob."""

    @property
    def mine(self) -> list[float]:
        """x of this replica per knob."""
        return self.places[self.seat.replica]


class FanOut:
    """The knobs, and a design that places the replicas on them.

    Args:
        specs: the knobs.
        design: a function of seed and round.
        seed: of the design.
        columns: the column of the design that each knob takes: its own, unless two share one value.
    """

    def __init__(self, specs: Sequence[KnobSpec], design: Design, seed: int, columns: Sequence[int]) -> None:
        self.specs = list(specs)
        self._design = design
        self._seed = seed
        self._columns = list(columns)
        self._known: Standing | None = None

    def standing(self, t: int, rounds: Rounds, seat: Seat) -> Standing:
        """Who stands where at step ``t``. Remembered for the rest of the round: every step asks."""
        known, whole = self._known, int(t)  # torch allows fractions of an epoch
        if known is None or whole not in known.steps or known.seat != seat:
            rows = self._design.places(seat.size, len(self.specs), self._seed, rounds.index(whole))
            rows = [[row[column] for column in self._columns] for row in rows]
            rho = [spec.factor(x) for spec, x in zip(self.specs, rows[seat.replica], strict=True)]
            known = self._known = Standing(range(whole, rounds.next_end(whole + 1)), seat, rows, rho)
        return known

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Further knobs, each with a column of its own."""
        self._columns += range(len(self.specs), len(self.specs) + len(more))
        self.specs += more
        self._known = None

    def load(self, spreads: Sequence[float], seed: int) -> None:
        """Spreads and seed of a checkpoint."""
        pairs = zip(self.specs, spreads, strict=True)
        self.specs = [dataclasses.replace(spec, spread=float(spread)) for spec, spread in pairs]
        self._seed, self._known = seed, None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}
