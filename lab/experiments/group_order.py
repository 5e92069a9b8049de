"""Does HDET find an order of the parameter groups? The order of their rates at the end of a run, seed against seed.

    python lab/experiments/group_order.py               # the feed in small, six seeds; minutes on one core
    python lab/experiments/group_order.py --again       # what agreed most, and its placebo, on ten other seeds
    python lab/experiments/group_order.py --ablation    # and the runs of stacked_ablation.py, if their files are there
    python lab/experiments/group_order.py --table

The paper says that the rates of the four groups (embedding, no_decay, non_embedding, transformer) fall in an order of
their own, which the controller discovers. If there is one, runs that differ in nothing but the seed (weights, samples,
multipliers) must end in the same order. Eight replicas that share gradients, T = 20, spread 1/9; the corrected
controller, the same at the sigma of the released code, ``Normalised()``, and a placebo. The agreement of the seeds is
the mean of Spearman's rank correlation over all pairs of them: 1 if all orders are equal, 0 by chance. ``p`` is the
share of random orders that agree as much.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from provenance import commit, versions
from real.ledger import save
from stacked_ablation import RESULTS as ABLATION
from stacked_bench import Bench
from stacked_replicas import Column, Method

from hdet.ensemble.controller import Corrected
from hdet.ensemble.normalised import Normalised
from lab.runs.placebo import Placebo
from lab.tasks import FeedTask, Task
from lab.tasks.streams import generator_of

RESULTS = Path(__file__).parent / "results" / "group_order.json"
REPLICAS, STEPS, EVERY, RATE, SEEDS = 8, 800, 20, 5e-3, 6
SPREAD = 1 / 9
RELEASED = 0.002
"""sigma in the code that the authors released; the paper has 0.1."""
ROWS = {
    "corrected": Method("corrected controller, sigma 0.1", True, SPREAD, lambda seed: Corrected()),
    "released": Method("sigma 0.002, as released", True, SPREAD, lambda seed: Corrected(sigma=RELEASED)),
    "normalised": Method("`Normalised()`", True, SPREAD, lambda seed: Normalised()),
    "placebo": Method(
        "sigma 0.002, losses shuffled", True, SPREAD, lambda seed: Placebo(seed, Corrected(sigma=RELEASED))
    ),
}
AGAIN = ("released", "placebo"), tuple(range(100, 110))
"""Rows and seeds of ``--again``."""
TRIES = 20_000
"""Random sets of orders."""


def feed(steps: int) -> Task:
    """The feed in small; the batch is that of all replicas."""
    size = 8 * REPLICAS
    return FeedTask(256, 256, history=4, width=8, depth=1, batch_size=size, horizon=steps * size)


def ranks(values: Sequence[float]) -> list[float]:
    """From the lowest, 0, to the highest; equal values share their mean rank.

    >>> ranks([0.3, 0.1, 0.3, 0.2])
    [2.5, 0.0, 2.5, 1.0]
    """
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 if one of them has no order.

    >>> correlation([1, 2, 3, 4], [10, 20, 30, 40]), correlation([1, 2, 3], [3, 2, 1]), correlation([1, 1], [1, 2])
    (1.0, -1.0, 0.0)
    """
    x, y = (torch.tensor(ranks(values), dtype=torch.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    length = float((x.square().sum() * y.square().sum()).sqrt())
    return round(float(x @ y) / length, 12) if length else 0.0


def agreement(runs: Sequence[Sequence[float]]) -> float:
    """The mean correlation over all pairs of runs."""
    return fmean(correlation(a, b) for a, b in combinations(runs, 2))


def chance(found: float, runs: int, groups: int, tries: int = TRIES) -> float:
    """The share of random sets of orders that agree at least as much.

    >>> chance(1.0, 2, 2, tries=2000) > 0.4, chance(1.0, 5, 4, tries=2000) < 0.01
    (True, True)
    """
    generator = generator_of("orders", runs, groups)
    orders = torch.rand(tries, runs, groups, generator=generator, dtype=torch.float64).argsort(-1).argsort(-1).double()
    centred = orders - (groups - 1) / 2
    total = centred.sum(1).square().sum(-1)  # |sum|^2 = sum of |x|^2 + sum over ordered pairs of x y
    each = float(centred[0, 0].square().sum())
    means = (total - runs * each) / (each * runs * (runs - 1))
    return float((means >= found - 1e-9).double().mean())


def order(values: Sequence[float], names: Sequence[str]) -> str:
    """In words.

    >>> order([1.0, 0.9, 1.0], ["a", "b", "c"])
    'b < a = c'
    """
    rows = sorted(zip(values, names, strict=True))
    signs = [" = " if low[0] == high[0] else " < " for low, high in pairwise(rows)]
    return rows[0][1] + "".join(sign + name for sign, (_, name) in zip(signs, rows[1:], strict=True))


def described(label: str, learned: Sequence[Sequence[float]], groups: Sequence[str]) -> dict[str, Any]:
    """One row: factors on the schedule [seed][group], their orders and how well these agree."""
    found = agreement(learned)
    orders = [order(row, groups) for row in learned]
    return {
        "label": label,
        "groups": list(groups),
        "learned": [list(row) for row in learned],
        "orders": orders,
        "different_orders": len(set(orders)),
        "agreement": found,
        "p": chance(found, len(learned), len(groups)),
    }


def explored(rows: Sequence[str], steps: int, seeds: Sequence[int], device: torch.device) -> list[dict[str, Any]]:
    """Some rows on the small feed."""
    bench = Bench(feed(steps), device)
    columns = [Column(key, ROWS[key], EVERY, RATE) for key in rows]
    done = bench.train(columns, seeds, REPLICAS, steps)
    names = done.stack.group_names
    return [
        described(column.method.label, [row[c].learned for row in done.runs.runs], names)
        for c, column in enumerate(columns)
    ]


def of_the_ablation(folder: Path) -> list[dict[str, Any]]:
    """The rows of stacked_ablation.py that have a controller."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for row in content.get("rows", []):
            if row["row"] in ("hdet", "placebo"):
                label = f"{content['task']}, rate {row['rate']:.3g}, T = {row['T']}: {row['label']}"
                names = ("embedding", "no_decay", "non_embedding", "transformer")
                found.append(described(label, row["learned"], names))
    return found


def table(content: dict[str, Any]) -> str:
    """Markdown."""
    about = (
        f"{content['replicas']} replicas, {content['steps']} steps, T = {content['every']}, {content['seeds']} seeds"
    )
    lines = [f"\n**feed in small**, {about}, {content['versions']['device']}\n"]
    lines += ["| controller | lowest to highest factor | different orders | agreement | p |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    again = [{**row, "label": f"{row['label']}, other seeds"} for row in content.get("again", [])]
    for row in [*content["rows"], *again, *content.get("ablation", [])]:
        every = [value for run in row["learned"] for value in run]
        cells = [row["label"], f"{min(every):.3f} to {max(every):.3f}"]
        cells += [f"{row['different_orders']} of {len(row['learned'])}", f"{row['agreement']:+.2f}", f"{row['p']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="only what agreed most, on other seeds; adds to the file")
    parser.add_argument("--ablation", action="store_true", help="add what stacked_ablation.py has, and train nothing")
    parser.add_argument("--table", action="store_true", help="print what the file says, and run nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(words)
    if given.seeds < 2:
        parser.error(f"--seeds must be at least 2, since orders are compared in pairs, but got {given.seeds}")
    content = json.loads(given.results.read_text()) if given.results.exists() else {}
    if not content and (given.ablation or given.again or given.table):
        parser.error(f"{given.results} is not there; run without --again, --ablation and --table first")
    if given.ablation:
        content["ablation"] = of_the_ablation(ABLATION)
    elif not given.table:
        torch.set_num_threads(1)
        content |= _run(given.again, given.steps, given.seeds, torch.device(given.device))
    if not given.table:
        save(given.results, content)
    print(table(content))


def _run(again: bool, steps: int, seeds: int, device: torch.device) -> dict[str, Any]:
    """What is new for the file."""
    if again:
        return {"again": explored(AGAIN[0], steps, AGAIN[1], device)}
    began = time.perf_counter()
    rows = explored(list(ROWS), steps, range(seeds), device)
    about = {"replicas": REPLICAS, "steps": steps, "every": EVERY, "rate": RATE, "seeds": seeds}
    about |= {"seconds": time.perf_counter() - began, "versions": versions(device), "commit": commit()}
    return {**about, "rows": rows}


if __name__ == "__main__":
    main()
