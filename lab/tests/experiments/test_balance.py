"""The study of the balance: what it measures is what the product measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from balance import FACTORS, SEEDS, TIMES, Job, Outcome, best_of, error, run, table


def test_a_low_rate_has_the_higher_balance() -> None:
    low, high = (run(Job("tiny", 0, rate)) for rate in (1e-4, 0.3))
    assert sorted(low.seen) == sorted(high.seen) == list(range(len(TIMES)))
    assert low.seen[3][0] > 0.9 > 0.0 > high.seen[3][0] > -1.0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_best_rate_lies_between_those_tried(k: int) -> None:
    losses = [math.exp((math.log(factor) - math.log(FACTORS[k]) - 0.2) ** 2) for factor in FACTORS]
    assert best_of(FACTORS, losses) == pytest.approx(math.log(FACTORS[k]) + 0.2)


def test_a_fit_does_not_see_the_problem_that_it_is_tried_on() -> None:
    """Each problem has an offset of its own, which only a fit that has seen it would know."""
    groups, offset = np.repeat([0, 1], 20), np.repeat([1.0, -1.0], 20)
    x = np.random.default_rng(0).normal(size=40)
    assert error([x], x + offset, groups) == pytest.approx(2.0, abs=0.1)


def test_the_table_has_a_line_for_each_time() -> None:
    jobs = [Job(name, seed, factor) for name in ("a", "b", "c") for seed in SEEDS for factor in FACTORS]
    seen = {job: -0.3 * math.log(job.rate) for job in jobs}
    outcomes = [Outcome(math.exp(math.log(job.rate) ** 2), dict.fromkeys(range(4), (seen[job], 0.0))) for job in jobs]
    _, *lines = table(jobs, outcomes)
    assert [float(line.split()[0]) for line in lines] == list(TIMES)
    assert {line.split()[5] for line in lines} == {"0.00"}  # the balance alone tells everything here
