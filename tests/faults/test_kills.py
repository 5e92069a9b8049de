"""Twelve kills of the matrix: the survivors notice, and a new start ends where the run that was not killed does."""

from __future__ import annotations

import pytest

from tests.faults.cases import Case, a_few, kills
from tests.faults.trial import try_it


@pytest.mark.slow
@pytest.mark.parametrize("case", a_few(), ids=str)
def test_a_killed_run_comes_back_bit_by_bit(case: Case) -> None:
    result = try_it(case)
    assert result.came_back, result.told
    assert result.bit_equal
    assert result.buffers_equal or result.way == "search"  # which is saved inside rounds, where ranks have their own
    assert not result.lost
    assert result.seconds is not None
    assert result.seconds < 10
    assert result.named or result.by_torch


def test_the_matrix_has_every_way_point_number_and_victim() -> None:
    cases = kills()
    assert len(cases) == 200
    assert cases == kills()
    assert {(case.plan.way, case.plan.ranks, case.trap.point) for case in cases} == {
        (way, ranks, point)
        for way in ("trained", "search", "arms")
        for ranks in (2, 3, 4)
        for point in ("converge", "checkpoint", "journal", "take-off", "between rounds")
        if way == "search" or point != "take-off"
    }
    assert all(case.trap.rank < case.plan.ranks for case in cases)
    assert {case.trap.rank == 0 for case in cases} == {True, False}
