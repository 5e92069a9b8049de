"""Take-off: from any guess, on losses that a person can follow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto import takeoff
from hdet.algorithm.auto.course import Course
from hdet.algorithm.auto.evidence import Evidence, Fan
from hdet.algorithm.auto.memory import Memory
from hdet.algorithm.auto.pilot import Action, Order, Pilot, PilotState
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.auto.takeoff import Leg, Phase, TakeOffState, Wish
from hdet.algorithm.linesearch import LineSearch


def rising(level: float = 0.0, **known: float) -> TakeOffState:
    state = TakeOffState(phase=Phase.RISING, level=level, first=2.0, best=2.0)
    return state._replace(**known)  # type: ignore[arg-type]


def after_first_step(moved: float, loss: float = 2.3, state: TakeOffState | None = None, **more: float) -> Leg:
    evidence = Evidence((0, 1), Fan([], True), [loss] * 8, peak=299.0, displacement=moved, **more)  # type: ignore[arg-type]
    return takeoff.after_round(state or TakeOffState(), evidence)


def after_losses(
    state: TakeOffState,
    losses: list[float],
    reach: float = -math.inf,
    moved: float = 0.1,
    steps: int = 4,
    late: bool = False,
) -> Leg:
    evidence = Evidence((0, steps), Fan([], True), losses, 299.0, steps=steps, displacement=moved, reach=reach)
    return takeoff.after_round(state, evidence, late=late)


@given(st.floats(1e-12, 1e-2, exclude_max=True))
def test_after_the_first_step_the_guess_does_not_matter(moved: float) -> None:
    """Whatever the first step moved, the next ones move the weights by 1e-4 of their norm."""
    leg = after_first_step(moved)
    rate_then, rate_now = math.exp(TakeOffState().level), math.exp(leg.state.level)
    assert moved * rate_now / rate_then == pytest.approx(1e-4)
    assert leg.wish is Wish.KEEP


def test_a_step_is_longer_than_what_the_weights_can_resolve() -> None:
    """In bf16 neighbouring numbers are 1/128 apart: steps of 1e-4 would be lost."""
    leg = after_first_step(1e-6, resolution=1 / 128)
    assert 1e-6 * math.exp(leg.state.level - TakeOffState().level) == pytest.approx(1 / 256)


def test_a_first_step_that_was_too_long_is_undone_and_one_that_was_lost_is_repeated() -> None:
    too_long = after_first_step(0.5)
    assert too_long.wish is Wish.RESTART
    assert math.isnan(too_long.state.first)  # that loss belongs to weights that are gone
    lost = after_first_step(0.0)
    assert lost.state.phase is Phase.FIRST
    assert lost.state.level == pytest.approx(TakeOffState().level + math.log(10))
    for _ in range(50):
        lost = after_first_step(0.0, state=lost.state)
    assert lost.state.level == pytest.approx(math.log(1e15))  # the bound of all factors
    broken = after_first_step(math.inf, loss=math.nan)
    assert (broken.wish, broken.state.phase) == (Wish.RESTART, Phase.FIRST)  # still nothing is known
    assert broken.state.level == pytest.approx(TakeOffState().level - math.log(1e6))


def test_without_a_step_of_the_optimizer_nothing_is_concluded() -> None:
    """Gradients are still being accumulated, or GradScaler skipped the step."""
    for state in (TakeOffState(), rising(level=3.0)):
        assert after_losses(state, [9.0] * 8, reach=9.0, steps=0) == Leg(state)


def test_weights_that_never_move_keep_to_the_guess_in_the_end() -> None:
    leg = after_losses(TakeOffState(level=5.0), [2.0] * 8, moved=0.0, late=True)
    assert (leg.state.phase, leg.state.level, leg.alarm) == (Phase.LANDED, 0.0, takeoff.NEVER_MOVED)


def test_a_probe_that_is_never_finite_keeps_to_the_guess_the_second_time() -> None:
    state = after_first_step(1e-5, loss=math.nan).state
    once = after_losses(state, [math.nan] * 8)
    assert (once.state.phase, once.alarm, once.growth) == (Phase.RISING, None, 1.0)
    twice = after_losses(once.state, [math.inf] * 8)
    assert (twice.state.phase, twice.state.level, twice.alarm) == (Phase.LANDED, 0.0, takeoff.NOT_FINITE)
    seen = after_losses(once.state, [2.0] * 8, moved=1e-4)
    assert (seen.state.phase, seen.state.first) == (Phase.RISING, 2.0)


def after_round(state: TakeOffState, now: float, reach: float = -math.inf, late: bool = False) -> Leg:
    """A round whose fan says that nothing lies beyond the weights as they are."""
    return after_losses(state, [now, *[9.0] * 7], reach, late=late)


@pytest.mark.parametrize(("best_point", "growth"), [(0, 1.0), (1, 1.0), (2, 2.0), (4, 4.0), (7, 8.0)])
def test_the_rate_grows_by_what_the_fan_sees(best_point: int, growth: float) -> None:
    losses = [1.9] * 8
    losses[best_point] = 1.0
    leg = after_losses(rising(), losses)
    assert leg.growth == pytest.approx(growth)
    assert leg.state.level == pytest.approx(math.log(growth))
    assert leg.wish is Wish.KEEP


def test_the_fan_is_heard_until_the_loss_has_moved() -> None:
    """A batch that is being learned falls to nothing far out on any line."""
    losses = [1.9] * 7 + [0.0]
    for seen, growth in ((False, 8.0), (True, 1.0)):
        assert after_losses(rising(seen=seen), losses).growth == growth


@given(st.floats(-50, 50))
def test_the_rate_grows_to_what_the_gradients_ask_for_but_never_shrinks_or_leaps(reach: float) -> None:
    leg = after_round(rising(level=3.0), 1.9, reach)
    assert leg.state.level == pytest.approx(min(max(reach, 3.0), 3.0 + math.log(8)))


def test_it_has_landed_when_nothing_has_asked_for_more_for_24_steps() -> None:
    state = rising(level=3.0)
    for _ in range(5):
        leg = after_round(state, 1.5)
        state = leg.state
        assert (state.phase, leg.growth) == (Phase.RISING, 1.0)
    landed = after_round(state, 1.5)
    assert (landed.state.phase, landed.state.level) == (Phase.LANDED, 3.0)
    assert (landed.wish, landed.exploded) == (Wish.GO_BACK, False)
    assert landed.ceiling == pytest.approx(3.0 - math.log(4))
    shorter = after_losses(state, [1.5, *[9.0] * 7], steps=2)
    assert (shorter.state.phase, shorter.state.quiet) == (Phase.RISING, 22)
    asked_again = after_round(state, 1.5, reach=4.0)
    assert (asked_again.state.phase, asked_again.state.quiet) == (Phase.RISING, 0)


def test_while_nothing_has_happened_the_rate_grows_all_the_same() -> None:
    """A small probe batch may see nothing, or a little of its own noise."""
    for now, growth in ((2.0, 2.0), (2.015, 2.0), (1.985, 2.0), (2.03, 1.0), (1.97, 1.0)):
        leg = after_round(rising(quiet=20), now)
        assert leg.growth == growth
        assert after_round(leg.state, 2.0).growth == growth  # what was seen once has been seen


def test_a_loss_far_above_the_first_ends_it_the_second_time() -> None:
    first = after_round(rising(level=3.0), 4.1, reach=9.0)
    assert (first.state.phase, first.state.bad, first.growth) == (Phase.RISING, 1, 1.0)
    second = after_round(first.state, 4.2)
    assert (second.state.phase, second.wish, second.exploded) == (Phase.LANDED, Wish.GO_BACK, True)
    assert second.state.level == second.ceiling == pytest.approx(3.0 - math.log(4))
    forgiven = after_round(first.state, 0.9)
    assert (forgiven.state.bad, forgiven.state.phase, forgiven.wish) == (0, Phase.RISING, Wish.KEEP)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 13.0])
def test_it_ends_at_once_where_the_loss_explodes(loss: float) -> None:
    leg = after_round(rising(best=1.0), loss)
    assert (leg.state.phase, leg.exploded) == (Phase.LANDED, True)


def test_a_loss_that_rises_for_a_while_does_not_end_it() -> None:
    """A small network's loss goes up and down on the way; its best rate may lie beyond."""
    leg = after_round(rising(best=1.0), 3.9)
    assert (leg.state.phase, leg.state.bad, leg.wish) == (Phase.RISING, 0, Wish.NOTHING)


@pytest.mark.parametrize(("now", "level"), [(1.1, 3.0), (1.4, 3.0), (1.6, 2.0)])
def test_it_lands_where_the_loss_was_lowest_if_half_of_the_gain_is_lost(now: float, level: float) -> None:
    landed = after_round(rising(level=3.0, best=1.0, best_at=2.0, quiet=20), now)
    assert (landed.state.phase, landed.state.level, landed.exploded) == (Phase.LANDED, level, False)


def test_a_loss_that_never_fell_bounds_nothing_whatever_the_first_guess() -> None:
    """After a restart the first loss is that of a whole round; at its level nothing was gained either."""
    for restarted in (False, True):
        state = after_first_step(0.5 if restarted else 1e-4, loss=2.0).state
        state = after_losses(state, [2.0, *[9.0] * 7], steps=2).state
        low = state.level
        for _ in range(30):
            state = after_losses(state, [2.1, *[9.0] * 7], reach=low + 3, steps=2).state
        assert (state.phase, state.level) == (Phase.LANDED, pytest.approx(low + 3))


def test_what_was_learned_and_lost_again_ends_it_the_second_time() -> None:
    once = after_round(rising(level=3.0, best=1.0, best_at=2.0), 2.5)
    assert (once.state.phase, once.state.fallen) == (Phase.RISING, 1)
    twice = after_round(once.state, 2.2)
    assert (twice.state.phase, twice.state.level, twice.ceiling, twice.exploded) == (Phase.LANDED, 2.0, 2.0, True)
    assert after_round(once.state, 1.3).state.fallen == 0
    little = rising(level=3.0, best=1.6, best_at=2.0)  # a batch's own luck
    for _ in range(2):
        little = after_round(little, 2.7).state
    assert (little.phase, little.fallen) == (Phase.RISING, 0)


def test_skipped_steps_and_a_blind_probe_do_not_make_it_grow() -> None:
    skipped = after_losses(rising(level=3.0), [1.9] * 8, moved=0.0)
    assert (skipped.state, skipped.growth) == (rising(level=3.0), 1.0)
    blind = after_losses(rising(level=3.0), [2.0] * 8, reach=9.0)
    assert (blind.state.phase, blind.state.level, blind.alarm) == (Phase.LANDED, 0.0, takeoff.BLIND)  # the guess


def test_landing_late_keeps_the_rate_unless_the_loss_has_exploded() -> None:
    bad = after_round(rising(level=3.0), 4.1, late=True)
    assert (bad.state.phase, bad.exploded) == (Phase.LANDED, True)
    good = after_round(rising(level=3.0), 1.5, late=True)
    assert (good.state.phase, good.state.level, good.exploded) == (Phase.LANDED, 3.0, False)


@given(st.lists(st.tuples(st.lists(st.floats(), min_size=8, max_size=8), st.floats(-50, 50)), max_size=80))
def test_any_losses_land_it_in_the_end_at_a_finite_level(rounds: list[tuple[list[float], float]]) -> None:
    state = after_first_step(1e-6, loss=1.0).state
    for losses, reach in rounds:
        if state.phase == Phase.LANDED:
            break
        state = after_losses(state, losses, reach).state
        assert math.isfinite(state.level)
    assert state.phase == Phase.LANDED or len(rounds) < c.LONGEST


@given(st.floats(0.01, 1), st.booleans(), st.floats(0, 1))
def test_a_course_goes_from_its_factor_to_one_without_turning(factor: float, geometric: bool, part: float) -> None:
    course = Course(10, 50, factor, geometric)
    assert course.at(10) == pytest.approx(factor)
    assert course.at(50) == course.at(99) == 1.0
    assert factor - 1e-9 <= course.at(10 + 40 * part) <= course.at(10 + 40 * min(part + 0.01, 1)) + 1e-9


@given(st.integers(1, 400), st.one_of(st.none(), st.integers(1, 90)), st.sampled_from([None, 1, 7]))
def test_growing_rounds_agree_with_their_list(total: int, landed: int | None, length: int | None) -> None:
    rounds = Growing(total, landed, length)
    ends = list(rounds.ends)
    assert [t for t in range(-2, total + 5) if rounds.ends_at(t)] == ends
    assert total in ends
    for t in range(1, total + 1):
        start, end = rounds.span(t)
        assert start < t <= end
        assert end == min(e for e in ends if e >= t) == rounds.next_end(t)
        assert rounds.index(t) == sum(e <= t for e in ends)


def pilot(knobs: int = 1, **changed: object) -> Pilot:
    return Pilot(LineSearch(), knobs, **{"total_steps": 1000, **changed})  # type: ignore[arg-type]


def landed(state: PilotState) -> PilotState:
    takeoff = state.takeoff._replace(phase=Phase.LANDED, first=2.0)
    return state._replace(takeoff=takeoff, landed=40, learned=[1.0] * len(state.learned), scale=2.0)


def after(
    rules: Pilot, state: PilotState, fan: Fan, span: tuple[int, int], losses: list[float], **more: float
) -> Order:
    """One round of an ordinary run."""
    known = {"peak": 299.0, "steps": span[1] - span[0], "displacement": 0.1, **more}
    return rules.after_round(state, Evidence(span, fan, losses, **known))  # type: ignore[arg-type]


def test_nothing_moves_once_the_schedule_falls() -> None:
    """The same losses, minimum at 1.8 times the displacement, early and late."""
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    losses = [(row[0] - 1.8) ** 2 for row in fan.rho]
    for shape, moves in ((1.0, True), (0.79, False)):
        state = landed(rules.begin())
        for _ in range(4):
            state = after(rules, state, fan, (400, 460), losses, shape=shape).state
        assert (state.learned[0] > 1) == moves


def test_a_climb_is_not_taken_for_a_rate_that_is_too_low() -> None:
    """At half of its target the rate's displacement has its minimum at twice its length: the target is right."""
    for knobs in (1, 3):
        rules = pilot(knobs)
        state = landed(rules.begin())._replace(course=Course(40, 300, 0.1, geometric=False))
        way = state.course.at(170)
        for k in range(12, 18):
            fan = rules.fan(state, k)
            losses = [sum((rho * way - 1.0) ** 2 for rho in row) for row in fan.rho]
            state = after(rules, state, fan, (160, 180), losses).state
        assert state.learned == pytest.approx([1.0] * knobs, rel=0.2)


def test_in_the_climb_down_means_below_the_rate_in_force() -> None:
    """Points that are best where they stand are no reason to lower the target; points far below are."""
    for place, target in ((1.0, 1.0), (0.1, 0.8)):
        rules = pilot()
        state = landed(rules.begin())._replace(course=Course(40, 300, 0.1, geometric=False))
        for k in (12, 13, 15):
            fan = rules.fan(state, k)
            losses = [(row[0] - place) ** 2 for row in fan.rho]
            state = after(rules, state, fan, (100, 120), losses).state
        assert (state.learned[0] < target) == (place < 1)


def test_each_knob_finds_its_own_rate() -> None:
    """The first wants three times as much as the second: their rates part, and the common one stays."""
    rules = pilot(knobs=2)
    state = landed(rules.begin())
    for k in range(12, 72):
        fan = rules.fan(state, k)
        wanted = [1.7 / state.learned[0], 0.6 / state.learned[1]]
        losses = [sum((rho - best) ** 2 for rho, best in zip(row, wanted, strict=True)) for row in fan.rho]
        state = after(rules, state, fan, (400, 460), losses).state
    assert state.learned[0] / state.learned[1] == pytest.approx(1.7 / 0.6, rel=0.35)


def test_going_back_at_landing_must_be_worth_it() -> None:
    """It may cost a tenth of the run, unless the loss has exploded."""
    kept = Memory().added(level=-1.0, step=5)
    for steps, loss, goes_back in ((1000, 1.5, True), (300, 1.5, False), (200, math.nan, True)):
        rules = pilot(total_steps=steps)
        state = rules.begin()._replace(takeoff=rising(level=2.0, quiet=20), memory=kept)
        order = after(rules, state, rules.fan(state, 10), (37, 41), [loss, *[9.0] * 7])
        assert (order.action, order.state.landed) == (Action.GO_BACK if goes_back else Action.NOTHING, 41)
        assert order.event == ("landed: went back to step 5" if goes_back else "landed: went on")
        climb = order.state.course
        assert (climb.at(41) < 1, climb.end) == (goes_back, max(299.0, 41 + 0.1 * steps) if goes_back else 0)


def test_without_anything_to_go_back_to_it_goes_on() -> None:
    rules = pilot()
    state = rules.begin()._replace(takeoff=rising(level=2.0, quiet=20))
    order = after(rules, state, rules.fan(state, 10), (37, 41), [1.5, *[9.0] * 7])
    assert (order.action, order.event) == (Action.GO_ON, "landed: slowed down")


def test_a_loss_that_stays_high_makes_it_go_back_at_a_third() -> None:
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    good = after(rules, landed(rules.begin()), fan, (400, 460), [0.5] * 8)
    assert good.action is Action.KEEP
    noisy = after(rules, good.state, fan, (460, 520), [1.6] * 8)
    assert noisy.state.worse == 0  # another batch, no explosion
    once = after(rules, good.state, fan, (460, 520), [7.0] * 8)
    assert once.action is Action.NOTHING
    twice = after(rules, once.state, fan, (520, 600), [math.nan] * 8, earlier=0.5)
    assert twice.action is Action.GO_BACK
    assert twice.state.learned == pytest.approx([good.state.learned[0] / 3])


def test_a_batch_on_which_no_weights_have_a_finite_loss_says_nothing() -> None:
    """Neither the weights nor those before them: the rate must not sink, however often."""
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    good = after(rules, landed(rules.begin()), fan, (400, 460), [0.5, *[0.6] * 7])
    first = after(rules, good.state, fan, (460, 520), [math.nan] * 8)
    assert (first.action, first.alarm) == (Action.NOTHING, takeoff.NOT_FINITE)
    state = first.state
    for _ in range(20):
        order = after(rules, state, fan, (520, 600), [math.inf] * 8)
        assert (order.action, order.alarm) == (Action.NOTHING, None)  # one alarm is enough
        state = order.state
    assert state.learned == good.state.learned


def test_a_probe_that_goes_blind_raises_an_alarm_once() -> None:
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    still = after(rules, landed(rules.begin()), fan, (400, 460), [0.5] * 8, displacement=1e-6)
    assert still.alarm is None  # the weights have hardly moved
    blind = after(rules, still.state, fan, (460, 520), [0.5] * 8)
    assert (blind.alarm, blind.action) == (takeoff.BLIND, Action.KEEP)
    assert after(rules, blind.state, fan, (520, 600), [0.5] * 8).alarm is None


def test_a_loss_that_earlier_weights_share_is_the_batchs() -> None:
    """Five times the largest loss so far, and half of all progress gone; the weights it would go back to decide."""
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    for low, high in ((1.5, 10.0), (0.2, 1.7)):
        good = after(rules, landed(rules.begin()), fan, (400, 460), [low] * 8).state
        assert not rules.doubts(good, [low * 1.1] * 8)
        assert rules.doubts(good, [high] * 8)
        shared = after(rules, good, fan, (460, 520), [high] * 8, earlier=high - 0.1)
        assert (shared.state.worse, shared.state.scale, shared.state.learned) == (0, max(high, 2.0), [1.0])
        ruined = after(rules, good, fan, (460, 520), [high] * 8, earlier=low)
        assert (ruined.action, ruined.state.learned) == (Action.GO_BACK, pytest.approx([1 / 3]))
        worse = after(rules, good, fan, (460, 520), [high] * 8, earlier=0.85 * high)
        assert (worse.action, worse.state.worse) == (Action.NOTHING, 1)
        again = after(rules, worse.state, fan, (520, 600), [high] * 8, earlier=0.85 * high)
        assert again.action is Action.GO_BACK


@given(st.lists(st.floats(), min_size=8, max_size=8), st.floats(), st.floats(), st.floats(allow_nan=False, min_value=0))
def test_any_losses_leave_a_finite_rate(losses: list[float], before: float, first: float, scale: float) -> None:
    rules = pilot()
    state = landed(rules.begin())
    state = state._replace(takeoff=state.takeoff._replace(first=first), scale=scale, low=before)
    fan = rules.fan(state, k=12)
    order = after(rules, state, fan, (400, 460), losses, earlier=before)
    assert 0 < order.state.learned[0] < math.inf


def test_a_third_is_of_the_rate_in_force_not_of_where_it_was_going() -> None:
    rules = pilot()
    state = landed(rules.begin())._replace(course=Course(400, 900, 0.1, geometric=False))
    fan = rules.fan(state, k=12)
    for span in ((400, 410), (410, 420)):
        was = state.learned[0] * state.course.at(span[1])
        state = after(rules, state, fan, span, [math.nan] * 8).state
    assert state.learned[0] * state.course.at(420) == pytest.approx(was / 3)


def test_runs_that_are_too_short_do_not_take_off() -> None:
    short = pilot(total_steps=39).begin()
    assert (short.learned, short.landed) == ([1.0], 0)
    assert not short.held  # the schedule rises by itself
    assert pilot(total_steps=40).begin().landed is None


def test_without_a_controller_there_is_no_take_off_and_nothing_moves() -> None:
    rules = Pilot(None, 2, 1000)
    state = rules.begin()
    assert state.landed == 0
    fan = rules.fan(state, 3)
    order = after(rules, state, fan, (0, 40), [row[0] for row in fan.rho])
    assert order.state.learned == [1.0, 1.0]
    assert order.update is None


def test_points_stand_on_both_sides_and_every_third_round_each_knob_has_its_own_order() -> None:
    rules = pilot(knobs=4)
    for k, orders in ((3, 1), (4, 1), (5, 4)):  # together two rounds of three, then each by itself
        rho = rules.fan(landed(rules.begin()), k).rho
        for column in zip(*rho, strict=True):
            assert sorted(column) == pytest.approx([1 + 0.3 * (2 * r / 7 - 1) for r in range(8)])
        assert len({tuple(column) for column in zip(*rho, strict=True)}) == orders
