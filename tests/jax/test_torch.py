"""What the twin does not have agrees with the product itself: runs of unknown length, bounds, other schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.optim.lr_scheduler import LambdaLR

import hdet
import hdet.jax
from hdet.jax import AutoState
from hdet.jax.schedule import Plan
from hdet.schedulers.trapezoid import Trapezoid
from tests.jax.runs import Lesson, Out, data, make, runner, step_of, weights
from tests.models import two_layer

STEPS = 220
pytestmark = pytest.mark.filterwarnings("ignore::hdet.errors.SearchWarning")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class TorchRun:
    """SGD in torch on the same batches."""

    def __init__(self, guess: float) -> None:
        self.model = two_layer()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=guess)
        self.rates: list[float] = []
        self.xs, self.ys = (torch.from_numpy(rows) for rows in data(STEPS))

    def train(self, scheduler: Any, begin: int, end: int) -> None:
        for t in range(begin, end):
            loss = ((self.model(self.xs[t]) - self.ys[t]) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            scheduler.step(loss.detach())


def run(state: AutoState, begin: int, end: int, optimizer: Any = None) -> tuple[Any, AutoState, Out]:
    xs, ys = (rows[begin:end] for rows in data(STEPS))
    params = [jnp.asarray(w) for w in weights()] if begin == 0 else run.params  # type: ignore[attr-defined]
    go = runner("sgd", True, True) if optimizer is None else jax.jit(step_of(optimizer, True))
    (run.params, state), out = go(state, params, xs, ys, Lesson.of(end - begin))  # type: ignore[attr-defined]
    return run.params, state, out  # type: ignore[attr-defined]


@pytest.mark.parametrize("finishes", ["at once", "twice"])
def test_a_run_of_unknown_length_is_finished(finishes: str) -> None:
    """Half the steps without an end, and then it falls; or is told in its fall that it has half as many steps."""
    theirs = TorchRun(0.01)
    scheduler = hdet.auto(theirs.optimizer)
    state = make("sgd", 0.01).init([jnp.asarray(w) for w in weights()])
    rates = []
    plan = [(0, 110, 110 if finishes == "at once" else 300), (110, 220, None)]
    for begin, end, steps in plan:
        if finishes == "twice" and begin == 110:
            middle = 165
            theirs.train(scheduler, begin, middle)
            state, out = _part(state, begin, middle)
            rates += [float(rate) for rate in out.rate]
            scheduler.finish(220 - middle)
            state = hdet.jax.finish(state, 220 - middle)
            begin = middle
        theirs.train(scheduler, begin, end)
        state, out = _part(state, begin, end)
        rates += [float(rate) for rate in out.rate]
        if steps is not None:
            scheduler.finish(steps)
            state = hdet.jax.finish(state, steps)
    np.testing.assert_allclose(rates, theirs.rates, rtol=1e-9)
    assert rates[-1] < 1e-3 * max(rates)
    mine, found = hdet.jax.found(state), scheduler.found
    assert found is not None
    assert (mine.status, mine.why, mine.rolled_back) == (found.status, found.why, found.rolled_back)
    assert (mine.rate, mine.within) == pytest.approx((found.rate, found.within), rel=1e-9)


def test_a_run_is_finished_while_it_is_held() -> None:
    theirs = TorchRun(0.01)
    scheduler = hdet.auto(theirs.optimizer, total_steps=STEPS)
    theirs.train(scheduler, 0, 100)
    state, before = _part(make("sgd", 0.01, total_steps=STEPS).init([jnp.asarray(w) for w in weights()]), 0, 100)
    scheduler.finish(50)
    theirs.train(scheduler, 100, 150)
    state, after = _part(hdet.jax.finish(state, 50), 100, 150)
    np.testing.assert_allclose([*before.rate, *after.rate], theirs.rates, rtol=1e-9)
    assert int(state.memory.plan.total) == scheduler.total_steps == 150


@pytest.mark.parametrize("steps", [2, 10, 100])
def test_the_plain_schedule(steps: int) -> None:
    own = Plan.of(steps, None).plain(jnp.arange(steps))
    np.testing.assert_allclose(own, [Trapezoid.of(steps).at(t) for t in range(steps)], rtol=1e-9)


def _part(state: AutoState, begin: int, end: int) -> tuple[AutoState, Out]:
    _, state, out = run(state, begin, end)
    return state, out


def test_a_rate_is_never_above_its_bound() -> None:
    theirs = TorchRun(0.01)
    theirs.train(hdet.auto(theirs.optimizer, total_steps=STEPS, highest=0.02), 0, STEPS)
    optimizer = make("sgd", 0.01, total_steps=STEPS, highest=0.02)
    _, state, out = run(optimizer.init([jnp.asarray(w) for w in weights()]), 0, STEPS, optimizer)
    np.testing.assert_allclose(out.rate, theirs.rates, rtol=1e-9)
    assert max(float(rate) for rate in out.rate) == pytest.approx(0.02)
    assert hdet.jax.found(state).why == "at the bound you gave"


def test_a_schedule_of_optax() -> None:
    """The same shape in torch: a warm-up of 30 steps, and a cosine."""
    warm = 30

    def shape(t: int) -> float:
        return (t + 1) / (warm + 1) if t < warm else 0.5 + 0.5 * math.cos(math.pi * (t - warm) / (STEPS - warm))

    theirs = TorchRun(0.01)
    schedule = LambdaLR(theirs.optimizer, shape)
    theirs.train(hdet.auto(theirs.optimizer, total_steps=STEPS, schedule=schedule), 0, STEPS)
    parts = [
        lambda t: 7.0 * (t + 1) / (warm + 1),
        lambda t: 7.0 * (0.5 + 0.5 * jnp.cos(jnp.pi * t / (STEPS - warm))),
    ]
    optimizer = make("sgd", 0.01, total_steps=STEPS, schedule=optax.join_schedules(parts, [warm]))
    _, _, out = run(optimizer.init([jnp.asarray(w) for w in weights()]), 0, STEPS, optimizer)
    np.testing.assert_allclose(out.rate, theirs.rates, rtol=1e-9)
