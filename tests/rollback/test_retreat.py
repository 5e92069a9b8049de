"""The guard's rule on made-up losses: which snapshot is put back, and what becomes of the factor."""

from __future__ import annotations

import math

import pytest

from hdet.rollback.retreat import Action, Decision, Policy, Retreat
from hdet.rollback.ruin import Block

EVERY = 8
FINE = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.03, 0.97]


def blocks(*losses: float) -> list[Block]:
    return [Block(loss, 1) for loss in losses]


def trained(policy: Policy, rounds: int = 6) -> tuple[Retreat, int]:
    """After some rounds whose losses fall from 5 to 1."""
    state, t = Retreat(), 0
    for k in range(rounds):
        t += EVERY
        decision = policy.after_round(state, t, blocks(*(x + 4 / (k + 1) - 4 / rounds for x in FINE)), is_sound=True)
        assert decision.action is Action.KEEP
        state = decision.state
    return state, t


def after(policy: Policy, state: Retreat, t: int, *losses: float, is_sound: bool = True) -> Decision:
    return policy.after_round(state, t, blocks(*losses), is_sound=is_sound)


POLICY = Policy(EVERY, factor=0.25, recover=2, most=3)


def test_back_by_one_where_the_round_began_well_and_by_two_where_it_did_not() -> None:
    state, t = trained(POLICY)
    well = after(POLICY, state, t + EVERY, 1.0, *[90.0] * 7)
    assert (well.action, well.back_to, well.slot) == (Action.ROLL_BACK, t, state.kept[-1][1])
    ill = after(POLICY, state, t + EVERY, *[90.0] * 8)
    assert (ill.action, ill.back_to, ill.slot) == (Action.ROLL_BACK, t - EVERY, state.kept[0][1])
    dark = after(POLICY, state, t + EVERY, *[math.nan] * 8)
    assert (dark.action, dark.back_to) == (Action.ROLL_BACK, t - EVERY)


def test_further_back_where_the_last_snapshot_was_no_good_either() -> None:
    state, t = trained(POLICY)
    once = after(POLICY, state, t + EVERY, 1.0, *[90.0] * 7).state
    again = after(POLICY, once, t + 2 * EVERY, 1.0, *[90.0] * 7)
    assert again.back_to == t - EVERY
    third = after(POLICY, again.state, t + 3 * EVERY, 1.0, *[90.0] * 7)
    assert third.back_to == t - EVERY
    assert after(POLICY, third.state, t + 4 * EVERY, 1.0, *[90.0] * 7).action is Action.GIVE_UP


def test_weights_after_losses_that_look_ill_are_not_kept() -> None:
    state, t = trained(POLICY)
    assert after(POLICY, state, t + EVERY, *FINE[:6], 90.0, 90.0).action is Action.NOTHING
    assert after(POLICY, state, t + EVERY, *FINE[:7], math.nan).action is Action.NOTHING
    assert after(POLICY, state, t + EVERY, *FINE).action is Action.KEEP


def test_the_factor_recovers_unless_it_happens_again_soon() -> None:
    state, t = trained(POLICY)
    back = after(POLICY, state, t + EVERY, *[90.0] * 8).state
    factors = [POLICY.factor_at(back.slowed, t + EVERY * k) for k in (1, 2, 3, 4)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0])
    fine = after(POLICY, back, t + 2 * EVERY, *FINE).state
    again = after(POLICY, fine, t + 3 * EVERY, is_sound=False).state
    assert [POLICY.factor_at(again.slowed, t + EVERY * k) for k in (3, 9)] == [0.25, 0.25]
    stays = Policy(EVERY, factor=0.25, recover=None, most=3)
    assert stays.factor_at(after(stays, state, t + EVERY, *[90.0] * 8).state.slowed, 10**6) == 0.25


def test_harder_data_are_acquitted() -> None:
    state, t = trained(POLICY)
    back = after(POLICY, state, t + EVERY, *[90.0 + x for x in FINE])
    assert back.state.slowed.times == 1
    freed = after(POLICY, back.state, t + 2 * EVERY, *[90.0 + x for x in FINE])
    assert freed.action is Action.KEEP
    assert freed.state.slowed == state.slowed


def test_without_a_snapshot_it_slows_down_and_goes_on() -> None:
    state, t = trained(POLICY)
    decision = after(POLICY, state.remembering(()), t + EVERY, *[90.0] * 8)
    assert (decision.action, decision.state.slowed.low) == (Action.GO_ON, 0.25)
    assert after(POLICY, decision.state, t + 2 * EVERY, *[90.0] * 8).action is Action.KEEP
