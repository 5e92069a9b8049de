"""Groups of arms that train one model: where each arm stands, and what becomes of them at the end of a round.

Numbers in, numbers out: no tensors here. The rules are the library's (`hdet.ensemble`), but for population-based
training, which is the published one (Jaderberg et al. 2017): truncation and perturbation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from hdet.ensemble.controller import Controller, comparable
from hdet.ensemble.design import Balanced, levels
from knobs.task import Knob
from lab.tasks.streams import generator_of

__all__ = ["Explorers", "Group", "Method", "Population", "group_of"]

QUARTER = 0.25
"""The part of a population that is given up in a round, and the part that takes its place."""
PERTURBED = 1.5
"""The factor by which a copy's value changes, up or down."""


@lru_cache(maxsize=100_000)
def places(replicas: int, knobs: int, seed: int, k: int) -> tuple[tuple[float, ...], ...]:
    """The balanced design, remembered: it is a function of its arguments."""
    return tuple(tuple(row) for row in Balanced().places(replicas, knobs, seed, k))


class Method(NamedTuple):
    """A row of the table."""

    label: str
    controller: Controller | None = None
    """None: the value stays where it is."""
    signal: str = "train"
    """What arms are compared by: their ``train`` losses over the round, or the probe at their ``last`` weights or at
    the ``mean`` of their weights over the round."""
    spread: float = 0.0
    """Of the outermost arms, as the logarithm of a factor."""
    rounds: int = 50
    """In a run."""
    shuffled: bool = False
    """A placebo: signals of other arms."""
    population: bool = False
    """Not averaged: the worst arms go on from the weights of the best."""


class Group(Protocol):
    """The arms of one run."""

    values: list[float]
    """Of the arms, in the round that comes."""
    best: int | None
    """The arm that stands for the run; None: their mean does."""

    @property
    def value(self) -> float:
        """Of the run."""
        ...

    def end_round(self, signals: Sequence[float]) -> list[int] | None:
        """From whose weights each arm goes on; None: from the mean."""
        ...


class Explorers:
    """Arms around a base value, which a controller of the library moves.

    Args:
        method: the row.
        knob: what they explore.
        start: the guess.
        arms: how many.
        seed: of the design and of the placebo.
    """

    best: int | None = None

    def __init__(self, method: Method, knob: Knob, start: float, arms: int, seed: int) -> None:
        self._method, self._arms, self._seed, self._k = method, arms, seed, 0
        self._spec = knob.spec(method.spread)
        self.value = self._spec.start(start)
        self._state = method.controller.init(1) if method.controller is not None else None
        self._fan_out()

    def end_round(self, signals: Sequence[float]) -> None:
        """Move the base, and fan out again."""
        seen = comparable(signals)
        if seen is not None and self._method.controller is not None:
            if self._method.shuffled:
                order = torch.randperm(self._arms, generator=generator_of("placebo", self._seed, self._k)).tolist()
                seen = [seen[r] for r in order]
            offsets = [[self._method.spread * x] for x in self._places]
            update = self._method.controller.update(self._state, seen, offsets)
            self._state, self.value = update.state, self._spec.moved(self.value, update.moves[0])
        self._k += 1
        self._fan_out()

    def _fan_out(self) -> None:
        self._places = [row[0] for row in places(self._arms, 1, self._seed, self._k)]
        self.values = [self._spec.value(self.value, x) for x in self._places]


class Population:
    """Population-based training: arms keep their weights; after a round the worst take over those of the best."""

    def __init__(self, method: Method, knob: Knob, start: float, arms: int, seed: int) -> None:
        spec = knob.spec(method.spread)
        base = spec.start(start)
        self._knob, self._generator = knob, generator_of("population", seed, arms)
        self.values = [spec.value(base, x) for x in levels(arms)]
        self.best: int = arms // 2

    @property
    def value(self) -> float:
        return self.values[self.best]

    def end_round(self, signals: Sequence[float]) -> list[int]:
        """Copies of the best stand where the worst stood, at other values."""
        order = sorted(range(len(signals)), key=lambda r: signals[r] if math.isfinite(signals[r]) else math.inf)
        few = max(1, round(QUARTER * len(order)))
        sources, self.best = list(range(len(order))), order[0]
        for place, loser in enumerate(order[-few:]):
            winner = order[place]
            up = torch.rand((), generator=self._generator).item() < 0.5
            self.values[loser] = self._knob.times(self.values[winner], PERTURBED if up else 1 / PERTURBED)
            sources[loser] = winner
        return sources


def group_of(method: Method, knob: Knob, start: float, arms: int, seed: int) -> Group:
    """The arms of one run of a row."""
    return (Population if method.population else Explorers)(method, knob, start, arms, seed)
