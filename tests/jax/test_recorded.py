"""Gradients and losses that were recorded in torch make the same rates in ``hdet.jax``, step by step, in float64.

A small model is trained by torch's library, with the search of :func:`hdet.auto`; its gradients and losses are
kept. They are then given, as they are, to the slow twin of the rule and to :func:`hdet.jax.auto`. Of ``hdet.jax`` only
public names are used: the rate of a step is how long its update is, over the optimizer's own direction.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
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

import hdet
from hdet import jax as hj
from tests.jax.runs import BASES, Rule
from tests.models import batch, two_layer
from tests.search import twin

CLOSE = 1e-9
STEPS = 160
SENSIBLE = {"sgd": 0.1, "adam": 0.02, "lion": 0.005}
pytestmark = pytest.mark.filterwarnings("ignore::hdet.errors.SearchWarning")


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Trouble(NamedTuple):
    """What goes wrong in a run."""

    guess: float = 0.1
    """The first rate, over a sensible one."""
    gradient: Callable[[int], float] = lambda t: 1.0
    """What the gradient of a step is multiplied by ..."""
    told: Callable[[float, int], float] = lambda loss, t: loss
    """... and what is told of its loss."""


CASES = {
    "nothing": Trouble(),
    "rollback": Trouble(told=lambda loss, t: loss + 1000.0 * (60 <= t < 70)),
    "nan": Trouble(gradient=lambda t: math.nan if t in (30, 40) else 1.0),
    "first step too long": Trouble(guess=1e4),
    "plateau": Trouble(told=lambda loss, t: 1.0 + 0.05 * (5 * t % 7 - 3)),
}
EVENTS = {
    "nothing": ["first_step"],
    "rollback": ["first_step", "rolled_back"],
    "nan": ["first_step", "bad_batch", "rolled_back"],
    "first step too long": ["restarted"],
    "plateau": ["first_step"],
}
"""What the twin says has happened at first, each thing once."""


class Lion(torch.optim.Optimizer):
    """Torch has none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                mean = 0.9 * m + 0.1 * p.grad
                p -= group["lr"] * (mean.sign() + 0.0 * mean)  # NaN stays NaN
                m.mul_(0.99).add_(0.01 * p.grad)


TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "lion": Lion,
}


class Record(NamedTuple):
    """A run of torch's library."""

    guess: float
    gradients: list[list[Tensor]]
    losses: list[float]
    rates: list[float]
    weights: list[np.ndarray]
    """After each step, and after rolling back."""
    returned: list[bool]
    """Whether a step was followed by going back to earlier weights."""
    found: Any


@cache
def recorded(kind: str, case: str) -> Record:
    trouble, model = CASES[case], two_layer()
    guess = SENSIBLE[kind] * trouble.guess
    optimizer = TORCH[kind](model.parameters(), lr=guess)
    scheduler = hdet.auto(optimizer, total_steps=STEPS)
    record = Record(guess, [], [], [], [], [], scheduler)
    for t in range(STEPS):
        x, y = batch(t, 0)
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= trouble.gradient(t)
        record.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        record.losses.append(trouble.told(loss.item(), t))
        record.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        stepped = flat(model.parameters())
        scheduler.step(torch.tensor(record.losses[-1], dtype=torch.float64))
        record.weights.append(flat(model.parameters()))
        record.returned.append(not np.array_equal(record.weights[-1], stepped, equal_nan=True))
    return record._replace(found=scheduler.found)


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(x.detach() if isinstance(x, Tensor) else x)) for x in tensors])


class Directed:
    """An optimizer of the twin that tells the direction of each of its steps."""

    def __init__(self, kind: str, tell: Callable[[np.ndarray], None]) -> None:
        self.rule, self.tell = Rule(kind), tell

    def __call__(self, theta: twin.Theta, g: twin.Theta, eta: list[float], /) -> twin.Theta:
        origin = [[torch.zeros_like(x) for x in theta[0]]]
        self.tell(flat(copy.deepcopy(self.rule)(origin, g, [1.0])[0]))
        return self.rule(theta, g, eta)


def simulated(kind: str, record: Record) -> tuple[twin.History, list[np.ndarray]]:
    """By the twin: every sequence, and the direction of every step."""
    directions: list[np.ndarray] = []
    settings = twin.Settings(S=STEPS, guess=[record.guess], anneal_strategy="trapezoid")
    theta0 = [[p.detach().clone() for p in two_layer().parameters()]]
    history = twin.simulate(
        settings,
        theta0,
        lambda theta, t: (record.losses[t], [record.gradients[t]]),
        lambda: Directed(kind, directions.append),
    )
    return history, directions


def optimizer_of(kind: str, guess: float) -> optax.GradientTransformationExtraArgs:
    return hj.auto(optax.inject_hyperparams(BASES[kind])(learning_rate=guess), total_steps=STEPS)


@cache
def replayed(kind: str) -> Callable[..., Any]:
    """One program for all runs of an optimizer, since the guess is in the state."""
    update = optimizer_of(kind, 1.0).update

    def step(carry: Any, row: Any) -> Any:
        params, state = carry
        gradients, loss = row
        updates, state = update(gradients, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return (params, state), (updates, params)

    return jax.jit(lambda params, state, rows: jax.lax.scan(step, (params, state), rows))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", SENSIBLE)
def test_recorded_gradients_make_the_same_rates(kind: str, case: str) -> None:
    record = recorded(kind, case)
    history, directions = simulated(kind, record)
    np.testing.assert_allclose([eta for (eta,) in history.rate], record.rates, rtol=CLOSE, atol=0.0)

    params = [jnp.asarray(p.detach().numpy()) for p in two_layer().parameters()]
    gradients = [jnp.asarray(np.stack([g.numpy() for g in row])) for row in zip(*record.gradients, strict=True)]
    rows = gradients, jnp.asarray(record.losses)
    (_, state), (updates, weights) = replayed(kind)(params, optimizer_of(kind, record.guess).init(params), rows)

    compared = 0
    for t, direction in enumerate(directions):
        update, ours = flat(u[t] for u in updates), flat(w[t] for w in weights)
        assert np.isfinite(ours).all(), t
        if not np.isfinite(record.weights[t]).all():
            continue  # torch's weights are NaN until the round ends; ours wait
        np.testing.assert_allclose(ours, record.weights[t], rtol=1e3 * CLOSE, atol=1e3 * CLOSE, err_msg=f"step {t}")
        if not record.returned[t] and np.isfinite(direction).all():
            rate = np.linalg.norm(update) / np.linalg.norm(direction)
            assert rate == pytest.approx(record.rates[t], rel=CLOSE, abs=0.0), t
            assert rate == pytest.approx(history.rate[t][0], rel=CLOSE, abs=0.0), t
            np.testing.assert_allclose(update, rate * direction, rtol=1e-6, atol=1e-9 * np.abs(update).max())
            compared += 1
    assert compared > 0.9 * STEPS

    found = hj.found(state)
    theirs = record.found
    assert (found.status, found.why, found.rolled_back) == (theirs.status, theirs.why, theirs.rolled_back)
    assert (found.rate, found.within) == pytest.approx((theirs.rate, theirs.within), rel=CLOSE)
    events = [event.split()[0] for event in history.event if event is not None]
    assert [*dict.fromkeys(events)][: len(EVENTS[case])] == EVENTS[case]
    assert (found.status == "stopped") == (case == "plateau")
    assert found.rolled_back == sum(event in ("bad_batch", "rolled_back") for event in events)
