"""The guard's rule on made-up losses: when it rolls back, to which snapshot, and what becomes of the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from hdet.rollback.policy import (
    LOOK,
    OLD,
    PATIENCE,
    SPACING,
    Action,
    Cause,
    GuardDecision,
    GuardPolicy,
    GuardState,
    Snapshot,
    Step,
    Usual,
)

pytestmark = pytest.mark.quick

EVERY = 16
FINE = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.03, 0.97]
POLICY = GuardPolicy(EVERY, factor=0.25, recover=2, max_rollbacks=3)


def trained(policy: GuardPolicy = POLICY, looks: int = 24) -> tuple[GuardState, int]:
    """After some looks whose losses fall from 5 to 1; gradients have norms of 1 to 2."""
    state, t = GuardState(kept=(Snapshot(0, 0),)), 0
    for k in range(looks):
        losses = [x + 4 / (k + 1) - 4 / looks for x in FINE[LOOK * (k % 2) :][:LOOK]]
        decision = after(state, t := t + LOOK, *losses, policy=policy)
        assert decision.action in (Action.KEEP, Action.NOTHING)
        state = decision.state
    return state, t


def after(
    state: GuardState,
    t: int,
    *losses: float,
    norms: Sequence[float] = (1.0, 2.0, 1.0, 2.0),
    withheld: Sequence[bool] = (False,) * LOOK,
    is_sound: bool = True,
    policy: GuardPolicy = POLICY,
) -> GuardDecision:
    steps = [Step(*row) for row in zip(losses or FINE[:LOOK], norms, withheld, strict=False)]
    return policy.after_look(state, t, steps, is_sound)


def test_two_snapshots_are_young_and_one_is_old() -> None:
    state, t = trained()
    old, *recent = state.kept
    assert [(one.step, one.slot) for one in recent] == [(t - SPACING, recent[0].slot), (t, 1 - recent[0].slot)]
    assert old.slot == OLD
    assert t - state.begun + EVERY >= t - old.step - SPACING >= t - state.begun
    far, _ = trained(GuardPolicy(SPACING, 0.25, 2, 3))
    assert OLD not in {one.slot for one in far.kept}, "a round is as short as the time between snapshots"


def test_a_leap_is_rolled_back_to_before_it_began() -> None:
    """It is seen at the end of its look, or of the next: the snapshot is two looks old."""
    state, t = trained()
    decision = after(state, t + LOOK, *[9.0] * LOOK)
    assert (decision.action, decision.cause) == (Action.ROLL_BACK, Cause.LOSSES)
    assert decision.step == t - SPACING
    assert decision.aside is not None
    assert decision.aside != decision.slot
    assert decision.state.replaced == Snapshot(t + LOOK, decision.aside)


def test_a_leap_that_ends_within_two_looks_is_seen_too() -> None:
    state, t = trained()
    one = after(state, t + LOOK, 1.0, 1.0, 9.0, 9.0)
    assert one.action is Action.NOTHING
    assert after(one.state, t + 2 * LOOK, 9.0, 9.0, 1.0, 1.0).action is Action.ROLL_BACK


@pytest.mark.parametrize("losses", [(9.0, 1.0, 1.0, 1.0), (1.0, 9.0, 9.0, 1.0), (1.1, 1.12, 1.08, 1.1)])
def test_single_losses_and_small_changes_do_not_count(losses: tuple[float, ...]) -> None:
    state, t = trained()
    assert after(state, t + LOOK, *losses).action in (Action.NOTHING, Action.KEEP)


def test_a_gradient_out_of_all_proportion_has_diverged_unless_it_was_withheld() -> None:
    state, t = trained()
    norms = (1.0, 2.0, 50.0, 2.0)
    decision = after(state, t + LOOK, norms=norms)
    assert (decision.action, decision.cause) == (Action.ROLL_BACK, Cause.STEP)
    assert decision.step == t, "the snapshot of two steps before the bad one"
    first = after(state, t + LOOK, norms=(50.0, 1.0, 1.0, 1.0))
    assert first.step == t - SPACING, "weights whose gradient is bad may be bad themselves"
    used = after(state, t + LOOK, norms=norms, withheld=(False, False, True, False))
    assert used.action is Action.NOTHING
    assert 50.0 not in used.state.usual.norms
    assert after(state, t + LOOK, norms=(1.0, 2.0, 19.0, 2.0)).action is Action.NOTHING


def test_two_withheld_in_a_row_are_a_rollback_and_a_false_alarm_if_it_does_not_help() -> None:
    state, t = trained()
    decision = after(state, t + 2, norms=(50.0, 50.0), withheld=(True, True))
    assert (decision.action, decision.step) == (Action.ROLL_BACK, t - SPACING)
    well = after(decision.state, t + 4, norms=(1.0, 1.0))
    assert well.action in (Action.NOTHING, Action.KEEP)
    assert well.state.slowed.rollbacks == 1
    data = after(decision.state, t + 4, norms=(60.0, 50.0))
    assert (data.action, data.step, data.slot) == (Action.TAKE_BACK, t + 2, decision.aside)
    assert data.state.slowed == state.slowed
    assert after(data.state, t + 8, norms=(50.0,) * 4).action in (Action.NOTHING, Action.KEEP)


def test_weights_of_two_steps_before_the_first_withheld_one_are_good_enough() -> None:
    state, t = trained()
    decision = after(state, t + 3, norms=(1.0, 50.0, 50.0), withheld=(False, True, True))
    assert (decision.action, decision.step) == (Action.ROLL_BACK, t)


def test_gradients_that_are_never_finite_are_withheld_until_patience_ends() -> None:
    state, t = trained()
    actions = []
    for _ in range(PATIENCE // LOOK):
        decision = after(state, t := t + LOOK, *[math.nan] * LOOK, norms=(math.nan,) * LOOK, withheld=(True,) * LOOK)
        state = decision.state
        actions.append(decision.action)
    assert actions[0] is Action.ROLL_BACK
    assert set(actions[1:-1]) == {Action.NOTHING}
    assert actions[-1] is Action.GIVE_UP


def test_weights_that_are_not_finite_go_to_the_last_snapshot_and_further_back_if_it_is_no_better() -> None:
    state, t = trained()
    once = after(state, t + LOOK, is_sound=False)
    assert (once.action, once.cause, once.step, once.aside) == (Action.ROLL_BACK, Cause.WEIGHTS, t, None)
    again = after(once.state, t + 2 * LOOK, is_sound=False)
    assert again.step == state.kept[0].step
    third = after(again.state, t + 3 * LOOK, is_sound=False)
    assert third.step == state.kept[0].step
    assert after(third.state, t + 4 * LOOK, is_sound=False).action is Action.GIVE_UP


def test_weights_after_losses_that_look_ill_are_not_kept() -> None:
    state, t = trained()
    state = after(state, t + LOOK).state
    assert after(state, t + SPACING, 1.0, 1.0, 1.0, 9.0).action is Action.NOTHING
    assert after(state, t + SPACING, 1.0, 1.0, 9.0, 1.0).action is Action.KEEP
    assert after(state, t + SPACING).action is Action.KEEP


def test_the_first_rollback_leaves_the_rate_alone_and_the_next_does_not() -> None:
    state, t = trained()
    once = after(state, t + LOOK, *[9.0] * LOOK).state
    assert POLICY.factor_at(once.slowed, t + LOOK) == 1.0
    well, now = once, t + LOOK
    for _ in range(3):
        well = after(well, now := now + LOOK).state
    again = after(well, now := now + LOOK, is_sound=False).state
    factors = [POLICY.factor_at(again.slowed, now + k * EVERY) for k in (0, 1, 2, 3)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0])
    late = after(well, now + 5 * EVERY, is_sound=False).state
    assert POLICY.factor_at(late.slowed, now + 5 * EVERY) == 1.0


def test_the_rate_stays_low_if_training_diverges_again_while_it_recovers() -> None:
    state, t = trained()
    for _ in range(2):
        state = after(state, t := t + LOOK, is_sound=False).state
    for _ in range(3):
        state = after(state, t := t + LOOK).state
    assert state.since_well == 0
    third = after(state, t := t + LOOK, is_sound=False).state
    assert third.slowed.low == third.slowed.ceiling < 0.25
    stays = GuardPolicy(EVERY, factor=0.25, recover=None, max_rollbacks=3)
    state, t = trained(stays)
    for _ in range(2):
        state = after(state, t := t + LOOK, is_sound=False, policy=stays).state
    assert stays.factor_at(state.slowed, 10**6) == 0.25


def test_harder_data_are_a_false_alarm_and_such_a_leap_is_tolerated_from_then_on() -> None:
    state, t = trained()
    back = after(state, t := t + LOOK, *[9.0 + x for x in FINE[:LOOK]])
    assert back.state.slowed.rollbacks == 1
    assert POLICY.until_next_look(back.state) == 2
    freed = after(back.state, t := t + 2, 10.0, 10.1)
    assert (freed.action, freed.slot, freed.step) == (Action.TAKE_BACK, back.aside, t - 2)
    assert freed.state.slowed == state.slowed
    state = freed.state
    for k in range(30):
        decision = after(state, t := t + LOOK, *[(1.0 if k % 4 else 9.0) + x for x in FINE[:LOOK]])
        assert decision.action in (Action.NOTHING, Action.KEEP), k
        state = decision.state


@pytest.mark.parametrize(("part", "action"), [(0.25, Action.KEEP), (0.42, Action.TAKE_BACK)])
def test_a_third_of_what_was_lost_is_enough_for_a_false_alarm(part: float, action: Action) -> None:
    state, t = trained()
    back = after(state, t + LOOK, *[11.0] * LOOK)
    assert back.action is Action.ROLL_BACK
    assert after(back.state, t + LOOK + 2, *[1.0 + 10.0 * part] * 2).action is action


def test_weights_that_explode_once_more_are_no_false_alarm() -> None:
    state, t = trained()
    back = after(state, t + LOOK, *[9.0] * LOOK)
    again = after(back.state, t + LOOK + 2, 1.0, 9.0)
    assert again.action is not Action.TAKE_BACK


def test_a_round_that_has_lost_what_was_gained_goes_to_an_older_snapshot() -> None:
    """Slowly, so that no look leaps."""
    state, t = trained(looks=60)
    level, actions = 1.0, []
    for _ in range(2 * EVERY):
        level += 0.12
        decision = after(state, t := t + LOOK, *[level + x - 1.0 for x in FINE[:LOOK]])
        state = decision.state
        actions.append(decision.action)
        if decision.action is Action.ROLL_BACK:
            assert decision.step <= t - EVERY
            return
    raise AssertionError(actions)


def test_without_a_snapshot_it_goes_on() -> None:
    state, t = trained()
    decision = after(state.remembering(()), t + LOOK, *[9.0] * LOOK)
    assert decision.action is Action.GO_ON
    assert after(decision.state, t + 2 * LOOK, *[9.0] * LOOK).action is Action.KEEP


def test_a_step_is_remembered_by_what_is_known_of_it() -> None:
    usual = Usual().noting(None, 3.0).noting(2.0, None)
    assert (usual.norms, usual.losses) == ((2.0,), (3.0,))


@pytest.mark.parametrize(("known", "exceeded"), [(15, False), (16, True)])
def test_a_step_is_compared_with_no_fewer_than_sixteen(known: int, exceeded: bool) -> None:
    """The first steps of a run differ among themselves by as much."""
    assert Usual(norms=(1.0,) * known).is_exceeded_by(100.0) is exceeded
    assert Usual(losses=(1.0, *[1.1] * (known - 1))).is_exceeded_by(None, 100.0) is exceeded
