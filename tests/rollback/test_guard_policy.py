"""The guard's rule on made-up losses: when it holds still or rolls back, to which snapshot, and what the rate does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.rollback.guard_policy import LOOK, PATIENCE, SPACING, GuardPolicy
from hdet.rollback.guard_state import (
    ASIDE,
    LARGEST,
    RECENT,
    Cause,
    GuardDecision,
    GuardState,
    Outcome,
    RecentSteps,
    Step,
)
from hdet.rule.enums import Action
from hdet.rule.judge import Snapshot

pytestmark = pytest.mark.quick

EVERY = 16
FINE = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.03, 0.97]
POLICY = GuardPolicy(EVERY, factor=0.25, recover=2, max_rollbacks=3)


def trained(policy: GuardPolicy = POLICY, looks: int = 24) -> tuple[GuardState, int]:
    """After some looks whose losses fall from 5 to 1; gradients have norms of 1 to 2."""
    state, t = GuardState(unproven=Snapshot(0, RECENT)), 0
    for k in range(looks):
        losses = [x + 4 / (k + 1) - 4 / looks for x in FINE[LOOK * (k % 2) :][:LOOK]]
        decision = after(state, t := t + LOOK, *losses, policy=policy)
        assert decision.action in (Action.KEEP, Action.NOTHING)
        state = decision.state
    if state.unproven is not None:
        state = after(state, t := t + LOOK, policy=policy).state
    return state, t


def after(
    state: GuardState,
    t: int,
    *losses: float,
    norms: Sequence[float] = (1.0, 2.0, 1.0, 2.0),
    left_out: Sequence[bool] = (False,) * LOOK,
    is_sound: bool = True,
    policy: GuardPolicy = POLICY,
) -> GuardDecision:
    steps = [Step(*row) for row in zip(losses or FINE[:LOOK], norms, left_out, strict=False)]
    return policy.after_look(state, t, steps, is_sound=is_sound)


def one(state: GuardState, t: int, loss: float = 1.0, norm: float = 1.0, policy: GuardPolicy = POLICY) -> GuardDecision:
    """A look of one step, as while the guard holds still."""
    return policy.after_look(state, t, [Step(loss, norm, left_out=state.hold is not None)])


def rolled_back(loss: float = 9.0, norm: float = 1.0, looks: int = 24) -> tuple[GuardDecision, int]:
    """Two strange steps in a row."""
    state, t = trained(looks=looks)
    first = one(state, t + 1, loss, norm)
    assert (first.action, first.state.strange) == (Action.NOTHING, 1)
    return one(first.state, t + 2, loss, norm), t + 2


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_counts_once_it_is_known_to_be_sound() -> None:
    state, t = trained()
    while (decision := after(state, t := t + LOOK)).action is not Action.KEEP:
        state = decision.state
    assert decision.state.unproven == Snapshot(t, RECENT)
    assert decision.state.kept == state.kept
    proven = after(decision.state, t + LOOK)
    assert proven.proven == proven.state.kept[-1].slot != RECENT
    assert proven.state.kept[-1].step == t
    broken = after(decision.state, t + LOOK, is_sound=False)
    assert (broken.action, broken.cause, broken.step) == (Action.ROLL_BACK, Cause.WEIGHTS, state.kept[-1].step)
    assert all(snapshot.step < t for snapshot in broken.state.kept)


def test_two_snapshots_are_young_and_one_is_older_than_a_round() -> None:
    """Each in a slot of its own."""
    wide = GuardPolicy(10 * EVERY, 0.25, 2, 3)
    state, t = trained(wide, looks=200)
    old, earlier, last = state.kept
    assert t - last.step <= SPACING + LOOK
    assert last.step - earlier.step <= SPACING + LOOK
    assert t - old.step > SPACING + LOOK
    assert len({RECENT, *(snapshot.slot for snapshot in state.kept)}) == 4
    far, _ = trained(GuardPolicy(2 * SPACING, 0.25, 2, 3))
    assert len(far.kept) == 2, "a round is as short as the time between two snapshots"


@given(st.lists(st.sampled_from(["fine", "strange", "broken"]), max_size=60))
def test_slots_never_collide_and_steps_are_in_order(looks: list[str]) -> None:
    state, t = trained(GuardPolicy(EVERY, 0.25, 2, 10**6))
    policy = GuardPolicy(EVERY, 0.25, 2, 10**6)
    for kind in looks:
        losses = (30.0,) if kind == "strange" else (1.0,)
        decision = after(state, t := t + 1, *losses, is_sound=kind != "broken", policy=policy)
        state = decision.state
        slots = [snapshot.slot for snapshot in state.kept]
        assert len({*slots}) == len(slots) <= 3
        assert not {RECENT, ASIDE} & {*slots}
        steps = [snapshot.step for snapshot in state.kept]
        assert steps == sorted(steps)
        assert all(step <= t for step in steps)
        assert {*slots} <= state.slots


def test_weights_after_losses_that_look_ill_are_not_kept() -> None:
    state, t = trained()
    state = state._replace(kept=(Snapshot(t - SPACING, 1),))
    assert after(state, t, 1.0, 1.0, 1.0, 9.0).action is Action.NOTHING
    assert after(state, t, 1.0, 1.0, 9.0, 1.0).action is Action.KEEP
    assert after(state, t).action is Action.KEEP


# -- single steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [Step(9.0, 1.0), Step(1.0, 50.0), Step(math.nan, 1.0), Step(1.0, math.inf, True)])
def test_a_single_strange_step_is_no_fault(step: Step) -> None:
    state, t = trained()
    decision = POLICY.after_look(state, t + 1, [step])
    assert (decision.action, decision.state.strange) == (Action.NOTHING, 1)
    assert POLICY.until_next_look(decision.state) == 1
    assert decision.state.left_out == int(step.left_out)
    assert decision.state.usual == state.usual
    again = after(decision.state, t + 2)
    assert again.state.strange == 0
    assert again.state.hold is None


@pytest.mark.parametrize(("loss", "norm"), [(9.0, 1.0), (1.0, 50.0), (math.nan, 1.0), (1.0, math.nan)])
def test_two_strange_steps_in_a_row_are_rolled_back_to_before_the_first(loss: float, norm: float) -> None:
    before, _ = trained()
    decision, t = rolled_back(loss, norm)
    assert (decision.action, decision.cause) == (Action.ROLL_BACK, Cause.STEP)
    assert decision.step == max(one.step for one in before.kept if one.step <= t - 3)
    assert decision.state.hold is not None
    assert decision.state.hold.replaced == Snapshot(t, ASIDE)
    assert decision.state.slowed.rollbacks == 0, "not before it is known what was at fault"
    assert POLICY.until_next_look(decision.state) == 1


def test_losses_above_their_best_say_nothing() -> None:
    """As those of adversaries, which rise by themselves."""
    state, t = trained()
    for k in range(12):
        state = after(state, t := t + LOOK, *[x + 0.2 * k for x in FINE[:LOOK]]).state
    assert state.hold is None
    risen = state._replace(usual=RecentSteps(losses=(3.0, 3.1) * 8))
    assert not risen.is_strange(Step(9.0, 1.0))
    assert risen.is_strange(Step(math.nan, 1.0))
    assert risen._replace(looks=trained()[0].looks).is_strange(Step(9.0, 1.0))


@pytest.mark.parametrize("losses", [(9.0, 1.0, 1.0, 1.0), (1.0, 9.0, 1.0, 9.0), (1.05, 1.06, 1.04, 1.05)])
def test_single_losses_and_small_changes_do_not_count(losses: tuple[float, ...]) -> None:
    state, t = trained()
    assert after(state, t + LOOK, *losses).action in (Action.NOTHING, Action.KEEP)


def test_a_step_is_remembered_by_what_is_known_of_it() -> None:
    usual = RecentSteps().followed_by(Step(3.0)).followed_by(Step(norm=2.0))
    assert (usual.norms, usual.losses) == ((2.0,), (3.0,))


@pytest.mark.parametrize(("known", "exceeded"), [(15, False), (16, True)])
def test_a_step_is_compared_with_no_fewer_than_sixteen(known: int, exceeded: bool) -> None:
    """The first steps of a run differ among themselves by as much."""
    assert RecentSteps(norms=(1.0,) * known).is_exceeded_by(Step(norm=100.0)) is exceeded
    assert RecentSteps(losses=(1.0, *[1.1] * (known - 1))).is_exceeded_by(Step(100.0)) is exceeded


@given(st.lists(st.floats(0, 1e30), max_size=60))
def test_a_limit_of_norms_is_a_number_that_no_infinite_one_is_below(norms: list[float]) -> None:
    limit = RecentSteps(norms=tuple(norms)).norm_limit
    assert 0 < limit <= LARGEST
    assert not math.inf <= limit
    assert not math.nan <= limit


# -- holding still ----------------------------------------------------------------------------------------------------


def test_weights_had_diverged_if_the_snapshots_losses_are_as_usual_at_once() -> None:
    decision, t = rolled_back()
    waiting = one(decision.state, t + 1)
    assert waiting.state.hold is not None, "one may be usual by chance"
    found = one(waiting.state, t + 2)
    assert (found.action, found.outcome) == (Action.NOTHING, Outcome.WEIGHTS)
    assert found.ended is not None
    assert (found.ended.begun, found.ended.back) == (t, decision.step)
    assert found.state.slowed[:2] == (1, 1)
    assert (found.state.hold, found.state.held) == (None, 2)


def test_data_were_bad_if_they_are_as_usual_later_and_the_rate_is_not_to_blame() -> None:
    decision, t = rolled_back(looks=400)
    state, batches = decision.state, 0
    assert state.hold is not None
    while batches < state.hold.allowed - 2:
        waiting = one(state, t := t + 1, 8.0)
        assert waiting.action is Action.NOTHING
        state, batches = waiting.state, batches + 1
        assert state.hold is not None
    found = one(one(state, t + 1).state, t + 2)
    assert (found.action, found.outcome) == (Action.NOTHING, Outcome.BAD_DATA)
    assert found.state.held == batches + 2
    assert found.state.slowed[:2] == (1, 0)
    assert POLICY.factor_at(found.state.slowed, t) == 1.0


def test_data_are_harder_if_they_stay_so_and_the_rollback_is_undone() -> None:
    decision, t = rolled_back(looks=400)
    state = decision.state
    assert state.hold is not None
    for _ in range(state.hold.allowed):
        found = one(state, t := t + 1, 8.0)
        state = found.state
    assert (found.action, found.slot, found.outcome) == (Action.TAKE_BACK, ASIDE, Outcome.HARDER_DATA)
    assert state.slowed.rollbacks == state.since_kept == 0
    for k in range(30):
        decision = after(state, t := t + LOOK, *[(1.0 if k % 4 else 8.0) + x for x in FINE[:LOOK]])
        assert decision.action in (Action.NOTHING, Action.KEEP), k
        state = decision.state


def test_broken_weights_are_not_restored_if_the_data_are_harder() -> None:
    decision, t = rolled_back()
    assert decision.state.hold is not None
    state = decision.state._replace(hold=decision.state.hold._replace(replaced=None, allowed=1))
    found = one(state, t + 1, 8.0)
    assert (found.action, found.outcome) == (Action.NOTHING, Outcome.HARDER_DATA)


@pytest.mark.parametrize(
    ("losses", "outcome"), [((1.0, 1.04), "BAD_DATA"), ((1.0, 8.0), "HARDER_DATA"), ((8.0, 1.0), "HARDER_DATA")]
)
def test_if_no_two_losses_are_usual_their_mean_decides(losses: tuple[float, float], outcome: str) -> None:
    decision, t = rolled_back(looks=400)
    assert decision.state.hold is not None
    state = decision.state._replace(hold=decision.state.hold._replace(allowed=2))
    for loss in losses:
        assert state.hold is not None
        found = one(state, t := t + 1, loss)
        state = found.state
    assert found.outcome is Outcome[outcome]


def test_losses_that_became_usual_before_the_leap_was_seen_do_not_count() -> None:
    """They belong to the harder data: what was usual before them is the measure."""
    state, t = trained(looks=60)
    state = state._replace(usual=RecentSteps(losses=(0.0, 4.0) * 24))
    decision = after(state, t + LOOK, *[3.0] * LOOK)
    while decision.ended is None:
        decision = one(decision.state, t := t + 1, 3.0)
    assert decision.outcome is Outcome.HARDER_DATA


@given(st.integers(0, 10**6), st.integers(0, 10**5))
def test_no_more_than_a_fiftieth_is_held(t: int, held: int) -> None:
    allowed = POLICY.allowed(GuardState(held=held), t)
    assert 2 <= allowed <= EVERY
    assert allowed == 2 or held + allowed <= t / 50


def test_gradients_that_are_never_finite_end_the_run() -> None:
    state, t = trained()
    actions = []
    for _ in range(PATIENCE):
        decision = one(state, t := t + 1, math.nan, math.nan)
        state = decision.state
        actions.append(decision.action)
    assert actions[:2] == [Action.NOTHING, Action.ROLL_BACK]
    assert set(actions[2:-1]) == {Action.NOTHING}
    assert actions[-1] is Action.GIVE_UP


# -- levels, and the rate ---------------------------------------------------------------------------------------------


def test_a_leap_that_no_single_loss_shows_is_rolled_back() -> None:
    """Each loss is within what was usual at the beginning of these steps, and all are above the last ones."""
    state, t = trained(looks=60)
    state = state._replace(usual=RecentSteps(losses=(0.0, 4.0) * 24))
    decision = after(state, t + LOOK, *[3.0] * LOOK)
    assert (decision.action, decision.cause) == (Action.ROLL_BACK, Cause.LOSSES)
    assert decision.step <= t - LOOK
    assert decision.state.hold is not None
    assert decision.state.hold.strange == 3.0
    assert decision.state.hold.usual == pytest.approx(1.0, abs=0.1)


def test_a_round_that_has_lost_what_was_gained_goes_to_an_older_snapshot() -> None:
    """Slowly, so that no look leaps."""
    state, t = trained(looks=60)
    state = state._replace(looks=state.looks._replace(tolerated=5.0))
    level = 1.0
    for _ in range(2 * EVERY):
        level += 0.12
        wide = state._replace(usual=RecentSteps(losses=(0.0, 4.0) * 24))  # no single loss is strange
        decision = after(wide, t := t + LOOK, *[level + x - 1.0 for x in FINE[:LOOK]])
        state = decision.state
        if decision.action is Action.ROLL_BACK:
            assert decision.cause is Cause.LOSSES
            assert decision.step <= t - EVERY
            return
    raise AssertionError(state)


def test_broken_weights_go_further_back_if_it_is_no_better_and_then_it_ends() -> None:
    state, t = trained(GuardPolicy(10 * EVERY, 0.25, 2, 3), looks=200)
    state = state._replace(unproven=Snapshot(t, RECENT))
    once = after(state, t + LOOK, is_sound=False)
    assert (once.action, once.cause, once.step) == (Action.ROLL_BACK, Cause.WEIGHTS, state.kept[-1].step)
    assert once.state.hold is None
    again = after(once.state._replace(unproven=Snapshot(t + LOOK, RECENT)), t + 2 * LOOK, is_sound=False)
    assert again.step == state.kept[-2].step
    third = after(again.state._replace(unproven=Snapshot(t + 2 * LOOK, RECENT)), t + 3 * LOOK, is_sound=False)
    assert third.step == state.kept[0].step
    fourth = after(third.state._replace(unproven=Snapshot(t + 3 * LOOK, RECENT)), t + 4 * LOOK, is_sound=False)
    assert fourth.action is Action.GIVE_UP


def broken(state: GuardState, t: int, policy: GuardPolicy = POLICY) -> GuardState:
    return after(state._replace(unproven=Snapshot(t, RECENT)), t, is_sound=False, policy=policy).state


def test_only_rollbacks_in_a_row_end_a_run() -> None:
    """A run of a week may have many, if it is well in between."""
    state, t = trained()
    for _ in range(20):
        state = broken(state, t)
        assert state.slowed.in_a_row == 1
        for _ in range(5 * EVERY // LOOK):
            state = after(state, t := t + LOOK).state
    assert state.slowed.rollbacks == 20
    assert POLICY.factor_at(state.slowed, t) == 1.0


def test_the_first_rollback_leaves_the_rate_alone_and_the_next_does_not() -> None:
    state, t = trained()
    once = broken(state, t)
    assert POLICY.factor_at(once.slowed, t) == 1.0
    well = once
    for _ in range(3):
        well = after(well, t := t + LOOK).state
    again = broken(well, t := t + LOOK)
    factors = [POLICY.factor_at(again.slowed, t + k * EVERY) for k in (0, 1, 2, 3)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0])
    late = broken(well, t + 5 * EVERY)
    assert POLICY.factor_at(late.slowed, t + 5 * EVERY) == 1.0


def test_the_rate_stays_low_if_training_diverges_again_while_it_recovers() -> None:
    state, t = trained()
    for _ in range(2):
        state = broken(state, t := t + LOOK)
    for _ in range(5):
        state = after(state, t := t + LOOK).state
    assert state.since_kept == 0
    third = broken(state, t := t + LOOK)
    assert third.slowed.low == third.slowed.ceiling < 0.25
    stays = GuardPolicy(EVERY, factor=0.25, recover=None, max_rollbacks=3)
    state, t = trained(stays)
    for _ in range(2):
        state = broken(state, t := t + LOOK, stays)
    assert stays.factor_at(state.slowed, 10**6) == 0.25


def test_without_a_snapshot_it_goes_on() -> None:
    state, t = trained()
    first = one(state.remembering(()), t + 1, 9.0)
    decision = one(first.state, t + 2, 9.0)
    assert decision.action is Action.CANNOT_ROLL_BACK
    assert after(decision.state, t + 2 + LOOK, *[9.0] * LOOK).action is Action.KEEP
