"""``max_lr="auto"`` on a real model agrees with its slow twin, step by step, in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import hdet
from hdet.algorithm.auto import reference
from hdet.algorithm.auto.pilot import BLIND, NEVER_MOVED, NO_GAIN, NOT_FINITE
from hdet.algorithm.published_reference import Adam, Momentum
from hdet.errors import ProbeWarning
from tests.models import batch, two_layer

Groups = list[list[Tensor]]
MU = {"adam": 0.9, "momentum": 0.9, "sgd": 0.0}
SENSIBLE = {"adam": 0.02, "momentum": 0.02, "sgd": 0.1}
"""Rates at which each optimizer trains this network well."""


class Lesson:
    """A small network, its batches, and what goes wrong with them.

    Args:
        groups: parameter groups, one or two.
        outliers: the targets of a step are this many times too large: it throws the weights away.
        probes: what the probe says of the true loss in round k.
        still: until this step gradients are 0.
        unit: what the loss is multiplied by.
    """

    def __init__(
        self,
        groups: int = 1,
        outliers: dict[int, float] | None = None,
        probes: Callable[[float, int], float] = lambda loss, k: loss,
        still: int = 0,
        unit: float = 1.0,
    ) -> None:
        self.model = two_layer()
        first, last = list(self.model[0].parameters()), list(self.model[2].parameters())
        self.groups: Groups = [first + last] if groups == 1 else [first, last]
        self.outliers, self.probes, self.still, self.unit = outliers or {}, probes, still, unit

    def loss(self, t: int) -> Tensor:
        x, y = batch(t, 0)
        return mse_loss(self.model(x), y * self.outliers.get(t, 1.0)) * self.unit * float(t >= self.still)

    def probe_batch(self, k: int) -> tuple[Tensor, Tensor, int]:
        return *batch(10_000 + k, 0, 64), k

    def probe(self, data: tuple[Tensor, Tensor, int]) -> float:
        x, y, k = data
        return self.probes(mse_loss(self.model(x), y).item(), int(k))

    def load(self, theta: reference.Theta) -> None:
        with torch.no_grad():
            for xs, ys in zip(self.groups, theta, strict=True):
                for x, y in zip(xs, ys, strict=True):
                    x.copy_(y)


class Sink:
    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            self.rounds.append(record)


def make_optimizer(kind: str, groups: Groups, guesses: list[float]) -> torch.optim.Optimizer:
    rows = [{"params": group, "lr": guess} for group, guess in zip(groups, guesses, strict=True)]
    return torch.optim.Adam(rows) if kind == "adam" else torch.optim.SGD(rows, momentum=MU[kind])


def _as_tensor(lesson: Lesson) -> Callable[[Any, Any], Tensor]:
    return lambda _, data: torch.tensor(lesson.probe(data), dtype=torch.float64)


def trained(lesson: Lesson, kind: str, guesses: list[float], S: int, **arguments: Any) -> dict[str, Any]:
    """By the product."""
    optimizer = make_optimizer(kind, lesson.groups, guesses)
    probe = hdet.ProbeBatch(lesson.model, _as_tensor(lesson), lesson.probe_batch)
    sink = Sink()
    scheduler = hdet.OneCycleLR(
        optimizer, "auto", total_steps=S, cycle_momentum=False, probe=probe, journal=sink, **arguments
    )
    out: dict[str, Any] = {"rate": [], "loss": [], "theta": [], "rounds": sink.rounds}
    for t in range(S):
        optimizer.zero_grad()
        loss = lesson.loss(t)
        loss.backward()
        out["rate"].append([group["lr"] for group in optimizer.param_groups])
        out["loss"].append(loss.item())
        optimizer.step()
        scheduler.step(loss)
        out["theta"].append([p.detach().clone() for group in lesson.groups for p in group])
    return out


def simulated(lesson: Lesson, kind: str, guesses: list[float], S: int, **letters: Any) -> reference.History:
    """By the twin."""
    theta0 = [[p.detach().clone() for p in group] for group in lesson.groups]

    def loss_and_grad(theta: reference.Theta, t: int) -> tuple[float, reference.Theta]:
        lesson.load(theta)
        loss = lesson.loss(t)
        grads = iter(torch.autograd.grad(loss, [p for group in lesson.groups for p in group]))
        return loss.item(), [[next(grads) for _ in group] for group in lesson.groups]

    def probe(theta: reference.Theta, k: int) -> float:
        lesson.load(theta)
        with torch.no_grad():
            return lesson.probe(lesson.probe_batch(k))

    settings = reference.Settings(S=S, guess=guesses, mu=MU[kind], **letters)
    new: Callable[[], Any] = Adam if kind == "adam" else Momentum
    return reference.simulate(settings, theta0, loss_and_grad, probe, new)


def assert_equal(ours: dict[str, Any], twin: reference.History) -> None:
    rounds = ours["rounds"]
    assert [(r["step"], r["event"]) for r in rounds] == list(zip(twin.end, twin.event, strict=True))
    for k, record in enumerate(rounds):
        (row,) = record["replicas"]
        assert row["signal"] == pytest.approx(twin.probe[k], rel=1e-9, nan_ok=True), k
        assert record["loss_before"] == pytest.approx(twin.before[k], rel=1e-9, nan_ok=True), k
        assert record["reach"] == pytest.approx(twin.reach[k], rel=1e-9, abs=0.0), k
        assert record["learned"] == pytest.approx([twin.m[k]] * len(record["learned"]), rel=1e-9), k
        end = twin.end[k]
        assert record["base_before"] == pytest.approx(twin.rate[end - 1], rel=1e-9), k
        assert end == twin.end[-1] or record["base"] == pytest.approx(twin.rate[end], rel=1e-9), k
        words = (twin.event[k] or "").split("went back to step ")
        assert record["went_back_to"] == (int(words[1]) if len(words) > 1 else None)
    for t, rates in enumerate(twin.rate):
        assert ours["rate"][t] == pytest.approx(rates, rel=1e-9), t
        assert ours["loss"][t] == pytest.approx(twin.loss[t], rel=1e-9, nan_ok=True), t
        flat = [x for group in twin.theta[t] for x in group]
        for mine, theirs in zip(ours["theta"][t], flat, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def both(kind: str, guesses: list[float], S: int, arguments: dict[str, Any] | None = None, **wrong: Any) -> list[str]:
    """Product and twin agree; what happened."""
    ours = trained(Lesson(len(guesses), **wrong), kind, guesses, S, **(arguments or {}))
    twin = simulated(Lesson(len(guesses), **wrong), kind, guesses, S, **(arguments or {}))
    assert_equal(ours, twin)
    return [event for event in twin.event if event]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wrong_by", [1e-5, 1.0, 1e4])
@pytest.mark.parametrize("kind", MU)
def test_from_any_guess_it_goes_the_way_of_the_twin(kind: str, wrong_by: float, groups: int) -> None:
    guesses = [SENSIBLE[kind] * wrong_by * factor for factor in (1.0, 0.5)[:groups]]
    first, *_ = both(kind, guesses, 220)
    assert first == ("restarted: the first step was too long" if wrong_by > 1 else "first step")


@pytest.mark.parametrize("arguments", [{"pct_start": 0.02}, {"pct_start": 0.9, "div_factor": 3.0}], ids=str)
def test_with_other_schedules_too(arguments: dict[str, float]) -> None:
    both("momentum", [1.0], 150, arguments)


@pytest.mark.parametrize(
    ("kind", "guesses", "outliers", "goes_back"),
    [
        pytest.param("sgd", [0.1], {10: 1e4}, [7], id="early"),
        pytest.param("momentum", [0.1, 0.3], {20: 100.0}, [15], id="in the search, two groups"),
        pytest.param("adam", [0.1], {45: 100.0}, [13, 36], id="in the search, and Adam remembers"),
        pytest.param("sgd", [0.1], {120: 30.0}, [87], id="after the peak"),
        pytest.param("adam", [0.1, 0.2], {120: 100.0}, [11, 11, 87], id="after the peak, and Adam remembers"),
        pytest.param("sgd", [0.1], {20: 1e3, 23: 1e5, 60: 1e3, 150: 1e3}, [15, 15, 43, 124], id="again and again"),
    ],
)
def test_it_goes_back_where_the_twin_does(
    kind: str, guesses: list[float], outliers: dict[int, float], goes_back: list[int]
) -> None:
    """Batches with targets far too large: the weights are thrown away, at once or in the second round."""
    story = both(kind, guesses, 200, outliers=outliers)
    told = [event for event in story if event != NO_GAIN]
    assert told == ["first step", *(f"too hot: went back to step {t}" for t in goes_back)]


def test_a_first_step_to_nowhere_is_undone_until_one_is_known() -> None:
    first, second, *rest = both("sgd", [1.0], 80, outliers={0: 1e200})
    assert (first, second) == ("restarted: the first step was too long", "first step")
    assert not rest


def test_first_steps_that_are_lost_in_rounding_are_repeated() -> None:
    story = both("sgd", [1e-14], 80, unit=1e-4)
    assert story.count("first step") == len(story) > 1


@pytest.mark.parametrize("kind", MU)
def test_a_search_begins_with_the_first_gradient(kind: str) -> None:
    first, *_ = both(kind, [SENSIBLE[kind] / 100], 120, still=20)
    assert first == "first step"


@pytest.mark.filterwarnings("ignore::hdet.errors.ProbeWarning")
@pytest.mark.parametrize("steps", [1, 2, 39])
def test_a_short_run_is_plain_onecycle(steps: int) -> None:
    assert both("momentum", [0.03], steps) == []


def test_the_shortest_run_that_searches() -> None:
    assert both("momentum", [0.03], 40) == ["first step"]


@pytest.mark.parametrize(
    ("guess", "why", "wrong"),
    [
        pytest.param(0.1, NOT_FINITE, {"probes": lambda loss, k: math.nan}, id="NaN"),
        pytest.param(1e5, NOT_FINITE, {"probes": lambda loss, k: math.inf}, id="infinite, after a restart"),
        pytest.param(0.1, BLIND, {"probes": lambda loss, k: 1.0 + k}, id="blind"),
        pytest.param(1e5, BLIND, {"probes": lambda loss, k: 1.0 + k}, id="blind, after a restart"),
        pytest.param(0.1, NEVER_MOVED, {"still": 99}, id="still"),
    ],
)
def test_the_guess_is_kept_to_where_the_twin_does(guess: float, why: str, wrong: dict[str, Any]) -> None:
    with pytest.warns(ProbeWarning, match=why):
        story = both("sgd", [guess, guess], 120, **wrong)
    assert story[-1] == f"kept to the guess: {why}"
    assert sum(event.startswith("kept") for event in story) == 1


@pytest.mark.parametrize("dark", [{0}, {1}, {0, 4, 9}, set(range(3, 30))], ids=str)
def test_batches_without_a_finite_loss_do_not_end_the_search(dark: set[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, *rest = both("sgd", [0.1], 120, probes=lambda loss, k: math.nan if k in dark else loss)
    assert first == "first step"
    assert not any(event.startswith("kept") for event in rest)
