"""The experiment measures the product: a run on the stack has the base rates of ``hdet.OneCycleLR(max_lr="auto")``."""

from __future__ import annotations

import math
from typing import Any

import misset_auto
import pytest
import torch
from misset_auto import AutoRuns, Prober, Run
from shapes import onecycle
from stacked import Adam, Momentum, Stack
from supply import Supply

import hdet
from hdet.algorithm.auto import constants
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import Action, Order, Phase, Pilot, PilotState
from tests.experiments.small_tasks import CPU, small

STEPS = 420
SEED = 2


def on_the_stack(task: Any, optimizer: str, seed: int, guess: float) -> tuple[torch.Tensor, Run]:
    stack = Stack(task, [seed], 1, CPU)
    update = {"adam": Adam, "sgd": Momentum}[optimizer](stack.theta)
    supply = Supply(task, [seed], STEPS, CPU)
    run = Run(STEPS, seed, guess)
    runs = AutoRuns(stack, update, [[run]], supply)
    step = runs.train_step()
    for t in range(1, STEPS + 1):
        step()
        runs.after_step(t)
    rates = runs.rates[:, 0, 0]
    assert (rates == rates[:, :1]).all()  # one rate for all groups
    return rates[:, :1], run


def by_the_product(
    task: Any, optimizer: str, seed: int, guess: float, grouped: bool = False
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    class Journal:
        def write(self, record: dict[str, Any]) -> None:
            records.append(record)

    model, records = task.model(seed), []
    groups = [{"params": group["params"]} for group in task.groups(model)]
    whole = groups if grouped else [p for group in groups for p in group["params"]]
    build = {"adam": torch.optim.Adam, "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)}[optimizer]
    own = build(whole, lr=guess)
    probe = hdet.ProbeBatch(model, task.loss, lambda k: task.probe(seed, k))
    scheduler = hdet.OneCycleLR(own, "auto", STEPS, cycle_momentum=False, seed=seed, probe=probe, journal=Journal())
    rates = []
    for t in range(STEPS):
        rates.append([group["lr"] for group in own.param_groups])
        loss = task.loss(model, task.batch(seed, t))
        own.zero_grad()
        loss.backward()
        own.step()
        scheduler.step(loss)
    return torch.tensor(rates, dtype=torch.float64), [record for record in records if "step" in record]


@pytest.mark.parametrize(
    ("name", "optimizer", "guess", "grouped", "until"),
    [
        ("text", "adam", 1e-3, False, 61),
        ("text", "adam", 1e-6, True, 61),
        ("feed", "sgd", 1.0, False, STEPS),
        ("feed", "adam", 10.0, True, STEPS),
        ("digits", "sgd", 1e3, False, STEPS),
    ],
)
def test_rates_are_the_products(name: str, optimizer: str, guess: float, grouped: bool, until: int) -> None:
    """The small text model is chaotic at its rate: from 1e-16 at step 30 to 1e-2 at step 73 (seed 2)."""
    task = small(name)
    mine, run = on_the_stack(task, optimizer, SEED, guess)
    theirs, journal = by_the_product(task, optimizer, SEED, guess, grouped)
    torch.testing.assert_close(mine.expand_as(theirs)[:until], theirs[:until], rtol=1e-6, atol=0)
    assert [record["step"] for record in journal] == [step for step, _, _ in run.events]
    new_base = [record["base"][0] for record in journal if record["step"] <= until]
    assert new_base == pytest.approx([rate for step, _, rate in run.events if step <= until], rel=1e-6)
    went_back = [record["step"] for record in journal if "went back" in (record["event"] or "")]
    back = [step for step, action, _ in run.events if action is Action.GO_BACK]
    assert [step for step in went_back if step <= until] == [step for step in back if step <= until]
    if until == STEPS:
        assert journal[-1]["learned"][0] * guess == pytest.approx(run.found, rel=1e-6)


def test_the_way_back_is_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are soon called ruined: training goes back, and a first step that is too long is undone."""
    monkeypatch.setattr(constants, "WORSE", 1e-3)
    monkeypatch.setattr(constants, "RUINED", 1e-3)
    task = small("digits")
    mine, run = on_the_stack(task, "sgd", SEED, 1e3)
    theirs, _ = by_the_product(task, "sgd", SEED, 1e3)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert {Action.RESTART, Action.GO_BACK} <= {action for _, action, _ in run.events}


def test_pilots_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of these weights and of a round ago, the way gone and the reach, round by round."""
    seen: list[Evidence] = []
    decide = Pilot.after_round

    def noted(self: Pilot, state: PilotState, evidence: Evidence) -> Order:
        seen.append(evidence)
        return decide(self, state, evidence)

    monkeypatch.setattr(Pilot, "after_round", noted)
    task = small("digits")
    on_the_stack(task, "sgd", 3, 1e3)
    mine, seen = seen, []
    by_the_product(task, "sgd", 3, 1e3)
    assert len(mine) == len(seen) > 10
    for one, other in zip(mine, seen, strict=True):
        assert (one.span, one.steps) == (other.span, other.steps)
        same = [(one.now, other.now), (one.before, other.before), (one.peak, other.peak), (one.shape, other.shape)]
        if one.shape >= constants.FALLING:  # later nobody listens
            same += [(one.displacement, other.displacement), (one.reach, other.reach)]
        for a, b in same:
            assert a == pytest.approx(b, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("why", ["blind", "dark"])
def test_a_guess_that_is_kept_to(why: str) -> None:
    """A probe that does not see the weights, or gives no number: the plain schedule from there on."""
    task = small("digits")
    factor = {"blind": 0.0, "dark": math.nan}[why]
    task.probe = lambda seed, round, probe=task.probe: (probe(seed, round)[0] * factor, probe(seed, round)[1])
    if why == "blind":
        task.loss = lambda model, batch, loss=task.loss: loss(model, batch) * (batch[0].abs().sum() > 0)
    mine, run = on_the_stack(task, "sgd", SEED, 1e-2)
    with pytest.warns(UserWarning, match="the guess is kept to"):
        theirs, _ = by_the_product(task, "sgd", SEED, 1e-2)
    assert run.state.phase is Phase.KEPT
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_prober_deals_runs_out_to_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without a GPU: what would be captured is run."""

    def captured(run: Any) -> Any:
        sizes.append(run)
        return run

    sizes: list[Any] = []
    monkeypatch.setattr(misset_auto, "captured", captured)
    task = small("feed")
    stack, supply = Stack(task, [0], 1, CPU), Supply(task, [0], 1, CPU)
    points = stack.theta[0, 0] * torch.linspace(0.5, 1.5, 27).view(9, 3, 1)
    batch = supply.probes([(0, k) for k in range(9)])
    plain, graphs = Prober(stack, graph=False), Prober(stack, graph=True)
    monkeypatch.setattr(graphs, "_sizes", (4, 1))
    torch.testing.assert_close(graphs(points, batch), plain(points, batch))
    torch.testing.assert_close(graphs(points.flip(0), batch), plain(points.flip(0), batch))
    assert len(sizes) == 2


def test_a_run_too_short_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STEPS", 30)
    task = small("feed")
    mine, _ = on_the_stack(task, "adam", 3, 1e-2)
    theirs, _ = by_the_product(task, "adam", 3, 1e-2)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert mine[:, 0].tolist() == pytest.approx((1e-2 * onecycle(30)[:30]).tolist())
