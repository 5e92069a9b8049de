"""Some kills of the fault matrix: none loses the run, and what comes back is the run that was not killed."""

from __future__ import annotations

import pytest

from tests.faults.matrix import Case, attempt, every_case
from tests.threads import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = [
    Case("trained", 2, "first", "in converge", 1),
    Case("trained", 2, "last", "between rounds", 0),
    Case("trained", 2, "first", "in a checkpoint's write", 1),
    Case("trained", 2, "first", "in a journal's write", 1),
    Case("trained", 3, "some", "in converge", 2),
    Case("arms", 2, "last", "in converge", 0),
    Case("arms", 2, "first", "in a checkpoint's write", 2),
    Case("probed", 2, "first", "in take-off", 1),
    Case("probed", 2, "last", "between rounds", 2),
    Case("probed", 2, "first", "in a checkpoint's write", 0),
    Case("probed", 2, "first", "in a journal's write", 2),
    Case("probed", 3, "some", "in take-off", 2),
]


@pytest.mark.parametrize("case", SOME, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_a_kill_loses_nothing(case: Case) -> None:
    outcome = attempt(case)
    assert outcome.came_back, outcome.words
    assert outcome.equal
    assert outcome.noticed < 20


def test_the_whole_matrix_has_200_kills_and_these_are_of_it() -> None:
    every = list(every_case())
    assert len(set(every)) == len(every) >= 200
    assert set(SOME) <= set(every)
