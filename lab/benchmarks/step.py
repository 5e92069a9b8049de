"""Host time of an ordinary step, the one between two round ends: hdet's ``step(loss)`` over torch's ``step()``.

The loss is a CPU 0-d tensor, the optimizer Adam with 4 parameter groups (and with 1). The two take turns in blocks so
short that a busy machine seldom interrupts one; a ratio is the median over pairs of neighbours. The first two ratios
are of a process without torch.distributed; ``_1_rank`` and ``_2_ranks`` are of 4 groups in a gloo group of that many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import parser, ratio, run_ranks, show
from torch.optim.lr_scheduler import OneCycleLR

import hdet

NEVER = 10**7
"""Steps until the run and its first round end: further than any block goes."""
TARGETS = {"ours_over_torch": "target <= 1.5"}


class Seconds(NamedTuple):
    """Per step, one entry for each block."""

    ours: list[float]
    torchs: list[float]


def optimizer_of(groups: int) -> torch.optim.Optimizer:
    """Adam over one small tensor per group."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(groups)]
    optimizer = torch.optim.Adam([{"params": [parameter]} for parameter in parameters], lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.zeros(2)
    return optimizer


def contest(groups: int, blocks: int, steps: int) -> Seconds:
    """Both schedulers in turn, ``blocks`` times ``steps`` steps each."""
    loss = torch.tensor(2.5)
    torchs = OneCycleLR(optimizer_of(groups), max_lr=0.1, total_steps=NEVER)
    ours = hdet.OneCycleLR(optimizer_of(groups), max_lr=0.1, total_steps=NEVER, sync_every=NEVER)
    for scheduler in (torchs, ours):
        scheduler.optimizer.step()  # torch warns if the scheduler is the first to step
    seconds = Seconds([], [])
    for block in range(-1, blocks):  # the first one warms up; hdet looks for other replicas in it
        ours_took, torchs_took = _time(lambda: ours.step(loss), steps), _time(lambda: torchs.step(), steps)
        if block >= 0:
            seconds.ours.append(ours_took)
            seconds.torchs.append(torchs_took)
    return seconds


def contest_on_rank(rank: int, groups: int, blocks: int, steps: int) -> Seconds:
    """The same inside a process group."""
    return contest(groups, blocks, steps)


def _time(step: Callable[[], object], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def measure(blocks: int, steps: int, timeout: float) -> dict[str, Any]:
    """The figures."""
    torch.set_num_threads(1)
    four, one = contest(4, blocks, steps), contest(1, blocks, steps)
    of_ranks = {n: run_ranks(contest_on_rank, n, 4, blocks, steps, timeout=timeout)[0] for n in (1, 2)}
    return {
        "ours_over_torch": ratio(four.ours, four.torchs),
        "ours_over_torch_1_group": ratio(one.ours, one.torchs),
        "ours_over_torch_1_rank": ratio(of_ranks[1].ours, of_ranks[1].torchs),
        "ours_over_torch_2_ranks": ratio(of_ranks[2].ours, of_ranks[2].torchs),
        "ours_us": 1e6 * median(four.ours),
        "torch_us": 1e6 * median(four.torchs),
        "ours_us_1_group": 1e6 * median(one.ours),
        "torch_us_1_group": 1e6 * median(one.torchs),
        "blocks": blocks,
        "steps_per_block": steps,
    }


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--blocks", type=int, default=1000, help="turns of each scheduler (default: 1000)")
    line.add_argument("--steps", type=int, default=30, help="steps per turn (default: 30)")
    line.add_argument("--timeout", type=float, default=120.0, help="seconds for each process group (default: 120)")
    given = line.parse_args()
    if not 1 <= given.blocks * given.steps < NEVER // 2:
        line.error(f"--blocks times --steps must be at least 1 and below {NEVER // 2}")
    show(measure(given.blocks, given.steps, given.timeout), TARGETS, given.json)


if __name__ == "__main__":
    main()
