"""Curves of training losses: what a judge must let pass, and what it must not miss.

Those that are made up are pure functions of a kind and a seed, and were written before the rule that they test. A
hundred are recorded from real runs in which nothing explodes (docs/decisions/027-what-left-the-lab.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["EXPLOSIONS", "KINDS", "LossCurve", "curve", "exploding", "harder", "recorded"]

Losses = np.ndarray
"""One float64 for each step."""


class LossCurve(NamedTuple):
    """The losses of a run, and where its rounds end."""

    name: str
    losses: Losses
    ends: list[int]
    falls_from: int
    """The step from which the schedule falls."""
    explodes_at: int | None = None

    def rounds(self) -> Iterator[tuple[int, Losses, bool]]:
        """For each round: the step it ends at, its losses, and whether the schedule falls there."""
        begin = 0
        for end in self.ends:
            yield end, self.losses[begin:end], end > self.falls_from
            begin = end


class Ground(NamedTuple):
    """What a kind starts from: a loss that falls, and its noise."""

    mean: Losses
    noise: Losses
    deviations: Losses
    """Of the noise, at each step."""
    random: np.random.Generator

    @property
    def deviation(self) -> float:
        """At the first step, where it is largest."""
        return float(self.deviations[0])


def _growing_ends(steps: int) -> list[int]:
    """Rounds as a search has them: a fifth of the steps so far, two at least."""
    ends = [1]
    while ends[-1] < steps - 1:
        ends.append(min(ends[-1] + max(2, ends[-1] // 5), steps - 1))
    return [*ends, steps]


def _ground(random: np.random.Generator) -> Ground:
    """An exponential or a power that falls by 0.1 to 1000 noise deviations, in any unit."""
    steps = int(random.integers(60, 1200))
    t = np.arange(steps) / steps
    gain = 10 ** random.uniform(-1, 3)
    speed = 10 ** random.uniform(-0.3, 1.5)
    falling = np.exp(-speed * t) if random.random() < 0.5 else (1 + 20 * speed * t) ** -0.5
    floor = gain * random.uniform(0, 3)
    unit = 10 ** random.uniform(-6, 6)
    deviations = unit * (1 - random.random() * 0.8 * t)
    return Ground(unit * (floor + gain * falling), deviations * random.standard_normal(steps), deviations, random)


def _plain(g: Ground) -> Losses:
    return g.mean + g.noise


def _offset(g: Ground) -> Losses:
    """A constant a million times the noise, in the steps of a float32."""
    return (g.mean + g.noise + g.deviation * g.random.choice([-1e6, 1e6])).astype(np.float32).astype(float)


def _crosses_zero(g: Ground) -> Losses:
    return g.mean + g.noise - g.random.uniform(g.mean.min(), g.mean.max())


def _negative(g: Ground) -> Losses:
    return g.mean + g.noise - 2 * g.mean.max()


def _bf16(g: Ground) -> Losses:
    """Eight bits: most neighbours are equal, or differ by far more than the noise."""
    losses = g.mean + 0.2 * g.noise
    exponent = np.floor(np.log2(np.maximum(np.abs(losses), 1e-300)))
    step = 2.0 ** (exponent - 7)
    return np.round(losses / step) * step


def _heavy_tails(g: Ground) -> Losses:
    """Single batches far above the others, upwards as losses have them."""
    shape = g.random.uniform(1.2, 2.5)
    return g.mean + g.deviation * g.random.pareto(shape, len(g.mean))


def _tasks_by_step(g: Ground) -> Losses:
    """Two to five tasks in turn, a step each, whose losses differ by up to a hundred deviations."""
    tasks = int(g.random.integers(2, 6))
    levels = g.random.uniform(0, 100, tasks) * g.deviation
    return g.mean + g.noise + levels[np.arange(len(g.mean)) % tasks]


def _tasks_by_block(g: Ground) -> Losses:
    """Two or three tasks in turn, for 5 to 60 steps each; the hardest is ten deviations above the easiest."""
    tasks, length = int(g.random.integers(2, 4)), int(g.random.integers(5, 60))
    levels = np.linspace(0, 10, tasks)
    return g.mean + g.noise + g.deviations * levels[np.arange(len(g.mean)) // length % tasks]


def _phase_jump(g: Ground) -> Losses:
    """From some step on ten deviations more, as where a harder part of the data begins."""
    at = int(g.random.integers(1, len(g.mean)))
    return g.mean + g.noise + 10 * g.deviations[at] * (np.arange(len(g.mean)) >= at)


def _rises_in_the_end(g: Ground) -> Losses:
    """It overfits, or its regulariser grows: slowly up again, by half of what was gained."""
    t = np.arange(len(g.mean)) / len(g.mean)
    return g.mean + g.noise + np.maximum(t - 0.4, 0) * np.ptp(g.mean) * 0.5


def _nothing_learned(g: Ground) -> Losses:
    return np.full(len(g.mean), g.mean[0]) + g.noise


def _wanders(g: Ground) -> Losses:
    """A policy or an adversary: a random walk that returns, with steps of a third of the noise."""
    place, walk = 0.0, []
    for push in g.random.standard_normal(len(g.mean)):
        place = 0.95 * place + 0.3 * push
        walk.append(place)
    return g.mean[0] + g.noise + g.deviation * np.array(walk)


def _single_nan(g: Ground) -> Losses:
    """A batch or two without a number."""
    losses = g.mean + g.noise
    losses[g.random.integers(0, len(losses), 2)] = math.nan
    return losses


KINDS: dict[str, Callable[[Ground], Losses]] = {
    "plain": _plain,
    "offset": _offset,
    "crosses zero": _crosses_zero,
    "negative": _negative,
    "bf16": _bf16,
    "heavy tails": _heavy_tails,
    "tasks by step": _tasks_by_step,
    "tasks by block": _tasks_by_block,
    "phase jump": _phase_jump,
    "rises in the end": _rises_in_the_end,
    "nothing learned": _nothing_learned,
    "wanders": _wanders,
    "single nan": _single_nan,
}
"""Curves in which nothing diverges."""


def curve(kind: str, seed: int) -> LossCurve:
    """One of a kind. Every third has rounds of two steps throughout."""
    random = np.random.default_rng([seed, *kind.encode()])
    losses = KINDS[kind](_ground(random))
    return _curve(f"{kind} {seed}", losses, seed)


def _curve(name: str, losses: Losses, seed: int, explodes_at: int | None = None) -> LossCurve:
    steps = len(losses)
    ends = _growing_ends(steps) if seed % 3 else [*range(2, steps, 2), steps]
    return LossCurve(name, losses, ends, int(0.45 * steps), explodes_at)


def recorded() -> list[LossCurve]:
    """Of real runs; the first 400 steps of long ones."""
    with np.load(Path(__file__).with_name("recorded.npz")) as file:
        parts = np.split(file["losses"].astype(float), file["ends"][:-1])
        runs = zip(file["names"].tolist(), file["steps"].tolist(), parts, strict=True)
    return [LossCurve(name, losses, _growing_ends(len(losses)), int(0.45 * steps)) for name, steps, losses in runs]


def harder(seed: int, deviations: float = 100.0) -> LossCurve:
    """From some step on this many deviations more, whatever the weights: a far harder part of the data begins."""
    random = np.random.default_rng([seed, *b"harder"])
    ground = _ground(random)
    at = int(random.integers(20, len(ground.mean) - 20))
    rise = deviations * ground.deviations[at] * (np.arange(len(ground.mean)) >= at)
    return _curve(f"harder {seed}", ground.mean + ground.noise + rise, seed, at)


# Explosions ----------------------------------------------------------------------------------------------------------


def _doubling(losses: Losses, at: int, scale: float, random: np.random.Generator) -> Losses:
    """What is above doubles every step or every few, until no float holds it."""
    doublings = (np.arange(len(losses)) - at) / random.uniform(1, 6)
    with np.errstate(over="ignore"):
        return losses + np.where(doublings >= 0, scale * 2.0**doublings, 0.0)


def _leap(losses: Losses, at: int, scale: float, random: np.random.Generator) -> Losses:
    """From one step to the next to several times what was gained, and it stays there."""
    high = scale * 10 ** random.uniform(0.5, 3)
    return losses + high * (np.arange(len(losses)) >= at)


def _not_a_number(losses: Losses, at: int, scale: float, random: np.random.Generator) -> Losses:
    return np.where(np.arange(len(losses)) >= at, random.choice([math.nan, math.inf]), losses)


EXPLOSIONS: dict[str, Callable[[Losses, int, float, np.random.Generator], Losses]] = {
    "doubling": _doubling,
    "leap": _leap,
    "not a number": _not_a_number,
}


def exploding(kind: str, explosion: str, seed: int) -> LossCurve:
    """A curve of a kind that explodes after its first tenth: by more than it has gained, and than its noise shows."""
    random = np.random.default_rng([seed, *f"{kind} {explosion}".encode()])
    losses = KINDS[kind](_ground(random))
    steps = len(losses)
    at = int(random.integers(max(20, steps // 10), steps - max(24, steps // 10)))
    before = losses[:at][np.isfinite(losses[:at])]
    usual = np.quantile(np.abs(np.diff(before)), 0.9) * 20
    scale = float(np.ptp(before) + usual)
    losses = EXPLOSIONS[explosion](losses, at, scale, random)
    return _curve(f"{kind}, {explosion} {seed}", losses, seed, at)
