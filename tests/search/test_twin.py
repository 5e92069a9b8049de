"""The rule agrees with its slow twin on hundreds of made-up runs, good and bad."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from hdet.rule.constants import DEFAULT as c
from hdet.rule.decision import Evidence, Rule
from hdet.rule.enums import Action, Phase
from hdet.rule.estimate import Measured
from hdet.rule.judge import Block, LossHistory
from hdet.rule.progress import Progress
from hdet.rule.state import State
from tests.search.twin import Run, Seen, Settings, Theta, next_end

pytestmark = pytest.mark.quick

WORLDS = 400
NOWHERE: Theta = [[torch.zeros(())]]
PHASES = {"first": Phase.FIRST, "searching": Phase.SEARCHING, "stopped": Phase.STOPPED}


class World:
    """What a made-up run measures. Everything is drawn from one generator, so that a failure can be repeated."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = Settings(
            S=rng.choice([39, 40, 41, 67, 120, 200, 500, 1500, 4000]),
            guess=[10 ** rng.uniform(-6, 2)],
            pct_start=rng.choice([0.3, 0.3, 0.05, 0.9]),
            rollback=rng.random() < 0.8,
        )
        self.level = rng.choice([1.0, 2.3, 1e-3, 500.0, -2.0, 0.0])
        self.unit = rng.choice([1.0, 1e-3, 1e4])
        self.trouble = rng.choice([0.0, 0.0, 0.02, 0.1])
        """How often the losses of a round are far off, NaN or infinite."""
        self.harder = rng.choice([0, 0, 0, 30, 90])
        """From this step on losses are far higher, whatever the weights."""
        self.gives_losses = rng.random() < 0.8
        self.still = rng.choice([0, 0, 0, 0, 3, 300])
        """Steps at the beginning in which nothing moves."""
        self.silent = rng.choice([0, 0, 0, 0, 3, 30, 300])
        """Steps at the beginning without a gradient."""
        self.follows = rng.random() < 0.9
        """Whether steps follow the rate; else nothing holds displacement and rates together."""

    def losses(self, t: int, steps: int) -> list[Block]:
        rng = self.rng
        if not self.gives_losses:
            return []
        self.level -= self.unit * rng.random()
        off = self.unit * 1e3 * (0 < self.harder < t)
        if rng.random() < self.trouble:
            off = rng.choice([math.nan, math.inf, 100.0, 1e9]) * self.unit
        count = min(max(steps, 1), 8)
        return [Block(self.level + off + 0.1 * self.unit * rng.random(), 1) for _ in range(count)]

    def seen(self, t: int, run: Run) -> Seen:
        """What a path may show; now and then no gradients, or NaN or infinite ones."""
        rng, s = self.rng, self.settings
        if not run.looks or t == s.S:
            return Seen(0.0 if rng.random() < 0.98 else math.inf)
        q = 10 ** rng.uniform(-8, 0) if rng.random() < 0.9 else rng.choice([0.0, math.inf, 5e-3, 1e-2])
        rate = s.guess[0] * s.h(t - 1) * run.m
        estimated_rate = (
            rate * rng.choice([0.0, 0.5, 3.0, 20.0]) * rng.random() * 10 if run.phase == "searching" else 0.0
        )
        kappa, beta = rng.choice([0.0, 0.5, 0.8, 0.95, 1.0]), rng.uniform(-1, 1)
        size = rng.choice([0.0, math.nan, math.inf]) if rng.random() < 0.1 else 1.0
        sizes = [] if t <= self.silent else [1.0, size] if rng.random() < 0.5 else [size]
        eta = [1.0 if self.follows else run.rates(t - 1)[0]] * rng.randint(1, 70)
        return Seen(0.0 if t <= self.still else q, estimated_rate, kappa, beta, sizes, eta)


def agree(state: State, run: Run, times: Sequence[int]) -> None:
    assert math.exp(state.log_factor) == pytest.approx(run.m, rel=1e-9)
    assert math.exp(min(state.ceiling, 700.0)) == pytest.approx(min(run.C, math.exp(700.0)), rel=1e-9)
    assert state.phase is PHASES[run.phase]
    assert [one.step for one in state.snapshots] == [kept.t for kept in run.kept]
    if state.phase is Phase.SEARCHING:
        assert_judged_alike(state.history, run)
        assert math.exp(state.slowed_from) == pytest.approx(run.m_before, nan_ok=True)
        assert [state.factor(t) for t in times] == pytest.approx([run.factor(t) for t in times])


def assert_judged_alike(history: LossHistory, run: Run) -> None:
    judge = run.judge
    gain = judge.fine[0] - min(judge.fine) if judge.fine else 0.0
    lowest, recent = min(judge.fine, default=math.nan), [block.mean for block in history.recent]
    size = max(map(abs, [1e-300, *judge.fine]))
    close = {"rel": 1e-9, "abs": 1e-9 * size, "nan_ok": True}
    assert (history.lowest, history.gain) == pytest.approx((lowest, gain), **close)
    assert list(history.before) == pytest.approx(judge.before[-2:], **close)
    assert (history.suspect_level, history.nonfinite_streak) == pytest.approx((judge.suspect, judge.silent), **close)
    assert recent == pytest.approx([block.mean for block in judge.blocks][len(judge.blocks) - len(recent) :], **close)
    assert list(history.second_differences) == pytest.approx(judge.known_bends, **close)
    assert list(history.latest) == pytest.approx(judge.bends[-1] if judge.bends else [], **close)
    assert history.noise == pytest.approx(judge.sigma, **close)


def no_optimizer() -> object:
    return None


def follow(seed: int) -> Counter[str]:
    """One run of rule and twin side by side; what happened in it."""
    world = World(seed)
    s = world.settings
    rule, run = Rule(s.S), Run(s, NOWHERE, no_optimizer)  # type: ignore[arg-type]  # it has none
    state, run.has_losses = rule.begin(), world.gives_losses
    agree(state, run, [0, 1])
    began, known = 0, Progress()
    story: Counter[str] = Counter()
    while began < s.S:
        t = s.S if began == s.S - 1 else min(next_end(began), s.S - 1)
        steps = t - began if world.rng.random() < 0.95 else 0
        seen, blocks, guess = world.seen(t, run), world.losses(t, steps), s.guess[0] * s.h(t - 1)
        progress = known.after(blocks, t) if run.has_losses and steps else known
        evidence = Evidence(
            end=t,
            steps=steps,
            blocks=tuple(blocks),
            peak=s.peak,
            schedule_share=1.0 if t <= s.peak else s.h(t) / s.h(0),
            measured=Measured(
                moved=seen.q,
                straightness=seen.kappa,
                balance=seen.beta,
                gradients=tuple(seen.sizes),
                rates=math.fsum(seen.eta),
                path_steps=len(seen.eta),
            ),
            estimated_log_factor=math.log(seen.estimated_rate / guess) if seen.estimated_rate > 0 else -math.inf,
            has_losses=run.has_losses,
            **progress.outlook(),
        )
        if not s.rollback:
            state = rule.remembering(state, ())
        decision, level = rule.after_round(state, evidence), state.log_factor
        known = decision.progress(known, evidence)
        event = run.end_round(t, steps, blocks, seen)
        code, detail = [*(event or "").split(), None, None][:2]
        assert (decision.event, str(decision.rolled_back_to or (decision.why and decision.why.value))) == (
            code,
            str(detail),
        )
        if s.rollback:
            assert (decision.action is Action.KEEP) == bool(run.kept and run.kept[-1].t == t)
        raised = decision.state.log_factor - level
        told = (
            event
            if code == "stopped"
            else code or ("raised" if raised > 0 else "fell" if evidence.schedule_share < c.fall_start else "nothing")
        )
        story[told.split(" to step")[0]] += 1
        state, began = decision.state, t
        agree(state if s.rollback else rule.remembering(state, ()), run, [t, t + 1, 2 * t])
    return story


@pytest.mark.parametrize("part", range(4))
def test_the_rule_goes_the_way_of_the_twin(part: int) -> None:
    story: Counter[str] = Counter()
    for seed in range(part, WORLDS, 4):
        try:
            story += follow(seed)
        except Exception as error:
            raise AssertionError(f"world {seed}") from error
    assert len([event for event in story if event.startswith("stopped")]) == 3
    for event in ("first_step", "restarted", "rolled_back", "slowed_down", "false_alarm", "raised", "fell"):
        assert story[event] >= 3, event  # the worlds are wide enough
    assert sum(story.values()) > 1000


def test_the_shape_is_torchs() -> None:
    """Plain OneCycle if the given rate is used; else its rise is held at 1."""
    s = Settings(S=30, guess=[0.5], pct_start=0.4, div_factor=10.0, final_div_factor=100.0)
    run = Run(s, NOWHERE, no_optimizer)  # type: ignore[arg-type]
    p = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, 30, pct_start=0.4, div_factor=10.0, final_div_factor=100.0, cycle_momentum=False
    )
    assert run.phase == "stopped"
    for t in range(30):
        assert run.rates(t) == pytest.approx(scheduler.get_last_lr())
        if t >= s.peak:
            assert s.h(t) == pytest.approx(scheduler.get_last_lr()[0] / 0.5)
        optimizer.step()
        if t < 29:
            scheduler.step()
    assert [s.h(t) for t in (0, 5)] == [1.0, 1.0]
