"""The rule, on rounds that a person can follow, and on any rounds at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.rule.constants import DEFAULT as c
from hdet.rule.decision import STOPPED, Decision, Evidence, Rule, next_end
from hdet.rule.enums import Action, Event, Phase, Reason
from hdet.rule.estimate import Measured
from hdet.rule.judge import Block, LossHistory, Snapshot
from hdet.rule.state import State

pytestmark = pytest.mark.quick

RULE = Rule(1000)
"""q is 0.1."""
PEAK = 299.0
HISTORY = LossHistory(
    lowest=1.0, gain=2.0, before=(1.0, 1.1), recent=(Block(1.1, 1),) * 4, second_differences=(0.01,) * 20
)
"""The level fell from 3 to 1; 0.6 more is too much."""
KEPT = (Snapshot(90, 0), Snapshot(100, 1))
SEARCHING = State(Phase.SEARCHING, log_factor=0.0, peak=PEAK, history=HISTORY, snapshots=KEPT)
"""Well into a search, at the guess itself."""
FOUND = SEARCHING._replace(ceiling=0.0, asked=0.0, most_asked=0.0)
"""The same, after gradients have turned."""
AGAIN = Event.RESTARTED
CLIMB = math.exp(c.max_climb * 20 / (PEAK + 1))
"""The most by which a round of 20 steps raises the target, once the loss has fallen."""
HARDER = Event.FALSE_ALARM


def losses(level: float, blocks: int = 8) -> tuple[Block, ...]:
    return (Block(level, 2),) * blocks


def after(state: State, level: float = 1.0, rule: Rule = RULE, **known: Any) -> Decision:
    """One round that ends at step 120, with losses of this level."""
    rest: dict[str, Any] = {
        "end": 120,
        "peak": PEAK,
        "steps": 20,
        "moved": 0.1,
        "gradients": (1.0, 2.0),
        "blocks": losses(level),
    }
    given = {**rest, **known}
    measured = Measured(**{name: given.pop(name) for name in Measured._fields if name in given})
    return rule.after_round(state, Evidence(**given, measured=measured))


def first_step(moved: float, state: State | None = None, **known: Any) -> Decision:
    rest: dict[str, Any] = {"end": 1, "steps": 1, "moved": moved, "rates": 1e-3, "path_steps": 1}
    return after(state or RULE.begin(), **{**rest, **known})


# -- the first step ----------------------------------------------------------------------------------------------------


@given(st.floats(2e-5, 1e-2, exclude_max=True), st.integers(1, 2000), st.sampled_from([0.0, 50.0, PEAK, 600.0]))
def test_after_the_first_step_the_guess_does_not_matter(moved: float, t: int, peak: float) -> None:
    """Whatever the first step moved, the next one moves the weights by 5e-3 of their norm."""
    decision = first_step(moved, end=t, peak=peak)
    if t > max(peak, c.min_steps):
        assert decision.why == Reason.NO_GRADIENT
        return
    state = decision.state
    assert moved * state.factor(t) / RULE.begin().factor(t - 1) == pytest.approx(5e-3)
    assert (decision.event, decision.action, decision.slot, decision.resets_path) == (
        Event.FIRST_STEP,
        Action.KEEP,
        0,
        True,
    )
    assert (state.phase, state.peak, state.snapshots) == (Phase.SEARCHING, peak, (Snapshot(t, 0),))


@pytest.mark.parametrize(("moved", "undone"), [(9.9e-3, False), (1e-2, True), (1e5, True)])
def test_a_first_step_that_was_too_long_is_undone(moved: float, undone: bool) -> None:
    decision = first_step(moved)
    assert (decision.action is Action.RESTART) == (decision.event == AGAIN) == undone
    assert decision.resets_path
    assert decision.state.phase is Phase.SEARCHING
    assert moved * decision.state.factor(1) / c.initial_factor == pytest.approx(5e-3)
    if undone:
        assert (decision.state.snapshots, decision.slot) == ((), None)


def test_a_first_step_to_nowhere_is_undone_and_tried_far_lower() -> None:
    decision = first_step(math.inf)
    assert (decision.action, decision.event, decision.resets_path) == (Action.RESTART, AGAIN, True)
    assert decision.state == RULE.begin()._replace(log_factor=pytest.approx(math.log(1e-6)))
    for _ in range(9):
        decision = first_step(math.inf, decision.state)
    assert decision.state.log_factor == math.log(1e-15)  # the bound of all factors: a lower one would not be the rate's


@pytest.mark.parametrize(
    ("moved", "rounding", "longer"),
    [
        (1e-12, 2.0**-24, 1e3),
        (1.1e-5, 2.0**-24, 5e-3 / 1.1e-5),
        (1.1e-5, 0.0, 5e-3 / 1.1e-5),  # fp64 counts as fp32
        (1.3e-5, 2.0**-24, None),
        (2.4e-3, 2.0**-9, 5e-3 / 2.4e-3),  # bf16
        (2.6e-3, 2.0**-9, None),
    ],
)
def test_a_first_step_of_which_much_may_be_rounding_is_made_again(
    moved: float, rounding: float, longer: float | None
) -> None:
    """From the same weights, and so much longer that it can be measured."""
    decision = first_step(moved, rounding=rounding)
    assert (decision.action is Action.RESTART) == (decision.state.phase is Phase.FIRST) == (longer is not None)
    assert (decision.event, decision.resets_path) == (Event.FIRST_STEP, True)
    if longer is not None:
        assert decision.state == RULE.begin()._replace(log_factor=pytest.approx(math.log(c.initial_factor * longer)))


def test_a_first_step_that_may_not_be_longer_counts() -> None:
    """The user's bound, or the largest factor that there is."""
    level = RULE.begin().log_factor
    assert first_step(1e-9, highest=level).state.phase is Phase.SEARCHING
    assert first_step(1e-9, RULE.begin().with_log_factor(math.inf)).state.phase is Phase.SEARCHING
    assert first_step(1e-9, highest=level + 1).state.log_factor == level + 1


@pytest.mark.parametrize("moved", [0.0, math.nan])
def test_a_first_step_that_was_lost_is_repeated_higher(moved: float) -> None:
    decision = first_step(moved)
    assert (decision.action, decision.event, decision.resets_path) == (Action.NOTHING, Event.FIRST_STEP, True)
    assert decision.state == RULE.begin()._replace(log_factor=pytest.approx(0.0))
    for _ in range(50):
        decision = first_step(moved, decision.state)
    assert decision.state.log_factor == math.log(1e15)


@pytest.mark.parametrize(
    ("moved", "gradients"), [(0.0, ()), (0.0, (0.0,)), (1e-3, (0.0, 0.0)), (0.0, (math.inf,)), (0.0, (math.nan, 1.0))]
)
def test_a_first_step_without_a_gradient_or_skipped_because_of_it_says_nothing(
    moved: float, gradients: tuple[float, ...]
) -> None:
    assert first_step(moved, gradients=gradients) == Decision(RULE.begin(), resets_path=True)


def test_the_first_step_tells_how_far_a_rate_goes() -> None:
    state = first_step(1e-4, rates=2e-3, path_steps=2).state
    assert (state.pace, state.rate) == (pytest.approx(0.05), pytest.approx(1e-3))
    assert math.isnan(first_step(1e-4, rates=0.0).state.pace)


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimated_log_factor", "growth"),
    [(0.0, 1.0), (1.0, 1.0), (5.0, 1.0), (7.5, 1.5), (10.0, CLIMB), (1e9, CLIMB)],
)
def test_the_target_is_raised_to_a_part_of_the_reach(estimated_log_factor: float, growth: float) -> None:
    """To q * 2 of it, a fifth."""
    numerator = math.log(estimated_log_factor) if estimated_log_factor else -math.inf
    decision = after(SEARCHING, estimated_log_factor=numerator)
    assert math.exp(decision.state.log_factor) == pytest.approx(growth)
    assert (decision.action, decision.slot, decision.event, decision.resets_path) == (Action.KEEP, 0, None, False)
    assert decision.state.snapshots == (Snapshot(100, 1), Snapshot(120, 0))
    fallen = after(SEARCHING, estimated_log_factor=numerator, schedule_share=0.89)
    assert (fallen.state.log_factor, fallen.state.ceiling) == (SEARCHING.log_factor, math.inf)
    assert repr(after(SEARCHING, estimated_log_factor=numerator, schedule_share=0.9)) == repr(decision)  # NaN is NaN


@pytest.mark.parametrize(("straightness", "growth"), [(1.0, CLIMB), (0.81, CLIMB), (0.79, 1.0)])
def test_while_the_way_is_straight_the_target_is_raised_whatever_the_reach(straightness: float, growth: float) -> None:
    decision = after(SEARCHING, straightness=straightness)
    assert math.exp(decision.state.log_factor) == pytest.approx(growth)


@pytest.mark.parametrize(
    ("steps", "peak", "known", "growth"),
    [
        (20, 299.0, {}, CLIMB),
        (60, 299.0, {}, 2.0),  # not more
        (1, 299.0, {}, math.exp(0.025)),
        (20, 299.0, {"made": 61}, 2.0),  # every other step is left out: 150 are the rise
        (2, 0.0, {}, 2.0),  # a schedule that does not rise
        (1, 299.0, {"is_below": False}, math.sqrt(2)),
        (2, 299.0, {"is_below": False}, 2.0),
        (20, 299.0, {"is_below": False}, 3.0),
    ],
)
def test_the_climb_takes_a_part_of_the_schedules_rise_once_the_loss_has_fallen(
    steps: int, peak: float, known: dict[str, Any], growth: float
) -> None:
    state = SEARCHING._replace(pace=1.0, rate=1.0, peak=peak)
    decision = after(state, steps=steps, peak=peak, straightness=1.0, **known)
    assert math.exp(decision.state.log_factor) == pytest.approx(growth)


def test_after_a_roll_back_the_climb_is_slow() -> None:
    assert math.exp(after(SEARCHING, straightness=1.0, is_below=False).state.log_factor) == pytest.approx(CLIMB)


@pytest.mark.parametrize(
    ("total", "end", "numerator"), [(1000, 120, 7.5), (8000, 120, 15.0), (None, 9, 4.8475), (270, 9, 4.8475)]
)
def test_a_longer_run_wants_a_lower_rate(total: int | None, end: int, numerator: float) -> None:
    """q = S^(-1/3): 1/10, 1/20, and 1/6.5 where S is 30 times the 9 steps so far. The estimate is 1.5 in all."""
    rule = Rule(total)
    decision = after(SEARCHING, rule=rule, estimated_log_factor=math.log(numerator), end=end)
    assert math.exp(decision.state.log_factor) == pytest.approx(1.5, rel=1e-3)


def test_where_gradients_turn_the_rate_in_use_is_asked_for() -> None:
    """At step 120 of 299 the rate is at 121/300 of the target; 15 q is 1.5."""
    state = after(SEARCHING).state
    assert math.exp(state.asked) == math.exp(state.ceiling) == pytest.approx(1.5 * 121 / 300)
    assert state.factor(120) == pytest.approx(121 / 300)
    assert state.factor(299) == state.peak_factor == pytest.approx(1.5 * 121 / 300)
    late = after(SEARCHING, end=299).state
    assert late.asked == 0.0  # not more than the target was


@pytest.mark.parametrize(("pace", "path_steps", "climbs"), [(1.0, 40, True), (1.0, 41, False), (math.nan, 40, False)])
def test_a_short_path_that_is_straight_again_climbs_on(pace: float, path_steps: int, climbs: bool) -> None:
    """From the rate in use: at step 120 of 299 it may be all that was found, and 300/121 of it is the target."""
    turned = FOUND._replace(log_factor=2.0, pace=pace, rate=1.0)
    state = after(turned, straightness=1.0, path_steps=path_steps).state
    assert math.isinf(state.ceiling) == math.isinf(state.asked) == climbs
    if climbs:
        assert state.log_factor == pytest.approx(math.log(300 / 121 * CLIMB))


def test_what_is_asked_for_follows_estimates_both_ways() -> None:
    """By 0.15 of the way up while gradients point on; one that is lower says nothing."""
    lower, higher = (math.log(one / (0.1 * c.estimate_fraction)) for one in (0.5, math.e))
    for estimate, asked in ((higher, 0.15), (lower, 0.0), (-math.inf, 0.0)):
        assert after(FOUND, balance=1.0, estimated_log_factor=estimate).state.asked == pytest.approx(asked)
    far = after(FOUND, balance=1.0, estimated_log_factor=20.0).state
    assert math.exp(far.asked) == pytest.approx(CLIMB)
    assert far.ceiling == far.log_factor == far.asked


@pytest.mark.parametrize(
    ("total", "end", "balance", "asked"),
    [
        (1000, 120, 0.38, 0.0),
        (1000, 120, 0.28, -0.1 * math.log(2)),
        (1000, 120, -1.0, -math.log(2)),
        (1000, 500, 0.0, 0.0),
        (1000, 500, -0.3, -0.3 * math.log(2)),
        (None, 120, 0.5 - 1 / 30, 0.0),
        (None, 120, 0.4 - 1 / 30, -0.1 * math.log(2)),
    ],
)
def test_fewer_gradients_that_point_on_lower_what_is_asked_for(
    total: int | None, end: int, balance: float, asked: float
) -> None:
    """0.5 less the part of the run that is done is usual; one that is lower by 1 halves, but no more than a round may
    raise."""
    known: dict[str, Any] = {"balance": balance, "end": end, "peak": 700.0 if end == 500 else PEAK}
    known["path_steps"] = 9
    state = after(FOUND, rule=Rule(total), estimated_log_factor=20.0 if asked else -math.inf, **known).state
    assert state.asked == state.ceiling == pytest.approx(max(asked, -math.log(CLIMB)))
    assert state.most_asked == 0.0


@pytest.mark.parametrize("balance", [0.3, -1.0])
def test_a_path_of_few_steps_says_nothing_by_its_balance(balance: float) -> None:
    assert after(FOUND, balance=balance, path_steps=8).state.asked == 0.0
    assert after(FOUND, balance=balance, path_steps=9).state.asked < 0.0


def test_until_the_loss_has_fallen_the_prior_counts_as_an_estimate() -> None:
    """A step at m = 1 is 0.05 long, and 0.5 is usual: the prior is 10. A round moves by 0.15 of the way there."""
    found, known = (
        FOUND._replace(pace=1.0, rate=1.0),
        {"balance": 0.4, "rates": 1.0, "path_steps": 20, "distance": 0.05},
    )
    step = 0.15 * math.log(10)
    assert after(found, is_below=False, **known).state.asked == pytest.approx(step)
    assert after(found, **known).state.asked == 0.0
    higher = after(found, is_below=False, estimated_log_factor=math.log(20 / 0.2), **known).state.asked
    assert higher == pytest.approx(0.15 * math.log(20))
    assert after(FOUND, is_below=False, **known).state.asked == 0.0  # not the first path


def test_a_path_against_gradients_that_has_gained_nothing_is_rolled_back() -> None:
    kept = FOUND._replace(snapshots=(Snapshot(100, 0),), prior=1.0)
    nowhere: dict[str, Any] = {"has_gained": False, "balance": -0.81, "path_steps": 20, "blocks": (Block(1.0, 1),) * 8}
    back = after(kept, **nowhere)
    assert (back.event, back.rolled_back_to) == (Event.ROLLED_BACK, 100)
    assert math.exp(back.state.log_factor) == pytest.approx(1 / 3)
    later = after(back.state, blocks=(Block(1.0, 1),) * 8)
    assert later.event is None  # losses as high as before do not undo it
    fine: list[dict[str, Any]] = [{"has_gained": True}, {"balance": -0.79}, {"path_steps": 19}, {"schedule_share": 0.5}]
    for change in fine:
        assert after(kept, **{**nowhere, **change}).event is None
    for other in ({"snapshots": ()}, {"prior": 1.1}, {"prior": math.nan}):  # nothing to go back to; rates are low
        assert after(kept._replace(**other), **nowhere).event is None


def test_a_path_lowers_no_further_than_a_rollback_and_not_after_one() -> None:
    down = FOUND
    for _ in range(20):
        down = after(down, balance=-1.0, path_steps=9).state
    assert math.exp(down.asked) == pytest.approx(1 / c.backoff)
    assert after(down, balance=1.0, estimated_log_factor=2.0).state.asked > down.asked
    back = after(FOUND, moved=math.inf, has_losses=False).state
    assert math.exp(back.asked) == pytest.approx(1 / c.backoff)
    assert after(back, balance=-1.0, path_steps=9).state.asked == back.asked


@pytest.mark.parametrize("drawn", [0.5, 0.0, -0.5])
def test_after_a_divergence_the_prior_draws_up_no_further_than_it_has(drawn: float) -> None:
    """A third of the rate in use remains, and no more, whatever the prior is."""
    found = FOUND._replace(ceiling=drawn, log_factor=drawn, reach=-9.0)
    back = after(found, moved=math.inf, has_losses=False).state
    assert (back.asked, back.ceiling) == (pytest.approx(-math.log(3)), pytest.approx(drawn - math.log(3)))
    then = after(back, balance=0.38)
    assert then.state.ceiling == pytest.approx(max(drawn, 0.0) - math.log(3))
    climbs = SEARCHING._replace(has_diverged=True, reach=-9.0)
    assert after(climbs).state.ceiling == after(climbs).state.asked


@pytest.mark.parametrize("distance", [1e-9, 0.05, 0.5, 5.0, 1e9])
def test_what_is_found_is_drawn_to_steps_of_the_usual_length(distance: float) -> None:
    """In a run of 1000 steps that is 0.5; m = 1 stands for a rate of 10, at which a step is as long as ``distance``."""
    known = {"distance": distance, "rates": 10.0, "path_steps": 20, "log_guess": math.log(10.0), "gradients": (1.0,)}
    state = after(FOUND._replace(pace=1.0, rate=1.0), moved=1e9, **known).state
    prior = 0.5 / distance
    pull = min(max((prior / math.exp(state.asked)) ** c.prior_weight, 1 / c.backoff), c.backoff)
    assert math.exp(state.ceiling) == pytest.approx(min(math.exp(state.asked) * pull, CLIMB))
    assert state.reach == pytest.approx(math.log(distance))
    long_path = after(state, distance=5.0, rates=10.0, path_steps=41).state
    assert long_path.reach == state.reach  # of later steps the path says nothing


def test_losses_without_noise_raise_what_gradients_would_not() -> None:
    steady = tuple(Block(1.0 - k / 100, 2) for k in range(8))
    near, short = {"log_guess": 0.0, "rates": 1.0, "path_steps": 20, "distance": 0.5}, {"blocks": steady[:7]}
    found = FOUND._replace(pace=1.0, rate=1.0)
    assert math.exp(after(found, blocks=steady, **near).state.asked) == pytest.approx(CLIMB)
    climbs = SEARCHING._replace(log_factor=-0.5, pace=1.0, rate=1.0)
    assert after(climbs, blocks=steady, **near).state.log_factor == pytest.approx(-0.5 + math.log(CLIMB))
    for known in (near | short, near | {"distance": 3.0}, near | {"has_losses": False}, {"path_steps": 9}):
        lower = after(found, balance=0.28, **{"blocks": steady, **known}).state.asked
        assert lower == pytest.approx(-0.1 * math.log(2))


@given(st.floats(0, 2000), st.floats(0, 2000), st.floats(-1, 1500), st.sampled_from(Phase), st.floats(-30, 30))
def test_the_rate_rises_to_the_target_until_the_peak_and_stays(
    a: float, b: float, peak: float, phase: Phase, ceiling: float
) -> None:
    state = State(phase, log_factor=0.0, peak=peak)
    low, high = state.factor(min(a, b)), state.factor(max(a, b))
    assert 0 < low <= high <= 1
    assert state.factor(max(peak, 0.0)) == 1.0
    if phase is not Phase.SEARCHING:
        assert low == 1.0
    assert state._replace(ceiling=ceiling).factor(a) == min(state.factor(a), math.exp(ceiling))


def test_the_rise_by_hand() -> None:
    state = State(Phase.SEARCHING, log_factor=0.0, peak=31.0)
    assert [state.factor(t) for t in (7, 15, 31, 32)] == [0.3, 0.5, 1.0, 1.0]
    assert [state.factor(t) for t in (0, 1, 3)] == [0.3] * 3


@pytest.mark.parametrize(("made", "expected"), [(0, 1.0), (1, 1.0), (2, 0.25), (3, 0.5), (9, 2.0)])
def test_steps_of_the_optimizer_for_each_of_the_schedule(made: int, expected: float) -> None:
    assert Evidence(end=5, steps=1, made=made).steps_per_call == expected
    assert Evidence(end=1, steps=1, made=made).steps_per_call == 1.0


def test_steps_that_were_not_made_say_nothing() -> None:
    """Gradients are still being accumulated, or GradScaler skipped the step."""
    for state in (RULE.begin(), SEARCHING, STOPPED):
        assert after(state, 9.0, estimated_log_factor=9.0, steps=0) == Decision(state)
    assert after(SEARCHING, 9.0, estimated_log_factor=9.0, steps=0, end=480) == Decision(SEARCHING)


@pytest.mark.parametrize("known", [{"straightness": 1.0}, {"estimated_log_factor": 5.0}, {}])
@pytest.mark.parametrize("gradients", [(), (0.0, 0.0)])
def test_a_round_without_a_gradient_says_nothing_about_the_rate(
    known: dict[str, float], gradients: tuple[float, ...]
) -> None:
    decision = after(SEARCHING, gradients=gradients, **known)
    assert (decision.state.log_factor, decision.state.ceiling, decision.action) == (0.0, math.inf, Action.KEEP)


@pytest.mark.parametrize(
    ("sizes", "largest"), [((), 0.0), ((0.0, 3.0, 1.0), 3.0), ((1.0, math.nan, 2.0), math.nan), ((math.inf,), math.inf)]
)
def test_the_largest_gradient_does_not_hide_what_is_no_number(sizes: tuple[float, ...], largest: float) -> None:
    assert Measured(gradients=sizes).gradient == pytest.approx(largest, nan_ok=True)


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_snapshots_are_four_steps_apart() -> None:
    """It takes as many losses to see an explosion."""
    state = SEARCHING._replace(snapshots=(Snapshot(3, 1), Snapshot(7, 0)))
    for end in (8, 9, 10):
        decision = after(state, end=end)
        assert (decision.action, decision.slot, decision.state.snapshots) == (Action.NOTHING, None, state.snapshots)
    decision = after(state, end=11)
    assert (decision.action, decision.slot) == (Action.KEEP, 1)
    assert decision.state.snapshots == (Snapshot(7, 0), Snapshot(11, 1))


def test_only_snapshots_that_exist_are_remembered() -> None:
    assert RULE.remembering(SEARCHING, {1}).snapshots == (Snapshot(100, 1),)
    assert RULE.remembering(SEARCHING, ()).snapshots == ()
    assert RULE.remembering(SEARCHING, {0, 1, 7}) == SEARCHING


# -- diverged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [{"level": 1.61}, {"level": 1e9}, {"level": math.nan}])
def test_diverged_weights_are_rolled_back(known: dict[str, float]) -> None:
    """0.3 of the gain of 2 above the lower of the last two levels."""
    decision = after(SEARCHING, estimated_log_factor=9.0, **known)
    assert (decision.action, decision.slot, decision.rolled_back_to) == (Action.ROLL_BACK, 0, 90)
    assert (decision.event, decision.rolled_back_to, decision.resets_path) == (Event.ROLLED_BACK, 90, True)
    state = decision.state
    assert math.exp(state.log_factor) == pytest.approx(1 / 3)
    assert (state.snapshots, state.slowed_from) == ((Snapshot(90, 0),), 0.0)
    assert math.isnan(state.pace)


@pytest.mark.parametrize(("level", "share"), [(1.59, 1.0), (2.9, 0.5)])
def test_a_little_worse_has_not_diverged(level: float, share: float) -> None:
    """In the descent all of the gain may be lost."""
    assert after(SEARCHING, level, schedule_share=share).action is Action.KEEP
    assert after(SEARCHING, level + 0.2, schedule_share=share).action is Action.ROLL_BACK


@pytest.mark.parametrize(
    ("known", "action"),
    [
        ({"estimated_log_factor": -math.inf}, Action.ROLL_BACK),
        ({"estimated_log_factor": -9.0}, Action.KEEP),  # the estimate is below the rate, and gradients do not turn back
        ({"estimated_log_factor": -math.inf, "has_losses": False}, Action.KEEP),  # sizes of gradients were judged
        ({"estimated_log_factor": -math.inf, "gradients": ()}, Action.KEEP),  # none were sampled
        ({"estimated_log_factor": -math.inf, "path_steps": 1}, Action.KEEP),
        ({"estimated_log_factor": -math.inf, "schedule_share": 0.5}, Action.KEEP),
    ],
)
def test_where_gradients_turn_against_the_way_a_smaller_rise_is_ruin(known: dict[str, Any], action: Action) -> None:
    """A rise by 0.7, at a noise of 0.12 or so: between 3 and 12 deviations."""
    noisy = SEARCHING._replace(history=HISTORY._replace(second_differences=(0.2,) * 48))
    assert 0.7 / 12 < noisy.history.noise < 0.7 / 3
    assert after(noisy, 1.7, **known).action is action


def test_after_going_back_the_snapshot_stays_and_is_gone_back_to_again() -> None:
    back = after(SEARCHING, math.nan)
    again = after(back.state, moved=math.inf)
    assert (again.rolled_back_to, again.state.snapshots) == (90, (Snapshot(90, 0),))
    assert math.exp(again.state.log_factor) == pytest.approx(1 / 9)
    well = after(again.state)
    assert (well.slot, well.state.snapshots) == (1, (Snapshot(90, 0), Snapshot(120, 1)))
    assert math.isnan(well.state.slowed_from)


def test_a_ceiling_goes_down_with_the_rate_and_not_up() -> None:
    state = SEARCHING._replace(ceiling=-1.0)
    assert after(state, 9.0).state.ceiling == pytest.approx(-1.0 - math.log(3))
    assert state.with_log_factor(5.0).ceiling == -1.0
    assert state.with_log_factor(-2.0).ceiling == pytest.approx(-3.0)


def test_where_it_was_the_data_the_rate_is_as_before() -> None:
    """Losses stay as high after going back."""
    back = after(FOUND._replace(ceiling=-0.5), 5.0).state
    assert (back.asked, back.ceiling) == (pytest.approx(-math.log(3)), pytest.approx(-0.5 - math.log(3)))
    cleared = after(back, 5.0, gradients=())
    assert cleared.event == HARDER
    assert (cleared.action, cleared.state.log_factor) == (Action.KEEP, 0.0)
    assert (cleared.state.ceiling, cleared.state.asked) == (pytest.approx(-0.5), pytest.approx(0.0))
    free = after(after(SEARCHING, 5.0, schedule_share=0.5).state, 5.0, schedule_share=0.5).state
    assert (free.log_factor, free.ceiling) == (0.0, math.inf)
    assert math.isnan(cleared.state.slowed_from)
    helped = after(back, 1.0)
    assert (helped.event, helped.state.log_factor) == (None, pytest.approx(-math.log(3)))
    assert math.isnan(helped.state.slowed_from)


def test_a_round_without_losses_does_not_forget_what_the_rate_was() -> None:
    silent = after(after(SEARCHING, 5.0).state, blocks=()).state
    assert silent.slowed_from == 0.0
    assert after(silent, 5.0).event == HARDER


def test_one_step_from_a_new_origin_sets_no_ceiling() -> None:
    """Its gradient is taken at the origin itself: it gives no estimate, and that says nothing."""
    assert after(SEARCHING, path_steps=1).state.ceiling == math.inf
    assert math.isfinite(after(SEARCHING, path_steps=2).state.ceiling)


def test_a_run_that_cannot_go_back_slows_down_and_is_judged_from_there() -> None:
    state = RULE.remembering(SEARCHING, ())
    decision = after(state, 9.0)
    assert (decision.action, decision.event, decision.resets_path) == (Action.CANNOT_ROLL_BACK, Event.SLOWED_DOWN, True)
    assert (decision.rolled_back_to, decision.slot) == (None, None)
    assert math.exp(decision.state.log_factor) == pytest.approx(1 / 3)
    assert math.isnan(decision.state.slowed_from)
    same = after(decision.state, 9.0)
    assert (same.action, same.state.log_factor) == (Action.KEEP, decision.state.log_factor)
    worse = after(RULE.remembering(same.state, ()), 12.0)
    assert worse.action is Action.CANNOT_ROLL_BACK


def test_without_losses_only_nan_or_infinite_weights_have_diverged() -> None:
    assert after(SEARCHING, blocks=()).action is Action.KEEP
    assert after(SEARCHING, blocks=()).state.history == HISTORY
    assert after(SEARCHING, blocks=(), moved=math.inf).action is Action.ROLL_BACK


def test_a_round_of_which_little_is_known_is_fine() -> None:
    assert after(SEARCHING, blocks=(Block(math.nan, 3),)).action is Action.KEEP
    assert after(SEARCHING, blocks=(Block(math.nan, 4),)).action is Action.ROLL_BACK


# -- alarms ------------------------------------------------------------------------------------------------------------


def alarmed(decision: Decision) -> str | None:
    if decision.why is not None:
        assert (decision.state, decision.action) == (STOPPED, Action.NOTHING)
        assert decision.event is Event.STOPPED
    return decision.why


@pytest.mark.parametrize(
    ("peak", "t", "late"), [(PEAK, 299, False), (PEAK, 300, True), (10.0, 40, False), (10.0, 41, True)]
)
@pytest.mark.parametrize("steps", [0, 20])
@pytest.mark.parametrize("moved", [0.0, math.nan])
def test_weights_that_never_move_keep_to_the_guess_in_the_end(
    peak: float, t: int, late: bool, steps: int, moved: float
) -> None:
    decision = first_step(moved, end=t, peak=peak, steps=steps)
    assert alarmed(decision) == (Reason.NEVER_MOVED if late else None)


@pytest.mark.parametrize(("t", "late"), [(299, False), (300, True)])
def test_weights_that_move_without_a_gradient_keep_to_the_guess_in_the_end(t: int, late: bool) -> None:
    decision = first_step(1e-3, end=t, peak=PEAK, gradients=())
    assert alarmed(decision) == (Reason.NO_GRADIENT if late else None)
    assert late or decision == Decision(RULE.begin(), resets_path=True)


PACED = SEARCHING._replace(pace=2.0, rate=1e-3)


def lagging(raised: float, shorter: float, path_steps: int = 10, state: State = PACED) -> Decision:
    """A round whose path was made at ``raised`` times the first rate, and came ``shorter`` less far."""
    rates = raised * state.rate * path_steps
    return after(state, moved=state.pace * rates / shorter, rates=rates, path_steps=path_steps)


@pytest.mark.parametrize(
    ("raised", "shorter", "path_steps", "lags"),
    [
        (20.1, 30.1, 10, True),
        (19.9, 30.1, 10, False),  # not raised by much
        (20.1, 29.9, 10, False),  # steps that shrink, to and fro
        (1e3, 180.0, 10, True),
        (1e3, 175.0, 10, False),  # they did become longer
        (20.1, 1e4, 64, True),
        (20.1, 1e4, 65, False),  # it may have arrived
        (1 / 20, 1e4, 10, False),
    ],
)
def test_steps_that_do_not_follow_the_rate_keep_to_the_guess(
    raised: float, shorter: float, path_steps: int, lags: bool
) -> None:
    assert alarmed(lagging(raised, shorter, path_steps)) == (Reason.RATE_IGNORED if lags else None)


def test_after_a_rollback_that_is_not_compared() -> None:
    back = after(PACED, 9.0).state
    assert math.isnan(back.pace)
    assert alarmed(lagging(50.0, 1e4, state=PACED)) == Reason.RATE_IGNORED
    assert after(back, moved=1e-9, rates=1.0, path_steps=10).why is None
    assert after(PACED, moved=0.0, rates=1.0, path_steps=10).why is None
    assert after(PACED, moved=1e-9, rates=1.0, path_steps=0).why is None


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_that_are_too_short_keep_to_the_guess() -> None:
    assert Rule(40).begin() == Rule(None).begin() == State()
    state = Rule(39).begin()
    assert state == State(Phase.STOPPED, log_factor=0.0)
    assert (state.factor(0), state.peak_factor) == (1.0, 1.0)
    assert [Rule(steps).long_enough for steps in (39, 40, None)] == [False, True, True]


def test_another_table_of_constants_is_another_rule() -> None:
    rule = Rule(1000, constants=c._replace(initial_factor=0.1, max_growth=4.0))
    assert rule.begin().factor(0) == pytest.approx(0.1)
    found = after(SEARCHING, rule=rule, straightness=1.0, steps=200).state.log_factor
    assert math.exp(found) == pytest.approx(4.0)


numbers = st.one_of(st.floats(), st.floats(-5, 5))
blocks = st.lists(st.builds(Block, numbers, st.integers(1, 3)), max_size=8).map(tuple)
rounds = st.lists(
    st.builds(
        Evidence,
        end=st.just(1),
        steps=st.sampled_from([0, 1, 20, 20]),
        blocks=blocks,
        peak=st.sampled_from([-1.0, PEAK, 900.0]),
        schedule_share=st.floats(0, 1) | st.just(1.0),
        measured=st.builds(
            Measured,
            moved=st.floats(min_value=0) | st.floats(1e-5, 1e-1),
            straightness=st.floats(0, 2),
            gradients=st.lists(st.floats(min_value=0) | st.just(1.0), max_size=3).map(tuple),
            rates=st.floats(0, 1e6),
            path_steps=st.integers(1, 100),
            rounding=st.sampled_from([0.0, 2.0**-24, 2.0**-9]),
        ),
        estimated_log_factor=st.floats(allow_nan=False) | st.floats(-5, 30),
        is_below=st.booleans(),
        undone=st.none() | st.tuples(numbers, numbers),
        highest=st.just(math.inf) | st.floats(-20, 20),
    ),
    max_size=40,
)
rules = st.builds(Rule, st.sampled_from([None, 20, 100, 1000, 10**6]))


@given(rounds, rules)
def test_any_rounds_keep_the_rules(rows: list[Evidence], rule: Rule) -> None:
    state, t = rule.begin(), 0
    copies: dict[int, int] = {}
    """What lies in each slot: the step at which it was kept."""
    for row in rows:
        t = next_end(t)
        evidence = row._replace(end=t)
        decision = rule.after_round(state, evidence)
        assert rule.after_round(state, evidence) == decision or "nan" in repr(decision)  # it has no memory of its own
        check_decision(state, evidence, decision)
        if decision.action is Action.KEEP and decision.slot is not None:
            copies[decision.slot] = t
        elif decision.action is Action.ROLL_BACK and decision.slot is not None:
            back = state.snapshots[-1 if decision.state.excused and not state.excused else 0]
            assert copies[decision.slot] == decision.rolled_back_to == back.step
        state = decision.state
        assert all(copies[one.slot] == one.step for one in state.snapshots)
        assert len({one.slot for one in state.snapshots}) == len(state.snapshots) <= 2
        assert math.log(1e-15) <= state.log_factor <= math.log(1e15)
        assert 0 < state.peak_factor <= math.exp(state.log_factor) * (1 + 1e-9)
        assert not math.isnan(state.ceiling)


def check_decision(state: State, evidence: Evidence, decision: Decision) -> None:
    """What holds of every round."""
    moved, end = decision.state.log_factor - state.log_factor, evidence.end
    if state.phase is Phase.STOPPED or (evidence.steps == 0 and decision.why is None):
        assert decision == Decision(state) or "nan" in repr(decision)
    elif decision.why is not None:
        assert decision.state.phase is Phase.STOPPED
        assert decision.state.factor(end) == 1.0
    elif state.phase is Phase.SEARCHING:
        assert decision.state.phase is Phase.SEARCHING
        diverged, excused = decision.event in (Event.ROLLED_BACK, Event.SLOWED_DOWN), decision.event is Event.BAD_BATCH
        is_lowered = decision.action in (Action.ROLL_BACK, Action.CANNOT_ROLL_BACK)
        assert is_lowered == (diverged or excused) == decision.resets_path
        assert diverged or excused or math.isfinite(evidence.measured.moved)
        assert not (excused and state.excused)
        if diverged:
            low = math.log(1e-15) - state.log_factor
            assert moved == pytest.approx(max(-math.log(c.backoff), low), abs=1e-9)
        elif excused:
            assert moved == 0
        elif decision.event is None:
            most = c.max_growth if evidence.is_below or math.isnan(state.pace) else c.backoff
            assert 0 <= moved <= math.log(most) + 1e-9
            assert moved == 0 or evidence.schedule_share >= c.fall_start
            assert decision.state.factor(end) >= state.factor(end) * (1 - 1e-9)  # the rate is not forced down
    else:
        assert decision.resets_path
        assert decision.event in (None, Event.FIRST_STEP, AGAIN)


@given(st.lists(st.lists(st.floats(-1, 3), min_size=2, max_size=8), max_size=25), st.integers(-9, 9), st.booleans())
def test_neither_unit_nor_zero_point_nor_sign_of_the_loss_matter(
    rows: list[list[float]], power: int, reads_bits: bool
) -> None:
    """Losses of few bits and units that are powers of two: nothing is lost in rounding."""
    short = [[round(loss * 64) / 64 for loss in row] for row in rows]
    unit, offset = 2.0**power, 2.0 ** (power + 6) if reads_bits else 0.0
    plain, other = (
        decisions([tuple(Block(u * loss + o, 1) for loss in row) for row in short])
        for u, o in ((1.0, 0.0), (unit, offset))
    )
    assert plain == other


def decisions(rows: list[tuple[Block, ...]]) -> list[tuple[Any, ...]]:
    """A search along rows of losses: what is decided."""
    state, t, found = SEARCHING._replace(history=LossHistory(), snapshots=()), 20, []
    for row in rows:
        t = next_end(t)
        decision = after(state, blocks=row, end=t, estimated_log_factor=1.0)
        state = decision.state
        found.append((decision.action, decision.event, state.log_factor, state.ceiling))
    return found
