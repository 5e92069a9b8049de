"""Does the rate that a run finds depend on its length by chance? Runs that get longer by ten steps at a time.

    python lab/experiments/lengths.py --json lengths.json

A few small problems with Adam, AdamW and SGD with momentum, lengths 150 to 600, five seeds, two guesses. The found
rate, as the median over the seeds, should change little from one length to the next: the last lines show the largest
ratio between neighbours. Seeds and guesses of a length train as rows of one stack.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from auto_runs import AutoRuns, Run
from real.bench import Validator
from stacked import Stack
from supply import Supply
from zoo_stack import UPDATES, ZooTask

LENGTHS = tuple(range(150, 601, 10))
GUESSES = (1e-3, 1.0)
PAIRS = (
    "function/adam",
    "function/momentum",
    "line/adamw",
    "softmax/adam",
    "softmax/momentum",
    "layers/adamw",
    "layers/momentum",
    "autoencoder/adam",
    "factors/adam",
)
CPU = torch.device("cpu")


class Found(NamedTuple):
    """One run."""

    rate: float
    rolled_back: int
    """How often."""
    loss: float
    """On held-out data."""


class Job(NamedTuple):
    """The runs of one length."""

    pair: str
    length: int
    seeds: int
    guesses: Sequence[float]


def find(job: Job) -> list[list[Found]]:
    """[guess][seed]"""
    torch.set_num_threads(1)
    name, optimizer = job.pair.split("/")
    task, seeds = ZooTask(name), range(job.seeds)
    stack = Stack(task, seeds, len(job.guesses), CPU)
    runs = [[Run(job.length, guess) for guess in job.guesses] for _ in seeds]
    auto_runs = AutoRuns(stack, UPDATES[optimizer](stack.theta), runs)
    step = auto_runs.train_step(Supply(task, seeds, job.length, CPU).batches)
    for t in range(1, job.length + 1):
        step()
        auto_runs.end_rounds(t)
    losses = Validator(stack, stack.theta)(stack.theta).tolist()
    return [
        [Found(row[k].found, row[k].rolled_back, losses[u][k]) for u, row in enumerate(runs)]
        for k in range(len(job.guesses))
    ]


def table(runs: dict[tuple[str, float, int], list[Found]]) -> dict[str, list[dict[str, float]]]:
    """Per pair and guess, a row for every length."""
    rows: dict[str, list[dict[str, float]]] = {}
    for (pair, guess, length), seeds in runs.items():
        rows.setdefault(f"{pair}/{guess:g}", []).append(
            {
                "steps": length,
                "found": statistics.median(run.rate for run in seeds),
                "rolled_back": sum(run.rolled_back > 0 for run in seeds),
                "loss": statistics.median(run.loss for run in seeds),
            }
        )
    return rows


def largest_ratio(values: Iterable[float]) -> float:
    """Between neighbours.

    >>> largest_ratio([1.0, 2.0, 1.5])
    2.0
    """
    return max((max(a, b) / min(a, b) for a, b in pairwise(values)), default=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=",".join(PAIRS), help="problem/optimizer, of zoo_problems.py")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--guesses", default=",".join(map(str, GUESSES)))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", action="store_true", help="print every length")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    given = parser.parse_args()
    guesses = [float(guess) for guess in given.guesses.split(",")]
    jobs = [
        Job(pair, int(length), given.seeds, guesses)
        for pair in given.pairs.split(",")
        for length in given.lengths.split(",")
    ]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        results = pool.map(find, jobs, chunksize=4)
    runs = {
        (job.pair, guess, job.length): found
        for job, result in zip(jobs, results, strict=True)
        for guess, found in zip(guesses, result, strict=True)
    }
    rows = table(runs)
    summary = {name: round(largest_ratio(row["found"] for row in lengths), 3) for name, lengths in rows.items()}
    for name, lengths in rows.items():
        for row in lengths if given.rows else []:
            print(f"{name:28}" + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    for name, ratio in summary.items():
        print(f"{name:28}found rate {ratio:6.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"largest_ratio": summary, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
