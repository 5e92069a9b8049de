"""The library on small problems of many kinds, beside the best of a grid of fixed rates.

    python lab/experiments/zoo.py --json lab/experiments/results/zoo.json

Ten models, six optimizers, two lengths. A cell: the final held-out loss of ``hdet.auto``, from a guess of 1e-3, over
that of torch's OneCycleLR at the best of 20 fixed rates, three to a decade. One seed chooses the rate, others score it.
The grid's losses are kept in the file and used again; delete it to run them anew.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR
from zoo_problems import BATCH, OPTIMIZERS, PROBLEMS, Problem, model_of

import hdet

LENGTHS = (100, 400)
RATES = tuple(10 ** (k / 3) for k in range(-15, 5))
TARGETS = {100: 1.10, 400: 1.10}
"""What the geometric mean may be, by length."""
WORST = 100.0
"""A ratio beyond this counts as this."""
BROKEN = 1e9
"""The loss of a run that did not end with a number."""


def train(
    problem: Problem, optimizer: torch.optim.Optimizer, model: torch.nn.Module, scheduler: Any, seed: int
) -> float:
    """The held-out loss after all steps of the scheduler; BROKEN if training broke."""
    stream, ours = torch.Generator().manual_seed(seed), isinstance(scheduler, hdet.AutoScheduler)
    for _ in range(scheduler.total_steps):
        loss = problem.loss(model, problem.batch(stream, BATCH))
        if not (ours or math.isfinite(loss.item())):
            return BROKEN
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss) if ours else scheduler.step()
    model.eval()
    with torch.no_grad():
        final = float(problem.loss(model, problem.held_out()))
    return min(final, BROKEN) if math.isfinite(final) else BROKEN


def fixed(problem: str, optimizer: str, length: int, seed: int, rate: float) -> float:
    """torch's OneCycleLR at one rate."""
    model = model_of(PROBLEMS[problem], seed)
    opt = OPTIMIZERS[optimizer](model.parameters(), lr=rate)
    return train(PROBLEMS[problem], opt, model, OneCycleLR(opt, rate, total_steps=length, cycle_momentum=False), seed)


def auto(problem: str, optimizer: str, length: int, seed: int, guess: float = 1e-3) -> tuple[float, float]:
    """hdet's, without an idea of the rate: the loss, and the rate found."""
    model = model_of(PROBLEMS[problem], seed)
    opt = OPTIMIZERS[optimizer](model.parameters(), lr=guess)
    scheduler = hdet.auto(opt, total_steps=length)
    found = 0.0

    def watch(*_: object) -> None:
        nonlocal found
        found = max(found, opt.param_groups[0]["lr"])

    opt.register_step_post_hook(watch)
    return train(PROBLEMS[problem], opt, model, scheduler, seed), found


def grid(job: tuple[str, str, int, int]) -> list[float]:
    """Losses of all rates; beyond three in a row at thrice the best nothing better comes."""
    torch.set_num_threads(1)
    losses: list[float] = []
    for rate in RATES:
        hopeless = len(losses) > 7 and all(loss > 3 * min(losses) for loss in losses[-3:])
        losses.append(BROKEN if hopeless else fixed(*job, rate))
    return losses


def score(job: tuple[str, str, int, int, float]) -> dict[str, float]:
    """One seed of a cell: the best rate's loss, and ours."""
    torch.set_num_threads(1)
    problem, optimizer, length, seed, rate = job
    loss, found = auto(problem, optimizer, length, seed)
    return {"fixed": fixed(problem, optimizer, length, seed, rate), "auto": loss, "found": found}


def tables(lengths: list[int], seeds: int, path: Path, processes: int) -> dict[str, Any]:
    """Everything; the file is written after the grid and at the end."""
    known = json.loads(path.read_text()) if path.exists() else {"rates": RATES, "grid": {}}
    cells = [(p, o, length) for length in lengths for p in PROBLEMS for o in OPTIMIZERS]
    missing = [cell for cell in cells if _name(cell) not in known["grid"]]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for cell, losses in zip(missing, pool.map(grid, [(*cell, 0) for cell in missing], chunksize=1), strict=True):
            known["grid"][_name(cell)] = losses
        path.write_text(json.dumps(known, indent=1))
        best = {cell: best_rate(known, *cell) for cell in cells}
        jobs = [(*cell, seed, best[cell]) for cell in cells for seed in range(1, seeds + 1)]
        results = pool.map(score, jobs, chunksize=1)
    scores: dict[str, Any] = {}
    for (*cell, _, rate), result in zip(jobs, results, strict=True):
        entry = scores.setdefault(_name(tuple(cell)), {"best_rate": rate, "seeds": []})
        entry["seeds"].append({**result, "ratio": min(result["auto"] / result["fixed"], WORST)})
    known["scores"] = scores
    path.write_text(json.dumps(known, indent=1))
    return known


def best_rate(known: dict[str, Any], problem: str, optimizer: str, length: int) -> float:
    """Of the grid."""
    return RATES[_best(known["grid"][_name((problem, optimizer, length))])]


def show(known: dict[str, Any], length: int) -> dict[str, Any]:
    """One table as text, and the figures that sum it up."""
    print(f"\n{length} steps: loss over that of the best fixed rate (found rate over it)")
    print(" " * 12 + "".join(f"{name:>16}" for name in OPTIMIZERS))
    ratios = []
    for problem in PROBLEMS:
        shown = []
        for optimizer in OPTIMIZERS:
            entry = known["scores"][_name((problem, optimizer, length))]
            ratio = _middle([seed["ratio"] for seed in entry["seeds"]])
            found = _middle([seed["found"] / entry["best_rate"] for seed in entry["seeds"]])
            ratios.append(ratio)
            shown.append(f"{ratio:8.2f} ({found:5.2f})")
        print(f"{problem:12}" + "".join(f"{text:>16}" for text in shown))
    ordered, mean = sorted(ratios), _middle(ratios)
    return {
        "steps": length,
        "mean": round(mean, 3),
        "target": "none" if length not in TARGETS else "PASS" if mean <= TARGETS[length] else "MISS",
        "median": round(statistics.median(ratios), 3),
        "tenth_worst": round(ordered[-len(ordered) // 10], 3),
        "worst": round(ordered[-1], 3),
    }


def _middle(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.mean(math.log(max(value, 1e-12)) for value in values))


def _best(losses: list[float]) -> int:
    return min(range(len(losses)), key=losses.__getitem__)


def _name(cell: tuple[Any, ...]) -> str:
    return "/".join(map(str, cell))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("zoo.json"), help="grid and scores")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    known = tables(lengths, given.seeds, given.json, given.processes)
    for length in lengths:
        print(json.dumps(show(known, length)))


if __name__ == "__main__":
    main()
