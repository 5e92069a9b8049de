"""The rows that decide about HDET, on one GPU: do replicas train more stably than plain training, and what does it?

    python lab/experiments/stacked_ablation.py --tasks feed --seconds 540   # a scan for the border, then every row
    python lab/experiments/stacked_ablation.py --tasks text --seconds 540
    python lab/experiments/stacked_ablation.py --table
    python lab/experiments/stacked_ablation.py --quick --results quick      # both in miniature, a minute on a CPU

Eight replicas, 5000 steps of OneCycleLR with Adam (beta1 stays at 0.9), five seeds, T = 20 and 100; all rows of a task
train together as one stack, on the same samples, in TF32. Tasks: the feed, and a byte-level GPT on the source of
Python's standard library. Rows: plain data-parallel training; HDET (shared gradients, spread 1/9, the corrected
controller); the same with losses shuffled over the replicas; arms, which apply their own gradients
and are averaged every T steps, without and with the spread. The scan is plain training at a grid of rates on other
seeds, and the two rates are its neighbours at the border (``crashes.border``). With ``--seconds`` the time is estimated
first, and what does not fit is left out: the placebo, then two seeds. One JSON file per task in
results/stacked_ablation, written after the scan and after the run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from crashes import CRASH, border, table
from provenance import commit, versions
from real.ledger import save
from real_lr import tidy
from stacked_bench import Bench
from stacked_replicas import Column, Method

from hdet.ensemble.controller import Corrected
from lab.runs.placebo import Placebo
from lab.tasks import Task, task_named

RESULTS = Path(__file__).parent / "results" / "stacked_ablation"
SPREAD = 1 / 9
PLAIN, PLACEBO = "plain", "placebo"
METHODS = {
    PLAIN: Method("plain data-parallel", shares=True, spread=0.0),
    "hdet": Method("HDET: shared gradients, spread", True, SPREAD, lambda seed: Corrected()),
    PLACEBO: Method("the same, losses shuffled", True, SPREAD, lambda seed: Placebo(seed)),
    "arms": Method("arms, no spread", shares=False, spread=0.0),
    "arms-spread": Method("arms, spread", shares=False, spread=SPREAD),
}
"""Those that share gradients first."""
_AT_THE_END = 60.0
"""Seconds for making batches and for evaluating, of those that are left."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how long."""

    task: str
    options: dict[str, Any]
    batch: int
    """Samples per replica and step."""
    scan: tuple[float, ...]
    """Peak rates that are tried first."""
    replicas: int = 8
    steps: int = 5000
    every: tuple[int, ...] = (20, 100)
    """T."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    scan_seeds: tuple[int, ...] = (1000, 1001, 1002)

    def make_task(self) -> Task:
        """Its batches are those of all replicas together."""
        together = self.batch * self.replicas
        more = {"horizon": self.steps * together} if self.task == "feed" else {}
        return task_named(self.task, batch_size=together, **more, **self.options)

    def arguments(self) -> dict[str, Any]:
        """As JSON has them."""
        return json.loads(json.dumps(vars(self)))  # type: ignore[no-any-return]


SETTINGS = {
    "feed": Setting("feed", {}, 64, tuple(0.01 * 1.6**k for k in range(8))),
    "text": Setting(
        "text", {"width": 128, "depth": 5, "heads": 4, "context": 64}, 4, tuple(0.003 * 1.8**k for k in range(8))
    ),
}
SMALL: dict[str, dict[str, Any]] = {
    "feed": {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1},
    "text": {"width": 16, "depth": 1, "heads": 2, "context": 16},
}


def small(setting: Setting) -> Setting:
    """The same in miniature."""
    few = {"steps": 40, "every": (4, 10), "replicas": 4, "seeds": (0, 1), "scan_seeds": (1000,), "batch": 4}
    return replace(setting, options=SMALL[setting.task], scan=setting.scan[2:7:2], **few)


def columns_of(setting: Setting, rates: Sequence[float], rows: Sequence[str]) -> list[Column]:
    """Every row at every T and rate; plain training, which never meets, only once for all T."""
    found = [
        Column(key, METHODS[key], every, rate)
        for key in rows
        for every in (setting.every[:1] if METHODS[key].is_plain else setting.every)
        for rate in rates
    ]
    return sorted(found, key=lambda column: not column.method.shares)


# A file per task -----------------------------------------------------------------------------------------------------


def file_of(folder: Path, setting: Setting, device: torch.device) -> tuple[Path, dict[str, Any]]:
    """The task's file, and what it has if it was made with the same arguments."""
    path = folder / f"{setting.task}.json"
    there = json.loads(path.read_text()) if path.exists() else {}
    if there.get("arguments") != setting.arguments():
        there = {}
    about = {"task": setting.task, "arguments": setting.arguments(), "crash": CRASH}
    return path, {**there, **about, "versions": versions(device), "commit": commit()}


def scan(bench: Bench, setting: Setting, path: Path, content: dict[str, Any]) -> None:
    """Plain training at every rate of the grid: a run is one replica with the whole batch."""
    columns = [Column(PLAIN, METHODS[PLAIN], setting.every[0], rate) for rate in setting.scan]
    trained = bench.train(columns, setting.scan_seeds, 1, setting.steps)
    reference = bench.reference()
    rows = trained.results(reference, setting.scan_seeds)
    rates = border([row["rate"] for row in rows], [row["summary"]["crashed"] / len(row["seeds"]) for row in rows])
    about = {"steps": trained.steps, "ms_a_step": 1000 * trained.seconds, "rows": rows, "border": list(rates)}
    content.update(reference=reference, scan=about)
    save(path, content)
    for row in rows:
        losses = ", ".join(f"{loss:.4f}" for loss in row["loss"])
        print(f"{setting.task}: rate {row['rate']:.4g}: {losses}, crashed {row['summary']['crashed']}", flush=True)
    print(f"{setting.task}: border {rates}, the best constant prediction {reference:.4f}", flush=True)


def fitting(bench: Bench, setting: Setting, rates: Sequence[float], rows: Sequence[str]) -> tuple[list[str], int]:
    """The rows and how many seeds, cut to the time that is left: first the placebo goes, then two seeds."""
    if bench.until == math.inf:
        return list(rows), len(setting.seeds)
    columns = columns_of(setting, rates, rows)
    whole = bench.seconds_of(columns, setting.seeds, setting.replicas, setting.steps)
    tidy()
    left = bench.until - time.time() - _AT_THE_END
    few = [row for row in rows if row != PLACEBO]
    plans = [(list(rows), len(setting.seeds)), (few, len(setting.seeds)), (few, max(1, len(setting.seeds) - 2))]
    needs = [
        whole * len(columns_of(setting, rates, some)) * seeds / (len(columns) * len(setting.seeds))
        for some, seeds in plans
    ]
    chosen = next((plan for plan, need in zip(plans, needs, strict=True) if need < left), plans[-1])
    seconds = ", ".join(f"{need:.0f}" for need in needs)
    print(
        f"{setting.task}: {left:.0f} s left, plans need {seconds}; {','.join(chosen[0])}, {chosen[1]} seeds", flush=True
    )
    return chosen


def ablate(
    bench: Bench, setting: Setting, rates: Sequence[float], rows: Sequence[str], path: Path, content: dict[str, Any]
) -> None:
    """Every row at some rates."""
    kept, count = fitting(bench, setting, rates, rows)
    columns, seeds = columns_of(setting, rates, kept), setting.seeds[:count]
    trained = bench.train(columns, seeds, setting.replicas, setting.steps)
    reference = bench.reference()
    content.update(
        reference=reference,
        parameters=trained.stack.theta.shape[-1],
        steps=trained.steps,
        complete=trained.steps == setting.steps,
        runs_at_once=len(columns) * len(seeds),
        ms_a_step=1000 * trained.seconds,
        rows=trained.results(reference, seeds),
    )
    save(path, content)
    print(table(content), flush=True)


# The command line ----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(SETTINGS), help=f"some of {','.join(SETTINGS)}")
    parser.add_argument("--rows", default=",".join(METHODS), help=f"some of {','.join(METHODS)}")
    parser.add_argument("--scan", action="store_true", help="look for the border, and no more")
    parser.add_argument("--rates", help="peak rates instead of those at the border, several by commas")
    parser.add_argument("--steps", type=int, help="of every run, instead of 5000")
    parser.add_argument("--seeds", type=int, help="how many, instead of 5")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="everything in miniature; needs --results of its own")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    parser.add_argument("--seconds", type=float, help="end runs after so many seconds; their results say so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-fused", action="store_true", help="do not compile Adam")
    given = parser.parse_args(words)
    if given.table:
        for path in sorted(given.results.glob("*.json")):
            print(table(json.loads(path.read_text())))
        return
    names, rows = given.tasks.split(","), given.rows.split(",")
    if not {*names} <= {*SETTINGS}:
        parser.error(f"--tasks must be some of {','.join(SETTINGS)}, but got {given.tasks}")
    if not {*rows} <= {*METHODS}:
        parser.error(f"--rows must be some of {','.join(METHODS)}, but got {given.rows}")
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs --results, a folder of its own: its figures are no results")
    torch.set_num_threads(1)  # batches are made by many threads, each of which works alone
    device, until = torch.device(given.device), time.time() + given.seconds if given.seconds else math.inf
    for name in names:
        setting = small(SETTINGS[name]) if given.quick else SETTINGS[name]
        setting = replace(
            setting, steps=given.steps or setting.steps, seeds=tuple(range(given.seeds or len(setting.seeds)))
        )
        bench = Bench(setting.make_task(), device, not given.no_graph, not given.no_fused, until)
        path, content = file_of(given.results, setting, device)
        if given.scan or ("scan" not in content and not given.rates):
            scan(bench, setting, path, content)
            tidy()
        if not given.scan:
            rates = [float(word) for word in given.rates.split(",")] if given.rates else content["scan"]["border"]
            ablate(bench, setting, rates, [key for key in METHODS if key in rows], path, content)
            tidy()


if __name__ == "__main__":
    main()
