"""lab/experiments/schedules.py: every schedule is searched, and a search is compared with the best fixed rate."""

from __future__ import annotations

import math

from schedules import RATES, ratios, schedules


def test_every_schedule_has_a_ratio_from_each_guess() -> None:
    found = ratios(60, 1, RATES[4:11:3])
    assert set(found) == set(schedules(60))
    for row in found.values():
        assert row["best rate"] in RATES
        assert all(math.isfinite(value) and 0.3 < value < 10 for key, value in row.items() if key.startswith("from"))
