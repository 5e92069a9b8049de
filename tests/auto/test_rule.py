"""The pilot's rules, on rounds that a person can follow, and on any rounds at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import (
    BLIND,
    NEVER_MOVED,
    NO_GAIN,
    NO_GRADIENT,
    NOT_FINITE,
    NOT_FOLLOWED,
    Action,
    Moment,
    Order,
    Phase,
    Pilot,
    PilotState,
)

PILOT = Pilot(1000)
PEAK = 299.0
SEARCHING = PilotState(
    Phase.SEARCHING, level=0.0, peak=PEAK, first=2.0, moments=(Moment(90, 0), Moment(100, 1)), seen=True
)
"""Well into a search, at the guess itself."""
AGAIN = "restarted: the first step was too long"


def after(state: PilotState, now: float = 1.0, before: float = 1.0, pilot: Pilot = PILOT, **known: Any) -> Order:
    """One round that ends at step 120."""
    rest: dict[str, Any] = {"span": (100, 120), "peak": PEAK, "steps": 20, "displacement": 0.1}
    return pilot.after_round(state, Evidence(now=now, before=before, **{**rest, **known}))


def first_step(moved: float, state: PilotState | None = None, now: float = 2.0, **known: Any) -> Order:
    rest: dict[str, Any] = {"span": (0, 1), "steps": 1, "displacement": moved}
    return after(state or PILOT.begin(), now, math.nan, **{**rest, **known})


# -- the first step ----------------------------------------------------------------------------------------------------


@given(st.floats(1e-12, 1e-2, exclude_max=True), st.integers(1, 2000), st.sampled_from([0.0, 50.0, PEAK, 600.0]))
def test_after_the_first_step_the_guess_does_not_matter(moved: float, t: int, peak: float) -> None:
    """Whatever the first step moved, the next one moves the weights by 2e-3 of their norm."""
    late = t > max(peak, c.SHORTEST)
    order = first_step(moved, span=(t - 1, t), peak=peak)
    if late:
        assert order.alarm == NO_GRADIENT
        return
    state = order.state
    assert moved * state.factor * state.rise(t) / PILOT.begin().factor == pytest.approx(2e-3)
    assert (order.event, order.action, order.slot, order.anew) == ("first step", Action.KEEP, 0, True)
    assert (state.phase, state.peak, state.first, state.moments) == (Phase.SEARCHING, peak, 2.0, (Moment(t, 0),))


def test_a_step_is_longer_than_what_the_weights_can_resolve() -> None:
    """In bf16 neighbouring numbers are 1/128 apart: steps of 2e-3 would be lost."""
    state = first_step(1e-6, resolution=1 / 128).state
    assert 1e-6 * state.factor * state.rise(1) / PILOT.begin().factor == pytest.approx(1 / 256)


@pytest.mark.parametrize(("moved", "undone"), [(9.9e-3, False), (1e-2, True), (1e5, True)])
def test_a_first_step_that_was_too_long_is_undone(moved: float, undone: bool) -> None:
    order = first_step(moved)
    assert (order.action is Action.RESTART) == (order.event == AGAIN) == undone
    assert order.anew
    assert order.state.phase is Phase.SEARCHING
    assert moved * order.state.factor * order.state.rise(1) / PILOT.begin().factor == pytest.approx(2e-3)
    if undone:  # that loss belongs to weights that are gone
        assert math.isnan(order.state.first)
        assert (order.state.moments, order.slot) == ((), None)


def test_a_first_step_to_nowhere_is_undone_and_tried_far_lower() -> None:
    order = first_step(math.inf, now=math.nan)
    assert (order.action, order.event, order.anew) == (Action.RESTART, AGAIN, True)
    assert order.state == PILOT.begin()._replace(level=pytest.approx(math.log(1e-9)))
    for _ in range(9):
        order = first_step(math.inf, order.state)
    assert order.state.level == math.log(1e-15)  # the bound of all factors: a lower level would not be the rate's


@pytest.mark.parametrize("moved", [0.0, math.nan])
def test_a_first_step_that_was_lost_is_repeated_higher(moved: float) -> None:
    order = first_step(moved)
    assert (order.action, order.event, order.anew) == (Action.NOTHING, "first step", True)
    assert order.state == PILOT.begin()._replace(level=pytest.approx(math.log(1e-2)))
    for _ in range(50):
        order = first_step(moved, order.state)
    assert order.state.level == math.log(1e15)


def test_a_first_loss_that_is_no_number_is_none() -> None:
    order = first_step(1e-5, now=math.inf)
    assert math.isnan(order.state.first)
    assert order.action is Action.KEEP
    assert after(order.state, now=3.0, before=math.nan).state.first == 3.0


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reach", "growth"),
    [(-math.inf, 1.0), (0.0, 1.0), (math.log(1 / 0.7), 1.0), (math.log(2.0), 1.4), (math.log(9.0), 2.0), (700.0, 2.0)],
)
def test_the_target_is_raised_to_a_part_of_the_reach(reach: float, growth: float) -> None:
    order = after(SEARCHING, reach=reach)
    assert order.state.factor == pytest.approx(growth)
    assert (order.action, order.slot, order.event, order.anew) == (Action.KEEP, 0, None, False)
    assert order.state.moments == (Moment(100, 1), Moment(120, 0))
    fallen = after(SEARCHING, reach=reach, shape=0.89)
    assert fallen.state == SEARCHING._replace(moments=order.state.moments)
    assert after(SEARCHING, reach=reach, shape=0.9) == order


def test_where_nothing_is_gained_and_nobody_asks_for_more_the_rate_is_halved() -> None:
    once = after(SEARCHING, 1.01, 1.0)
    assert (once.state.idle, once.state.factor, once.event) == (1, 1.0, None)
    twice = after(once.state, 1.01, 1.0)
    assert (twice.state.idle, twice.state.factor, twice.event) == (0, pytest.approx(0.5), NO_GAIN)
    assert (twice.action, twice.anew, twice.went_back_to) == (Action.KEEP, False, None)  # it goes on from here
    assert after(twice.state, 1.01, 1.0).state.factor == pytest.approx(0.5)  # two more rounds, not one


@pytest.mark.parametrize(
    "round",
    [
        {"now": 0.99},  # something was gained
        {"now": 1.0},
        {"now": 1.01, "before": math.nan},  # nothing to compare with
        {"now": 1.01, "reach": 9.0},  # the gradients ask for more
        {"now": 1.01, "straightness": 0.9},
        {"now": 1.01, "steps": 15},  # too short to tell
    ],
    ids=str,
)
def test_rounds_that_are_not_idle(round: dict[str, float]) -> None:
    order = after(SEARCHING._replace(idle=1), **{"before": 1.0, **round})
    assert (order.state.idle, order.event) == (0, None)
    assert order.state.factor >= 1.0


def test_once_the_schedule_falls_nothing_is_halved() -> None:
    order = after(SEARCHING._replace(idle=1), 1.01, 1.0, shape=0.89)
    assert (order.state.level, order.event) == (SEARCHING.level, None)


@given(st.floats(0, 2000), st.floats(0, 2000), st.floats(-1, 1500), st.sampled_from(Phase))
def test_the_rate_rises_to_the_target_until_the_peak_and_stays(a: float, b: float, peak: float, phase: Phase) -> None:
    state = PilotState(phase, peak=peak)
    low, high = state.rise(min(a, b)), state.rise(max(a, b))
    assert 0 < low <= high <= 1
    assert state.rise(max(peak, 0.0)) == 1.0
    if phase is not Phase.SEARCHING:
        assert low == 1.0


def test_the_rise_by_hand() -> None:
    state = PilotState(Phase.SEARCHING, peak=31.0)
    assert [state.rise(t) for t in (7, 15, 31)] == pytest.approx([2.0 ** (0.7 * k) for k in (-2, -1, 0)])
    assert [state.rise(t) for t in (0, 1, 3)] == [0.3] * 3


def test_steps_that_were_not_made_say_nothing() -> None:
    """Gradients are still being accumulated, or GradScaler skipped the step."""
    for state in (PILOT.begin(), SEARCHING, PILOT.kept()):
        assert after(state, 9.0, reach=9.0, steps=0) == Order(state)
    assert after(SEARCHING, 9.0, reach=9.0, steps=0, span=(400, 480)) == Order(SEARCHING)


# -- too hot -----------------------------------------------------------------------------------------------------------


def test_weights_that_are_certainly_ruined_are_given_up_at_once() -> None:
    """The first loss is 2: a quarter of it is 0.5."""
    for now in (1.51, 1e9, math.inf, math.nan):
        order = after(SEARCHING, now, 1.0, reach=9.0)
        assert (order.action, order.slot, order.went_back_to) == (Action.GO_BACK, 0, 90)
        assert (order.event, order.anew) == ("too hot: went back to step 90", True)
        assert order.state == SEARCHING._replace(level=pytest.approx(-math.log(3)), moments=(Moment(90, 0),))


@pytest.mark.parametrize("now", [1.21, 1.49])
def test_weights_that_are_perhaps_ruined_are_given_up_the_second_time(now: float) -> None:
    once = after(SEARCHING, now, 1.0, reach=9.0)
    assert once == Order(SEARCHING._replace(worse=1))
    twice = after(once.state, now, 1.0, reach=9.0)
    assert (twice.action, twice.went_back_to, twice.state.worse) == (Action.GO_BACK, 90, 0)
    fine = after(once.state, 1.19, 1.0)
    assert (fine.action, fine.state.worse) == (Action.KEEP, 0)
    assert after(fine.state, now, 1.0).action is Action.NOTHING


def test_after_going_back_the_copy_stays_and_is_gone_back_to_again() -> None:
    order = after(SEARCHING, math.nan, 1.0)
    again = after(order.state, 9.0, 1.0)
    assert (again.went_back_to, again.state.moments) == (90, (Moment(90, 0),))
    assert again.state.factor == pytest.approx(1 / 9)
    well = after(again.state, 0.9, 1.0)
    assert (well.slot, well.state.moments) == (1, (Moment(90, 0), Moment(120, 1)))


@pytest.mark.parametrize("first", [2.0, -2.0])
def test_a_resumed_run_slows_down_where_it_cannot_go_back(first: float) -> None:
    state = PILOT.remembering(SEARCHING._replace(first=first), ())
    assert state.moments == ()
    order = after(state, math.nan, math.nan)
    assert (order.action, order.event, order.anew) == (Action.GO_ON, "too hot: slowed down", True)
    assert (order.state.factor, order.went_back_to, order.slot) == (pytest.approx(1 / 3), None, None)
    finite = after(state, 50.0, math.nan)  # nothing to compare with
    assert finite.action is Action.KEEP


def test_a_first_loss_of_zero_is_a_unit_of_one() -> None:
    state = SEARCHING._replace(first=0.0)
    assert [after(state, now, 0.0).action for now in (0.09, 0.11, 0.26)] == [
        Action.KEEP,
        Action.NOTHING,
        Action.GO_BACK,
    ]


def test_a_batch_on_which_no_weights_have_a_finite_loss_says_nothing() -> None:
    for now, before in ((math.nan, math.nan), (math.inf, math.inf)):
        assert after(SEARCHING, now, before, reach=9.0) == Order(SEARCHING)


LOSSES = st.one_of(st.floats(-5, 5), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(LOSSES, LOSSES, st.integers(0, 1), st.integers(0, 1))
def test_what_is_maximised_is_judged_as_its_negative(now: float, before: float, worse: int, idle: int) -> None:
    state = SEARCHING._replace(worse=worse, idle=idle)
    order = after(state, now, before)
    mirrored = after(state._replace(first=-state.first), -now, -before, direction=-1.0)
    assert mirrored._replace(state=mirrored.state._replace(first=-mirrored.state.first)) == order


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 1))
def test_where_groups_differ_only_a_loss_that_is_no_number_counts(now: float, before: float, moved: float) -> None:
    order = after(SEARCHING._replace(seen=False, worse=1, idle=1), now, before, displacement=moved, direction=0.0)
    assert (order.action, order.event, order.state.worse, order.state.idle) == (Action.KEEP, None, 0, 0)
    assert after(SEARCHING, math.nan, before, direction=0.0).action is Action.GO_BACK


# -- alarms ------------------------------------------------------------------------------------------------------------


def alarmed(order: Order) -> str | None:
    if order.alarm is not None:
        assert (order.state, order.action) == (PILOT.kept(), Action.NOTHING)
        assert order.event == f"kept to the guess: {order.alarm}"
    return order.alarm


@pytest.mark.parametrize(
    ("peak", "t", "late"), [(PEAK, 299, False), (PEAK, 300, True), (10.0, 40, False), (10.0, 41, True)]
)
@pytest.mark.parametrize("steps", [0, 20])
def test_weights_that_never_move_keep_to_the_guess_in_the_end(peak: float, t: int, late: bool, steps: int) -> None:
    order = first_step(0.0, span=(t - 20, t), peak=peak, steps=steps)
    assert alarmed(order) == (NEVER_MOVED if late else None)


@pytest.mark.parametrize(("peak", "t", "late"), [(PEAK, 299, False), (PEAK, 300, True)])
def test_weights_that_move_without_a_gradient_keep_to_the_guess_in_the_end(peak: float, t: int, late: bool) -> None:
    order = first_step(1e-3, span=(t - 20, t), peak=peak, gradient=0.0)
    assert alarmed(order) == (NO_GRADIENT if late else None)
    assert late or order == Order(PILOT.begin(), anew=True)


@pytest.mark.parametrize(("moved", "gradient"), [(0.0, 0.0), (1e-3, 0.0), (0.0, math.inf), (0.0, math.nan)])
def test_a_first_step_without_a_gradient_or_skipped_because_of_it_says_nothing(moved: float, gradient: float) -> None:
    assert first_step(moved, gradient=gradient) == Order(PILOT.begin(), anew=True)


@pytest.mark.parametrize("known", [{"straightness": 1.0}, {"reach": 5.0}, {"now": 1.05}])
def test_a_round_without_a_gradient_neither_raises_nor_counts_as_idle(known: dict[str, float]) -> None:
    state = SEARCHING._replace(idle=1)
    order = after(state, gradient=0.0, **known)
    assert (order.state.level, order.state.idle, order.action) == (0.0, 1, Action.KEEP)


PACED = SEARCHING._replace(pace=2.0, rate=1e-3)


def lagging(raised: float, shorter: float, stretch: int = 10, state: PilotState = PACED) -> Order:
    """A round whose way of so many steps was made at ``raised`` times the first rate, and came ``shorter`` less far."""
    rates = raised * state.rate * stretch
    return after(state, displacement=state.pace * rates / shorter, rates=rates, stretch=stretch)


@pytest.mark.parametrize(
    ("raised", "shorter", "stretch", "lags"),
    [
        (20.0, 30.1, 10, True),
        (19.9, 30.1, 10, False),  # not raised by much
        (20.0, 29.9, 10, False),  # steps that shrink, to and fro
        (1e3, 180.0, 10, True),
        (1e3, 175.0, 10, False),  # they did become longer
        (20.0, 1e4, 64, True),
        (20.0, 1e4, 65, False),  # it may have arrived
        (1 / 20, 1e4, 10, False),
    ],
)
def test_steps_that_do_not_follow_the_rate_keep_to_the_guess(
    raised: float, shorter: float, stretch: int, lags: bool
) -> None:
    assert alarmed(lagging(raised, shorter, stretch)) == (NOT_FOLLOWED if lags else None)


def test_after_going_back_nobody_asks_for_that() -> None:
    back = after(PACED, 9.0, 1.0).state
    assert math.isnan(back.pace)
    assert alarmed(lagging(50.0, 1e4, state=PACED)) == NOT_FOLLOWED
    assert after(back, displacement=1e-9, rates=1.0, stretch=10).alarm is None
    assert after(PACED, displacement=0.0, rates=1.0, stretch=10).alarm is None


def test_the_first_step_tells_how_far_a_rate_goes() -> None:
    state = first_step(1e-4, rates=2e-3, stretch=2).state
    assert (state.pace, state.rate) == (pytest.approx(0.05), pytest.approx(1e-3))
    assert math.isnan(first_step(1e-4).state.pace)


def test_a_probe_that_is_never_finite_keeps_to_the_guess_the_second_time() -> None:
    state = SEARCHING._replace(first=math.nan, seen=False)
    once = after(state, math.nan, math.nan, displacement=0.5)
    assert once == Order(state._replace(dark=1))
    assert alarmed(after(once.state, math.inf, math.nan, displacement=0.5)) == NOT_FINITE
    assert after(once.state, 2.0, math.nan).state.first == 2.0


@pytest.mark.parametrize(
    ("now", "before", "moved", "blind"),
    [
        (2.0, 2.0, 0.011, True),
        (2.0, 2.0, 0.009, False),
        (2.0, 2.0, math.nan, False),
        (2.0, 2.1, 0.5, False),
        (2.0, math.nan, 0.5, False),  # nothing was compared: after a restart there is no copy
        (math.nan, 2.0, 0.5, False),
    ],
)
def test_a_probe_that_does_not_see_the_weights(now: float, before: float, moved: float, blind: bool) -> None:
    order = after(SEARCHING._replace(seen=False), now, before, displacement=moved)
    assert alarmed(order) == (BLIND if blind else None)


def test_what_was_seen_once_is_seen() -> None:
    seen = after(SEARCHING._replace(seen=False), 2.0, 2.0000001, displacement=1e-4).state
    assert seen.seen
    assert after(seen, 2.0, 2.0, displacement=0.5).alarm is None
    assert not after(SEARCHING._replace(seen=False), 2.0, math.nan).state.seen


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_that_are_too_short_or_not_searched_keep_to_the_guess() -> None:
    assert Pilot(40).begin() == Pilot(None).begin() == PilotState()
    for rules in (Pilot(39), Pilot(1000, searches=False)):
        assert rules.begin() == PilotState(Phase.KEPT, level=0.0)
        assert (rules.begin().factor, rules.begin().rise(0)) == (1.0, 1.0)
    assert [Pilot(steps).long_enough for steps in (39, 40, None)] == [False, True, True]
    assert Pilot(100).rounds.ends[-1] == 100


def test_only_copies_that_exist_are_remembered() -> None:
    assert PILOT.remembering(SEARCHING, {1}).moments == (Moment(100, 1),)
    assert SEARCHING.slots == {0, 1}
    assert PILOT.begin().slots == frozenset()


def test_evidence_by_default_says_nothing() -> None:
    defaults = Evidence((0, 1), 2.0)
    assert math.isnan(defaults.before)
    assert math.isnan(defaults.displacement)
    assert defaults[3:6] == (0.0, 1.0, 1)
    assert defaults[7:] == (-math.inf, 0.0, 0.0, 1.0, 0.0, 0, 1.0)


loss = st.one_of(st.floats(), st.floats(0, 5))
rounds = st.lists(
    st.builds(
        Evidence,
        span=st.just((0, 1)),
        now=loss,
        before=loss,
        peak=st.sampled_from([-1.0, PEAK, 900.0]),
        shape=st.floats(0, 1) | st.just(1.0),
        steps=st.sampled_from([0, 1, 20, 20]),
        displacement=st.floats(min_value=0) | st.floats(1e-5, 1e-1),
        reach=st.floats(allow_nan=False) | st.floats(-5, 30),
        resolution=st.sampled_from([0.0, 2.0**-52, 2.0**-7]),
    ),
    max_size=40,
)


@given(rounds, st.booleans(), st.sampled_from([None, 20, 1000]))
def test_any_rounds_keep_the_rules(rows: list[Evidence], searches: bool, total: int | None) -> None:
    pilot = Pilot(total, searches)
    state, t = pilot.begin(), 0
    copies: dict[int, int] = {}
    """What lies in each slot: the step at which it was kept."""
    for row in rows:
        began, t = t, pilot.rounds.next_end(t + 1)
        evidence = row._replace(span=(began, t), before=row.before if state.moments else math.nan)
        order = pilot.after_round(state, evidence)
        check_order(state, evidence, order)
        if order.action is Action.KEEP and order.slot is not None:
            copies[order.slot] = t
        elif order.action is Action.GO_BACK and order.slot is not None:
            assert copies[order.slot] == order.went_back_to == state.moments[0].step
        state = order.state
        assert all(copies[moment.slot] == moment.step for moment in state.moments)
        assert len(state.slots) == len(state.moments) <= 2
        assert 1e-15 <= state.factor <= 1e15
        assert math.isfinite(state.level)
        assert math.isfinite(state.first) or math.isnan(state.first)


def check_order(state: PilotState, evidence: Evidence, order: Order) -> None:
    """What holds of every round."""
    moved = order.state.level - state.level
    if state.phase is Phase.KEPT or (evidence.steps == 0 and order.alarm is None):
        assert order == Order(state)
    elif order.alarm is not None:
        assert order.state.phase is Phase.KEPT
        assert order.state.factor == 1.0
    elif state.phase is Phase.SEARCHING:
        assert order.state.phase is Phase.SEARCHING
        too_hot = (order.event or "").startswith("too hot")
        assert (order.action in (Action.GO_BACK, Action.GO_ON)) == too_hot == order.anew
        if too_hot:
            low = math.log(1e-15) - state.level
            assert moved == pytest.approx(max(-math.log(c.SLOWER), low), abs=1e-9)
        elif order.event == NO_GAIN:
            assert state.idle == c.IDLE - 1
            assert evidence.now > evidence.before
            assert evidence.steps >= c.JUDGED
            assert evidence.shape >= c.FALLING
            assert moved == pytest.approx(max(-math.log(c.FASTEST), math.log(1e-15) - state.level), abs=1e-9)
        else:
            assert 0 <= moved <= math.log(c.FASTEST) + 1e-9
            assert moved == 0 or (evidence.shape >= c.FALLING and order.action is Action.KEEP)
            if (
                moved > 0 and evidence.straightness >= c.STRAIGHT
            ):  # twofold, whatever the reach; or as far as a factor goes
                high = math.log(1e15) - state.level
                assert moved == pytest.approx(min(math.log(c.FASTEST), high), abs=1e-9)
            elif moved > 0:
                assert order.state.level <= evidence.reach + math.log(c.HEED) + 1e-9
    else:
        assert order.anew
        assert order.event in ("first step", AGAIN)
