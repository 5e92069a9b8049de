"""The library itself, one model at a time on this machine, at the tasks, seeds and lengths of ``misset_lr.py``.

    python experiments/misset_product.py --task feed --seeds 3 --start 0.001

Trains with ``hdet.OneCycleLR(max_lr="auto")`` from a guess that is ``start`` times the best rate, and by torch's
OneCycleLR at the best rate, which ``experiments/results/misset_TASK.json`` knows. It does not compare with the losses
there: the stack has other rounding, and no running statistics. Adds its row to ``experiments/results/product.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import hdet
from hdet.tasks import Task, task_named

RESULTS = Path(__file__).parent / "results"


OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)}


def table_of(task: str, optimizer: str, length: str) -> dict[str, Any]:
    """The table with the best fixed rate and its losses."""
    name = f"misset_{task}{'_sgd' if optimizer == 'sgd' else ''}.json"
    tables = json.loads((RESULTS / name).read_text())["tables"]
    return next(table for table in tables if (table["length"], table["optimizer"]) == (length, optimizer))


def train(task: Task, optimizer_name: str, seed: int, rate: float, steps: int, fixed: bool = False) -> dict[str, Any]:
    """One run: its validation loss, the highest rate in it, and the seconds it took."""
    model = task.model(seed)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), lr=rate)
    more = {"total_steps": steps, "cycle_momentum": False}  # the stacked runs do not cycle momentum either
    if fixed:
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, **more)
    else:
        probe = hdet.ProbeBatch(model, task.loss, lambda k: task.probe(seed, k))
        scheduler = hdet.OneCycleLR(optimizer, "auto", probe=probe, seed=seed, **more)
    began, highest = time.perf_counter(), 0.0
    for t in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(seed, t))
        loss.backward()
        optimizer.step()
        highest = max(highest, float(optimizer.param_groups[0]["lr"]))
        scheduler.step(*([] if fixed else [loss]))
    return {"loss": task.evaluate(model)["loss"], "highest": [highest], "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=("text", "feed", "digits"))
    parser.add_argument("--optimizer", default="adam", choices=tuple(OPTIMIZERS))
    parser.add_argument("--length", default="full", choices=("full", "short"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", type=float, default=1e-3, help="the guess over the best rate")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = table_of(given.task, given.optimizer, given.length)
    task = task_named(given.task, **table["arguments"]["options"])
    runs = []
    best, steps = table["best"]["rate"], table["steps"]
    for seed in table["seeds"][: given.seeds]:
        run = train(task, given.optimizer, seed, given.start * best, steps)
        reference = train(task, given.optimizer, seed, best, steps, fixed=True)["loss"]
        run.update(seed=seed, reference=reference, ratio=run["loss"] / reference)
        runs.append(run)
        print(json.dumps(run), flush=True)
    ratios = [run["ratio"] for run in runs]
    row = {
        "task": given.task,
        "optimizer": given.optimizer,
        "steps": table["steps"],
        "start": given.start,
        "best_rate": table["best"]["rate"],
        "ratio": statistics.mean(ratios),
        "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
        "runs": runs,
    }
    add(row, RESULTS / "product.json")
    print(json.dumps({name: value for name, value in row.items() if name != "runs"}))


def add(row: dict[str, Any], path: Path) -> None:
    """Add a row to the file, in place of an earlier one of the same settings."""
    names = ("task", "optimizer", "steps", "start")
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [other for other in rows if any(other[name] != row[name] for name in names)]
    path.write_text(json.dumps([*rows, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
