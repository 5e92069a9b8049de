"""Who needs no learning rate? Every row of the table on real data: validation losses at 20 points of every run.

    python lab/experiments/real_lr.py --workloads dev                        # all rows that the files do not have
    python lab/experiments/real_lr.py --workloads dev --rows auto --again
    python lab/experiments/real_lr.py --workloads test --log "final table" --processes 4 --seconds 500
    python lab/experiments/real_lr.py --workloads all --quick --synthetic    # two cores, no data

One JSON file per workload in lab/experiments/results/real/, written after every pass; rows that it has are not run
again, unless ``--again``. Every run of a test workload is logged with date, commit and the reason given. Other people's
packages are optional: `pip install '.[compare]'`, or for a machine without a registry
`pip install --target .packages --no-deps -c constraints.txt dadaptation dog-optimizer mechanic-pytorch momo-opt
parameterfree prodigyopt schedulefree` and ``PYTHONPATH=.packages``. Prodigy with Schedule-Free, ScheduleFree+ and
Schedule-Free around any optimizer are written here (`real/stacked_peers.py`). adamw-calibrated and nadamw-calibrated
need the settings of `real_calibrate.py`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from provenance import commit, library, versions
from real.bench import EVALUATIONS, Bench, evaluated_at
from real.labels import LABELS
from real.ledger import Ledger, log_test_run
from real.processes import run_each
from real.rows import EXTENSIONS, FEW, PASSES, STARTS, Best, Pass, choose, is_on_edge, widened
from real.workloads import SPLITS, WORKLOADS
from stacked import Supply

CHOOSING = (1000, 1001)
RESULTS = Path(__file__).parent / "results" / "real"
OURS = ("auto", "auto-alone", "placebo")
GROUPS = f"{', '.join(SPLITS)}, all"


@dataclass
class Plan:
    """What to run."""

    workloads: list[str]
    rows: list[str]
    folder: Path
    device: torch.device
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    choosing: list[int] = field(default_factory=lambda: list(CHOOSING))
    starts: tuple[float, ...] = STARTS
    few: tuple[float, ...] = FEW
    points: int = 13
    """Of the grid."""
    extensions: int = EXTENSIONS
    """How often it may be widened."""
    evaluations: int = EVALUATIONS
    longest: int | None = None
    """Runs are cut to so many steps."""
    samples: int | None = None
    """Batches are cut to so many samples."""
    synthetic: bool = False
    again: bool = False
    graph: bool = True
    log: str = ""
    """Why workloads of test are run."""
    until: float = float("inf")
    """No pass is begun after this moment."""


class Cut:
    """A task with small batches and a small validation set, for machines without a GPU."""

    def __init__(self, task: Any, samples: int) -> None:
        self._task, self.batch_size = task, samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batch(self, *place: int) -> tuple[torch.Tensor, ...]:
        return tuple(part[: self.batch_size] for part in self._task.batch(*place))

    def validation(self) -> list[tuple[torch.Tensor, ...]]:
        return [tuple(part[: 8 * self.batch_size] for part in self._task.validation()[0])]


class Workbench:
    """The benches of one workload: for choosing, and for scoring. Batches are made when they are first needed."""

    def __init__(self, plan: Plan, workload: Any) -> None:
        self._plan, self._workload = plan, workload
        self.steps = min(workload.steps, plan.longest or workload.steps)
        task = workload.task(synthetic=plan.synthetic)
        self.task = task if plan.samples is None else Cut(task, plan.samples)

    @cached_property
    def choosing(self) -> Bench:
        return self._bench(self._plan.choosing)

    @cached_property
    def scoring(self) -> Bench:
        return self._bench(self._plan.seeds)

    def _bench(self, seeds: Sequence[int]) -> Bench:
        plan, workload = self._plan, self._workload
        began = time.perf_counter()
        supply = Supply(self.task, seeds, self.steps, plan.device)
        print(f"{workload.name} batches: {time.perf_counter() - began:.1f} s", flush=True)
        how = (plan.device, plan.graph, plan.evaluations)
        return Bench(self.task, workload.optimizer, workload.customary, self.steps, seeds, supply, *how)


def run_workload(plan: Plan, workload: Any) -> Ledger:
    """The grid, then the passes of which the file lacks rows."""
    bench = Workbench(plan, workload)
    ledger = Ledger(plan.folder / f"{workload.name}.json", _head(plan, workload, bench))
    wanted = _all_wanted(plan, workload, ledger)
    if "best" not in ledger.content:
        if time.time() > plan.until:
            return ledger
        began = time.perf_counter()
        ledger.content.update(choose(bench.choosing, plan.points, plan.extensions))
        ledger.content["initial"] = bench.scoring.initial()
        ledger.save()
        tidy()
        print(f"{workload.name} grid: {time.perf_counter() - began:.1f} s, {ledger.content['best']}", flush=True)
    elif plan.extensions and is_on_edge(ledger.content["grid"]) and time.time() <= plan.until:
        was = ledger.content["best"]["rate"]
        ledger.content.update(widened(bench.choosing, ledger.content))
        ledger.content["grid"]["widened"] = versions(plan.device)
        if ledger.content["best"]["rate"] != was:
            print(f"{workload.name}: the best rate is another, so that all rows begin anew", flush=True)
            ledger.content["rows"] = {}
            wanted = _all_wanted(plan, workload, ledger)
        ledger.save()
        tidy()
    chosen = ledger.content["best"]
    best = Best(chosen["rate"], chosen.get("schedulefree"))
    for number, one in enumerate(PASSES):
        if wanted[number] and time.time() <= plan.until:
            began = time.perf_counter()
            _run_pass(plan, ledger, one, bench.scoring, best, wanted[number])
            ledger.save()
            tidy()
            print(f"{workload.name} {', '.join(wanted[number])}: {time.perf_counter() - began:.1f} s", flush=True)
    return ledger


def _run_pass(plan: Plan, ledger: Ledger, one: Pass, bench: Bench, best: Best, wanted: list[str]) -> None:
    for name, outcome in one.run(bench, best, plan.starts, plan.few, wanted).items():
        if isinstance(outcome, str):
            ledger.skip(name, outcome)
            print(f"{name}: {outcome}", flush=True)
        else:
            more = {"commit": commit(), **({"library": library()} if name in OURS else {})}
            ledger.add(name, outcome, best.rate, more)


def _all_wanted(plan: Plan, workload: Any, ledger: Ledger) -> dict[int, list[str]]:
    """By pass; if any are of a workload of test, that is logged first."""
    wanted = {number: _wanted(plan, ledger, one) for number, one in enumerate(PASSES)}
    if workload.split == "test" and not plan.synthetic and any(wanted.values()):
        log_test_run(plan.folder, workload.name, [name for rows in wanted.values() for name in rows], plan.log)
    return wanted


def _wanted(plan: Plan, ledger: Ledger, one: Pass) -> list[str]:
    """Rows of a pass that are asked for and not there."""
    found = []
    for name in one.rows:
        if name not in plan.rows:
            continue
        if plan.again or name not in ledger:
            found.append(name)
        elif name in OURS and ledger.content["rows"][name].get("library") != library():
            print(f"{ledger.path.stem} {name} is of another version of the library: see --again", flush=True)
    return found


def _head(plan: Plan, workload: Any, bench: Workbench) -> dict[str, Any]:
    arguments = {
        "steps": bench.steps,
        "seeds": plan.seeds,
        "choosing": plan.choosing,
        "points": plan.points,
        "starts": plan.starts,
        "few": plan.few,
        "evaluations": plan.evaluations,
        "samples": plan.samples,
        "synthetic": plan.synthetic,
        "optimizer": workload.optimizer,
        "customary": workload.customary,
    }
    return {
        "workload": workload.name,
        "split": workload.split,
        "density": getattr(bench.task, "density", False),
        "arguments": arguments,
        "evaluated": evaluated_at(bench.steps, plan.evaluations),
        "versions": versions(plan.device),
    }


def tidy() -> None:
    """Give a pass's graphs and tensors back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The command line ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="dev", help=f"{GROUPS} or names")
    parser.add_argument("--rows", help=f"some of {','.join(LABELS)}")
    parser.add_argument("--results", type=Path, help="folder of the JSON files, default lab/experiments/results/real")
    parser.add_argument("--seeds", type=int, help="that score, default 3; quick: 1")
    parser.add_argument("--points", type=int, help="of the grid, default 13; quick: 3")
    parser.add_argument("--steps", type=int, help="cut runs to so many steps; quick: 60")
    parser.add_argument("--again", action="store_true", help="run rows again that the files have")
    parser.add_argument("--synthetic", action="store_true", help="stand-ins of the same shapes instead of data")
    parser.add_argument("--quick", action="store_true", help="short runs, few seeds and starts, for two cores")
    parser.add_argument("--seconds", type=float, help="begin no pass after so many seconds")
    parser.add_argument("--processes", type=int, default=1, help="workloads at a time, a process each")
    parser.add_argument("--log", default="", help="why workloads of test are run; needed for them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    return parser


def named(words: str, known: dict[str, Any]) -> list[str]:
    """The workloads that splits and names stand for, each once."""
    groups = {split: [name for name, w in known.items() if w.split == split] for split in SPLITS}
    groups["all"] = list(known)
    return list(dict.fromkeys(name for word in words.split(",") for name in groups.get(word, [word])))


def parsed(words: list[str] | None = None, known: dict[str, Any] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The command line."""
    parser = _parser()
    given = parser.parse_args(words)
    known = known if known is not None else WORKLOADS
    names = named(given.workloads, known)
    rows = given.rows.split(",") if given.rows else list(LABELS)
    if not {*names} <= {*known}:
        parser.error(f"--workloads must be {GROUPS} or some of {','.join(known)}, but got {given.workloads}")
    if not {*rows} <= {*LABELS}:
        parser.error(f"--rows must be some of {','.join(LABELS)}, but got {given.rows}")
    if not given.synthetic and not given.log and any(known[name].split == "test" for name in names):
        parser.error('workloads of test are run for a reason, which is logged: add --log "why"')
    quick = given.quick
    folder = given.results or (RESULTS.with_name("real_quick") if quick or given.synthetic else RESULTS)
    plan = Plan(
        workloads=sorted(names, key=lambda name: -known[name].steps),  # the longest first: processes end together
        rows=rows,
        folder=folder,
        device=torch.device(given.device),
        seeds=list(range(given.seeds or (1 if quick else 3))),
        choosing=list(CHOOSING[:1] if quick else CHOOSING),
        starts=(1e-2, 1.0, 100.0) if quick else STARTS,
        few=(1e-2, 1.0) if quick else FEW,
        points=given.points or (3 if quick else 13),
        extensions=0 if quick else EXTENSIONS,
        evaluations=4 if quick else EVALUATIONS,
        longest=given.steps or (60 if quick else None),
        samples=8 if quick else None,
        synthetic=given.synthetic,
        again=given.again,
        graph=not given.no_graph,
        log=given.log,
        until=time.time() + given.seconds if given.seconds else float("inf"),
    )
    return plan, given


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    plan, given = parsed(words)
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far

    def one(name: str) -> None:
        print(run_workload(plan, WORKLOADS[name]).path, flush=True)
        tidy()

    run_each(Path(__file__).resolve(), words, plan.workloads, given.processes, plan.until, one)


if __name__ == "__main__":
    main()
