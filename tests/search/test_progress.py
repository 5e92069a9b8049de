"""Has the train loss fallen? Of losses that are made up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from hdet.rule.decision import next_end
from hdet.rule.judge import merged, table_of
from hdet.rule.progress import Progress

pytestmark = pytest.mark.quick


def after(losses: Sequence[float]) -> Progress:
    """At the end of a run with these losses, in the rounds of a search."""
    progress, t = Progress(), 0
    while t < len(losses):
        end = min(next_end(t) if t else 1, len(losses) - 1 if t < len(losses) - 1 else len(losses))
        table = table_of(list(enumerate(losses[t:end])), end - t)
        progress, t = progress.after(merged([table], end - t), end), end
    return progress


def part(history: Callable[[float], float], noise: float, steps: int, runs: int = 100) -> float:
    """Of how many runs the losses have fallen; ``history``: by the part of the run."""
    rng = random.Random(0)
    every = [[history(t / steps) + rng.gauss(0, noise) for t in range(steps)] for _ in range(runs)]
    return sum(after(losses).has_fallen() for losses in every) / runs


@pytest.mark.parametrize("steps", [60, 300, 1000])
@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_noise_does_not_fall(noise: float, steps: int) -> None:
    assert part(lambda t: 2.3, noise, steps) <= 0.15


@pytest.mark.parametrize("steps", [60, 300, 1000])
@pytest.mark.parametrize(
    "history",
    [
        lambda t: 2.3 - t,
        lambda t: 0.1 + 2.2 * math.exp(-20 * t),
        lambda t: 2.3 if t < 0.5 else 0.3,
        lambda t: -2000.0 * t,
    ],
)
def test_what_falls_has_fallen(history: Callable[[float], float], steps: int) -> None:
    assert part(history, 0.1, steps) >= 0.98


@pytest.mark.parametrize(("slope", "gained"), [(1.0, True), (0.01, True), (-0.05, False), (-1.0, False)])
def test_any_fall_is_a_gain(slope: float, gained: bool) -> None:
    progress = after([2.0 - slope * t / 100 + 0.01 * math.sin(9.0 * t) for t in range(100)])
    assert progress.has_gained is gained
    assert Progress().has_gained  # nothing is known


def test_a_slow_fall_below_a_large_noise_is_seen_in_many_steps() -> None:
    assert part(lambda t: 1.2 - 0.3 * t, 0.3, 1000) >= 0.98


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_what_explodes_and_comes_back_has_not_fallen(noise: float) -> None:
    assert part(lambda t: 2.3 if t < 0.02 or t > 0.3 else 50.0, noise, 300) <= 0.1


def test_next_to_nothing_is_nothing() -> None:
    assert part(lambda t: 2.33 - 0.03 * t, 0.01, 300) == 0


@pytest.mark.parametrize("zero", [0.0, 1e6, -1e6])
def test_a_loss_may_be_counted_from_any_zero_point(zero: float) -> None:
    rng = random.Random(0)
    assert after([zero + 2.3 * math.exp(-t / 60) + 0.01 * rng.gauss(0, 1) for t in range(300)]).has_fallen()
    still = after([zero] * 300)
    assert still.is_flat
    assert not still.has_fallen()


def test_one_bad_batch_at_the_end_does_not_matter() -> None:
    losses = [2.3 * math.exp(-t / 30) for t in range(300)]
    losses[290] = 1e6
    assert after(losses).has_fallen()


def test_flat_is_less_than_not_fallen() -> None:
    rng = random.Random(0)
    still, wild = after([1.0] * 60), after([1 + 0.3 * rng.gauss(0, 1) for _ in range(60)])
    assert still.is_flat
    assert not still.has_fallen()
    assert not wild.is_flat
    assert not wild.has_fallen()


@pytest.mark.parametrize("losses", [[], [1.0], [1.0] * 4, [math.nan] * 50])
def test_few_losses_say_nothing(losses: list[float]) -> None:
    progress = after(losses)
    assert not progress.is_known
    assert not progress.has_fallen()
    assert not progress.is_flat


def noisy(history: Callable[[int], float], steps: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [history(t) + rng.gauss(0, 0.1) for t in range(steps)]


@pytest.mark.parametrize("offset", [0.0, -1e3, 1e6])
@pytest.mark.parametrize(
    ("history", "below", "undone"),
    [
        (lambda t: 2.3, False, False),
        (lambda t: 2.3 - t / 60, True, False),
        (lambda t: 2.3 if t < 20 else 5.0, False, True),  # risen above all beginnings
        (lambda t: 2.3 - min(t, 30) / 30 if t < 50 else 2.5, False, True),  # had fallen, and is back
        (lambda t: 2.3 - min(t, 30) / 30 if t < 50 else 1.9, True, False),  # some of it is left
    ],
    ids=["flat", "falls", "rises", "dies", "suffers"],
)
def test_what_is_undone(history: Callable[[int], float], below: bool, undone: bool, offset: float) -> None:
    """Whatever the losses are counted from."""
    found = [after([loss + offset for loss in noisy(history, 104, seed)]) for seed in range(20)]
    assert sum(progress.is_below for progress in found) >= 19 if below else sum(p.is_below for p in found) <= 1
    assert (19 if undone else 0) <= sum(progress.undone is not None for progress in found) <= (20 if undone else 0)
    for progress in found:
        assert progress.undone in (None, (progress.first, progress.latest))


def test_what_came_after_the_weights_that_are_put_back_is_forgotten() -> None:
    progress = after(noisy(lambda t: 2.3 - min(t, 30) / 30 if t < 50 else 5.0, 61))
    assert progress.fell
    back = progress.rolled_back(43)
    assert max(one.end for one in back.stretches) == 43
    assert back.latest < 1.6 < progress.latest
    assert back.undone is None
    assert not back.fell
    assert back.start == progress.start
