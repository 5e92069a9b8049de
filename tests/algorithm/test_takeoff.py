"""Take-off: from any guess, on losses that a person can follow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.algorithm.linesearch import LineSearch
from hdet.algorithm.pilot import Flight, Pilot
from hdet.algorithm.rounds import Growing
from hdet.algorithm.takeoff import CLIMBING, LANDED, Course, Leg, TakeOff, TakeOffState


def climbing(level: float = 0.0, **known: float) -> TakeOffState:
    return TakeOffState(phase=CLIMBING, level=level, first=2.0, best=2.0)._replace(**known)


@given(st.floats(1e-12, 1e-2, exclude_max=True))
def test_after_the_first_step_the_guess_does_not_matter(moved: float) -> None:
    """Whatever the first step moved, the next ones move the weights by 1e-4 of their norm."""
    rules = TakeOff()
    leg = rules.after_first_step(rules.init(), moved, loss=2.3)
    rate_then, rate_now = math.exp(rules.init().level), math.exp(leg.state.level)
    assert moved * rate_now / rate_then == pytest.approx(rules.relative_step)
    assert leg.action == "keep"


def test_a_first_step_that_was_too_long_is_undone_and_one_that_was_lost_is_repeated() -> None:
    rules = TakeOff()
    too_long = rules.after_first_step(rules.init(), 0.5, loss=2.3)
    assert too_long.action == "restart"
    assert math.isnan(too_long.state.first)  # that loss belongs to weights that are gone
    lost = rules.after_first_step(rules.init(), 0.0, loss=2.3)
    assert lost.state.phase == rules.init().phase
    assert lost.state.level == pytest.approx(rules.init().level + math.log(10))
    for _ in range(50):
        lost = rules.after_first_step(lost.state, 0.0, loss=2.3)
    assert lost.state.level <= math.log(1e3)  # never far above the guess
    broken = rules.after_first_step(rules.init(), math.inf, loss=math.nan)
    assert broken.action == "restart"
    assert math.isfinite(broken.state.level)


def after_round(state: TakeOffState, now: float, reach: float = -math.inf, late: bool = False) -> Leg:
    """A round whose fan says that nothing lies beyond the weights as they are."""
    return TakeOff().after_round(state, [now, *[9.0] * 7], reach, moved=0.1, late=late)


@pytest.mark.parametrize(("best_point", "growth"), [(0, 1.0), (1, 1.0), (2, 2.0), (4, 4.0), (7, 8.0)])
def test_the_rate_grows_by_what_the_fan_sees(best_point: int, growth: float) -> None:
    losses = [1.9] * 8
    losses[best_point] = 1.0
    leg = TakeOff().after_round(climbing(), losses, -math.inf, moved=0.1, late=False)
    assert leg.growth == pytest.approx(growth)
    assert leg.state.level == pytest.approx(math.log(growth))
    assert leg.action == "keep"


def test_the_fan_is_heard_until_the_loss_has_moved() -> None:
    """A batch that is being learned falls to nothing far out on any line."""
    losses = [1.9] * 7 + [0.0]
    for seen, growth in ((0.0, 8.0), (1.0, 1.0)):
        assert TakeOff().after_round(climbing(seen=seen), losses, -math.inf, moved=0.1).growth == growth


@given(st.floats(-50, 50))
def test_the_rate_grows_to_what_the_gradients_ask_for_but_never_shrinks_or_leaps(reach: float) -> None:
    leg = after_round(climbing(level=3.0), 1.9, reach)
    assert leg.state.level == pytest.approx(min(max(reach, 3.0), 3.0 + math.log(8)))


def test_it_has_landed_when_nobody_has_asked_for_more_for_sixteen_steps() -> None:
    state = climbing(level=3.0)
    for _ in range(3):
        leg = after_round(state, 1.5)
        state = leg.state
        assert (state.phase, leg.growth) == (CLIMBING, 1.0)
    landed = after_round(state, 1.5)
    assert (landed.state.phase, landed.state.level) == (LANDED, 3.0)
    assert (landed.action, landed.exploded) == ("go back", False)
    assert landed.ceiling == pytest.approx(3.0 - math.log(4))
    shorter = TakeOff().after_round(state, [1.5, *[9.0] * 7], -math.inf, moved=0.1, steps=2)
    assert (shorter.state.phase, shorter.state.quiet) == (CLIMBING, 14)
    asked_again = after_round(state, 1.5, reach=4.0)
    assert (asked_again.state.phase, asked_again.state.quiet) == (CLIMBING, 0)


def test_while_nothing_has_happened_the_rate_grows_all_the_same() -> None:
    """A small probe batch may see nothing, or a little of its own noise."""
    for now, growth in ((2.0, 2.0), (2.015, 2.0), (1.985, 2.0), (2.03, 1.0), (1.97, 1.0)):
        leg = after_round(climbing(quiet=12.0), now)
        assert leg.growth == growth
        assert after_round(leg.state, 2.0).growth == growth  # what was seen once has been seen


def test_a_loss_far_above_the_first_ends_it_the_second_time() -> None:
    first = after_round(climbing(level=3.0), 4.1, reach=9.0)
    assert (first.state.phase, first.state.bad, first.growth) == (CLIMBING, 1, 1.0)
    second = after_round(first.state, 4.2)
    assert (second.state.phase, second.action, second.exploded) == (LANDED, "go back", True)
    assert second.state.level == second.ceiling == pytest.approx(3.0 - math.log(4))
    forgiven = after_round(first.state, 0.9)
    assert (forgiven.state.bad, forgiven.state.phase, forgiven.action) == (0, CLIMBING, "keep")


@pytest.mark.parametrize("loss", [math.nan, math.inf, 13.0])
def test_it_ends_at_once_where_the_loss_explodes(loss: float) -> None:
    leg = after_round(climbing(best=1.0), loss)
    assert (leg.state.phase, leg.exploded) == (LANDED, True)


def test_a_loss_that_rises_for_a_while_does_not_end_it() -> None:
    """A small network's loss goes up and down on the way; its best rate may lie beyond."""
    leg = after_round(climbing(best=1.0), 3.9)
    assert (leg.state.phase, leg.state.bad, leg.action) == (CLIMBING, 0, "")


@pytest.mark.parametrize(("now", "level"), [(1.1, 3.0), (1.4, 3.0), (1.6, 2.0)])
def test_it_lands_where_the_loss_was_lowest_if_half_of_the_gain_is_lost(now: float, level: float) -> None:
    landed = after_round(climbing(level=3.0, best=1.0, best_at=2.0, quiet=12.0), now)
    assert (landed.state.phase, landed.state.level, landed.exploded) == (LANDED, level, False)


def test_what_was_learned_and_lost_again_ends_it_the_second_time() -> None:
    once = after_round(climbing(level=3.0, best=1.0, best_at=2.0), 2.5)
    assert (once.state.phase, once.state.fallen) == (CLIMBING, 1)
    twice = after_round(once.state, 2.2)
    assert (twice.state.phase, twice.state.level, twice.ceiling, twice.exploded) == (LANDED, 2.0, 2.0, True)
    assert after_round(once.state, 1.3).state.fallen == 0
    little = climbing(level=3.0, best=1.6, best_at=2.0)  # a batch's own luck
    for _ in range(2):
        little = after_round(little, 2.7).state
    assert (little.phase, little.fallen) == (CLIMBING, 0)


def test_skipped_steps_and_a_blind_probe_do_not_make_it_grow() -> None:
    skipped = TakeOff().after_round(climbing(level=3.0), [1.9] * 8, -math.inf, moved=0.0, late=False)
    assert (skipped.state, skipped.growth) == (climbing(level=3.0), 1.0)
    blind = TakeOff().after_round(climbing(level=3.0), [2.0] * 8, 9.0, moved=0.1, late=False)
    assert (blind.state.phase, blind.state.level) == (LANDED, 0.0)  # the guess


def test_landing_late_keeps_the_rate_unless_the_loss_has_exploded() -> None:
    bad = after_round(climbing(level=3.0), 4.1, late=True)
    assert (bad.state.phase, bad.exploded) == (LANDED, True)
    good = after_round(climbing(level=3.0), 1.5, late=True)
    assert (good.state.phase, good.state.level, good.exploded) == (LANDED, 3.0, False)


@given(st.lists(st.tuples(st.lists(st.floats(), min_size=8, max_size=8), st.floats(-50, 50)), max_size=80))
def test_any_losses_land_it_in_the_end_at_a_finite_level(rounds: list[tuple[list[float], float]]) -> None:
    rules = TakeOff()
    state = rules.after_first_step(rules.init(), 1e-6, loss=1.0).state
    for losses, reach in rounds:
        if state.phase == LANDED:
            break
        state = rules.after_round(state, losses, reach, moved=0.1, late=False).state
        assert math.isfinite(state.level)
    assert state.phase == LANDED or len(rounds) < rules.longest


@given(st.floats(0.01, 1), st.booleans(), st.floats(0, 1))
def test_a_course_goes_from_its_factor_to_one_without_turning(factor: float, geometric: bool, part: float) -> None:
    course = Course(10, 50, factor, geometric)
    assert course.at(10) == pytest.approx(factor)
    assert course.at(50) == course.at(99) == 1.0
    assert factor - 1e-9 <= course.at(10 + 40 * part) <= course.at(10 + 40 * min(part + 0.01, 1)) + 1e-9


@given(st.integers(1, 400), st.integers(2, 4), st.one_of(st.none(), st.integers(1, 90)), st.sampled_from([None, 1, 7]))
def test_growing_rounds_agree_with_their_list(total: int, short: int, landed: int | None, length: int | None) -> None:
    rounds = Growing(short, total, landed, length)
    ends = list(rounds.ends)
    assert [t for t in range(-2, total + 5) if rounds.ends_at(t)] == ends
    assert total in ends
    for t in range(1, total + 1):
        start, end = rounds.span(t)
        assert start < t <= end
        assert end == min(e for e in ends if e >= t) == rounds.next_end(t)
        assert rounds.index(t) == sum(e <= t for e in ends)


def pilot(knobs: int = 1, **changed: object) -> Pilot:
    arguments = {"seed": 0, "rounds": Growing(4, 1000), "peak": 299.0, **changed}
    return Pilot(LineSearch(), knobs, 0.3, 8, **arguments)  # type: ignore[arg-type]


def landed(flight: Flight) -> Flight:
    state = flight.takeoff._replace(phase=LANDED, first=2.0)
    return flight._replace(takeoff=state, landed=40, learned=[1.0] * len(flight.learned), scale=2.0)


def test_nothing_moves_once_the_schedule_falls() -> None:
    """The same losses, minimum at 1.8 times the displacement, early and late."""
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    losses = [(row[0] - 1.8) ** 2 for row in fan.rho]
    for shape, moves in ((1.0, True), (0.79, False)):
        flight = landed(rules.begin())
        for _ in range(4):
            flight = rules.after_round(flight, fan, (400, 460), losses, 0.1, shape).flight
        assert (flight.learned[0] > 1) == moves


def test_a_climb_is_not_taken_for_a_rate_that_is_too_low() -> None:
    """At half of its target the rate's displacement has its minimum at twice its length: the target is right."""
    for knobs in (1, 3):
        rules = pilot(knobs)
        flight = landed(rules.begin())._replace(course=Course(40, 300, 0.1, geometric=False))
        way = flight.course.at(170)
        for k in range(12, 18):
            fan = rules.fan(flight, k)
            losses = [sum((rho * way - 1.0) ** 2 for rho in row) for row in fan.rho]
            flight = rules.after_round(flight, fan, (160, 180), losses, 0.1, 1.0).flight
        assert flight.learned == pytest.approx([1.0] * knobs, rel=0.2)


def test_in_the_climb_down_means_below_the_rate_in_force() -> None:
    """Points that are best where they stand are no reason to lower the target; points far below are."""
    for place, target in ((1.0, 1.0), (0.1, 0.8)):
        rules = pilot()
        flight = landed(rules.begin())._replace(course=Course(40, 300, 0.1, geometric=False))
        for k in (12, 13, 15):
            fan = rules.fan(flight, k)
            losses = [(row[0] - place) ** 2 for row in fan.rho]
            flight = rules.after_round(flight, fan, (100, 120), losses, 0.1, 1.0).flight
        assert (flight.learned[0] < target) == (place < 1)


def test_each_knob_finds_its_own_rate() -> None:
    """The first wants three times as much as the second: their rates part, and the common one stays."""
    rules = pilot(knobs=2)
    flight = landed(rules.begin())
    for k in range(12, 72):
        fan = rules.fan(flight, k)
        wanted = [1.7 / flight.learned[0], 0.6 / flight.learned[1]]
        losses = [sum((rho - best) ** 2 for rho, best in zip(row, wanted, strict=True)) for row in fan.rho]
        flight = rules.after_round(flight, fan, (400, 460), losses, 0.1, 1.0).flight
    assert flight.learned[0] / flight.learned[1] == pytest.approx(1.7 / 0.6, rel=0.35)


def test_going_back_at_landing_must_be_worth_it() -> None:
    """It may cost a tenth of the run, unless the loss has exploded."""
    for steps, loss, since in ((1000, 1.5, 41 - 100), (300, 1.5, 41 - 30), (200, math.nan, -math.inf)):
        rules = pilot(rounds=Growing(4, steps))
        flight = rules.begin()._replace(takeoff=climbing(level=2.0, quiet=12.0))
        order = rules.after_round(flight, rules.fan(flight, 10), (37, 41), [loss, *[9.0] * 7], 0.1, 1.0)
        assert (order.action, order.since, order.flight.landed) == ("go back", since, 41)
        assert order.flight.course.at(41) == 1.0


def test_a_loss_that_stays_high_makes_it_go_back_at_a_third() -> None:
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    good = rules.after_round(landed(rules.begin()), fan, (400, 460), [0.5] * 8, 0.1, 1.0)
    assert good.action == "keep"
    noisy = rules.after_round(good.flight, fan, (460, 520), [1.6] * 8, 0.1, 1.0)
    assert noisy.flight.worse == 0  # another batch, no explosion
    once = rules.after_round(good.flight, fan, (460, 520), [7.0] * 8, 0.1, 1.0)
    assert once.action == ""
    twice = rules.after_round(once.flight, fan, (520, 600), [math.nan] * 8, 0.1, 1.0)
    assert twice.action == "go back"
    assert twice.flight.learned == pytest.approx([good.flight.learned[0] / 3])


def test_a_loss_that_earlier_weights_share_is_the_batchs() -> None:
    """Five times the largest loss so far, and half of all progress gone; the weights it would go back to decide."""
    rules = pilot()
    fan = rules.fan(landed(rules.begin()), k=12)
    for low, high in ((1.5, 10.0), (0.2, 1.7)):
        good = rules.after_round(landed(rules.begin()), fan, (400, 460), [low] * 8, 0.1, 1.0).flight
        assert not rules.doubts(good, [low * 1.1] * 8)
        assert rules.doubts(good, [high] * 8)
        shared = rules.after_round(good, fan, (460, 520), [high] * 8, 0.1, 1.0, before=high - 0.1)
        assert (shared.flight.worse, shared.flight.scale, shared.flight.learned) == (0, max(high, 2.0), [1.0])
        ruined = rules.after_round(good, fan, (460, 520), [high] * 8, 0.1, 1.0, before=low)
        assert (ruined.action, ruined.flight.learned) == ("go back", pytest.approx([1 / 3]))
        worse = rules.after_round(good, fan, (460, 520), [high] * 8, 0.1, 1.0, before=0.85 * high)
        assert (worse.action, worse.flight.worse) == ("", 1)
        again = rules.after_round(worse.flight, fan, (520, 600), [high] * 8, 0.1, 1.0, before=0.85 * high)
        assert again.action == "go back"


@given(st.lists(st.floats(), min_size=8, max_size=8), st.floats(), st.floats(), st.floats(allow_nan=False, min_value=0))
def test_any_losses_leave_a_finite_rate(losses: list[float], before: float, first: float, scale: float) -> None:
    rules = pilot()
    flight = landed(rules.begin())
    flight = flight._replace(takeoff=flight.takeoff._replace(first=first), scale=scale, low=before)
    fan = rules.fan(flight, k=12)
    order = rules.after_round(flight, fan, (400, 460), losses, 0.1, 1.0, before=before)
    assert 0 < order.flight.learned[0] < math.inf


def test_a_third_is_of_the_rate_in_force_not_of_where_it_was_going() -> None:
    rules = pilot()
    flight = landed(rules.begin())._replace(course=Course(400, 900, 0.1, geometric=False))
    fan = rules.fan(flight, k=12)
    for span in ((400, 410), (410, 420)):
        was = flight.learned[0] * flight.course.at(span[1])
        flight = rules.after_round(flight, fan, span, [math.nan] * 8, 0.1, 1.0).flight
    assert flight.learned[0] * flight.course.at(420) == pytest.approx(was / 3)


def test_runs_that_are_too_short_do_not_take_off() -> None:
    short = pilot(rounds=Growing(2, 39), peak=11.0).begin()
    assert short.learned == [1.0]
    assert short.course.at(0) == pytest.approx(1 / 25)  # they warm up as the schedule would
    assert short.course.at(11) == 1.0
    assert pilot(rounds=Growing(2, 40)).begin().landed is None


def test_without_a_controller_there_is_no_take_off_and_nothing_moves() -> None:
    rules = Pilot(None, 2, 0.3, 8, 0, Growing(4, 1000, landed=0), peak=299)
    flight = rules.begin()
    assert flight.landed == 0
    fan = rules.fan(flight, 3)
    order = rules.after_round(flight, fan, (0, 40), [row[0] for row in fan.rho], 0.1, 1.0)
    assert order.flight.learned == [1.0, 1.0]
    assert order.update is None


def test_points_stand_on_both_sides_and_every_third_round_each_knob_has_its_own_order() -> None:
    rules = pilot(knobs=4)
    for k, orders in ((3, 1), (4, 1), (5, 4)):  # together two rounds of three, then each by itself
        rho = rules.fan(landed(rules.begin()), k).rho
        for column in zip(*rho, strict=True):
            assert sorted(column) == pytest.approx([1 + 0.3 * (2 * r / 7 - 1) for r in range(8)])
        assert len({tuple(column) for column in zip(*rho, strict=True)}) == orders
