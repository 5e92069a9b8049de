"""The pilot agrees with its slow twin on hundreds of made-up runs, good and bad."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import NO_GAIN, Action, Phase, Pilot, PilotState
from hdet.algorithm.auto.reference import Settings, Step, Theta, _next_end, _Run

WORLDS = 400
NOWHERE: Theta = [[torch.zeros(())]]


class World:
    """What a made-up run measures. Everything is drawn from one generator, so that a failure can be repeated."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = Settings(
            S=rng.choice([39, 40, 41, 67, 120, 200, 500, 1500, 4000]),
            guess=[10 ** rng.uniform(-6, 2)],
            pct_start=rng.choice([0.3, 0.3, 0.05, 0.9]),
            resolution=rng.choice([2.0**-52, 2.0**-7]),
        )
        self.now = self.first = rng.choice([1.0, 1.0, 2.3, 1e-3, 500.0, -2.0, 0.0])
        self.gain = rng.choice([0.1, 0.01, 0.0])
        """What a round brings at most, over the first loss."""
        self.trouble = rng.choice([0.0, 0.0, 0.02, 0.1, 0.4])
        """How often a loss is far off or no number."""
        self.dark = rng.choice([0, 0, 0, 0, 1, 2, 3])
        """Rounds at the beginning without a finite loss."""
        self.blind = rng.random() < 0.1
        """Whether the probe sees nothing."""
        self.still = rng.choice([0, 0, 0, 0, 3, 300])
        """Steps at the beginning in which nothing moves."""
        self.silent = rng.choice([0, 0, 0, 0, 3, 30, 300])
        """Steps at the beginning without a gradient."""
        self.follows = rng.random() < 0.9
        """Whether steps follow the rate; else nothing holds displacement and rates together."""

    def losses(self, k: int, t: int) -> tuple[float, float]:
        """Of the weights as they are and of a round ago."""
        rng, unit = self.rng, abs(self.first) or 1.0
        if k < self.dark:
            return rng.choice([math.nan, math.inf]), math.nan
        before = self.now
        if self.blind:
            return before, before
        self.now -= unit * rng.uniform(-0.08, self.gain)  # now and then a little worse, which is not too hot
        if rng.random() < self.trouble:
            off = before + unit * rng.choice([0.05, 0.15, 0.2, 0.3, 7])
            bad = rng.choice([math.nan, math.inf, off, off])
            return bad, rng.choice([before, before, math.nan])
        return self.now, before

    def displacement(self, t: int) -> float:
        rng = self.rng
        if t <= self.still:
            return 0.0
        if rng.random() < 0.1:
            return rng.choice([0.0, math.inf, 5e-3, 1e-2])
        return float(10 ** rng.uniform(-14, 1))

    def gradient(self, t: int) -> float:
        """The largest number of a round's gradients; now and then none, or one that is not finite."""
        if t <= self.silent:
            return 0.0
        return self.rng.choice([0.0, math.nan, math.inf]) if self.rng.random() < 0.1 else 1.0

    def reach(self, rate: float) -> float:
        """The gradients ask for more at first, and then for less."""
        return float(rate * self.rng.choice([0.0, 0.5, 1.1, 2.0, 3.0, 20.0]) * self.rng.random())


def agree(state: PilotState, run: _Run, t: int) -> None:
    assert state.level == pytest.approx(run.level, rel=1e-9, abs=1e-12)
    assert (state.phase is Phase.KEPT, state.phase is Phase.SEARCHING) == (run.alarmed, run.searching)
    assert [moment.step for moment in state.moments] == [kept.t for kept in run.kept]
    if state.phase is Phase.SEARCHING:
        assert (state.worse, state.idle, state.dark, state.seen) == (run.worse, run.idle, run.dark, run.seen)
        assert state.first == run.L0 or (math.isnan(state.first) and math.isnan(run.L0))
        assert [state.rise(t), state.rise(2 * t)] == pytest.approx([run.settings.rise(t), run.settings.rise(2 * t)])


def no_optimizer() -> object:
    return None


def follow(seed: int) -> Counter[str]:
    """One run of pilot and twin side by side; what happened in it."""
    world = World(seed)
    s = world.settings
    pilot, run = Pilot(s.S), _Run(s, NOWHERE, no_optimizer)  # type: ignore[arg-type]  # it has none
    state = pilot.begin()
    agree(state, run, 0)
    began = k = 0
    story: Counter[str] = Counter()
    while began < s.S:
        t = _next_end(began, s.S) if began else 1
        assert pilot.rounds.span(t) == (began, t)
        run.path.append(Step(NOWHERE, NOWHERE, 1.0 if world.follows else run.rates(t - 1)[0], NOWHERE))
        now, before = world.losses(k, t)
        before = before if run.kept else math.nan
        q = world.displacement(t) if not run.fallen else 0.0
        G, guess = world.gradient(t), s.guess[0] * s.h(t - 1)
        reach = world.reach(guess * run.m) if run.searching and not run.fallen else 0.0
        asked = math.log(reach / guess) if reach > 0 else -math.inf
        straight = reach * world.rng.choice([1.0, 1.0, 1.1, 2.0, 9.0])
        kappa = reach / straight if straight > 0 else 0.0
        evidence = Evidence((began, t), now, before, s.peak, s.h(t), t - began, q, asked, kappa, s.resolution, G)
        evidence = evidence._replace(rates=math.fsum(step.eta for step in run.path), stretch=len(run.path))
        order, level = pilot.after_round(state, evidence), state.level
        event = run.end_round(t, t - began, now, before, q, reach, straight, G)
        assert order.event == event, (seed, t)
        assert order.anew == (not run.path) or run.alarmed
        assert (order.action is Action.KEEP) == bool(run.kept and run.kept[-1].t == t)
        told = event or ("raised" if order.state.level > level else "fell" if s.h(t) < c.FALLING else "nothing")
        story[told.split(" to step")[0]] += 1
        state, began, k = order.state, t, k + 1
        agree(state, run, t)
    return story


@pytest.mark.parametrize("part", range(4))
def test_the_pilot_goes_the_way_of_the_twin(part: int) -> None:
    story: Counter[str] = Counter()
    for seed in range(part, WORLDS, 4):
        try:
            story += follow(seed)
        except Exception as error:
            raise AssertionError(f"world {seed}") from error
    assert len([event for event in story if event.startswith("kept")]) == 5
    again = "restarted: the first step was too long"
    for event in ("first step", again, "too hot: went back", NO_GAIN, "raised", "fell"):
        assert story[event] >= 5, event  # the worlds are wide enough
    assert sum(story.values()) > 1000


def test_the_shape_is_torchs() -> None:
    """Plain OneCycle where the guess is kept to; else its rise is held at 1."""
    s = Settings(S=30, guess=[0.5], pct_start=0.4, div_factor=10.0, final_div_factor=100.0)
    run = _Run(s, NOWHERE, no_optimizer)  # type: ignore[arg-type]
    p: Tensor = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, 30, pct_start=0.4, div_factor=10.0, final_div_factor=100.0, cycle_momentum=False
    )
    assert run.alarmed
    for t in range(30):
        assert run.rates(t) == pytest.approx(scheduler.get_last_lr())
        if t >= s.peak:
            assert s.h(t) == pytest.approx(scheduler.get_last_lr()[0] / 0.5)
        optimizer.step()
        if t < 29:
            scheduler.step()
    assert [s.h(t) for t in (0, 5)] == [1.0, 1.0]
