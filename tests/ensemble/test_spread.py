from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.ensemble.design import Balanced, Design, Permuted, assign, permutation
from tests.ensemble import design_twin
from tests.ensemble.rho import multipliers

pytestmark = pytest.mark.quick

sizes = st.integers(1, 64)
spreads = st.floats(0, 1)


@given(sizes, spreads)
def test_multipliers_have_mean_one_and_stay_in_bounds(n: int, alpha: float) -> None:
    rho = multipliers(n, alpha)
    assert math.fsum(rho) / n == pytest.approx(1, abs=1e-12)
    assert all(1 - alpha - 1e-12 <= x <= 1 + alpha + 1e-12 for x in rho)
    assert rho == sorted(rho)


@given(sizes)
def test_no_spread_is_exactly_one(n: int) -> None:
    assert multipliers(n, 0.0) == [1.0] * n


def test_published_setting() -> None:
    rho = multipliers(8, 1 / 9)
    assert rho[0] == pytest.approx(8 / 9)
    assert rho[-1] == pytest.approx(10 / 9)
    assert rho[4] - rho[3] == pytest.approx(2 / 63)


def test_two_replicas_reach_both_ends() -> None:
    assert multipliers(2, 0.25) == [0.75, 1.25]


@given(st.integers(), st.integers(0, 10**6), st.integers(0, 60), sizes)
def test_permutations_are_permutations(seed: int, k: int, knob: int, n: int) -> None:
    assert sorted(permutation(seed, k, knob, n)) == list(range(n))
    assert permutation(seed, k, knob, n) == permutation(seed, k, knob, n)


def test_permutations_change_with_seed_round_and_knob() -> None:
    base = permutation(0, 1, 0, 8)
    others = [permutation(1, 1, 0, 8), permutation(0, 2, 0, 8), permutation(0, 1, 1, 8)]
    assert all(other != base for other in others)


def test_knobs_do_not_stay_correlated_over_rounds() -> None:
    rho = multipliers(8, 1 / 9)
    rounds, total = 400, [[0.0] * 4 for _ in range(4)]
    for k in range(1, rounds + 1):
        x = assign([r - 1 for r in rho], seed=3, k=k, knobs=4)
        scale = math.fsum((r - 1) ** 2 for r in rho)
        for a in range(4):
            for b in range(4):
                total[a][b] += math.fsum(row[a] * row[b] for row in x) / scale / rounds
    for a in range(4):
        assert total[a][a] == pytest.approx(1)
        assert all(abs(total[a][b]) < 0.08 for b in range(4) if b != a)  # 4 standard errors of 1 / sqrt(7 * 400)


def test_every_replica_takes_every_place() -> None:
    places = [permutation(0, k, 0, 4) for k in range(1, 401)]
    for r in range(4):
        for place in range(4):
            assert 60 < sum(p[r] == place for p in places) < 140


def test_designs_never_change() -> None:
    """All ranks, machines and versions must place the replicas alike: a resumed run goes on from another's points."""
    assert _ranks(Permuted().places(n=4, knobs=2, seed=1, k=3)) == [[0, 1], [3, 2], [1, 3], [2, 0]]
    assert _ranks(Balanced().places(n=5, knobs=3, seed=1, k=0)) == [
        [2, 4, 4],
        [1, 0, 3],
        [4, 1, 2],
        [3, 3, 1],
        [0, 2, 0],
    ]
    assert _ranks(Balanced().places(n=5, knobs=3, seed=1, k=7)) == [
        [4, 4, 2],
        [3, 0, 1],
        [2, 1, 4],
        [0, 3, 3],
        [1, 2, 0],
    ]
    many = Balanced().places(n=4, knobs=6, seed=2, k=3)
    assert _ranks(many) == [[3, 1, 2, 3, 1, 2], [1, 0, 0, 0, 2, 3], [2, 3, 1, 1, 3, 0], [0, 2, 3, 2, 0, 1]]

    tied = Balanced().places(n=8, knobs=3, seed=0, k=8)  # sums of floats would choose another one from Python 3.12 on
    assert _ranks(tied) == [
        [6, 6, 7],
        [5, 2, 1],
        [4, 7, 0],
        [3, 4, 3],
        [2, 3, 2],
        [0, 5, 6],
        [7, 1, 4],
        [1, 0, 5],
    ]


@given(st.integers(0, 99), st.integers(0, 10**4), st.integers(1, 4), st.integers(1, 40) | st.integers(99, 120))
@settings(max_examples=30)
def test_designs_are_their_slow_twins(seed: int, k: int, knobs: int, n: int) -> None:
    assert permutation(seed, k, knobs, n) == design_twin.pi(seed, k, knobs, n)
    slow = [[float(x) for x in row] for row in design_twin.balanced(n, knobs, seed, k)]
    assert Balanced().places(n, knobs, seed, k) == slow  # bit for bit


def test_rotations_are_chosen_among_as_many_as_the_slow_twin_has() -> None:
    """One rotation more would be chosen by one knob of some forty."""
    for k in range(60):
        slow = [[float(x) for x in row] for row in design_twin.balanced(Balanced.MANY, 3, 0, k)]
        assert Balanced().places(Balanced.MANY, 3, 0, k) == slow


def test_a_balanced_design_overlaps_less_than_chance() -> None:
    """Sums of squared products of columns, over 50 rounds: orthogonal columns would have 0."""

    def overlap(places: list[list[float]]) -> float:
        columns = list(zip(*places, strict=True))
        pairs = [(a, b) for i, a in enumerate(columns) for b in columns[:i]]
        return sum(sum(x * y for x, y in zip(a, b, strict=True)) ** 2 for a, b in pairs)

    balanced = sum(overlap(Balanced().places(8, 3, 0, k)) for k in range(50))
    assert balanced < 0.05 * sum(overlap(Permuted().places(8, 3, 0, k)) for k in range(1, 51))


@pytest.mark.parametrize(("n", "most"), [(64, 0.3), (256, 0.5), (1024, 0.3)])
def test_two_knobs_are_less_correlated_than_by_chance(n: int, most: float) -> None:
    """The mean of the correlation's absolute value over 25 rounds; chance gives 0.8 / sqrt(N - 1)."""

    def correlation(design: Design) -> float:
        x = torch.tensor([design.places(n, 2, 0, k) for k in range(1, 26)], dtype=torch.float64)
        return float(((x[..., 0] * x[..., 1]).sum(1) / x[..., 0].square().sum(1)).abs().mean())

    assert correlation(Balanced()) < most * correlation(Permuted())
    assert n < 1024 or correlation(Balanced()) < 0.01


def test_more_knobs_than_rotations_are_permutations() -> None:
    places = Balanced().places(100, 60, seed=4, k=2)
    columns = [list(column) for column in zip(*places, strict=True)]
    assert len({tuple(column) for column in columns}) == 60
    turned = [columns[0][d:] + columns[0][:d] for d in range(50)]
    assert [column in turned for column in columns] == [True] * 50 + [False] * 10
    assert _ranks([[value] for value in columns[-1]]) == [[i] for i in permutation(4, 3, 59, 100)]


def _ranks(places: list[list[float]]) -> list[list[int]]:
    """Places as numbers from 0, the lowest."""
    return [[round((x + 1) / 2 * (len(places) - 1)) for x in row] for row in places]
