"""The library itself, one model at a time on this machine, at the tasks, seeds and lengths of ``misset_lr.py``.

    python experiments/misset_product.py --task feed --seeds 3 --start 0.001

Trains with ``hdet.OneCycleLR(max_lr="auto")`` from a guess that is ``start`` times the best rate, and compares with the
reference losses that ``experiments/results/misset_TASK.json`` has for the same seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import hdet
from hdet.tasks import Task, task_named

RESULTS = Path(__file__).parent / "results"


def table_of(task: str) -> dict[str, Any]:
    """The table of the full length with Adam."""
    tables = json.loads((RESULTS / f"misset_{task}.json").read_text())["tables"]
    return next(table for table in tables if table["length"] == "full" and table["optimizer"] == "adam")


def train(task: Task, seed: int, guess: float, steps: int, per_group: bool) -> dict[str, Any]:
    """One run: its validation loss, the rates found, and the seconds it took."""
    model = task.model(seed)
    optimizer = torch.optim.Adam(task.groups(model) if per_group else model.parameters(), lr=guess)
    probe = hdet.ProbeBatch(model, task.loss, lambda k: task.probe(seed, k))
    scheduler = hdet.OneCycleLR(
        optimizer, "auto", total_steps=steps, probe=probe, seed=seed, cycle_momentum=False
    )  # the stacked runs do not cycle momentum either
    began, found = time.perf_counter(), [0.0]
    for t in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(seed, t))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        found = [max(old, float(rate)) for old, rate in zip(found * 9, scheduler.base_lrs_now, strict=False)]
    return {"loss": task.evaluate(model)["loss"], "highest": found, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=("text", "feed", "digits"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", type=float, default=1e-3, help="the guess over the best rate")
    parser.add_argument("--per-group", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = table_of(given.task)
    task = task_named(given.task, **table["arguments"]["options"])
    rows = []
    for seed, reference in list(zip(table["seeds"], table["reference"], strict=True))[: given.seeds]:
        row = train(task, seed, given.start * table["best"]["rate"], table["steps"], given.per_group)
        row.update(seed=seed, ratio=row["loss"] / reference)
        rows.append(row)
        print(json.dumps(row), flush=True)
    name = f"product_{given.task}{'_groups' if given.per_group else ''}.json"
    (RESULTS / name).write_text(json.dumps({"start": given.start, "steps": table["steps"], "runs": rows}, indent=1))
    mean = sum(row["ratio"] for row in rows) / len(rows)
    print(json.dumps({"task": given.task, "per_group": given.per_group, "mean_ratio": mean, "runs": len(rows)}))


if __name__ == "__main__":
    main()
