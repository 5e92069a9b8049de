"""Lengths: a run that is a little longer finds about the same rate."""

from __future__ import annotations

import lengths
import pytest
from lengths import Found, Job


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_a_little_longer_finds_about_the_same(optimizer: str) -> None:
    """A round that is ruined at one length only is a factor of 3."""
    runs = [lengths.find(Job(f"function/{optimizer}", length, 2, (1e-3,)))[0] for length in (230, 240, 260, 280)]
    for seed in range(2):
        assert lengths.largest_ratio(found[seed].rate for found in runs) < 2.5


def test_a_table_has_the_medians_of_the_seeds() -> None:
    runs = [Found(0.1 * seed, seed % 2, 1.0) for seed in range(5)]
    (row,) = lengths.table({("line/adam", 1e-3, 200): runs})["line/adam/0.001"]
    assert (row["found"], row["rolled_back"], row["loss"]) == (0.2, 2, 1.0)


def test_ratios_are_those_of_neighbours_either_way() -> None:
    assert lengths.largest_ratio([4.0, 2.0, 3.0]) == 2.0
    assert lengths.largest_ratio([1.0]) == 1.0
