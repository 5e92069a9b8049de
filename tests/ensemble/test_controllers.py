"""The contract that every controller keeps, and what is particular to the paper's."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.ensemble.controller import AsPrinted, Controller, Corrected, softmax_weights
from hdet.ensemble.design import assign
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.normalised import Normalised
from hdet.errors import ArgumentError
from tests.ensemble.rho import multipliers

pytestmark = pytest.mark.quick

CONTROLLERS: dict[str, Controller] = {
    "corrected": Corrected(),
    "corrected, strong": Corrected(sigma=1e-3, meta_momentum=0.5, meta_lr=2.0),
    "corrected, no smoothing": Corrected(meta_momentum=0.0),
    "as printed": AsPrinted(),
    "normalised": Normalised(),
}
every_controller = pytest.mark.parametrize("rule", CONTROLLERS.values(), ids=CONTROLLERS.keys())
RATE = KnobSpec("lr", "relative", 1 / 9, scheduled=True)
finite = st.floats(allow_nan=False, allow_infinity=False)


def scaled(factors: list[float], moves: list[float]) -> list[float]:
    return [RATE.moved(m, move) for m, move in zip(factors, moves, strict=True)]


def offsets_in(k: int, n: int = 8, knobs: int = 3, alpha: float = 1 / 9) -> list[list[float]]:
    return [[rho - 1 for rho in row] for row in assign(multipliers(n, alpha), seed=1, k=k, knobs=knobs)]


@every_controller
@given(losses=st.lists(st.lists(finite, min_size=8, max_size=8), min_size=1, max_size=12))
def test_base_stays_positive_and_finite_for_any_finite_losses(rule: Controller, losses: list[list[float]]) -> None:
    state, factors = rule.init(3), [1.0] * 3
    for k, row in enumerate(losses):
        update = rule.update(state, row, offsets_in(k))
        state, factors = update.state, scaled(factors, update.moves)
        assert all(math.isfinite(m) and m > 0 for m in factors)
        assert all(math.isfinite(move) for move in update.moves)


@every_controller
@given(st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=8), st.permutations(range(8)))
def test_relabelling_replicas_changes_nothing(rule: Controller, losses: list[float], order: list[int]) -> None:
    x = offsets_in(2)
    plain = rule.update(rule.init(3), losses, x)
    relabelled = rule.update(rule.init(3), [losses[r] for r in order], [x[r] for r in order])
    assert relabelled.moves == plain.moves
    assert relabelled.state == plain.state


@every_controller
@pytest.mark.parametrize("better", ["above", "below"])
def test_base_goes_where_the_loss_is_lower(rule: Controller, better: str) -> None:
    sign = -1 if better == "above" else 1
    state, factors = rule.init(1), [1.0]
    for k in range(20):
        x = offsets_in(k, knobs=1)
        update = rule.update(state, [2 + sign * row[0] for row in x], x)
        state, factors = update.state, scaled(factors, update.moves)
    assert factors[0] > 1 if better == "above" else factors[0] < 1


@every_controller
def test_equal_losses_are_no_signal(rule: Controller) -> None:
    update = rule.update(rule.init(3), [0.7] * 8, offsets_in(4))
    assert update.moves == pytest.approx([0.0] * 3, abs=1e-15)


@every_controller
def test_update_does_not_change_its_arguments(rule: Controller) -> None:
    state, losses, x = rule.init(2), [float(r) for r in range(8)], offsets_in(1, knobs=2)
    before = repr((state, losses, x))
    rule.update(state, losses, x)
    assert repr((state, losses, x)) == before


@every_controller
def test_shuffled_losses_do_not_make_it_walk(rule: Controller) -> None:
    """Placebo: losses that have nothing to do with the rates, 60 rounds, 100 runs.

    At the published strength the base stays within a factor of two in 95 % of the runs. The strong setting is the known
    fault of the paper's rule (it has no notion of noise), so it is only asked to stay bounded.
    """
    rng = random.Random(7)
    ends = []
    for run in range(100):
        state, factors = rule.init(1), [1.0]
        for k in range(60):
            x = offsets_in(1000 * run + k, knobs=1)
            update = rule.update(state, [2 + 0.05 * rng.gauss(0, 1) for _ in x], x)
            state, factors = update.state, scaled(factors, update.moves)
        ends.append(abs(math.log(factors[0])))
    bound = math.log(2) if getattr(rule, "meta_lr", 1) <= 0.5 else math.log(1e6)
    assert sum(end <= bound for end in ends) >= 95


@every_controller
def test_state_round_trip(rule: Controller) -> None:
    state = rule.update(rule.init(3), [1.0, 2, 3, 4, 5, 6, 7, 8], offsets_in(3)).state
    restored = rule.init(3)._replace(**{name: list(values) for name, values in state._asdict().items()})
    again = rule.update(restored, [2.0, 1, 4, 3, 6, 5, 8, 7], offsets_in(4))
    assert again == rule.update(state, [2.0, 1, 4, 3, 6, 5, 8, 7], offsets_in(4))


def test_the_rule_by_hand() -> None:
    """Two replicas at 0.9 and 1.1 of the base, losses 1.0 and 1.0 - 0.1 ln 3: weights 1/4 and 3/4."""
    rule = Corrected(sigma=0.1, meta_momentum=0.9, meta_lr=0.5)
    update = rule.update(rule.init(1), [1.0, 1.0 - 0.1 * math.log(3)], [[-0.1], [0.1]])
    assert update.weights == pytest.approx([0.25, 0.75])
    assert update.deltas == pytest.approx([0.05])
    assert update.state.velocity == pytest.approx([0.005])
    assert update.moves == pytest.approx([0.0025])
    second = rule.update(update.state, [1.0, 1.0], [[0.1], [-0.1]])
    assert second.state.velocity == pytest.approx([0.0045])


def test_an_excluded_replica_does_not_bias_the_rest() -> None:
    update = Corrected().update(Corrected().init(1), [1.0, 1.0, 1.0], [[-0.1], [0.05], [0.1]])
    assert update.deltas == pytest.approx([0.0], abs=1e-15)


def test_softmax_of_one_is_one() -> None:
    assert softmax_weights([3.0], 0.1) == [1.0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"sigma": 0.0}, "sigma"),
        ({"sigma": -1.0}, "sigma"),
        ({"sigma": None}, "sigma"),
        ({"sigma": math.nan}, "sigma"),
        ({"sigma": math.inf}, "sigma"),
        ({"meta_momentum": 1.0}, "meta_momentum"),
        ({"meta_momentum": -0.1}, "meta_momentum"),
        ({"meta_momentum": math.nan}, "meta_momentum"),
        ({"meta_lr": -1.0}, "meta_lr"),
        ({"meta_lr": math.nan}, "meta_lr"),
    ],
)
def test_bad_arguments_say_value_rule_and_cure(arguments: dict[str, Any], word: str) -> None:
    for rule in (Corrected, AsPrinted):
        with pytest.raises(ArgumentError, match=f"{word} must be .* but got {word}=.*;"):
            rule(**arguments)
