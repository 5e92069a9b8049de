"""``hdet.jax.auto`` agrees with the slow twin of the torch rule, step by step, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax

from hdet.rule.enums import Event
from tests.jax.runs import NAN, Lesson, assert_equal, simulated, story, trained

CLOSE = 1e-9
SENSIBLE = {"adam": 0.02, "lion": 0.005, "momentum": 0.02, "sgd": 0.1}
STEPS = 220
KINDS = ["adam", "lion", "sgd"]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def both(kind: str, guess: float, rollback: bool = True, tells: bool = True, **wrong: Any) -> list[str]:
    lesson = Lesson.of(STEPS, **wrong)
    history = simulated(kind, guess, lesson, rollback=rollback, tells=tells)
    _, out = trained(kind, guess, lesson, rollback=rollback, tells=tells)
    assert_equal(out, history, CLOSE)
    return story(history)


@pytest.mark.parametrize("wrong_by", [1e-5, 1.0, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_from_any_guess(kind: str, wrong_by: float) -> None:
    happened = both(kind, SENSIBLE[kind] * wrong_by)
    assert happened[0] == (Event.RESTARTED if wrong_by > 1 else Event.FIRST_STEP)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [{10: 1e4}, {45: 1e4}, {20: 1e4, 23: 1e5, 60: 1e4, 150: 1e4}], ids=str)
def test_it_goes_back_where_the_twin_does(kind: str, targets: dict[int, float]) -> None:
    happened = both(kind, SENSIBLE[kind], targets=targets)
    assert kind in ("adam", "lion") or Event.ROLLED_BACK in happened


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 3, 30, 150])
def test_gradients_that_are_nan(kind: str, at: int) -> None:
    happened = both(kind, SENSIBLE[kind] / 10, gradient={at: NAN})
    assert (Event.RESTARTED if at == 0 else Event.BAD_BATCH) in happened


@pytest.mark.parametrize("kind", KINDS)
def test_nan_twice_costs_the_rate(kind: str) -> None:
    assert {Event.BAD_BATCH, Event.ROLLED_BACK} <= {*both(kind, SENSIBLE[kind] / 10, gradient={30: NAN, 40: NAN})}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plateau(kind: str) -> None:
    """A loss that does not fall, since what is told of it is noise."""
    both(kind, SENSIBLE[kind], added=lambda t: 50.0 * ((t * 7919) % 13 - 6), unit=lambda t: 1e-3)


@pytest.mark.parametrize(("kind", "slope"), [("adam", 0.02), ("lion", 0.1), ("sgd", 0.1)])
def test_a_path_that_gains_nothing(kind: str, slope: float) -> None:
    """What is told of the loss rises as fast as the loss falls."""
    happened = both(kind, SENSIBLE[kind], added=lambda t: 0.3 * ((t * 7919) % 13 - 6) + slope * t)
    assert Event.ROLLED_BACK in happened


@pytest.mark.parametrize("kind", KINDS)
def test_harder_data(kind: str) -> None:
    assert Event.FALSE_ALARM in both(kind, SENSIBLE[kind] / 10, added=lambda t: 1000.0 * (t >= 60))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", [{}, {45: 1e5}], ids=str)
def test_losses_that_fall_steadily(kind: str, targets: dict[int, float]) -> None:
    """They raise the rate though gradients have turned, unless training has diverged."""
    both(kind, SENSIBLE[kind] / 10, added=lambda t: 1e3 * (STEPS - t), targets=targets)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("dark", [(0,), (1,), (3, 4, 5), (50, 51, 52, 53, 54, 55)], ids=str)
def test_losses_that_are_nan(kind: str, dark: tuple[int, ...]) -> None:
    both(kind, SENSIBLE[kind], added=dict.fromkeys(dark, NAN))


def test_gradients_that_begin_late() -> None:
    assert both("sgd", 0.01, unit=dict.fromkeys(range(20), 0.0))[0] == Event.FIRST_STEP


def test_gradients_that_never_begin() -> None:
    assert both("sgd", 0.1, unit=lambda t: 0.0) == [Event.STOPPED]


@pytest.mark.parametrize("targets", [{}, {45: 1e5}], ids=str)
def test_without_losses(targets: dict[int, float]) -> None:
    happened = both("sgd", 0.01, tells=False, targets=targets)
    assert (Event.ROLLED_BACK in happened) == bool(targets)


def test_without_snapshots() -> None:
    happened = both("sgd", 0.1, rollback=False, targets={100: 1e4})
    assert Event.SLOWED_DOWN in happened
