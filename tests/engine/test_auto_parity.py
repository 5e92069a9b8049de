"""``max_lr="auto"`` on a real model agrees with its slow twin, step by step, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import hdet
from hdet.algorithm.auto import reference
from hdet.algorithm.published_reference import Adam, Momentum
from tests.models import batch, two_layer

Groups = list[list[Tensor]]
MU = {"adam": 0.9, "momentum": 0.9, "sgd": 0.0}
SENSIBLE = {"adam": 0.02, "momentum": 0.02, "sgd": 0.1}
"""Rates at which each optimizer trains this network well."""


class Lesson:
    """A small network, its batches, and what goes wrong with them.

    Args:
        groups: parameter groups, one or two.
        outlier: the step whose targets are ``size`` times too large: it throws the weights far away.
    """

    def __init__(self, groups: int, outlier: int | None = None, size: float = 1.0) -> None:
        self.model = two_layer()
        first, last = list(self.model[0].parameters()), list(self.model[2].parameters())
        self.groups: Groups = [first + last] if groups == 1 else [first, last]
        self.outlier, self.size = outlier, size

    def loss(self, t: int) -> Tensor:
        x, y = batch(t, 0)
        return mse_loss(self.model(x), y * self.size if t == self.outlier else y)

    def probe_batch(self, k: int) -> tuple[Tensor, Tensor]:
        return batch(10_000 + k, 0, 64)

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


def trained(lesson: Lesson, kind: str, guesses: list[float], S: int, **arguments: Any) -> dict[str, Any]:
    """By the product."""
    optimizer = make_optimizer(kind, lesson.groups, guesses)
    probe = hdet.ProbeBatch(lesson.model, lambda model, xy: mse_loss(model(xy[0]), xy[1]), lesson.probe_batch)
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
        x, y = lesson.probe_batch(k)
        with torch.no_grad():
            return mse_loss(lesson.model(x), y).item()

    settings = reference.Settings(S=S, guess=guesses, mu=MU[kind], **letters)
    new: Callable[[], Any] = Adam if kind == "adam" else Momentum
    return reference.simulate(settings, theta0, loss_and_grad, probe, new)


def assert_equal(ours: dict[str, Any], twin: reference.History) -> None:
    rounds = ours["rounds"]
    assert [(r["step"], r["event"]) for r in rounds] == list(zip(twin.end, twin.event, strict=True))
    for k, record in enumerate(rounds):
        losses = [point["signal"] for point in record["replicas"]]
        assert losses == pytest.approx(twin.probe[k], rel=1e-9, nan_ok=True), k
        assert record["learned"] == pytest.approx(twin.m[k], rel=1e-9), k
    for t, rates in enumerate(twin.rate):
        assert ours["rate"][t] == pytest.approx(rates, rel=1e-9), t
        assert ours["loss"][t] == pytest.approx(twin.loss[t], rel=1e-9, nan_ok=True), t
        flat = [x for group in twin.theta[t] for x in group]
        for mine, theirs in zip(ours["theta"][t], flat, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def story(twin: reference.History) -> list[str]:
    return [event for event in twin.event if event and event != "take-off"]


@pytest.mark.parametrize(
    ("kind", "wrong_by", "groups"),
    [
        pytest.param(kind, wrong_by, 1 + (row + column) % 2, id=f"{kind}-{wrong_by:g}")
        for row, kind in enumerate(MU)
        for column, wrong_by in enumerate((1e-5, 1.0, 1e4))
    ],
)
def test_from_any_guess_it_goes_the_way_of_the_twin(kind: str, wrong_by: float, groups: int) -> None:
    guesses = [SENSIBLE[kind] * wrong_by * factor for factor in (1.0, 0.5)[:groups]]
    ours = trained(Lesson(groups), kind, guesses, 220)
    twin = simulated(Lesson(groups), kind, guesses, 220)
    assert_equal(ours, twin)
    assert story(twin)[-1].startswith("landed: went")
    assert (story(twin)[0] == "restarted: the first step was too long") == (wrong_by > 1)


@pytest.mark.parametrize(
    ("kind", "guesses"),
    [pytest.param("momentum", [0.1, 3.0], id="together"), pytest.param("sgd", [0.1, 0.001], id="apart")],
)
def test_the_line_search_moves_as_the_twins_does(kind: str, guesses: list[float]) -> None:
    """Many short rounds after a short rise: the common rate goes up and down, or the groups part."""
    ours = trained(Lesson(2), kind, guesses, 260, sync_every=3, pct_start=0.1)
    twin = simulated(Lesson(2), kind, guesses, 260, T=3, pct_start=0.1)
    assert_equal(ours, twin)
    landing = next(k for k, event in enumerate(twin.event) if event and event.startswith("landed"))
    assert len({tuple(m) for m in twin.m[landing:]}) > 1


@pytest.mark.parametrize(
    ("kind", "outlier", "end"),
    [
        pytest.param("sgd", 14, "landed: went back", id="in take-off"),
        pytest.param("sgd", 120, "too hot: went back", id="later"),
        pytest.param("adam", 120, "too hot: went back", id="later, and Adam remembers"),
    ],
)
def test_it_goes_back_where_the_twin_does(kind: str, outlier: int, end: str) -> None:
    """One batch has targets a thousand times too large: the weights are thrown far away."""
    ours = trained(Lesson(1, outlier, 1e3), kind, [0.1], 200)
    twin = simulated(Lesson(1, outlier, 1e3), kind, [0.1], 200)
    assert_equal(ours, twin)
    assert story(twin)[-1].startswith(end)


def test_a_short_run_with_few_points_lands_late_as_the_twin_does() -> None:
    ours = trained(Lesson(2), "sgd", [0.1, 0.1], 60, points=4, seed=3)
    twin = simulated(Lesson(2), "sgd", [0.1, 0.1], 60, points=4, seed=3)
    assert_equal(ours, twin)
    assert story(twin)[-1].startswith("landed")
