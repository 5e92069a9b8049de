"""Ranks that are silent or late, and disks that are full or read-only: noticed, and a new start loses nothing."""

from __future__ import annotations

import pytest

from tests.faults.cases import GROUP_TIMEOUT, Case, others
from tests.faults.disks import SPOILS
from tests.faults.trial import try_it


def of(way: str, fault: str, point: str) -> Case:
    """The one case, if this user can have it."""
    found = [case for case in others() if (case.plan.way, case.trap.fault, case.trap.point) == (way, fault, point)]
    if not found:
        pytest.skip(f"{fault}, {point}: not for a user who may not mount a file system")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "fault"), [("arms", "silent"), ("arms", "late")])
def test_who_does_not_come_is_named_when_the_time_is_up(way: str, fault: str) -> None:
    result = try_it(of(way, fault, "between rounds"))
    assert result.bit_equal, result.told
    assert result.named
    assert result.seconds is not None
    assert GROUP_TIMEOUT - 0.5 < result.seconds < GROUP_TIMEOUT + 60


@pytest.mark.slow
@pytest.mark.parametrize("fault", SPOILS)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_everywhere_and_leaves_the_one_before(fault: str) -> None:
    result = try_it(of("trained", fault, "checkpoint"))
    assert result.bit_equal, result.told
    assert result.named
    assert result.seconds is not None


@pytest.mark.parametrize("fault", SPOILS)
def test_a_journal_that_cannot_be_written_stops_nobody(fault: str) -> None:
    result = try_it(of("trained", fault, "journal"))
    assert result.bit_equal, result.told
    assert result.seconds is None
