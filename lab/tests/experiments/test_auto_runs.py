"""lab/experiments/auto_runs.py: a run on the stack is the product on one model, step by step, whoever trains beside."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from auto_runs import AutoRuns, Run
from entries import NADAMW, submitted
from real.calibrated import Calibrated
from shapes import PEAK, Factors, onecycle, trapezoid
from stacked import Adam, Momentum, Optimizer, Stack, Supply
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.rule.constants import DEFAULT, Constants, Limits
from hdet.rule.decision import Decision, Evidence, Rule, next_end
from hdet.rule.enums import Action, Phase
from hdet.rule.judge import blocks_of
from hdet.search.measure import Measure
from hdet.search.steps import Steps
from lab.algoperf.training import BETAS, RISE, WEIGHT_DECAY, NAdamW, share_of
from lab.tests.experiments.small_tasks import CPU, small

STEPS, SEED = 150, 2
SOON = Limits(lost=0.0, noise=0.1)
"""Weights are soon called ruined."""
OPTIMIZERS: dict[str, tuple[Callable[[Tensor], Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "adam": (Adam, torch.optim.Adam),
    "momentum": (Momentum, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
    "nadamw": (
        lambda theta: Calibrated(theta, [NADAMW] * theta.shape[1]),
        lambda p, lr: NAdamW(p, lr, BETAS, weight_decay=WEIGHT_DECAY),
    ),
}
SCHEDULES: dict[Any, Any] = {
    trapezoid: None,
    onecycle: lambda o: OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=STEPS, cycle_momentum=False),
    submitted: lambda step: share_of(step, STEPS),
}


# The product ---------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """What ``hdet.auto`` has done."""

    rates: list[float]
    losses: list[float]
    decisions: list[tuple[int, Decision]]
    found: float


def product(
    task: Any,
    optimizer: str,
    guess: float,
    *,
    losses: bool = True,
    shape: Callable[[int], Factors] = trapezoid,
    rise: float = PEAK,
    ratios: dict[str, float] | None = None,
    **rule: Any,
) -> Product:
    """Train one model by it; ``ratios``: of its groups' rates to the guess; ``rule``: other numbers of its rule.

    ``rise`` is for the stack: the product sees it in the schedule.
    """
    del rise
    model = task.model(SEED)
    groups = [{**group, "lr": guess * (ratios or {}).get(group["name"], 1.0)} for group in task.groups(model)]
    own = OPTIMIZERS[optimizer][1](groups, lr=guess)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hdet.SearchWarning)
        scheduler = hdet.auto(own, total_steps=STEPS, schedule=SCHEDULES[shape])
        search = scheduler.search
        search.rule = Noted(STEPS, decisions=[], **rule)
        search.steps = Steps(range(len(groups)), search.rule.constants, None)
        search.steps.begin(own)
        done = Product([], [], search.rule.decisions, 0.0)
        for t in range(STEPS):
            done.rates.append(float(own.param_groups[0]["lr"]))
            own.zero_grad()
            loss = task.loss(model, task.batch(SEED, t))
            loss.backward()
            own.step()
            done.losses.append(loss.item())
            scheduler.step(loss) if losses else scheduler.step()
    return done._replace(found=guess * search.learned.peak_factor)


@dataclass(frozen=True)
class Noted(Rule):
    """A rule whose decisions can be read afterwards."""

    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def after_round(self, state: Any, evidence: Evidence) -> Decision:
        decision = super().after_round(state, evidence)
        self.decisions.append((evidence.end, decision))
        return decision


# The stack -----------------------------------------------------------------------------------------------------------


def stacked(task: Any, optimizer: str, *runs: Run) -> AutoRuns:
    """Train the runs side by side."""
    stack = Stack(task, [SEED], len(runs), CPU)
    auto_runs = AutoRuns(stack, OPTIMIZERS[optimizer][0](stack.theta), [list(runs)])
    step = auto_runs.train_step(Supply(task, [SEED], runs[0].steps, CPU).batches)
    for t in range(1, runs[0].steps + 1):
        step()
        auto_runs.end_rounds(t)
    return auto_runs


def told(decisions: list[tuple[int, Decision]]) -> list[tuple[Any, ...]]:
    return [(t, one.action, one.slot, one.event, one.resets_path) for t, one in decisions]


@pytest.mark.parametrize(
    ("name", "optimizer", "guess", "options", "until"),
    [
        ("digits", "momentum", 1e-2, {}, STEPS),
        ("digits", "momentum", 1e3, {"limits": SOON}, STEPS),  # restarted, and often rolled back
        ("digits", "momentum", 1e-2, {"losses": False}, STEPS),
        ("feed", "adam", 1e-6, {}, STEPS),
        ("feed", "adam", 1e-6, {"shape": onecycle}, STEPS),
        ("feed", "adam", 1e13, {}, STEPS),  # the first step goes very far
        ("feed", "adam", 1.0, {"constants": DEFAULT._replace(max_samples=3, round_growth=0.4, min_rise=0.1)}, STEPS),
        ("feed", "adam", 1e-6, {"ratios": {"embedding": 10.0, "no_decay": 0.3}}, STEPS),
        ("feed", "nadamw", 1e-6, {"shape": submitted, "rise": RISE}, STEPS),
        ("text", "adam", 1e-3, {}, 44),  # the small model is chaotic at its rate
    ],
    ids=["plain", "ruined", "norms", "low", "onecycle", "far", "numbers", "ratios", "submission", "text"],
)
def test_a_run_is_what_the_product_does(
    name: str, optimizer: str, guess: float, options: dict[str, Any], until: int
) -> None:
    task = small(name)
    slow = product(task, optimizer, guess, **options)
    run = Run(STEPS, guess, **options)
    others = [Run(STEPS, 1.0), Run(STEPS, 1.0, constants=Constants(round_growth=0.5)), Run(STEPS, 1e-3, searches=False)]
    runs = stacked(task, optimizer, others[0], run, *others[1:])
    mine, theirs = runs.rates[:, 0, 1, 0], torch.tensor(slow.rates, dtype=torch.float64)
    torch.testing.assert_close(mine[:until], theirs[:until], rtol=1e-6, atol=0)
    soon = min(until, 100)  # later rounding may have grown
    assert runs.losses[:soon, 0, 1].tolist() == pytest.approx(slow.losses[:soon], rel=1e-3, nan_ok=True)
    same = [(t, one) for t, one in slow.decisions if t <= until]
    assert told([(t, one) for t, one in run.decisions if t <= until]) == told(same)
    if until == STEPS:
        assert run.found == pytest.approx(slow.found, rel=1e-3)
    if options.get("limits") is SOON:
        assert {Action.RESTART, Action.ROLL_BACK} <= {one.action for _, one in run.decisions}
        assert run.rolled_back == sum(one.action is Action.ROLL_BACK for _, one in slow.decisions) > 1


@pytest.mark.parametrize("shape", SCHEDULES)
def test_a_run_without_a_search_is_a_schedule(shape: Callable[[int], Factors]) -> None:
    one, two = (Run(60, 1e-2, searches=searches, shape=shape) for searches in (False, True))
    runs = stacked(small("feed"), "adam", one, two)
    assert runs.rates[:, 0, 0, 0].tolist() == pytest.approx((1e-2 * shape(60)[:60]).tolist(), rel=1e-12)
    assert runs.rates[:, 0, 1, 0].tolist() != pytest.approx((1e-2 * shape(60)[:60]).tolist(), rel=0.1)


@pytest.mark.parametrize("name", ["feed", "digits"])
def test_groups_have_the_straightness_of_a_measure_of_their_own(name: str) -> None:
    """A Measure of each group, beside a model that is trained at the rates of the stack."""
    task, run = small(name), Run(60, 0.1)
    rates = stacked(task, "adam", run).rates[:, 0, 0, 0].tolist()
    model = task.model(SEED)
    own = torch.optim.Adam(task.groups(model), lr=1.0)
    measures = [Measure([g]) for g in range(len(own.param_groups))]
    found, begun = [], 1
    for t, rate in enumerate(rates[:15]):
        if t == 1:
            for measure in measures:
                measure.set_origin(own)
        own.zero_grad()
        task.loss(model, task.batch(SEED, t)).backward()
        for group in own.param_groups:
            group["lr"] = rate
        for measure in measures if t >= 1 else ():
            measure.sample(own)
        own.step()
        if t + 1 == next_end(begun):
            rows = [[measure.row([float(one) for one in measure.scalars(own)])] for measure in measures]
            found.append([one.measured(row).straightness for one, row in zip(measures, rows, strict=True)])
            begun = t + 1
            for measure in measures:
                measure.begin_round()
    assert len(found) > 5
    assert run.decisions[0][1].action is not Action.RESTART
    assert any(0 < one < 0.9 for row in found for one in row)
    for mine, theirs in zip(run.straight[1:], found, strict=False):  # the first is of the step that was measured
        assert list(mine) == pytest.approx(theirs, rel=1e-6)


def test_a_placebo_tosses_its_own_coins() -> None:
    runs = stacked(small("feed"), "adam", *[Run(100, 1e-3, placebo=name) for name in (None, "0", "0", "1")])
    real, first, same, second = (run.found for run in runs.runs.values())
    assert first == same
    assert len({real, first, second}) == 3


def test_a_placebo_sees_losses_of_other_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Evidence] = []
    decide = Rule.after_round

    def noted(self: Rule, state: Any, evidence: Evidence) -> Decision:
        seen.append(evidence)
        return decide(self, state, evidence)

    monkeypatch.setattr(Rule, "after_round", noted)
    losses = stacked(small("feed"), "adam", Run(100, 1e-3, placebo="0")).losses[:, 0, 0].tolist()
    own = [blocks_of(losses[evidence.end - evidence.steps : evidence.end]) for evidence in seen]
    shown = [own.index(evidence.blocks) for evidence in seen]
    assert all(number <= round for round, number in enumerate(shown))
    assert shown != list(range(len(seen)))
    assert {evidence.measured.straightness for evidence in seen} == {0.0, 1.0}
    assert {evidence.estimated_log_factor for evidence in seen} == {-math.inf}


@pytest.mark.parametrize("steps", [40, 100, 1001])
def test_rounds_end_before_and_after_the_last_step(steps: int) -> None:
    run = Run(steps, 1.0)
    run.state = run.state._replace(phase=Phase.SEARCHING)
    ends = [run.end]
    while ends[-1] < steps:
        assert 1 <= run.sampled.count(True) <= 8
        run.begin_round()
        ends.append(run.end)
    assert ends[-2:] == [steps - 1, steps]
    assert ends == sorted({*ends})
