"""What hdet adds to a DDP run at T = 1000: a BatchNorm CNN on scikit-learn's digits, 2 gloo ranks, journal on.

Two runs, one with torch's OneCycleLR and one with hdet's, take turns in blocks inside the same processes. A whole run
varies by more than hdet costs, so the parts are timed where they happen, on the slowest rank:

    overhead = (T * (hdet's ordinary step - torch's step) + a round end) / (T * a training step with torch's scheduler)

A round end is gather, finiteness, all-reduce, divergence, controller, journal and the wait for the other rank; it is
timed in a third run whose rounds are one step long. ``blocks_percent`` is the plain ratio of the blocks of the first
two, with all its noise and without round ends: only a check that nothing large was missed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from harness import parser, ratio, run_ranks, show, wait_for_turn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import hdet

T = 1000
RANKS, BATCH = 2, 64
BLOCK = 20
"""Steps per turn."""
ROUND_ENDS = 30
TARGETS = {"overhead_percent": "the paper reports 0.1"}


def build() -> nn.Module:
    """A small CNN for 8 x 8 images."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches of this rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(rank)
    while True:
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


class Run:
    """One training run that can be continued block by block, with a stopwatch on its scheduler."""

    def __init__(self, rank: int, schedule: Callable[[Optimizer, nn.Module], OneCycleLR]) -> None:
        torch.manual_seed(0)
        self._model = DistributedDataParallel(build())
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self._scheduler = schedule(self._optimizer, self._model)
        self._batches = batches(rank)
        self.scheduler_seconds: list[float] = []
        """Of each step so far."""

    def train(self, steps: int) -> float:
        """Seconds that ``steps`` steps took."""
        began = wait_for_turn()
        for images, labels in (next(self._batches) for _ in range(steps)):
            loss = nn.functional.cross_entropy(self._model(images), labels)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.scheduler_seconds.append(self._time_scheduler(loss))
        return time.perf_counter() - began

    def _time_scheduler(self, loss: Tensor) -> float:
        scheduler, began = self._scheduler, time.perf_counter()
        if isinstance(scheduler, hdet.OneCycleLR):
            scheduler.step(loss)
        else:
            scheduler.step()
        return time.perf_counter() - began


class Times(NamedTuple):
    """Seconds on one rank."""

    torch_blocks: list[float]
    ours_blocks: list[float]
    torch_step: float
    """An ordinary step of torch's scheduler."""
    ours_step: float
    first_step: float
    """hdet's first, where the replicas meet: once per run."""
    round_end: float


def contest(rank: int, blocks: int, folder: str) -> Times:
    """The two runs in turn, then round ends alone."""

    def ours(sync_every: int) -> Callable[[Optimizer, nn.Module], OneCycleLR]:
        journal = Path(folder) / f"{sync_every}.jsonl"
        return lambda optimizer, model: hdet.OneCycleLR(
            optimizer, 1e-3, 50 * T, sync_every=sync_every, auto_lr_start=0, model=model, journal=journal
        )

    plain = Run(rank, lambda optimizer, _: OneCycleLR(optimizer, 1e-3, 50 * T))
    explored = Run(rank, ours(sync_every=T))
    torch_blocks, ours_blocks = [], []
    for _ in range(blocks):
        torch_blocks.append(plain.train(BLOCK))
        ours_blocks.append(explored.train(BLOCK))
    rounds = Run(rank, ours(sync_every=1))
    rounds.train(ROUND_ENDS)
    return Times(
        torch_blocks,
        ours_blocks,
        torch_step=median(plain.scheduler_seconds),
        ours_step=median(explored.scheduler_seconds),
        first_step=explored.scheduler_seconds[0],
        round_end=median(rounds.scheduler_seconds[1:]),
    )


def measure(blocks: int, timeout: float) -> dict[str, Any]:
    """The figures, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[Times] = run_ranks(contest, RANKS, blocks, folder, timeout=timeout)
    worst = max(ranks, key=lambda times: times.round_end)
    training_step = median(worst.torch_blocks) / BLOCK
    steps_part = 100 * (worst.ours_step - worst.torch_step) / training_step
    round_part = 100 * worst.round_end / (T * training_step)
    return {
        "overhead_percent": steps_part + round_part,
        "steps_percent": steps_part,
        "round_end_percent": round_part,
        "blocks_percent": 100 * (ratio(worst.ours_blocks, worst.torch_blocks) - 1),
        "training_step_ms": 1e3 * training_step,
        "torch_step_us": 1e6 * worst.torch_step,
        "ours_step_us": 1e6 * worst.ours_step,
        "round_end_ms": 1e3 * worst.round_end,
        "first_step_ms": 1e3 * worst.first_step,
        "ranks": RANKS,
        "sync_every": T,
    }


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--blocks", type=int, default=20, help=f"turns of {BLOCK} steps for each run (default: 20)")
    line.add_argument("--timeout", type=float, default=170.0, help="seconds for the whole (default: 170)")
    given = line.parse_args()
    if not 1 <= given.blocks * BLOCK < T:
        line.error(f"--blocks must be at least 1 and below {T // BLOCK}, where the first round ends")
    show(measure(given.blocks, given.timeout), TARGETS, given.json)


if __name__ == "__main__":
    main()
