"""The placebo hears the same losses as the corrected controller, from other replicas."""

from __future__ import annotations

from hdet.ensemble.controller import Controller, Corrected, Velocity
from hdet.ensemble.design import permutation
from lab.runs.placebo import Placebo

SIGNALS = [1.0, 0.8, 1.3, 0.9]
OFFSETS = [[-0.1, 0.1], [-0.03, 0.03], [0.03, -0.1], [0.1, -0.03]]


def test_is_a_controller() -> None:
    assert isinstance(Placebo(), Controller)


def test_is_the_corrected_rule_on_shuffled_losses() -> None:
    rule, inside = Placebo(seed=5), Corrected()
    state = rule.init(2)
    for k in range(4):
        shuffled = [SIGNALS[r] for r in permutation(5, k + 1, -1, 4)]
        expected = inside.update(Velocity(state.velocity), shuffled, OFFSETS)
        update = rule.update(state, SIGNALS, OFFSETS)
        assert (update.moves, update.weights) == (expected.moves, expected.weights)
        state = update.state
    assert state.rounds == [4.0, 4.0]


def test_on_average_it_says_nothing() -> None:
    """Over many rounds moves cancel, where the rule itself goes one way."""
    rule, state = Placebo(), Placebo().init(1)
    deltas = []
    for _ in range(400):
        update = rule.update(state, [1.0, 0.9], [[-0.1], [0.1]])
        state = update.state
        deltas.append(update.deltas[0])
    honest = Corrected().update(Corrected().init(1), [1.0, 0.9], [[-0.1], [0.1]]).deltas[0]
    assert abs(sum(deltas)) < 0.15 * 400 * honest
