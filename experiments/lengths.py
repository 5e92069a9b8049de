"""Does the rate that a run finds depend on its length by chance? Runs that get longer by ten steps at a time.

    python experiments/lengths.py --json lengths.json

A few small problems with Adam, AdamW and SGD with momentum, lengths 150 to 600, five seeds, two guesses. The found
rate, the target at the run's end, as the median over the seeds, should change little from one length to the next: the
last lines show the largest ratio between neighbours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zoo import model_of, probe_of, train
from zoo_problems import OPTIMIZERS, PROBLEMS

import hdet
from hdet.journal import read_journal

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
"""``function`` is the network and the target of tests/engine/test_probed.py."""


class Found(NamedTuple):
    """One run."""

    rate: float
    """The target at its end."""
    went_back: int
    """How often."""
    loss: float
    """On held-out data."""


def find(pair: str, length: int, seed: int, guess: float) -> Found:
    """Train once, and read the journal."""
    name, optimizer = pair.split("/")
    problem = PROBLEMS[name]
    model = model_of(problem, seed)
    opt = OPTIMIZERS[optimizer](model.parameters(), lr=guess)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        arguments: dict[str, Any] = {"total_steps": length, "cycle_momentum": False, "journal": path}
        scheduler = hdet.OneCycleLR(opt, "auto", probe=probe_of(problem, model, seed), **arguments)
        loss = train(problem, opt, model, scheduler, seed)
        rounds = read_journal(path).rounds
    went_back = sum(record["went_back_to"] is not None for record in rounds)
    return Found(guess * rounds[-1]["learned"][0], went_back, loss)


def found(job: tuple[str, int, int, float]) -> Found:
    """:func:`find` in a process of a pool."""
    torch.set_num_threads(1)
    return find(*job)


def table(runs: dict[tuple[str, float, int], list[Found]]) -> dict[str, list[dict[str, float]]]:
    """Per pair and guess, a row for every length."""
    rows: dict[str, list[dict[str, float]]] = {}
    for (pair, guess, length), seeds in runs.items():
        rows.setdefault(f"{pair}/{guess:g}", []).append(
            {
                "steps": length,
                "found": statistics.median(run.rate for run in seeds),
                "went_back": sum(run.went_back > 0 for run in seeds),
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
    jobs = [
        (pair, int(length), seed, float(guess))
        for pair in given.pairs.split(",")
        for guess in given.guesses.split(",")
        for length in given.lengths.split(",")
        for seed in range(given.seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        results = pool.map(found, jobs, chunksize=10)
    runs: dict[tuple[str, float, int], list[Found]] = {}
    for (pair, length, _, guess), result in zip(jobs, results, strict=True):
        runs.setdefault((pair, guess, length), []).append(result)
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
