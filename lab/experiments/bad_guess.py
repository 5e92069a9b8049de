"""One bad guess, three ways: what does ``hdet.auto`` bring back?

    python lab/experiments/bad_guess.py          # about two minutes on two free cores; prints a table

The digits task with Adam, 300 steps on one device. A sweep with torch's OneCycleLR finds the best rate with two seeds
of its own. Three other seeds then train: torch at a hundredth of that rate (the bad guess), torch at the best rate, and
``hdet.auto`` from the bad guess. Writes validation losses and rates over the steps to
``lab/experiments/results/front.json``, from which ``docs/make_front_picture.py`` draws the picture of the README.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import checkout  # noqa: F401 - so that lab is found
import torch

import hdet
from lab.tasks import task_named

RESULT = Path(__file__).parent / "results" / "front.json"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FAR = 100.0
"""The guess is so many times too low."""
CHOOSING = (1000, 1001)
"""The seeds of the sweep; those that are shown count from 0."""
STEPS, EVERY = 300, 10


class Job(NamedTuple):
    """One run."""

    way: str
    rate: float
    seed: int
    steps: int
    every: int


class Curve(NamedTuple):
    """What one run gave, at step 0 and after every few steps."""

    steps: list[int]
    losses: list[float]
    """On the held-out images."""
    rates: list[float]


def train(job: Job) -> Curve:
    """One run on one thread."""
    torch.set_num_threads(1)
    task = task_named("digits")
    model = task.model(job.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.rate)
    if job.way == "auto":
        scheduler: Any = hdet.auto(optimizer, total_steps=job.steps)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, job.rate, total_steps=job.steps)
    curve = Curve([0], [task.evaluate(model)["loss"]], [scheduler.get_last_lr()[0]])
    for step in range(1, job.steps + 1):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(job.seed, step - 1))
        loss.backward()
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        scheduler.step(*([loss] if job.way == "auto" else []))
        if step % job.every == 0 or step == job.steps:
            curve.steps.append(step)
            curve.losses.append(task.evaluate(model)["loss"])
            curve.rates.append(rate)
    return curve


def measure(seeds: Sequence[int], steps: int, every: int, all_of: Callable[..., Any]) -> dict[str, Any]:
    """The sweep, then the three ways. ``all_of`` is ``map``, or a pool's."""
    swept = iter(list(all_of(train, [Job("torch", rate, seed, steps, steps) for rate in RATES for seed in CHOOSING])))
    sweep = [{"rate": rate, "loss": fmean(next(swept).losses[-1] for _ in CHOOSING)} for rate in RATES]
    best = min(sweep, key=lambda row: row["loss"])["rate"]
    ways = {"torch, bad guess": ("torch", best / FAR), "torch, tuned": ("torch", best), "hdet": ("auto", best / FAR)}
    jobs = [Job(way, rate, seed, steps, every) for way, rate in ways.values() for seed in seeds]
    curves = iter(list(all_of(train, jobs)))
    lines = [_line(name, rate, [next(curves) for _ in seeds]) for name, (_, rate) in ways.items()]
    about = {"task": "digits", "optimizer": "Adam", "steps": steps, "seeds": list(seeds), "choosing": CHOOSING}
    versions = {"hdet": hdet.__version__, "torch": torch.__version__.partition("+")[0]}
    return {"experiment": "bad_guess", **about, "far": FAR, "best": best, "sweep": sweep, "lines": lines, **versions}


def _line(name: str, given: float, curves: Sequence[Curve]) -> dict[str, Any]:
    losses, rates = ([getattr(curve, what) for curve in curves] for what in ("losses", "rates"))
    return {"name": name, "given": given, "steps": curves[0].steps, "losses": losses, "rates": rates}


def table(result: dict[str, Any]) -> str:
    """For people."""
    rows = [f"{'':18}{'max_lr given':>14}{'validation loss':>22}{'highest rate':>14}"]
    for line in result["lines"]:
        ends = [losses[-1] for losses in line["losses"]]
        error = stdev(ends) / len(ends) ** 0.5 if len(ends) > 1 else 0.0
        highest = fmean([max(rates) for rates in line["rates"]])
        rows.append(f"{line['name']:18}{line['given']:14.2g}{fmean(ends):13.4f} ± {error:.4f}{highest:14.2g}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        result = measure(range(given.seeds), given.steps, min(EVERY, given.steps), pool.map)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
