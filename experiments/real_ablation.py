"""What does the rule behind ``max_lr="auto"`` lose without each of its parts? On real data.

    python experiments/real_lr.py --workloads dev --rows onecycle        # first: the best rates, and what they reach
    python experiments/real_ablation.py --processes 4 --seconds 500      # four short workloads of dev
    python experiments/real_ablation.py --workloads dev --variants "HEED=0.5,never raised"
    python experiments/real_ablation.py --table

A variant is the rule with some of its constants changed; it trains from a thousandth and from a hundred times the best
rate. One JSON file per workload, ablation_NAME.json beside those of real_lr.py, written after every variant; variants
that it has are not run again, unless ``--again`` or the library has changed. All options of real_lr.py but ``--rows``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from provenance import commit, library, versions
from real.bench import Bench, Outcome
from real.ledger import Ledger
from real.processes import in_processes, without
from real.rows import Best, auto
from real.score import TUNED, scored_by, table_of
from real.workloads import WORKLOADS
from real_lr import Plan, Workbench, parsed, tidy

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto import rounds

SHORT = ("shakespeare-gru", "mnist-resnet-noisy", "adult-widedeep", "shakespeare-gpt")
"""Workloads of dev that take seconds."""
STARTS = (1e-3, 100.0)
AS_IT_IS = "as it is"
VARIANTS: dict[str, dict[str, float]] = {
    AS_IT_IS: {},
    "HEED=0.35": {"HEED": 0.35},
    "HEED=0.5": {"HEED": 0.5},
    "HEED=1": {"HEED": 1.0},
    "FASTEST=1.5": {"FASTEST": 1.5},
    "FASTEST=3": {"FASTEST": 3.0},
    "RISE=0": {"RISE": 0.0},
    "RISE=0.5": {"RISE": 0.5},
    "RISE=1": {"RISE": 1.0},
    "LEAST_RISE=0.1": {"LEAST_RISE": 0.1},
    "LEAST_RISE=1": {"LEAST_RISE": 1.0},
    "STRAIGHT=0.6": {"STRAIGHT": 0.6},
    "never straight": {"STRAIGHT": math.inf},
    "GROWING=0.1": {"GROWING": 0.1},
    "GROWING=0.3": {"GROWING": 0.3},
    "SHORT=4": {"SHORT": 4},
    "FALLING=0.8": {"FALLING": 0.8},
    "FALLING=0.99": {"FALLING": 0.99},
    "never too hot": {"WORSE": math.inf, "RUINED": math.inf},
    "too hot at once only": {"WORSE": 0.25, "RUINED": 0.25},
    "too hot sooner": {"WORSE": 0.05, "RUINED": 0.1},
    "SLOWER=2": {"SLOWER": 2.0},
    "SLOWER=10": {"SLOWER": 10.0},
    "RELATIVE_STEP=1e-4": {"RELATIVE_STEP": 1e-4},
    "RELATIVE_STEP=1e-3": {"RELATIVE_STEP": 1e-3},
    "RELATIVE_STEP=4e-3": {"RELATIVE_STEP": 4e-3},
    "IDLE=1": {"IDLE": 1},
    "IDLE=3": {"IDLE": 3},
    "never halved": {"IDLE": math.inf},
    "JUDGED=2": {"JUDGED": 2},
    "JUDGED=8": {"JUDGED": 8},
    "HEARD=4": {"HEARD": 4},
    "HEARD=16": {"HEARD": 16},
    "all heard": {"HEARD": math.inf},
    "never restarted": {"TOO_FAR": math.inf},
    "never raised": {"HEED": 1e-9, "STRAIGHT": math.inf},
}
"""Constants that are changed, by name. The last is the control: the rule without its signal."""


@contextmanager
def changed(values: Mapping[str, float]) -> Iterator[None]:
    """The rule with other constants inside."""
    was = {name: getattr(c, name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(was)


def _set(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        setattr(c, name, value)
    rounds._growing_ends.cache_clear()  # ends of rounds follow from constants


# Running -------------------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What real_lr.py knows of a workload."""

    rate: float
    """The best fixed one."""
    initial: float
    """The loss of the initial weights: none counts more."""
    tuned: list[float]
    """What OneCycle reaches at the best rate, by seed."""


def reference(folder: Path, name: str) -> Reference:
    """From the workload's file."""
    path = folder / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    if "onecycle" not in content["rows"]:
        command = f"python experiments/real_lr.py --workloads {name} --rows onecycle"
        raise SystemExit(f"{path} must have the best rate and its row of OneCycle, but has not. Run first: {command}")
    table = table_of(content)
    finals = [min(curve[-1], table.initial) for curve in table.methods[TUNED][1.0]]
    return Reference(content["best"]["rate"], table.initial, finals)


def run_workload(plan: Plan, workload: Any, variants: Sequence[str]) -> Ledger:
    """The variants that the file lacks, one after the other."""
    known = reference(plan.folder, workload.name)
    if len(known.tuned) < len(plan.seeds):
        raise SystemExit(f"OneCycle must have {len(plan.seeds)} seeds, but {workload.name} has {len(known.tuned)}")
    workbench = Workbench(replace(plan, evaluations=1), workload)
    ledger = Ledger(plan.folder / f"ablation_{workload.name}.json", _head(plan, workload, workbench, known))
    wanted = [name for name in variants if plan.again or name not in ledger]
    for number, name in enumerate(wanted, 1):
        if time.time() > plan.until:
            print(f"{workload.name}: no time left for {', '.join(wanted[number - 1 :])}", flush=True)
            break
        began = time.perf_counter()
        outcome = run_variant(workbench.scoring, known.rate, name)
        ledger.add(name, name, outcome, known.rate, {"constants": VARIANTS[name], "commit": commit()})
        ledger.save()
        tidy()
        ratio = math.exp(fmean(cells(ledger.content, known)[name].values()))
        seconds = time.perf_counter() - began
        print(f"{workload.name} {number}/{len(wanted)} {name}: {ratio:.3f}, {seconds:.1f} s", flush=True)
    return ledger


def run_variant(bench: Bench, rate: float, name: str) -> Outcome:
    """The rule with a variant's constants, from both starts."""
    with changed(VARIANTS[name]):
        found = auto(bench, Best(rate, None), STARTS, STARTS, ["auto"])["auto"]
    assert isinstance(found, Outcome)  # a text is for rows whose package is missing
    return found


def _head(plan: Plan, workload: Any, bench: Workbench, known: Reference) -> dict[str, Any]:
    arguments = {
        "steps": bench.steps,
        "seeds": plan.seeds,
        "starts": STARTS,
        "rate": known.rate,
        "samples": plan.samples,
        "synthetic": plan.synthetic,
        "optimizer": workload.optimizer,
        "library": library(),
    }
    density = getattr(bench.task, "density", False)
    head = {"workload": workload.name, "split": workload.split, "density": density, "arguments": arguments}
    return {**head, "evaluated": [bench.steps], "versions": versions(plan.device)}


# The table -----------------------------------------------------------------------------------------------------------

Cell = tuple[str, float, int]
"""Workload, start, seed."""


class Line(NamedTuple):
    """One variant."""

    name: str
    ratio: float
    """Of final losses to the tuned OneCycle's of the same seed: geometric mean over runs."""
    worst: float
    runs: int
    difference: float
    """Mean of log(final loss over that of the rule as it is), run by run."""
    error: float
    """Its standard error."""

    @property
    def mark(self) -> str:
        """What is beyond two standard errors."""
        if not abs(self.difference) > 2 * self.error:
            return ""
        return "worse" if self.difference > 0 else "better"


def cells(content: Mapping[str, Any], known: Reference) -> dict[str, dict[Cell, float]]:
    """By variant: log of each run's final loss over the tuned OneCycle's, as scored."""
    scored = scored_by(content)

    def log_ratio(loss: float | None, seed: int) -> float:
        return math.log(min(scored(loss), known.initial) / known.tuned[seed])

    return {
        name: {
            (content["workload"], cell["start"], seed): log_ratio(curve[-1], seed)
            for cell in row["starts"]
            for seed, curve in enumerate(cell["curves"])
        }
        for name, row in content["rows"].items()
    }


def lines_of(found: Mapping[str, Mapping[Cell, float]]) -> list[Line]:
    """The best first; differences over the runs that the rule as it is has too.

    >>> runs = [("text", 1.0, seed) for seed in range(2)]
    >>> found = {AS_IT_IS: dict.fromkeys(runs, 0.0), "other": dict(zip(runs, (0.1, 0.4)))}
    >>> [(line.name, round(line.difference, 3), round(line.error, 3), line.mark) for line in lines_of(found)]
    [('as it is', 0.0, 0.0, ''), ('other', 0.25, 0.15, '')]
    """
    base = found.get(AS_IT_IS, {})
    lines = []
    for name, row in found.items():
        differences = [value - base[cell] for cell, value in row.items() if cell in base]
        difference = fmean(differences) if differences else math.nan
        error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        ratio, worst = math.exp(fmean(row.values())), math.exp(max(row.values()))
        lines.append(Line(name, ratio, worst, len(row), difference, error))
    return sorted(lines, key=lambda line: line.ratio)


def markdown(lines: Sequence[Line]) -> str:
    """One line per variant."""
    head = "| | ratio | worst | runs | log, to as it is | standard error | |\n| --- |" + " ---: |" * 5 + " --- |"
    rows = [
        f"| {line.name} | {line.ratio:.3f} | {line.worst:.2f} | {line.runs} | "
        + (" | |" if line.name == AS_IT_IS else f"{line.difference:+.4f} | {line.error:.4f} | {line.mark}")
        + " |"
        for line in lines
    ]
    return "\n".join([head, *rows])


def read(folder: Path, workloads: Sequence[str]) -> dict[str, dict[Cell, float]]:
    """By variant: the runs of all workloads that have a file."""
    found: dict[str, dict[Cell, float]] = {}
    for workload in workloads:
        path = folder / f"ablation_{workload}.json"
        if path.exists():
            content = json.loads(path.read_text())
            for name, row in cells(content, reference(folder, workload)).items():
                found.setdefault(name, {}).update(row)
    return found


# The command line ----------------------------------------------------------------------------------------------------


def asked(words: Sequence[str], known: dict[str, Any] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The command line: own options, and all others as real_lr.py reads them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other options: see real_lr.py.")
    parser.add_argument("--variants", help=f"some of {','.join(VARIANTS)}")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    own, others = parser.parse_known_args(list(words))
    plan, given = parsed(["--workloads", ",".join(SHORT if known is None else known), *others], known)
    given.table, given.variants = own.table, own.variants.split(",") if own.variants else list(VARIANTS)
    known = known if known is not None else WORKLOADS
    if not {*given.variants} <= {*VARIANTS}:
        parser.error(f"--variants must be some of {','.join(VARIANTS)}, but got {own.variants}")
    if tests := [name for name in plan.workloads if known[name].split == "test"]:
        parser.error(
            f"--workloads must not be of test, which is for judging, but got {','.join(tests)}; take dev or kin"
        )
    return plan, given


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    plan, given = asked(words)
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    if given.table:
        print(markdown(lines_of(read(plan.folder, plan.workloads))))
        return
    for name in plan.workloads:
        reference(plan.folder, name)  # whether all are there, before hours pass
    if given.processes > 1:
        own = without(words, "--processes", "--workloads", "--seconds")
        sys.exit(in_processes(Path(__file__).resolve(), own, plan.workloads, given.processes, plan.until))
    for name in plan.workloads:
        print(run_workload(plan, WORKLOADS[name], given.variants).path, flush=True)
        tidy()


if __name__ == "__main__":
    main()
