"""Small tasks as a new user tries them, and the zoo: ``hdet.auto`` beside the best of a sweep of torch's OneCycleLR.

    python lab/experiments/small.py --processes 16 --write           # the table, and lab/experiments/results/small.json
    python lab/experiments/small.py --tasks mixture,ctc --seeds 1
    python lab/experiments/small.py --zoo --change estimate_weight=0.1 prior_weight=0,prior_distance=1

A line: the held-out loss of ``hdet.auto`` over torch's OneCycleLR at the best of a sweep of rates a factor 3 apart, a
geometric mean over seeds and starts, which are 1/1000 of that rate and the rate itself; in brackets the rate found over
it. The last lines: of runs above 1.2 times the best loss, and within 1.05, the share whose ``found`` says "unsure". A
column for each ``--change`` of the rule's constants, after one without. The sweeps are kept in the file and used
again; delete it to run them anew.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401 - so that lab is found
import torch
import zoo
from small_problems import OPTIMIZERS, SMALL, Small, model_of
from torch.optim.lr_scheduler import OneCycleLR
from zoo_problems import BATCH, PROBLEMS
from zoo_problems import OPTIMIZERS as ZOO_OPTIMIZERS

import hdet
import hdet.schedulers.auto_scheduler as door
from hdet.rule.constants import DEFAULT, Constants
from hdet.rule.decision import Rule

RESULTS, ZOO = (Path(__file__).parent / "results" / name for name in ("small.json", "zoo.json"))
RATES = tuple(3.0**k * 1e-2 for k in range(-11, 6))
STARTS, GUESS = (1e-3, 1.0), 1e-3
CHOOSING = (0, 1)
"""The seeds of the sweep, which score it, too."""
BROKEN, WORST = 1e9, 100.0
"""The loss of a run that did not end with a number, and the ratio at which one is counted."""


class Job(NamedTuple):
    """One run."""

    task: str
    seed: int
    rate: float
    """The peak of OneCycle, or the guess of the search."""
    constants: Constants | None = None
    """Of the search; None: plain OneCycle."""


def task_of(name: str) -> tuple[Small, Any]:
    """A small task or ``zoo/PROBLEM/OPTIMIZER/STEPS``, and what makes its optimizer."""
    if name in SMALL:
        return SMALL[name], OPTIMIZERS[SMALL[name].optimizer]
    _, problem, optimizer, steps = name.split("/")
    made = PROBLEMS[problem]
    return (
        Small(made.model, made.loss, made.batch, made.held_out, optimizer, int(steps), BATCH),
        ZOO_OPTIMIZERS[optimizer],
    )


def run(job: Job) -> dict[str, Any]:
    """Its score, and what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task, build = task_of(job.task)
    model, stream = model_of(task, job.seed), torch.Generator().manual_seed(100 + job.seed)
    optimizer = build(model.parameters(), lr=job.rate)
    scheduler: Any
    if job.constants is None:
        moves = "betas" in optimizer.defaults or optimizer.defaults.get("momentum", 0) > 0
        scheduler = OneCycleLR(optimizer, job.rate, total_steps=task.steps, cycle_momentum=moves)
    else:
        door.Rule = partial(Rule, constants=job.constants)  # type: ignore[misc,assignment]
        scheduler = hdet.auto(optimizer, total_steps=task.steps)
    for _ in range(task.steps):
        loss = task.loss(model, task.draw(stream, task.batch))
        if job.constants is None and not math.isfinite(float(loss.detach())):
            return {"score": BROKEN}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step() if job.constants is None else scheduler.step(loss.detach())
    score = task.score(model)
    score = min(score, BROKEN) if math.isfinite(score) else BROKEN
    if job.constants is None:
        return {"score": score}
    found = scheduler.found
    return {"score": score, "found": found.rate, "status": found.status, "says": str(found)}


def bests(names: Sequence[str], known: dict[str, Any], pool: Any) -> dict[str, tuple[float, float]]:
    """The best rate of each task and its loss; sweeps that are not known are run, and kept."""
    sweeps = known.setdefault("sweeps", {})
    jobs = [Job(n, seed, rate) for n in names if n in SMALL and n not in sweeps for rate in RATES for seed in CHOOSING]
    scores = iter(pool.map(run, jobs, chunksize=1))
    for name in dict.fromkeys(job.task for job in jobs):
        sweeps[name] = [[next(scores)["score"] for _ in CHOOSING] for _ in RATES]
    found = {}
    for name in names:
        if name in SMALL:
            losses = [middle(row) for row in sweeps[name]]
            best = min(range(len(RATES)), key=losses.__getitem__)
            found[name] = RATES[best], losses[best]
    cells = [name for name in names if name not in SMALL]
    grid = json.loads(ZOO.read_text()) if cells else {}
    rates = [zoo.best_rate(grid, *_cell(name)) for name in cells]
    scores = pool.map(run, [Job(name, CHOOSING[1], rate) for name, rate in zip(cells, rates, strict=True)], chunksize=1)
    return found | {n: (rate, one["score"]) for n, rate, one in zip(cells, rates, scores, strict=True)}


def _cell(name: str) -> tuple[str, str, int]:
    _, problem, optimizer, steps = name.split("/")
    return problem, optimizer, int(steps)


def jobs_of(name: str, best: float, seeds: int, constants: Constants) -> list[Job]:
    """All runs of a search. Of the zoo one seed, from the guess of its own table."""
    if name not in SMALL:
        return [Job(name, CHOOSING[1], GUESS, constants)]
    return [Job(name, seed, best * start, constants) for start in STARTS for seed in range(seeds)]


def middle(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(max(value, 1e-12)) for value in values))


def constants_of(change: str) -> Constants:
    """
    >>> constants_of("estimate_weight=0.3,max_samples=4")[:3]
    (2, 0.2, 4)
    """
    pairs = [pair.partition("=") for pair in change.split(",") if pair]
    return DEFAULT._replace(**{name: type(getattr(DEFAULT, name))(float(value)) for name, _, value in pairs})


def summary(names: Sequence[str], ratios: dict[str, float]) -> dict[str, float]:
    """Geometric means over kinds of tasks."""
    eight = [name for name in list(SMALL)[:8] if name != "picture"]
    kinds = {
        "the eight without the picture": [name for name in names if name in eight],
        "small": [name for name in names if name in SMALL],
        "zoo, 100 steps": [name for name in names if name.endswith("/100")],
        "zoo, 400 steps": [name for name in names if name.endswith("/400")],
    }
    return {kind: middle(min(ratios[name], WORST) for name in some) for kind, some in kinds.items() if some}


def doubted(runs: Iterable[tuple[float, str]]) -> dict[str, float]:
    """Of runs, as (loss over the best, status), that end far above the best and near it: the share that is unsure.

    >>> doubted([(1.3, "unsure"), (1.5, "settled"), (1.01, "settled"), (1.1, "unsure")])
    {'unsure above 1.2': 0.5, 'unsure within 1.05': 0.0}
    """
    runs = list(runs)
    kinds = {
        "unsure above 1.2": [status for ratio, status in runs if ratio > 1.2],
        "unsure within 1.05": [status for ratio, status in runs if ratio <= 1.05],
    }
    return {kind: some.count("unsure") / len(some) for kind, some in kinds.items() if some}


def _rows(jobs: Sequence[Job], outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"seed": job.seed, "guess": job.rate, **one} for job, one in zip(jobs, outcomes, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", help="some of them, with commas between; all by default")
    parser.add_argument("--zoo", action="store_true", help="the 120 cells of the zoo, too: one seed each")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--change", nargs="*", default=[], help="constants of the rule, as name=value,name=value")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where sweeps are kept")
    parser.add_argument("--write", action="store_true", help="keep the runs, too")
    given = parser.parse_args(arguments)
    names = given.tasks.split(",") if given.tasks else list(SMALL)
    if given.zoo:
        names += [f"zoo/{p}/{o}/{steps}" for steps in zoo.LENGTHS for p in PROBLEMS for o in ZOO_OPTIMIZERS]
    known = json.loads(given.json.read_text()) if given.json.exists() else {"rates": RATES}
    changes = ["", *given.change]
    with multiprocessing.get_context("fork").Pool(given.processes) as pool:
        best = bests(names, known, pool)
        given.json.write_text(json.dumps(known, indent=1) + "\n")
        keys = [(c, n) for c in changes for n in names]
        jobs = {key: jobs_of(key[1], best[key[1]][0], given.seeds, constants_of(key[0])) for key in keys}
        outcomes = iter(pool.map(run, [job for some in jobs.values() for job in some], chunksize=1))
    rows = {key: [next(outcomes) for _ in some] for key, some in jobs.items()}
    ratios = {key: middle(min(one["score"], BROKEN) / best[key[1]][1] for one in row) for key, row in rows.items()}
    print(" " * 30 + "".join(f"{change or 'as it is':>34}" for change in changes))
    for name in names:
        cells = [
            f"{ratios[c, name]:.2f} ({middle(r['found'] for r in rows[c, name]) / best[name][0]:.2g})" for c in changes
        ]
        print(f"{name:30}" + "".join(f"{cell:>34}" for cell in cells))
    sums = [summary(names, {name: ratios[change, name] for name in names}) for change in changes]
    for change, one in zip(changes, sums, strict=True):
        one |= doubted((r["score"] / best[n][1], r["status"]) for n in names for r in rows[change, n])
    for kind in sums[0]:
        print(f"{kind:30}" + "".join(f"{one.get(kind, math.nan):>34.3f}" for one in sums))
    if given.write:
        runs = {name: _rows(jobs["", name], rows["", name]) for name in names}
        best_of = {name: {"rate": rate, "loss": loss} for name, (rate, loss) in best.items()}
        kept = {**known, "summary": sums[0], "best": best_of, "runs": runs, "torch": torch.__version__}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
