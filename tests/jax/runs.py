"""Runs of ``hdet.jax.auto`` and of the slow twin on the same lessons, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor

import hdet.jax
from hdet.jax.rule import peak_factor
from hdet.rule.enums import Event
from tests.models import batch, two_layer
from tests.search import twin

BASES: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": optax.adam,
    "lion": lambda learning_rate: optax.lion(learning_rate, weight_decay=0.0),
    "momentum": lambda learning_rate: optax.sgd(learning_rate, momentum=0.9),
    "sgd": optax.sgd,
}


def happened(code: int) -> str | None:
    """What a number in a state stands for."""
    return [None, *(event.value for event in Event)][code]


def make(kind: str, guess: float, **arguments: Any) -> optax.GradientTransformationExtraArgs:
    """A search whose guess can be read."""
    return hdet.jax.auto(optax.inject_hyperparams(BASES[kind])(learning_rate=guess), **arguments)


class Lesson(NamedTuple):
    """What a small network learns, and what goes wrong: one number for each step.

    The loss of step t is that of its batch with targets times ``targets``, times ``unit``; what is told of it is the
    loss plus ``added``; its gradient is multiplied by ``gradient``.
    """

    targets: np.ndarray
    unit: np.ndarray
    added: np.ndarray
    gradient: np.ndarray

    @classmethod
    def of(cls, steps: int, **wrong: Mapping[int, float] | Callable[[int], float]) -> Lesson:
        rows = {"targets": 1.0, "unit": 1.0, "added": 0.0, "gradient": 1.0}
        found = {}
        for name, usual in rows.items():
            given = wrong.get(name, {})
            ask = given if callable(given) else (lambda t, given=given, usual=usual: given.get(t, usual))
            found[name] = np.array([ask(t) for t in range(steps)])
        return cls(**found)


@cache
def data(steps: int) -> tuple[np.ndarray, np.ndarray]:
    rows = [batch(t, 0) for t in range(steps)]
    return np.stack([x.numpy() for x, _ in rows]), np.stack([y.numpy() for _, y in rows])


def weights() -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in two_layer().parameters()]


def loss_of(params: Sequence[Any], x: Any, y: Any, targets: Any, unit: Any) -> Any:
    first, bias, last, offset = params
    return jnp.mean((jnp.tanh(x @ first.T + bias) @ last.T + offset - y * targets) ** 2) * unit


class Out(NamedTuple):
    """Every sequence of a run."""

    rate: Any
    loss: Any
    weights: Any
    event: Any
    """After each step; where no round has ended, that of the round before."""
    rounds: Any
    factor: Any


def step_of(optimizer: optax.GradientTransformationExtraArgs, tells: bool) -> Callable[..., tuple[Any, Out]]:
    """A whole run in one scan."""

    def run(state: Any, params: Any, xs: Any, ys: Any, lesson: Lesson) -> tuple[Any, Out]:
        def step(carry: Any, row: Any) -> Any:
            params, state = carry
            x, y, (targets, unit, added, gradient) = row
            loss, grads = jax.value_and_grad(loss_of)(params, x, y, targets, unit)
            grads = jax.tree.map(lambda g: g * gradient, grads)
            loss = loss + added
            more = {"value": loss} if tells else {}
            updates, after = optimizer.update(grads, state, params, **more)
            params = optax.apply_updates(params, updates)
            rate = after.steps.rate * after.guesses[0]
            return (params, after), Out(
                rate,
                loss,
                params,
                after.memory.notes.event,
                after.memory.notes.rounds,
                peak_factor(after.memory.learned),
            )

        return jax.lax.scan(step, (params, state), (xs, ys, lesson))

    return run


@cache
def runner(kind: str, rollback: bool, tells: bool) -> Callable[..., tuple[Any, Out]]:
    """The length and the guess are in the state, so that one program does for all."""
    return jax.jit(step_of(make(kind, 1.0, rollback=rollback), tells))


def trained(
    kind: str, guess: float, lesson: Lesson, *, rollback: bool = True, tells: bool = True, **arguments: Any
) -> Any:
    """By ``hdet.jax``: the last state, and every sequence."""
    steps = len(lesson.unit)
    params = [jnp.asarray(w) for w in weights()]
    state = make(kind, guess, total_steps=steps, rollback=rollback, **arguments).init(params)
    xs, ys = data(steps)
    (_, state), out = runner(kind, rollback, tells)(state, params, xs, ys, lesson)
    return state, out


# -- the twin ---------------------------------------------------------------------------------------------------------


class Rule:
    """The optimizers in plain letters."""

    def __init__(self, kind: str) -> None:
        self.kind, self.n = kind, 0
        self.m: list[Tensor] = []
        self.v: list[Tensor] = []

    def __call__(self, theta: twin.Theta, g: twin.Theta, eta: list[float], /) -> twin.Theta:
        self.n += 1
        self.m = self.m or [torch.zeros_like(x) for x in theta[0]]
        self.v = self.v or [torch.zeros_like(x) for x in theta[0]]
        return [[self.one(i, x, d, eta[0]) for i, (x, d) in enumerate(zip(theta[0], g[0], strict=True))]]

    def one(self, i: int, x: Tensor, g: Tensor, eta: float) -> Tensor:
        if self.kind == "sgd":
            return x - eta * g
        if self.kind == "momentum":
            self.m[i] = 0.9 * self.m[i] + g
            return x - eta * self.m[i]
        if self.kind == "lion":
            mean = 0.9 * self.m[i] + 0.1 * g
            update = mean.sign() + 0.0 * mean  # torch has 0 as the sign of NaN, jax NaN
            self.m[i] = 0.99 * self.m[i] + 0.01 * g
            return x - eta * update
        self.m[i] = 0.9 * self.m[i] + 0.1 * g
        self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
        m, v = self.m[i] / (1 - 0.9**self.n), self.v[i] / (1 - 0.999**self.n)
        return x - eta * m / (v.sqrt() + 1e-8)


def simulated(
    kind: str, guess: float, lesson: Lesson, *, rollback: bool = True, tells: bool = True, **letters: Any
) -> twin.History:
    """By the twin."""
    steps = len(lesson.unit)
    xs, ys = (torch.from_numpy(rows) for rows in data(steps))

    def loss_and_grad(theta: twin.Theta, t: int) -> tuple[float | None, twin.Theta]:
        first, bias, last, offset = params = [x.clone().requires_grad_() for x in theta[0]]
        out = torch.tanh(xs[t] @ first.T + bias) @ last.T + offset
        loss = ((out - ys[t] * lesson.targets[t]) ** 2).mean() * lesson.unit[t]
        grads = [g * lesson.gradient[t] for g in torch.autograd.grad(loss, params)]
        return (loss.item() + lesson.added[t] if tells else None), [grads]

    theta0 = [[torch.from_numpy(w) for w in weights()]]
    settings = twin.Settings(S=steps, guess=[guess], rollback=rollback, anneal_strategy="trapezoid", **letters)
    return twin.simulate(settings, theta0, loss_and_grad, lambda: Rule(kind))


def assert_equal(out: Out, history: twin.History, close: float) -> None:
    """Rates, weights, what was found and what happened, step by step."""
    ends = [t for t in range(len(out.rounds)) if out.rounds[t] > (out.rounds[t - 1] if t else 0)]
    assert [t + 1 for t in ends] == history.end
    assert [happened(int(out.event[t])) for t in ends] == [words and words.split()[0] for words in history.event]
    np.testing.assert_allclose(out.rate, [rates[0] for rates in history.rate], rtol=close, atol=0.0)
    found = [min(m, ceiling) for m, ceiling in zip(history.m, history.C, strict=True)]
    np.testing.assert_allclose([out.factor[t] for t in ends], found, rtol=close, atol=0.0)
    for t, theta in enumerate(history.theta):
        mine = np.concatenate([np.ravel(w[t]) for w in out.weights])
        theirs = torch.cat([x.flatten() for x in theta[0]]).numpy()
        assert np.isfinite(mine).all(), t
        if np.linalg.norm(theirs) < 50:  # an explosion magnifies rounding; if the twin's are NaN, ours wait
            assert np.linalg.norm(mine - theirs) <= 1e3 * close * np.linalg.norm(theirs), t


def story(history: twin.History) -> list[str]:
    """What happened, without rounds in which nothing did."""
    return [words.split()[0] for words in history.event if words is not None]


NAN = math.nan
