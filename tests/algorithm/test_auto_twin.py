"""The pilot and the line search agree with their slow twins on thousands of made-up rounds, good and bad."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from hdet.algorithm.auto.evidence import Evidence, Fan
from hdet.algorithm.auto.pilot import Action, Pilot, PilotState
from hdet.algorithm.auto.reference_rule import Measured, Rule, Settings
from hdet.algorithm.linesearch import LineSearch
from hdet.algorithm.linesearch_reference import Rows, line_search
from hdet.algorithm.signals import comparable

WORLDS = 200
"""Ten times as many agreed when this was written."""


class World:
    """What a made-up run measures. Everything is drawn from one generator, so that a failure can be repeated."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.settings = Settings(
            S=rng.choice([40, 41, 67, 120, 200, 300, 500]),
            guess=[10 ** rng.uniform(-6, 2) for _ in range(rng.choice([1, 1, 2, 3]))],
            pct_start=rng.choice([0.3, 0.3, 0.05, 0.9]),
            points=rng.choice([8, 8, 3, 4, 5]),
            spread=rng.choice([0.3, 0.2]),
            T=rng.choice([None, None, None, 6, 20]),
            seed=rng.randrange(5),
        )
        self.first = rng.choice([1.0, 1.0, 2.3, 1e-3, 500.0, -2.0])
        self.trouble = rng.choice([0.0, 0.0, 0.02, 0.1, 0.4])
        """How often a loss is far off or no number."""
        self.silence = rng.choice([0.0, 0.0, 0.1])
        """How often nothing moves, or the probe sees nothing."""
        self.gain = rng.choice([0.0, 0.02, 0.1, 0.3])
        """How much of the loss goes in a round."""
        self.place = rng.choice([0.2, 1.0, 1.0, 3.0])
        """Where the minimum on the line lies after landing."""
        self.noise = rng.choice([0.0, 1e-3, 0.05])
        self.now = self.first

    def losses(self, rho: list[list[float]], fixed: bool) -> list[float]:
        rng = self.rng
        self.now -= self.gain * rng.random() * (self.now if self.now > 0 else -0.1 * self.first)
        height = self.now
        if rng.random() < self.trouble:
            height = rng.choice(
                [math.nan, math.inf, self.now + abs(self.first) * rng.choice([0.4, 0.7, 1.5, 4, 7, 20])]
            )
        if rng.random() < self.silence:
            return [height] * len(rho)
        unit = abs(self.first)
        if fixed:  # the fan: some point far out may be the best
            found = [height + unit * rng.choice([0.0, 0.1, 1.0, -0.2]) * rng.random() for _ in rho]
            return [height, *found[1:]]
        tilt = [1 + 0.5 * g for g in range(len(rho[0]))]
        line = [sum(a * (r - self.place) ** 2 for a, r in zip(tilt, row, strict=True)) for row in rho]
        found = [height + unit * (0.1 * bend + self.noise * rng.gauss(0, 1)) for bend in line]
        if rng.random() < self.trouble:  # only some points have a finite loss
            finite = rng.sample(range(len(rho)), rng.choice([1, 2, 2, len(rho) - 1]))
            found = [loss if i in finite else math.nan for i, loss in enumerate(found)]
        return found

    def displacement(self) -> float:
        rng = self.rng
        if rng.random() < self.silence:
            return rng.choice([0.0, math.inf, 1e-4])
        return 10 ** rng.uniform(-7, 0)

    def reach(self, rate: float) -> float:
        """The gradients ask for more at first, and then for less."""
        return rate * self.rng.choice([0.0, 0.5, 1.1, 1.2, 3.0, 20.0]) * self.rng.random()

    def earlier(self) -> float:
        rng = self.rng
        return rng.choice([math.nan, self.now, self.now, self.now + 0.95 * abs(self.first), 0.5 * self.first])


def close(ours: list[float], theirs: list[float]) -> bool:
    """pytest.approx, without its price."""
    pairs = zip(ours, theirs, strict=True)
    return all(a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) or (a != a and b != b) for a, b in pairs)


def agree(state: PilotState, rule: Rule, t: float) -> None:
    assert close(state.learned, rule.m)
    assert close([state.course.at(t), state.course.at(t + 0.7)], [rule.course(t), rule.course(t + 0.7)])
    assert state.landed == rule.landed
    assert [moment.step for moment in state.memory.moments] == [kept.t for kept in rule.copies]
    assert close([moment.level for moment in state.memory.moments], [kept.level for kept in rule.copies])
    assert (state.worse, state.takeoff.quiet) == (rule.worse, rule.quiet)
    assert close([state.scale, state.low], [rule.scale, rule.low])
    take_off = state.takeoff
    assert close([take_off.first, take_off.best, take_off.best_at], [rule.L0, rule.Lb, rule.level_b])


def follow(seed: int) -> Counter[str]:
    """One run of pilot and twin side by side; what happened in it."""
    world = World(seed)
    letters = world.settings
    G = len(letters.guess)
    pilot = Pilot(LineSearch(), G, letters.S, letters.T, letters.points, letters.spread, letters.seed)
    state, rule = pilot.begin(), Rule(letters)
    agree(state, rule, 0)
    t = k = 0
    story: Counter[str] = Counter()
    while t < letters.S:
        began, t = t, rule.next_end(t)
        assert pilot.rounds(state).span(t) == (began, t)
        assert pilot.rounds(state).index(t - 1) == k
        fan = pilot.fan(state, k)
        assert fan == Fan(rule.rho(k), state.landed is None)
        losses = world.losses(fan.rho, fan.fixed)
        q, guess = world.displacement(), letters.guess[0] * letters.h(t - 1)
        reach = world.reach(guess * rule.m[0]) if fan.fixed else 0.0
        assert pilot.doubts(state, losses) == rule.doubts(losses)
        A = world.earlier() if rule.doubts(losses) else math.nan
        known = Measured(began, t, losses, q, reach, A)
        asked = math.log(reach / guess) if reach > 0 else -math.inf
        shape = letters.h(t)
        evidence = Evidence((began, t), fan, losses, letters.peak, shape, t - began, q, asked, 0.0, A)
        order, expected = pilot.after_round(state, evidence), rule.after_round(k, known)
        assert (order.event, order.went_back_to, order.anew) == (expected.event, expected.back_to, expected.anew)
        assert (order.action is Action.KEEP) == expected.keep
        assert (order.action is Action.RESTART) == expected.restart
        moved = state.landed is not None and order.state.learned != state.learned
        story[(order.event or ("moved" if moved else "nothing")).split(" to step")[0]] += 1
        state, k = order.state, k + 1
        agree(state, rule, t)
    return story


@pytest.mark.parametrize("part", range(WORLDS // 50))
def test_the_pilot_goes_the_way_of_the_twin(part: int) -> None:
    story: Counter[str] = Counter()
    for seed in range(50 * part, 50 * (part + 1)):
        try:
            story += follow(seed)
        except Exception as error:
            raise AssertionError(f"world {seed}") from error
    for event in ("landed: went back", "landed: went on", "too hot: went back", "moved", "take-off"):
        assert story[event] >= 5, event  # the worlds are wide enough


@pytest.mark.parametrize("knobs", [1, 2, 4])
@pytest.mark.parametrize("points", [3, 4, 5, 8, 16])
def test_the_line_search_goes_the_way_of_its_twin(knobs: int, points: int) -> None:
    """Slopes that last and slopes that change sign, on parabolas, straight lines and noise, with holes."""
    pilot = Pilot(LineSearch(), knobs, 1000, points=points)
    landed = pilot.without_take_off(0, None)
    for seed in range(5):
        rng = random.Random(seed)
        state, rows = LineSearch().init(knobs), Rows()
        place, bend = rng.choice([0.3, 0.9, 1.5, 4.0]), rng.choice([1.0, 1.0, 0.0, -0.1])
        noise, unit = rng.choice([0.0, 0.01, 0.3]), 10 ** rng.uniform(-4, 4)
        for k in range(30):
            rho = pilot.fan(landed, k).rho
            wanted = [place * (1 + 0.8 * g) for g in range(knobs)]
            losses = [
                sum(unit * (bend * (r - w) ** 2 - (w - 1) * r) for r, w in zip(row, wanted, strict=True))
                + unit * noise * rng.gauss(0, 1)
                for row in rho
            ]
            if rng.random() < 0.1:
                losses[rng.randrange(points)] = math.nan
            if rng.random() < 0.1:
                losses = [unit] * points
            update = LineSearch().update(state, comparable(losses), [[r - 1 for r in row] for row in rho])
            rows, moves = line_search(rows, losses, rho)
            assert [math.log1p(move) for move in update.moves] == pytest.approx(moves, rel=1e-7, abs=1e-10), (seed, k)
            state = update.state
            assert state.ups == [rows.above, rows.below], (seed, k)
            place = rng.choice([place, place, place, 1 / place])


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_whose_slopes_nearly_cancel_still_point_somewhere(sign: int) -> None:
    """One group wants a little more of what the other wants less of: the sum is small, and beyond its error."""
    pilot = Pilot(LineSearch(), 2, 1000)
    landed, state, rows = pilot.without_take_off(0, None), LineSearch().init(2), Rows()
    for k in (2, 5):  # rounds in which the groups stand apart
        rho = pilot.fan(landed, k).rho
        losses = [sign * (1.1 * first - second) for first, second in rho]
        update = LineSearch().update(state, losses, [[r - 1 for r in row] for row in rho])
        rows, moves = line_search(rows, losses, rho)
        assert close([math.log1p(move) for move in update.moves], moves)
        state = update.state
    assert state.ups == [rows.above, rows.below] == ([0, 2] if sign > 0 else [1, 0])


def test_where_no_loss_was_ever_finite_and_nothing_was_kept_nothing_happens() -> None:
    """The first step is undone, so that there is no copy; then the probe has no number for any weights."""
    letters = Settings(S=200, guess=[1.0])
    pilot, rule = Pilot(LineSearch(), 1, 200), Rule(letters)
    state = pilot.begin()
    for k, (began, t, q) in enumerate([(0, 1, 0.5), (1, 3, 0.1), (3, 5, 0.1), (5, 13, 0.1), (13, 21, 0.1)]):
        fan = pilot.fan(state, k)
        losses = [math.nan] * len(fan.rho)
        order = pilot.after_round(state, Evidence((began, t), fan, losses, letters.peak, 1.0, t - began, q))
        expected = rule.after_round(k, Measured(began, t, losses, q))
        assert (order.event, order.action is Action.KEEP) == (expected.event, expected.keep)
        state = order.state
        agree(state, rule, t)
    assert (state.landed, state.learned, state.memory.moments) == (5, [1.0], ())
