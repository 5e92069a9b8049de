"""Where take-off lands: a run that is a little longer lands at about the same part of it, at about the same rate."""

from __future__ import annotations

import landing
import pytest


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_lengths_that_once_landed_all_over_the_place(optimizer: str) -> None:
    """Steps 61, 31, 79 and 40 before rounds of take-off had one length."""
    lengths = (200, 230, 260, 280)
    runs = [landing.fly(f"function/{optimizer}", length, 0, 1e-3) for length in lengths]
    assert landing.largest_ratio(run.landed / length for run, length in zip(runs, lengths, strict=True)) < 1.5
    assert landing.largest_ratio(run.found for run in runs) < 1.5


def test_a_table_has_the_medians_of_the_seeds() -> None:
    runs = [landing.Flown(20 + seed, 0.1 * seed, "landed: went back to step 5", 1.0) for seed in range(5)]
    (row,) = landing.table({("line/adam", 1e-3, 200): runs})["line/adam/0.001"]
    assert (row["landed"], row["part"], row["found"], row["went_back"]) == (22, 0.11, 0.2, 5)


def test_ratios_are_those_of_neighbours_either_way() -> None:
    assert landing.largest_ratio([4.0, 2.0, 3.0]) == 2.0
    assert landing.largest_ratio([1.0]) == 1.0
