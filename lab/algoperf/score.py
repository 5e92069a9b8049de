"""The score of AlgoPerf, from the formula in its documentation.

Submission s needs the time t_sw for workload w: the median over studies of the earliest time at which a trial of the
study reaches the target, infinite if none does. r_sw = t_sw / min_s t_sw, and infinite above 4. Its performance
profile is

    rho_s(tau) = (number of workloads with r_sw <= tau) / (number of workloads),

and its score the mean of rho_s over 1 <= tau <= 4: 1 for a submission that is fastest on all workloads, 0 for one that
reaches no target.
`python lab/algoperf/released.py` compares this with the benchmark's own script on its released logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

LARGEST = 4.0
"""The largest tau; a submission that needs more than this times the fastest one's time has not reached the target."""

Times = Mapping[str, Mapping[str, float]]
"""The time to target of each submission on each workload, by their names."""


def time_to_target(times: Sequence[float], values: Sequence[float], target: float, *, is_minimized: bool) -> float:
    """The first time at which an evaluation reaches the target; infinite if none does.

    >>> time_to_target([10.0, 20.0, 30.0], [0.5, 0.3, 0.1], 0.3, is_minimized=True)
    20.0
    """
    return next(
        (
            time
            for time, value in zip(times, values, strict=True)
            if (value <= target if is_minimized else value >= target)
        ),
        math.inf,
    )


def of_studies(studies: Sequence[Sequence[float]]) -> float:
    """The median over studies of the fastest trial in each.

    >>> of_studies([[30.0, 20.0], [math.inf], [25.0]])
    25.0
    """
    return median(min(trials, default=math.inf) for trials in studies)


def ratios(times: Times, workloads: Sequence[str]) -> dict[str, list[float]]:
    """r_sw of each submission, in the order of the workloads; infinite above `LARGEST`."""
    rows: dict[str, list[float]] = {name: [] for name in times}
    for workload in workloads:
        fastest = min(row.get(workload, math.inf) for row in times.values())
        for name, row in times.items():
            time = row.get(workload, math.inf)
            is_near = math.isfinite(time) and time <= LARGEST * fastest
            rows[name].append(time / fastest if is_near else math.inf)
    return rows


def profile(row: Sequence[float], tau: float) -> float:
    """rho(tau): the part of the workloads on which a submission with these ratios is within tau of the fastest.

    >>> profile([1.0, 2.0, math.inf], 1.5)
    0.3333333333333333
    """
    return sum(ratio <= tau for ratio in row) / len(row)


def score(row: Sequence[float]) -> float:
    """The mean of the profile over 1 <= tau <= `LARGEST`.

    Each workload adds the part of that range in which it counts, so the integral needs no grid of tau.

    >>> score([1.0, 2.5, math.inf])
    0.5
    """
    return sum(max(LARGEST - ratio, 0.0) for ratio in row) / (LARGEST - 1) / len(row)
