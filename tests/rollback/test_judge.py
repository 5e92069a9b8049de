"""The judge of losses: no false alarm, no missed explosion, and neither zero point nor unit matter."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.rule.constants import BLOCKS, FEWEST, ROUNDS, Limits
from hdet.rule.enums import Verdict
from hdet.rule.judge import Block, LossHistory, judge
from tests.rollback.loss_curves import EXPLOSIONS, KINDS, LossCurve, curve, exploding, harder, recorded

LATE = 5
"""Rounds after the step of an explosion by whose end it must be seen. Rounds of two steps are too short for a level."""


@pytest.fixture(scope="module")
def seeds() -> range:
    """Of each kind. HDET_COURSES=1000 makes as many courses in all, HDET_FIRST_SEED=5000 others."""
    first, count = int(os.environ.get("HDET_FIRST_SEED", "0")), int(os.environ.get("HDET_COURSES", "260"))
    return range(first, first - -count // len(KINDS))


@pytest.fixture(scope="module")
def explosions(seeds: range) -> range:
    """Of each kind in each way: at least 200 in all."""
    return range(seeds.start, seeds.start + max(6, len(seeds) // 3))


def blocks_of(losses: Sequence[float]) -> list[Block]:
    count = min(len(losses), BLOCKS)
    edges = [number * len(losses) // count for number in range(count + 1)]
    parts = [[float(loss) for loss in losses[a:b]] for a, b in pairwise(edges)]
    means = [[loss for loss in part if math.isfinite(loss)] for part in parts]
    return [Block(math.fsum(m) / len(m) if m else math.nan, len(part)) for m, part in zip(means, parts, strict=True)]


def judged(one: LossCurve, unit: float = 1.0, offset: float = 0.0) -> Iterator[tuple[int, Verdict, LossHistory]]:
    """Round by round; the losses go on as they are, whatever is said of them."""
    memory = LossHistory()
    for end, losses, falling in one.rounds():
        memory, verdict = judge(memory, blocks_of(losses * unit + offset), falling=falling)
        yield end, verdict, memory


def alarms(one: LossCurve) -> list[int]:
    return [end for end, verdict, _ in judged(one) if verdict is Verdict.DIVERGED]


def seen_in_time(one: LossCurve, at: int) -> bool:
    """Whether an explosion at a step is."""
    return bool({*alarms(one)} & {*[end for end in one.ends if end > at][:LATE]})


@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm(kind: str, seeds: range) -> None:
    assert {seed: found for seed in seeds if (found := alarms(curve(kind, seed)))} == {}


def test_no_false_alarm_in_real_runs() -> None:
    runs = recorded()
    assert len({run.name for run in runs}) == 100
    assert all(len(run.losses) <= 400 for run in runs)
    assert {run.name: found for run in runs if (found := alarms(run))} == {}


@pytest.mark.parametrize("explosion", EXPLOSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_missed_explosion(kind: str, explosion: str, explosions: range) -> None:
    for seed in explosions:
        one = exploding(kind, explosion, seed)
        assert one.explodes_at is not None
        assert seen_in_time(one, one.explodes_at), one.name


@pytest.mark.parametrize("explosion", EXPLOSIONS)
def test_no_missed_explosion_of_real_runs(explosion: str) -> None:
    """In the middle of the recorded ones, to ten times the first loss above the last."""
    for run in recorded()[::5]:
        at, highest = len(run.losses) // 2, 10 * abs(run.losses[0]) + 10
        rising = {"doubling": highest * 2.0, "leap": highest, "not a number": math.nan}[explosion]
        losses = run.losses.copy()
        losses[at:] += rising
        assert seen_in_time(run._replace(losses=losses), at), run.name


def verdicts(one: LossCurve, unit: float = 1.0, offset: float = 0.0) -> list[Verdict]:
    return [verdict for _, verdict, _ in judged(one, unit, offset)]


some = st.one_of(
    st.builds(curve, st.sampled_from(sorted(KINDS)), st.integers(0, 10_000)),
    st.builds(exploding, st.sampled_from(sorted(KINDS)), st.sampled_from(["doubling", "leap"]), st.integers(0, 10_000)),
    st.builds(harder, st.integers(0, 10_000)),
)


@settings(max_examples=40, deadline=None)
@given(some, st.floats(1e-6, 1e6))
def test_the_unit_does_not_matter(one: LossCurve, unit: float) -> None:
    assert verdicts(one, unit) == verdicts(one)


@settings(max_examples=40, deadline=None)
@given(some.filter(lambda one: not one.name.startswith("offset")), st.floats(-1e3, 1e3))
def test_the_zero_point_does_not_matter(one: LossCurve, many: float) -> None:
    """Thousands of first losses away: a float still resolves the noise."""
    assert verdicts(one, offset=many * abs(one.losses[0])) == verdicts(one)


@settings(max_examples=20, deadline=None)
@given(some, st.integers(-20, 20))
def test_what_is_remembered_has_the_losses_unit(one: LossCurve, power: int) -> None:
    """Powers of two: losses of few bits keep them."""
    for (_, _, plain), (_, _, scaled) in zip(judged(one), judged(one, 2.0**power), strict=True):
        assert scaled.gain == 2.0**power * plain.gain
        assert scaled.noise == 2.0**power * plain.noise


def test_harder_data_are_a_false_alarm(seeds: range) -> None:
    """Diverged once at most; then the earlier weights are no better, and it was a false alarm."""
    called = 0
    for seed in seeds:
        found = [verdict for verdict in verdicts(harder(seed)) if verdict is not Verdict.FINE]
        assert found in ([], [Verdict.DIVERGED, Verdict.FALSE_ALARM]), seed
        called += bool(found)
    assert called > len(seeds) // 4  # the others had gained more than that, or are in the descent


def test_a_rollback_that_helps_is_no_false_alarm(seeds: range) -> None:
    """The losses of the rounds after it are those of before: it was the weights."""
    for seed in seeds:
        one = exploding("plain", "leap", seed)
        memory, healthy, found = LossHistory(), one.losses[: one.explodes_at], list[Verdict]()
        for _, losses, falling in one.rounds():
            seen = healthy[-len(losses) :] if Verdict.DIVERGED in found else losses
            memory, verdict = judge(memory, blocks_of(seen), falling=falling)
            found.append(verdict)
        assert [verdict for verdict in found if verdict is not Verdict.FINE] == [Verdict.DIVERGED], seed
        assert math.isnan(memory.suspect_level)


def test_no_loss_no_verdict() -> None:
    memory = LossHistory(lowest=1.0, gain=2.0, before=(1.0,), suspect_level=5.0)
    assert judge(memory, [], falling=False) == (memory, Verdict.FINE)


@pytest.mark.parametrize(("nonfinite_streak", "verdict"), [(3, Verdict.FINE), (4, Verdict.DIVERGED)])
def test_four_steps_without_a_number_are_an_explosion(nonfinite_streak: int, verdict: Verdict) -> None:
    memory, _ = judge(LossHistory(), [Block(1.0, 1)] * 4, falling=False)
    memory, first = judge(memory, [Block(1.0, 1), Block(math.nan, 2)], falling=True)
    assert first is Verdict.FINE
    assert judge(memory, [Block(math.inf, nonfinite_streak - 2)], falling=True)[1] is verdict


def test_limits_by_hand() -> None:
    """Levels 10, 6, 4; blocks alternate by 0.1: 3 second differences are 0.2 each but where the level falls."""
    memory = LossHistory()
    for level in (10.0, 6.0, 4.0, 4.0):
        memory, verdict = judge(memory, [Block(level, 1), Block(level + 0.1, 1)] * 2, falling=False)
        assert verdict is Verdict.FINE
    assert memory.gain == pytest.approx(6.0)
    limits = Limits(lost=0.3, noise=0.0)
    for rise, falling, verdict in (
        (1.7, False, Verdict.FINE),
        (1.9, False, Verdict.DIVERGED),
        (5.9, True, Verdict.FINE),
        (6.1, True, Verdict.DIVERGED),
    ):
        blocks = [Block(4.0 + rise, 1)] * 4
        assert judge(memory, blocks, falling=falling, limits=limits)[1] is verdict
        assert judge(memory, blocks, falling=falling, limits=Limits(lost=0.3, noise=math.inf))[1] is Verdict.FINE


def test_where_gradients_say_the_same_three_deviations_are_enough() -> None:
    """Sixty rounds of noise 0.1 at a level that falls from 2 to 1, then 1.8: most of the gain is lost, at five to
    twelve deviations. Harder data look the same to losses alone."""
    random, memory = Random(0), LossHistory()
    for number in range(60):
        level = 2.0 - min(number, 10) / 10
        rows = [Block(level + random.gauss(0.0, 0.1), 1) for _ in range(8)]
        memory, verdict = judge(memory, rows, falling=False, doubted=True)
        assert verdict is Verdict.FINE
    dead = [Block(1.8 + random.gauss(0.0, 0.1), 1) for _ in range(8)]
    assert judge(memory, dead, falling=False, doubted=True)[1] is Verdict.DIVERGED
    assert judge(memory, dead, falling=False)[1] is Verdict.FINE
    assert judge(memory, dead, falling=True, doubted=True)[1] is Verdict.FINE
    early = memory._replace(second_differences=memory.second_differences[:40])  # the noise is not well known yet
    assert judge(early, dead, falling=False, doubted=True)[1] is Verdict.FINE


def test_weights_that_explode_once_more_are_no_false_alarm() -> None:
    """Good after the rollback, and diverged before the round ends: the rate is still too high."""
    falling = [[Block(100.0 - 8 * k - j / 2, 4) for j in range(8)] for k in range(10)]
    memory = LossHistory()
    for blocks in falling:
        memory, verdict = judge(memory, blocks, falling=False)
        assert verdict is Verdict.FINE
    memory, verdict = judge(memory, [Block(2000.0, 4)] * 8, falling=False)
    assert verdict is Verdict.DIVERGED
    again = [falling[-1][0], *[Block(1900.0, 4)] * 7]
    assert judge(memory, again, falling=False)[1] is Verdict.DIVERGED
    assert judge(memory, [Block(1900.0, 4)] * 8, falling=False)[1] is Verdict.FALSE_ALARM


@pytest.mark.parametrize(
    ("second_differences", "noise"),
    [
        ((1.0,) * 3, math.inf),  # nothing is known of it yet
        ((0.1, 0.1, *(2.82,) * 14), 1.0),  # three quarters are below 2.82 deviations
        ((*(0.0,) * 14, 1.0, 3.0), 1.5),  # few bits: half of the second smallest step
        ((*(0.0,) * 15, 1.0), 0.0),  # one step may be an accident
    ],
)
def test_the_noise_by_hand(second_differences: tuple[float, ...], noise: float) -> None:
    """Few second differences may be small by chance: of 16 the noise is taken for 1 + 5/4 times as much."""
    assert LossHistory(second_differences=second_differences).noise == pytest.approx(noise * 2.25)


def test_a_run_begins_with_no_dark_step_behind_it() -> None:
    verdicts = [judge(LossHistory(), [Block(math.nan, steps)], falling=False)[1] for steps in (FEWEST - 1, FEWEST)]
    assert verdicts == [Verdict.FINE, Verdict.DIVERGED]


def test_every_block_makes_one_second_difference() -> None:
    """With the two before it, which may be of the round before."""
    memory = LossHistory()
    for _ in range(3):
        memory, _ = judge(memory, [Block(1.0, 1), Block(2.0, 1)], falling=False)
    assert memory.latest == (2.0, 2.0)


def test_a_leap_inside_a_round_is_seen_wherever_it_begins() -> None:
    """Four high blocks among low ones: the median of the round is low."""
    memory = LossHistory()
    for number in range(20):
        calm = [Block(1.0 + 0.01 * ((number + k) % 3), 1) for k in range(BLOCKS)]
        memory, verdict = judge(memory, calm, falling=False, limits=ROUNDS)
        assert verdict is Verdict.FINE
    for begin in range(BLOCKS - FEWEST + 1):
        losses = [9.0 if begin <= k < begin + FEWEST else 1.0 for k in range(BLOCKS)]
        after, verdict = judge(memory, [Block(loss, 1) for loss in losses], falling=False, limits=ROUNDS)
        assert (verdict, after.suspect_level) == (Verdict.DIVERGED, 9.0), begin
