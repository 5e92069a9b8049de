"""A second run from trained weights: which rate is found, and which would be best?

    python lab/experiments/again.py --write            # under four minutes on one core
    python lab/experiments/again.py --models layers    # half of it
    python lab/experiments/again.py --table            # of the file, as in docs/finding-the-rate.md

Digits, Adam, two models: two layers that 500 steps train well, and a CNN with BatchNorm that 200 steps do not. Three
runs of each seed:

    fresh    from first weights
    again    from the weights at the end of "fresh", on the same data
    turned   from the same weights, on images turned by a quarter: a new task, as in fine-tuning

Each with ``hdet.auto``, and with torch's OneCycleLR at rates half a decade apart, the best of which is the measure.
Writes lab/experiments/results/again.json with --write.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import checkout  # noqa: F401
import torch
from provenance import commit, versions
from torch import Tensor, nn

import hdet
from lab.tasks import Batch, DigitsTask

RESULTS = Path(__file__).parent / "results" / "again.json"
RUNS = ("fresh", "again", "turned")
GUESS = 1e-3
RATES = (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


class Model(NamedTuple):
    make: Callable[[DigitsTask, int], nn.Module]
    steps: int
    rates: Sequence[float]


def layers(task: DigitsTask, seed: int) -> nn.Module:
    """Two, with torch's first weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


MODELS = {"layers": Model(layers, 500, RATES[:6]), "cnn": Model(DigitsTask.model, 200, RATES[2:])}


class Turned(nn.Module):
    """A network that sees its images turned by a quarter."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.network(torch.rot90(x, 1, (2, 3)))
        return turned


class Ran(NamedTuple):
    before: float
    """Held-out loss before the run."""
    loss: float
    rate: float
    """The peak: found, or given."""


def train(task: DigitsTask, model: nn.Module, rate: float | None, batches: Sequence[Batch]) -> Ran:
    """One run of the model, which is trained in place. rate None: it is found."""
    before = task.evaluate(model)["loss"]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate or GUESS)
    scheduler: Any
    if rate is None:
        scheduler = hdet.auto(optimizer, total_steps=len(batches))
    else:
        scheduler = hdet.OneCycleLR(optimizer, rate, total_steps=len(batches), cycle_momentum=False)
    for batch in batches:
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    peak = scheduler.found.rate if rate is None else rate
    loss_after = task.evaluate(model)["loss"]
    return Ran(before, loss_after if math.isfinite(loss_after) else math.inf, peak)


def rows_of(name: str, seed: int, steps: int | None = None) -> list[dict[str, Any]]:
    """The three runs of a model and a seed: at the rate found, at that of the first run, and at those of the sweep."""
    make, usual, rates = MODELS[name]
    task = DigitsTask(width=4, batch_size=32)
    begin = {"fresh": make(task, seed)}
    rows: list[dict[str, Any]] = []
    for k, run in enumerate(RUNS):
        batches = [task.batch(len(RUNS) * seed + k, t) for t in range(steps or usual)]
        model = deepcopy(begin[run])
        auto = train(task, model, None, batches)
        if run == "fresh":
            begin |= {"again": model, "turned": Turned(model)}
        first = rows[0]["rate"] if rows else auto.rate
        at_first, *sweep = (train(task, deepcopy(begin[run]), rate, batches).loss for rate in (first, *rates))
        known = {"at_first_rate": at_first, "sweep": dict(zip(map(str, rates), sweep, strict=True))}
        rows.append({"model": name, "run": run, "seed": seed, **auto._asdict(), **known})
    return rows


def table(content: dict[str, Any]) -> str:
    """Means over the seeds; of rates, geometric ones."""
    lines = [
        "| model | run | loss before | found rate | best rate | loss at the found | at the first run's | at the best |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys((row["model"], row["run"]) for row in content["rows"]):
        rows = [row for row in content["rows"] if (row["model"], row["run"]) == name]
        best = [min((loss, float(rate)) for rate, loss in row["sweep"].items()) for row in rows]
        cells = [
            f"{fmean(row['before'] for row in rows):.3f}",
            f"{geometric_mean(row['rate'] for row in rows):.2g}",
            f"{geometric_mean(rate for _, rate in best):.2g}",
            f"{fmean(row['loss'] for row in rows):.3f}",
            f"{fmean(row['at_first_rate'] for row in rows):.3f}",
            f"{fmean(loss for loss, _ in best):.3f}",
        ]
        lines.append(f"| {' | '.join([*name, *cells])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of every run, in place of 500 and 200")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--table", action="store_true", help="print the table of the file and run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        print(table(json.loads(RESULTS.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(1)
    runs = product(given.models.split(","), range(given.seeds))
    rows = [row for name, seed in runs for row in rows_of(name, seed, given.steps)]
    content = {
        "command": "python lab/experiments/again.py --write",
        "commit": commit(),
        **versions(torch.device("cpu")),
        "steps": {name: given.steps or MODELS[name].steps for name in given.models.split(",")},
        "rows": rows,
    }
    print(table(content))
    if given.write:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
