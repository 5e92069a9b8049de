"""Lengths: a run that is a little longer finds about the same rate."""

from __future__ import annotations

import lengths
import pytest


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_a_little_longer_finds_about_the_same(optimizer: str) -> None:
    """Halving is a factor of 2; a round that gets too hot at one length only is one of 3 (momentum at 210 steps)."""
    runs = [lengths.find(f"function/{optimizer}", length, 0, 1e-3) for length in (230, 240, 260, 280)]
    assert lengths.largest_ratio(run.rate for run in runs) < 2.5


def test_a_table_has_the_medians_of_the_seeds() -> None:
    runs = [lengths.Found(0.1 * seed, seed % 2, 1.0) for seed in range(5)]
    (row,) = lengths.table({("line/adam", 1e-3, 200): runs})["line/adam/0.001"]
    assert (row["found"], row["went_back"], row["loss"]) == (0.2, 2, 1.0)


def test_ratios_are_those_of_neighbours_either_way() -> None:
    assert lengths.largest_ratio([4.0, 2.0, 3.0]) == 2.0
    assert lengths.largest_ratio([1.0]) == 1.0
