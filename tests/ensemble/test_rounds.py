from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet.ensemble.bases import Bases, decay_rate
from hdet.ensemble.design import Rounds, default_length
from hdet.ensemble.knob import KnobSpec

pytestmark = pytest.mark.quick


@given(st.integers(1, 60), st.integers(1, 70), st.integers(-3, 80))
def test_index_counts_the_ends_and_next_end_is_one(total: int, length: int, t: int) -> None:
    rounds = Rounds(length, total)
    ends = [s for s in range(1, total + 1) if s % length == 0 or s in (total - 1, total)]
    assert [s for s in range(-3, total + 20) if rounds.ends_at(s)] == ends
    if t <= total:
        assert rounds.index(t) == sum(end <= t for end in ends)
        assert rounds.next_end(t) == min(end for end in ends if end >= max(t, 1))


def test_a_round_is_not_inside_itself_where_it_ends() -> None:
    rounds = Rounds(length=4, total_steps=10)
    assert [t for t in range(11) if rounds.is_inside(t)] == [1, 2, 3, 5, 6, 7]


def test_default_length() -> None:
    assert [default_length(s) for s in (1, 49, 100, 5000, 50_000, 10**7)] == [1, 1, 2, 100, 1000, 1000]


@given(st.floats(1e-6, 10), st.floats(1e-4, 1), st.integers(1, 300))
def test_decay_reaches_the_floor_in_the_rounds_left(start: float, ratio: float, rounds: int) -> None:
    gamma = decay_rate(start, start * ratio, rounds)
    assert 0 <= gamma < 1
    assert start * (1 - gamma) ** rounds == pytest.approx(start * ratio, rel=1e-6)


def test_printed_formula_would_grow_but_ours_decays() -> None:
    # METHOD.md 3.1: torch's defaults div_factor 25, final_div_factor 1e4, K = 10
    assert decay_rate(start=1.0, floor=1 / 25 / 1e4, rounds=10) == pytest.approx(1 - 2.5e5**-0.1)


def test_decaying_base_never_goes_below_the_floor() -> None:
    state = Bases.begin([1.0, 1.0], None)
    for _ in range(50):
        state = state.after_round(moves=[-2.0, 0.0], schedule=[1.0, 0.5], floors=[0.1, 0.05], rounds=5)
    assert state.decayed == [0.1, 0.05]


@given(st.lists(st.tuples(st.floats(1e-15, 1e15), st.floats(-1e3, 1e3)), min_size=1, max_size=5))
def test_learned_factor_stays_in_its_bounds(pairs: list[tuple[float, float]]) -> None:
    rate = KnobSpec("lr", "relative", 0.1, scheduled=True)
    assert all(1e-15 <= rate.moved(m, move) <= 1e15 for m, move in pairs)


@given(st.integers(1, 60), st.integers(1, 70))
def test_spans_lie_side_by_side(total: int, length: int) -> None:
    rounds = Rounds(length, total)
    ends = [0, *(t for t in range(1, total + 1) if rounds.ends_at(t))]
    for begin, end in pairwise(ends):
        assert all(rounds.span(t) == (begin, end) for t in range(begin + 1, end + 1))


def test_rounds_left_and_a_run_without_an_end() -> None:
    assert [Rounds(4, 10).left_from(t) for t in (0, 1, 2, 3, 9, 10, 12)] == [3, 3, 2, 2, 1, 1, 1]
    endless = Rounds(4, None)
    assert [endless.ends_at(t) for t in (0, 3, 4, 8)] == [False, False, True, True]
    assert (endless.next_end(5), endless.index(9), endless.span(9)) == (8, 2, (8, 12))


def test_groups_that_come_late_decay_from_where_they_begin() -> None:
    state = Bases.begin([1.0], None).after_round([0.0], [1.0], [0.25], rounds=2)
    assert state.decayed == [pytest.approx(0.5)]
    late = state.grown(2, None)
    assert (late.starts, late.decayed[1:]) == ([1.0, 0.0, 0.0], [0.0, 0.0])
    begun = late.after_round([0.0, 0.5, 0.0], [9.0, 4.0, 8.0], [0.25, 1.0, 8.0], rounds=2)
    assert begun.starts == [1.0, 4.0, 8.0]
    assert begun.decayed == [pytest.approx(0.25), pytest.approx(3.0), 8.0]


def test_nothing_decays_to_a_floor_above_it() -> None:
    assert [decay_rate(1.0, floor, 3) for floor in (1.0, 2.0)] == [0.0, 0.0]
    assert decay_rate(-1.0, -2.0, 3) == 0.0
    assert decay_rate(1.0, -5.0, 3) == decay_rate(1.0, 0.0, 3) == 1.0


def test_rates_that_are_added_begin_unlearned() -> None:
    grown = Bases([0.5], [2.0], [1.0], "old").grown(2, "new")
    assert grown == Bases([0.5, 1.0, 1.0], [2.0, 0.0, 0.0], [1.0, 0.0, 0.0], "new")


def test_one_replica_alone_is_told_nothing_when_it_is_resumed_inside_a_round() -> None:
    """It knows all that there is to know: nobody was averaged."""

    def build() -> tuple[torch.optim.Optimizer, hdet.OneCycleLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        return optimizer, hdet.OneCycleLR(optimizer, 0.1, 40, sync_every=10)

    optimizer, scheduler = build()
    for _ in range(13):
        optimizer.step()
        scheduler.step(1.0)
    resumed, again = build()
    again.load_state_dict(scheduler.state_dict())
    resumed.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hdet.ResumeWarning)
        again.step(1.0)
    assert again.last_epoch == 14


@pytest.mark.parametrize("auto_lr", [True, False])
def test_a_group_that_is_added_is_controlled_as_the_others_are(auto_lr: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 40, sync_every=10, auto_lr=auto_lr)
    steering = scheduler._run.steering
    bounds = {"max_lr": 0.2, "initial_lr": 0.01, "min_lr": 1e-6, "max_momentum": 0.95, "base_momentum": 0.85}
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **bounds})
    optimizer.step()
    scheduler.step(1.0)
    assert len(steering.specs) == len(steering.bases.learned) == 2
    assert steering.bases.controller == (steering.controller.init(2) if auto_lr else None)


def test_a_probe_is_drawn_for_the_round_that_it_ends() -> None:
    model, asked = torch.nn.Linear(1, 1), list[int]()
    probe = hdet.ProbeBatch(model, lambda m, x: m(x).mean(), lambda k: asked.append(k) or torch.ones(1, 1))  # type: ignore[func-returns-value]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, sync_every=4, total_steps=40, signal=hdet.ProbeLoss(probe))
    for _ in range(12):
        optimizer.step()
        ensemble.step(1.0)
    assert asked == [0, 1, 2]
