"""Groups of arms that train one model: where each arm stands, and what becomes of them at the end of a round.

Numbers in, numbers out: no tensors here. The rules are the library's (`hdet.ensemble`), but for population-based
training, which is the published one (Jaderberg et al. 2017): truncation and perturbation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from virtual_runs import places

from hdet.ensemble.controller import Controller, comparable
from hdet.ensemble.design import levels, permutation
from hdet.ensemble.normalised import dot
from knobs.task import Knob
from lab.tasks.streams import generator_of

__all__ = ["Explorers", "Group", "Method", "Population", "antithetic", "group_of"]

QUARTER = 0.25
"""The part of a population that is given up in a round, and the part that takes its place."""
PERTURBED = 1.5
"""The factor by which a copy's value changes, up or down."""


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
    paired: bool = False
    """Arms in pairs that see the same batches at opposite places, and are compared with each other alone."""
    population: bool = False
    """Not averaged: the worst arms go on from the weights of the best."""


class Group(Protocol):
    """The arms of one run."""

    values: list[float]
    """Of the arms, in the round that comes."""
    best: int | None
    """The arm that stands for the run; None: their mean does."""
    slopes: list[float]
    """Of the signal per spread, round by round; below 0, more is better. None where arms do not differ."""

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
        self.slopes: list[float] = []
        self._spec = knob.spec(method.spread)
        self.value = self._spec.start(start)
        self._state = method.controller.init(1) if method.controller is not None else None
        self._fan_out()

    def end_round(self, signals: Sequence[float]) -> None:
        """Move the base, and fan out again."""
        seen = comparable(signals)
        if seen is not None and self._method.paired:
            seen = _centred_pairs(seen)
        if seen is not None and self._method.spread > 0:
            self.slopes.append(dot(self._places, seen) / dot(self._places, self._places))
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
        if self._method.paired:
            self._places = antithetic(self._arms, self._seed, self._k)
        else:
            self._places = [row[0] for row in places(self._arms, 1, self._seed, self._k)]
        self.values = [self._spec.value(self.value, x) for x in self._places]


class Population:
    """Population-based training: arms keep their weights; after a round the worst take over those of the best."""

    def __init__(self, method: Method, knob: Knob, start: float, arms: int, seed: int) -> None:
        spec = knob.spec(method.spread)
        base = spec.start(start)
        self._knob, self._generator = knob, generator_of("population", seed, arms)
        self.values, self.slopes = [spec.value(base, x) for x in levels(arms)], []
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


def antithetic(arms: int, seed: int, k: int) -> list[float]:
    """Places of pairs (0, 1), (2, 3) ...: opposite within a pair, dealt anew in every round.

    >>> sorted(round(x, 2) for x in antithetic(4, seed=0, k=1))
    [-1.0, -0.33, 0.33, 1.0]
    """
    sizes = levels(arms)[arms // 2 :]
    dealt = [sizes[i] for i in permutation(seed, k, 0, arms // 2)]
    signs = [1 - 2 * permutation(seed, k + 1, pair + 1, 2)[0] for pair in range(arms // 2)]
    return [s * sign * x for x, sign in zip(dealt, signs, strict=True) for s in (1, -1)]


def _centred_pairs(signals: Sequence[float]) -> list[float]:
    """Each less the mean of its pair.

    >>> _centred_pairs([1.0, 3.0, 10.0, 11.0])
    [-1.0, 1.0, -0.5, 0.5]
    """
    return [s - (signals[i] + signals[i ^ 1]) / 2 for i, s in enumerate(signals)]
