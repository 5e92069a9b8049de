"""Edges of the pilot that its slow twin has not: no take-off, no end, a resumed run, an odd controller."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from hdet.algorithm.auto import takeoff
from hdet.algorithm.auto.course import Course
from hdet.algorithm.auto.evidence import Evidence, Fan, lowest
from hdet.algorithm.auto.memory import Memory
from hdet.algorithm.auto.pilot import Action, Pilot
from hdet.algorithm.auto.rounds import Growing
from hdet.algorithm.auto.takeoff import Phase
from hdet.algorithm.controller import Update
from tests.algorithm.test_takeoff import after, landed, pilot, rising

FAR = [9.0] * 7
"""Points of the fan that say that nothing lies beyond."""


class Eager:
    """A controller that always wants more: twice as much of every knob but the last, half of that."""

    def init(self, knobs: int) -> list[int]:
        return [0, knobs]

    def update(self, state: list[int], signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        moves = [1.0] * (len(offsets[0]) - 1) + [-0.5]
        return Update([state[0] + 1, state[1]], moves, [1.0] * len(signals), moves)


def test_above_a_start_there_is_no_take_off_and_the_controller_waits() -> None:
    rules = Pilot(Eager(), 2, 1000, start=100)
    state = rules.begin()
    assert (rules.takes_off, state.landed, state.held, state.learned) == (False, 0, False, [1.0, 1.0])
    assert state.takeoff.phase is Phase.LANDED
    fan = rules.fan(state, 0)
    early = after(rules, state, fan, (80, 99), [0.5] * 8)
    assert (early.update, early.state.learned) == (None, [1.0, 1.0])
    on_time = after(rules, state, fan, (80, 100), [0.5, *[0.6] * 7], peak=0.0)
    assert on_time.state.learned == [2.0, 0.5]
    assert on_time.state.controller == [1, 2]


def test_rounds_without_a_step_say_nothing_to_the_controller() -> None:
    rules = Pilot(Eager(), 2, 1000, start=1)
    order = after(rules, rules.begin(), rules.fan(rules.begin(), 0), (80, 100), [0.5, *[0.6] * 7], peak=0.0, steps=0)
    assert (order.update, order.action) == (None, Action.KEEP)


def test_an_answer_for_other_knobs_is_handed_on_and_not_followed() -> None:
    """The engine refuses it, with the controller's name."""
    rules = Pilot(Eager(), 3, 1000, start=1)
    order = after(rules, rules.begin(), Fan([[1.0, 1.0]] * 8, False), (80, 100), [0.5, *[0.6] * 7], peak=0.0)
    assert order.update is not None
    assert order.state.learned == [1.0] * 3


def test_moves_that_only_part_the_knobs_are_made_in_the_climb_too() -> None:
    for knobs, moved in ((2, [2.0, 0.5]), (3, [1.0, 1.0, 1.0])):  # on the whole: nothing, and up
        rules = Pilot(Eager(), knobs, 1000)
        state = landed(rules.begin())._replace(course=Course(40, 300, 0.1, geometric=False))
        order = after(rules, state, rules.fan(state, 12), (160, 180), [0.5, *[0.6] * 7])
        assert order.state.learned == moved


def test_knobs_that_share_a_rate_share_their_column() -> None:
    rules = pilot(knobs=3, columns=(0, 1, 1))
    apart = rules.fan(landed(rules.begin()), 5).rho
    assert all(row[1] == row[2] for row in apart)
    assert any(row[0] != row[1] for row in apart)


def test_a_run_without_an_end_is_never_late_and_climbs_for_as_long_as_it_took() -> None:
    rules = pilot(total_steps=None)
    assert rules.takes_off
    kept = Memory().added(level=0.0, step=5)
    state = rules.begin()._replace(takeoff=rising(level=2.0), memory=kept)
    on = after(rules, state, rules.fan(state, 10), (10**6 - 2, 10**6), [1.5, *FAR])
    assert on.state.landed is None
    quiet = state._replace(takeoff=rising(level=2.0, quiet=40))
    down = after(rules, quiet, rules.fan(state, 10), (398, 400), [1.5, *FAR])
    assert (down.action, down.state.course.start, down.state.course.end) == (Action.GO_BACK, 400, 800)
    assert down.state.course.factor == pytest.approx(math.exp(-2.0))


@pytest.mark.parametrize(
    ("total", "t", "late"),
    [(1000, 300, False), (1000, 301, True), (100, 40, False), (100, 41, True), (50, 30, False), (50, 31, True)],
)
def test_take_off_has_its_part_of_the_run(total: int, t: int, late: bool) -> None:
    rules = pilot(total_steps=total)
    state = rules.begin()._replace(takeoff=rising(level=2.0), memory=Memory().added(0.0, 1))
    order = after(rules, state, rules.fan(state, 10), (t - 2, t), [1.5, *FAR])
    assert (order.state.landed is not None) == late


def test_a_resumed_run_slows_down_where_it_cannot_go_back() -> None:
    """At once beyond ten times the largest loss so far, the second time beyond three times; 2 is the largest."""
    rules = pilot()
    state = landed(rules.begin())
    fan = rules.fan(state, k=12)
    at_once = after(rules, state, fan, (400, 460), [20.1] * 8)
    assert (at_once.action, at_once.event) == (Action.GO_ON, "too hot: slowed down")
    assert at_once.state.learned == [pytest.approx(1 / 3)]
    assert (at_once.state.scale, at_once.state.worse) == (pytest.approx(6.7), 0)
    assert at_once.state.course == Course()
    for loss in (6.1, 19.9):
        once = after(rules, state, fan, (400, 460), [loss] * 8)
        assert (once.action, once.state.worse, once.state.learned) == (Action.NOTHING, 1, [1.0])
        twice = after(rules, once.state, fan, (460, 520), [loss] * 8)
        assert (twice.action, twice.state.worse) == (Action.GO_ON, 0)
    fine = after(rules, state, fan, (400, 460), [5.9] * 8)
    assert (fine.state.worse, fine.state.scale) == (0, 5.9)


def test_weights_far_above_the_first_loss_are_not_kept() -> None:
    rules = pilot()
    for loss, action in ((3.9, Action.KEEP), (4.1, Action.NOTHING)):
        state = landed(rules.begin())
        assert after(rules, state, rules.fan(state, 12), (400, 460), [loss, *[5.0] * 7]).action is action


def test_a_copy_says_at_what_rate_it_was_trained() -> None:
    rules = pilot()
    state = landed(rules.begin())._replace(course=Course(400, 500, 0.5, geometric=False), learned=[4.0])
    order = after(rules, state, rules.fan(state, 12), (400, 450), [0.5, *[0.6] * 7])
    assert order.state.memory.moments[-1].level == pytest.approx(math.log(4.0 * 0.75))
    assert order.state.memory.moments[-1].step == 450


def test_where_nothing_tells_the_rate_the_guess_is_climbed_to() -> None:
    rules = pilot()
    state = rules.begin()._replace(takeoff=rising(level=2.0))
    for peak, end in ((299.0, 299.0), (30.0, 41)):
        order = after(rules, state, rules.fan(state, 10), (39, 41), [2.0] * 8, peak=peak)
        assert (order.event, order.alarm) == (f"landed: {takeoff.BLIND}", takeoff.BLIND)
        assert (order.state.learned, order.state.landed, order.state.alarmed) == ([1.0], 41, True)
        assert order.state.course == Course(41, end, 1 / 25, geometric=False)


def test_only_copies_that_exist_are_remembered() -> None:
    rules = pilot()
    state = rules.begin()._replace(memory=Memory().added(0.0, 1).added(1.0, 2))
    assert [moment.step for moment in rules.remembering(state, {1}).memory.moments] == [2]


def test_evidence() -> None:
    fan = Fan([[1.0]] * 2, True)
    assert Evidence((0, 1), fan, [2.0, 2.0], 9.0).blind
    assert not Evidence((0, 1), fan, [2.0], 9.0).blind
    assert not Evidence((0, 1), fan, [2.0, 2.1], 9.0).blind
    assert not Evidence((0, 1), fan, [math.inf, math.inf], 9.0).blind
    assert Evidence((0, 1), fan, [math.nan, 3.0, -1.0], 9.0).best == -1.0
    assert lowest([math.nan, math.inf]) == math.inf
    defaults = Evidence((0, 1), fan, [2.0], 9.0)
    assert (defaults.shape, defaults.steps, defaults.reach, defaults.resolution) == (1.0, 1, -math.inf, 0.0)


def test_rounds_of_a_run_without_an_end() -> None:
    rounds = Growing(None, landed=9)
    assert rounds.ends == ()
    assert [t for t in range(60) if rounds.ends_at(t)] == [1, 3, 5, 7, 9, 17, 25, 33, 41, 49, 58]
    assert (rounds.next_end(50), rounds.index(50), rounds.span(50)) == (58, 10, (49, 58))
    assert Growing(None, landed=0, length=5).span(7) == (6, 11)
