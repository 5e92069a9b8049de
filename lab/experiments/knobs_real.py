"""Do arms find a knob's value while they train? Weight decay, dropout and others on little data, against a grid.

    python lab/experiments/knobs_real.py --workloads real --rows plain --arms 4        # the grid and the guesses first
    python lab/experiments/knobs_real.py --workloads dropout,beta2 --rows normalised,placebo --arms 8 --seconds 500
    python lab/experiments/knobs_real.py --workloads mini --arms 4                     # digits, for two cores
    python lab/experiments/knobs_real.py --table                                       # PASS or MISS

One JSON file per workload in lab/experiments/results/knobs_real/, written after every pass; rows that it has with the
seeds asked for are not run again, unless ``--again``. The grid is chosen on other seeds than those that score.
Validation is without the regulariser. All rows see as many samples; probes, which only arms have, are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from knobs.rows import METHODS, PLAIN, STARTS, Row, bench_of, choose, explored, plain
from knobs.score import ENOUGH, Cell, matters, meets, score
from knobs.stack import KnobBench
from knobs.workloads import MINI, REAL, WORKLOADS, KnobWorkload
from provenance import commit, versions
from real.ledger import Ledger
from real.processes import run_each
from real_lr import tidy

CHOOSING = (1000, 1001)
RESULTS = Path(__file__).parent / "results" / "knobs_real"
GROUPS = {"real": [w.name for w in REAL], "mini": [w.name for w in MINI]}
ROWS = (PLAIN, *METHODS)


@dataclass
class Plan:
    """What to run."""

    workloads: list[str]
    rows: list[str]
    arms: list[int]
    seeds: list[int]
    folder: Path
    device: torch.device
    points: int = 9
    """Of the grid."""
    longest: int | None = None
    """Runs are cut to so many steps."""
    evaluations: int = 10
    """Of a run."""
    synthetic: bool = False
    again: bool = False
    graph: bool = True
    until: float = float("inf")
    """No pass is begun after this moment."""


class Workbench:
    """The benches of one workload: for the grid, and for scoring. Batches are made when they are first needed."""

    def __init__(self, plan: Plan, workload: KnobWorkload) -> None:
        self._plan, self.workload = plan, workload
        self.steps = min(workload.steps, plan.longest or workload.steps)

    @cached_property
    def choosing(self) -> KnobBench:
        return self._bench(CHOOSING)

    @cached_property
    def scoring(self) -> KnobBench:
        return self._bench(self._plan.seeds)

    def _bench(self, seeds: Sequence[int]) -> KnobBench:
        plan = self._plan
        how = {"device": plan.device, "graph": plan.graph, "evaluations": plan.evaluations}
        return bench_of(self.workload, seeds, self.steps, plan.synthetic, how)


def run_workload(plan: Plan, workload: KnobWorkload) -> Ledger:
    """The grid, plain training from the guesses, then the rows of arms that the file lacks."""
    bench = Workbench(plan, workload)
    ledger = Ledger(plan.folder / f"{workload.name}.json", _head(plan, workload, bench.steps))

    def late() -> bool:
        return time.time() > plan.until

    if "best" not in ledger.content and not late():
        began = time.perf_counter()
        ledger.content.update(choose(bench.choosing, plan.points))
        ledger.save()
        tidy()
        print(f"{workload.name} grid: {time.perf_counter() - began:.1f} s, {ledger.content['best']}", flush=True)
    if "best" not in ledger.content:
        return ledger
    best = ledger.content["best"]["value"]
    guesses = [workload.knob.times(best, start) for start in STARTS]
    if _missing(plan, ledger, PLAIN, PLAIN) and not late():
        _keep(plan, ledger, {PLAIN: plain(bench.scoring, guesses)}, "plain, the guess")
    for arms in plan.arms:
        wanted = [name for name in METHODS if _missing(plan, ledger, name, f"{name}/{arms}")]
        if wanted and not late():
            found = explored(bench.scoring, guesses, wanted, arms)
            _keep(plan, ledger, {f"{name}/{arms}": row for name, row in found.items()})
    return ledger


def _missing(plan: Plan, ledger: Ledger, name: str, key: str) -> bool:
    """Whether a row is asked for and not there with these seeds."""
    there = ledger.content["rows"].get(key, {"seeds": []})["seeds"]
    return name in plan.rows and (plan.again or not {*plan.seeds} <= {*there})


def _keep(plan: Plan, ledger: Ledger, found: dict[str, Row], label: str = "") -> None:
    for key, row in found.items():
        method = METHODS.get(key.partition("/")[0])
        ledger.content["rows"][key] = {
            "label": method.label if method is not None else label,
            "seeds": plan.seeds,
            "commit": commit(),
            **row._asdict(),
        }
    ledger.save()
    tidy()
    print(f"{ledger.path.stem} {', '.join(found)}: {next(iter(found.values())).seconds:.1f} s", flush=True)


def _head(plan: Plan, workload: KnobWorkload, steps: int) -> dict[str, Any]:
    arguments = {
        "steps": steps,
        "points": plan.points,
        "choosing": CHOOSING,
        "starts": STARTS,
        "rate": workload.rate,
        "optimizer": workload.optimizer,
        "synthetic": plan.synthetic,
        "evaluations": plan.evaluations,
    }
    return {
        "workload": workload.name,
        "knob": workload.knob.name,
        "arguments": arguments,
        "versions": versions(plan.device),
    }


# The table -----------------------------------------------------------------------------------------------------------


def table(folder: Path, names: Sequence[str]) -> list[str]:
    """Lines of Markdown: every row of every file, and which rows meet the target."""
    files = {name: folder / f"{name}.json" for name in names}
    contents = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    lines, met = [], dict[str, list[str]]()
    for name, content in contents.items():
        knob = WORKLOADS[name].knob
        if PLAIN not in content["rows"]:
            continue
        worth = matters(content, knob)
        lines += ["", _title(name, content, worth), "", *_HEADER]
        for key, row in content["rows"].items():
            cells = score(content, key, knob)
            hit = meets(cells)
            if key != PLAIN:
                met.setdefault(key, [])
                met[key] += [name] if hit and worth else []
            lines.append(_line(key, row["label"], cells, hit))
    lines += ["", f"| row | workloads met of {len(contents)} | target {ENOUGH} |", "| --- | --- | --- |"]
    lines += [f"| {key} | {len(on)}: {', '.join(on)} | {_verdict(len(on) >= ENOUGH)} |" for key, on in met.items()]
    return lines[1:]


_HEADER = [
    f"| row | {' | '.join(f'from {start:g}' for start in STARTS)} | values at the end | |",
    f"| --- |{' --- |' * (len(STARTS) + 2)}",
]


def _title(name: str, content: dict[str, Any], worth: bool) -> str:
    value, edge = content["best"]["value"], content["best"]["on_edge"]
    notes = [" on the grid's edge" if edge else "", "" if worth else "; worth less than 5 %: does not count"]
    return f"**{name}**, {content['knob']}, best {value:.3g}{''.join(notes)}"


def _line(key: str, label: str, cells: Sequence[Cell], hit: bool) -> str:
    losses = " | ".join(f"{c.ratio:.3f} ± {c.error:.3f}{'' if c.harmless else ' worse'}" for c in cells)
    values = ", ".join(f"{cell.value:.2g}" for cell in cells)
    return f"| {label} ({key}) | {losses} | {values} | {_verdict(hit)} |"


def _verdict(hit: bool) -> str:
    return "PASS" if hit else "MISS"


# The command line ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="real", help=f"{', '.join(GROUPS)} or some of {','.join(WORKLOADS)}")
    parser.add_argument("--rows", default="all", help=f"all, or some of {','.join(ROWS)}")
    parser.add_argument("--arms", default="4,8", help="K, several by commas")
    parser.add_argument("--seeds", default="0,1,2", help="that score")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--points", type=int, default=9, help="of the grid")
    parser.add_argument("--steps", type=int, help="cut runs to so many steps")
    parser.add_argument("--evaluations", type=int, default=10, help="of a run")
    parser.add_argument("--again", action="store_true", help="run rows again that the files have")
    parser.add_argument("--table", action="store_true", help="print what the files have, and run nothing")
    parser.add_argument("--synthetic", action="store_true", help="stand-ins of the same shapes instead of data")
    parser.add_argument("--seconds", type=float, help="begin no pass after so many seconds")
    parser.add_argument("--processes", type=int, default=1, help="workloads at a time, a process each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    return parser


def parsed(words: list[str] | None = None) -> tuple[Plan, argparse.Namespace]:
    """The command line."""
    parser = _parser()
    given = parser.parse_args(words)
    names = [name for word in given.workloads.split(",") for name in GROUPS.get(word, [word])]
    rows = list(ROWS) if given.rows == "all" else given.rows.split(",")
    if not {*names} <= {*WORKLOADS}:
        parser.error(
            f"--workloads must be {', '.join(GROUPS)} or some of {','.join(WORKLOADS)}, but got {given.workloads}"
        )
    if not {*rows} <= {*ROWS}:
        parser.error(f"--rows must be some of {','.join(ROWS)}, but got {given.rows}")
    arms = [int(word) for word in given.arms.split(",")]
    plan = Plan(
        workloads=list(dict.fromkeys(names)),
        rows=rows,
        arms=arms,
        seeds=[int(word) for word in given.seeds.split(",")],
        folder=given.results,
        device=torch.device(given.device),
        points=given.points,
        longest=given.steps,
        evaluations=given.evaluations,
        synthetic=given.synthetic,
        again=given.again,
        graph=not given.no_graph,
        until=time.time() + given.seconds if given.seconds else float("inf"),
    )
    return plan, given


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    plan, given = parsed(words)
    if given.table:
        print("\n".join(table(plan.folder, plan.workloads)))
        return
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far

    def one(name: str) -> None:
        print(run_workload(plan, WORKLOADS[name]).path, flush=True)
        tidy()

    run_each(Path(__file__).resolve(), words, plan.workloads, given.processes, plan.until, one)


if __name__ == "__main__":
    main()
