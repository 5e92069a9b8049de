"""experiments/auto_runs.py: a run on the stack is the rule on one model, step by step, whoever trains beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from auto_runs import AutoRuns, Run, blocks_of, ends_of
from shapes import held, onecycle
from stacked import Adam, Momentum, Optimizer, Stack
from supply import Supply
from torch import Tensor

from hdet.auto.constants import DEFAULT, Constants
from hdet.auto.reach import Sums, estimate, straightness, weight_ratio
from hdet.auto.rounds import is_sampled
from hdet.auto.rule import Action, Decision, Evidence, Phase, Rule
from hdet.rollback.ruin import BLOCKS, LIMITS, Block, Limits
from tests.experiments.small_tasks import CPU, small

STEPS, SEED = 150, 2
SOON = Limits(lost=0.0, noise=0.1)
"""Weights are soon called ruined."""
OPTIMIZERS: dict[str, tuple[Callable[[Tensor], Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "adam": (Adam, torch.optim.Adam),
    "momentum": (Momentum, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
}


# The slow loop -------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A step whose gradient was looked at."""

    gradient: Tensor
    weights: Tensor
    rate: float
    before: float
    """The sum of the rates before it."""


class Slow:
    """The rule on one model, by hooks of nobody: keeps every sample and sums up anew where a round ends."""

    def __init__(self, task: Any, optimizer: str, guess: float, **options: Any) -> None:
        self.task, self.guess, self.losses = task, guess, options.pop("losses", True)
        self.rule = Rule(STEPS, **options)
        self.state = self.rule.begin()
        self.model = task.model(SEED)
        self.parameters = [p for group in task.groups(self.model) for p in group["params"]]
        self.optimizer = OPTIMIZERS[optimizer][1](self.parameters, lr=guess)
        self.decisions: list[tuple[int, Decision]] = []
        self.rates: list[float] = []
        self.seen: list[float] = []
        self.slots: dict[int | None, Any] = {None: self.copy()}  # without a slot: as it was before the first step
        self.begin_anew()

    def begin_anew(self) -> None:
        self.origin, self.samples, self.sum = self.weights(), list[Sample](), 0.0

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters])

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])

    def copy(self) -> Any:
        return deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def put_back(self, slot: int | None) -> None:
        model, optimizer = deepcopy(self.slots[slot])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def train(self) -> Slow:
        for begin, end in pairwise((0, *ends_of(STEPS, self.rule.constants))):
            values = []
            for t in range(begin, end):
                sampled = is_sampled(t - begin, end - begin, self.rule.constants)
                loss = self.step(t, sampled)
                if self.losses or sampled:
                    values.append(loss if self.losses else self.gradient().norm().log().item())
            self.end_round((begin, end), values)
        return self

    def step(self, t: int, sampled: bool) -> float:
        rate = self.guess * self.state.factor(t, self.rule.constants) * self.shape[t]
        self.optimizer.param_groups[0]["lr"] = rate
        self.rates.append(rate)
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model, self.task.batch(SEED, t))
        loss.backward()
        if sampled:
            self.samples.append(Sample(self.gradient(), self.weights(), rate, self.sum))
        self.sum += rate
        self.optimizer.step()
        self.seen.append(loss.item())
        return loss.item()

    @property
    def shape(self) -> Any:
        return onecycle(STEPS) if self.state.phase is Phase.KEPT else held(STEPS)

    def end_round(self, span: tuple[int, int], values: list[float]) -> None:
        now = self.weights()
        moved = ((now - self.origin).norm() / self.origin.norm()).item()
        sums = self.summed_up(now)
        finite = all(map(math.isfinite, sums))
        rate = estimate(sums) if finite else 0.0
        evidence = Evidence(
            span=span,
            steps=span[1] - span[0],
            blocks=tuple(self.blocks(values)),
            peak=0.3 * STEPS - 1,
            shape=self.shape[span[1]],
            moved=moved if math.isfinite(moved) else math.inf,
            reach=math.log(rate / self.guess / self.shape[span[1] - 1]) if rate > 0 else -math.inf,
            straightness=straightness(sums) if finite else 0.0,
            resolution=torch.finfo(now.dtype).eps,
        )
        decision = self.rule.after_round(self.state, evidence)
        self.decisions.append((span[1], decision))
        self.state = decision.state
        if decision.action is Action.KEEP:
            self.slots[decision.slot] = self.copy()
        elif decision.action in (Action.RESTART, Action.ROLL_BACK):
            self.put_back(decision.slot)
        if decision.anew or not finite:
            self.begin_anew()

    def summed_up(self, now: Tensor) -> Sums:
        """The equations of hdet.auto.reach."""
        weights: list[float] = []
        for before, sample in zip([None, *self.samples], self.samples, strict=False):
            ratio = weight_ratio(before.rate, sample.rate) if before is not None else 1.0
            weights = [*(weight * ratio for weight in weights), 1.0]
        pairs = list(zip(weights, self.samples, strict=True))
        asked = sum(w * (s.gradient @ (self.origin - s.weights)).item() for w, s in pairs)
        gained = (sum(w * s.gradient for w, s in pairs) @ (self.origin - now)).item()
        return Sums(asked, gained, self.sum, sum(w * s.before for w, s in pairs) / sum(weights))

    @staticmethod
    def blocks(values: list[float]) -> list[Block]:
        blocks = []
        for number in range(count := min(len(values), BLOCKS)):
            part = values[number * len(values) // count : (number + 1) * len(values) // count]
            numbers = [value for value in part if math.isfinite(value)]
            blocks.append(Block(sum(numbers) / len(numbers) if numbers else math.nan, len(part)))
        return blocks


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
    return [(t, one.action, one.slot, one.event, one.anew) for t, one in decisions]


@pytest.mark.parametrize(
    ("name", "optimizer", "guess", "options", "until"),
    [
        ("digits", "momentum", 1e-2, {}, STEPS),
        ("digits", "momentum", 1e3, {"limits": SOON}, STEPS),  # restarted, and often rolled back
        ("digits", "momentum", 1e-2, {"losses": False}, STEPS),
        ("feed", "adam", 1e-6, {}, STEPS),
        ("feed", "adam", 1e200, {}, STEPS),  # the first step ends in infinity
        ("feed", "adam", 1.0, {"constants": DEFAULT._replace(sampled=3, growing=0.4, least_rise=0.1)}, STEPS),
        ("text", "adam", 1e-3, {}, 44),  # the small model is chaotic at its rate
    ],
    ids=["plain", "ruined", "norms", "low", "infinite", "numbers", "text"],
)
def test_a_run_is_the_rule_on_one_model(
    name: str, optimizer: str, guess: float, options: dict[str, Any], until: int
) -> None:
    task = small(name)
    slow = Slow(task, optimizer, guess, **options).train()
    run = Run(STEPS, guess, **options)
    others = [Run(STEPS, 1.0), Run(STEPS, 1.0, constants=Constants(growing=0.5)), Run(STEPS, 1e-3, searches=False)]
    runs = stacked(task, optimizer, others[0], run, *others[1:])
    mine, theirs = runs.rates[:, 0, 1, 0], torch.tensor(slow.rates, dtype=torch.float64)
    torch.testing.assert_close(mine[:until], theirs[:until], rtol=1e-6, atol=0)
    soon = min(until, 100)  # later rounding may have grown
    assert runs.losses[:soon, 0, 1].tolist() == pytest.approx(slow.seen[:soon], rel=1e-6, nan_ok=True)
    same = [(t, one) for t, one in slow.decisions if t <= until]
    assert told([(t, one) for t, one in run.decisions if t <= until]) == told(same)
    if until == STEPS:
        assert run.found == pytest.approx(guess * slow.state.found, rel=1e-6)
    if options.get("limits") is SOON:
        assert {Action.RESTART, Action.ROLL_BACK} <= {one.action for _, one in run.decisions}
        assert run.rolled_back == sum(one.action is Action.ROLL_BACK for _, one in slow.decisions) > 1


def test_a_run_without_a_search_is_a_schedule() -> None:
    runs = stacked(small("feed"), "adam", Run(60, 1e-2, searches=False), Run(60, 1e-2))
    assert runs.rates[:, 0, 0, 0].tolist() == pytest.approx((1e-2 * onecycle(60)[:60]).tolist(), rel=1e-12)
    assert runs.rates[:, 0, 1, 0].tolist() != pytest.approx((1e-2 * onecycle(60)[:60]).tolist(), rel=0.1)


def test_a_run_too_short_to_search_keeps_to_the_guess() -> None:
    runs = stacked(small("feed"), "adam", Run(30, 1e-2))
    assert runs.rates[:, 0, 0, 0].tolist() == pytest.approx((1e-2 * onecycle(30)[:30]).tolist(), rel=1e-12)


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
    own = [blocks_of(losses[evidence.span[0] : evidence.span[1]]) for evidence in seen]
    shown = [own.index(evidence.blocks) for evidence in seen]
    assert all(number <= round for round, number in enumerate(shown))
    assert shown != list(range(len(seen)))
    assert {evidence.straightness for evidence in seen} == {0.0, 1.0}
    assert {evidence.reach for evidence in seen} == {-math.inf}


@pytest.mark.parametrize("steps", [40, 100, 1001])
def test_rounds_end_before_and_after_the_last_step(steps: int) -> None:
    ends = ends_of(steps)
    assert ends[-2:] == (steps - 1, steps)
    assert list(ends) == sorted({*ends})
    assert Run(steps, 1.0).sampled.count(True) <= 8 * len(ends)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100])
def test_blocks_are_equal_parts(count: int) -> None:
    blocks = blocks_of([float(i) for i in range(count)])
    lengths = [block.steps for block in blocks]
    assert (len(blocks), sum(lengths)) == (min(count, BLOCKS), count)
    assert max(lengths) - min(lengths) <= 1
    assert sum(block.mean * block.steps for block in blocks) == pytest.approx(sum(range(count)))


def test_limits_are_the_runs_own() -> None:
    """Two rules of different limits and the same start: the first rounds agree, then one is rolled back."""
    runs = stacked(small("digits"), "momentum", Run(STEPS, 1e-2, limits=SOON), Run(STEPS, 1e-2, limits=LIMITS))
    soon, later = runs.runs.values()
    assert soon.rolled_back > later.rolled_back
