"""What does the rule behind ``max_lr="auto"`` lose with each of its numbers changed?

    python lab/experiments/real_lr.py --workloads dev,kin --rows onecycle --processes 10     # first: the best rates
    python lab/experiments/ablation.py --processes 10 --seconds 500                          # dev, kin and the zoo
    python lab/experiments/ablation.py --workloads dev,zoo/line/adam/100 --variants "backoff=2,max_growth=3"
    python lab/experiments/ablation.py --table

A variant is the rule with one number changed, or a control. All variants of a problem train as rows of one stack, from
a thousandth of the best fixed rate, beside a run at that rate. One small JSON file per problem in results/ablation;
variants that it has are not run again, unless ``--again`` or the rule has changed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from auto_runs import AutoRuns, Run
from provenance import commit, library
from real.bench import Validator
from real.ledger import best_rate as fixed_rate
from real.ledger import save
from real.optimizers import update_of
from real.processes import in_processes, without
from real.score import scored_by
from real.targets import APART
from real.workloads import SPLITS, WORKLOADS
from real_lr import RESULTS as REAL
from real_lr import tidy
from stacked import Optimizer, Stack, Supply
from variants import AS_IT_IS, VARIANTS, run_of
from zoo import LENGTHS, best_rate
from zoo_problems import OPTIMIZERS, PROBLEMS
from zoo_stack import UPDATES, ZooTask

RESULTS = Path(__file__).parent / "results" / "ablation"
ZOO = Path(__file__).parent / "results" / "zoo.json"
SEEDS = (0, 1, 2)
START = 1e-3
"""The guess over the best rate."""
TOGETHER = 10
"""Small problems that a process trains, one after the other."""


# Problems ------------------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """What the variants are tried on."""

    name: str
    group: str
    """The column of the table."""
    steps: int
    rate: float
    """The best fixed one."""
    build: Callable[[], Any]
    """The task."""
    update: Callable[[Stack], Optimizer]


def problem_of(name: str, real: Path = REAL, zoo: Path = ZOO) -> Problem:
    """A workload, or ``zoo/PROBLEM/OPTIMIZER/STEPS``, and its best rate."""
    if name.startswith("zoo/"):
        _, problem, optimizer, steps = name.split("/")
        rate = best_rate(json.loads(zoo.read_text()), problem, optimizer, int(steps))
        build, update = lambda: ZooTask(problem), lambda stack: UPDATES[optimizer](stack.theta)
        return Problem(name, f"zoo {steps}", int(steps), rate, build, update)
    workload = WORKLOADS[name]
    group = "apart" if name in APART else "dev and kin" if workload.split in ("dev", "kin") else workload.split
    update = lambda stack: update_of(workload.optimizer, stack)  # noqa: E731
    return Problem(name, group, workload.steps, fixed_rate(real, name), workload.task, update)


def named(words: str) -> list[str]:
    """The problems that splits, zoo and names stand for, each once, the longest first: processes end together."""
    groups = {split: [name for name, w in WORKLOADS.items() if w.split == split] for split in SPLITS if split != "test"}
    zoo = {length: [f"zoo/{p}/{o}/{length}" for p in PROBLEMS for o in OPTIMIZERS] for length in LENGTHS}
    groups |= {"zoo": [name for names in zoo.values() for name in names]}
    groups |= {f"zoo{length}": names for length, names in zoo.items()}
    found = dict.fromkeys(name for word in words.split(",") for name in groups.get(word, [word]))
    known = {name for names in groups.values() for name in names}
    if unknown := [name for name in found if name not in known]:
        rule = f"--workloads must be {', '.join(groups)} or names of these; test is for judging"
        raise SystemExit(f"{rule}, but got {','.join(unknown)}")
    return sorted(found, key=lambda name: -WORKLOADS[name].steps if name in WORKLOADS else 0)


def bundled(names: Sequence[str]) -> list[str]:
    """Lists for processes: a workload each, the small problems ten together.

    >>> bundled(["sorting", *(f"zoo/{n}" for n in range(11))])[::2]
    ['sorting', 'zoo/10']
    """
    small = [name for name in names if name.startswith("zoo/")]
    bundles = [",".join(small[first : first + TOGETHER]) for first in range(0, len(small), TOGETHER)]
    return [*(name for name in names if name not in small), *bundles]


# Running -------------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """How to run."""

    variants: list[str]
    folder: Path
    device: torch.device
    seeds: tuple[int, ...] = SEEDS
    start: float = START
    again: bool = False
    graph: bool = True


def run_problem(plan: Plan, problem: Problem) -> dict[str, Any]:
    """The variants that the file lacks, all at once, and the run at the best rate."""
    path = plan.folder / f"{problem.name.replace('/', '_')}.json"
    head = {
        "problem": problem.name,
        "group": problem.group,
        "steps": problem.steps,
        "rate": float(f"{problem.rate:.6g}"),
        "start": plan.start,
        "seeds": list(plan.seeds),
        "library": library(),
    }
    there = json.loads(path.read_text()) if path.exists() else {}
    content = there if {name: there.get(name) for name in head} == head else {**head, "variants": {}}
    wanted = [name for name in plan.variants if plan.again or name not in content["variants"]]
    if wanted:
        found = trained(plan, problem, wanted)
        variants = {**content["variants"], **found.pop("variants")}
        save(path, {**content, **found, "commit": commit(), "variants": variants})
    return dict(json.loads(path.read_text()))


def trained(plan: Plan, problem: Problem, variants: Sequence[str]) -> dict[str, Any]:
    """Final losses of every variant, found rates over the best one, and how often weights were rolled back."""
    task = problem.build()
    began = time.perf_counter()
    fixed = [Run(problem.steps, problem.rate, searches=False) for _ in plan.seeds]
    others = [[run_of(v, problem.steps, plan.start * problem.rate, seed) for v in variants] for seed in plan.seeds]
    runs = [[one, *row] for one, row in zip(fixed, others, strict=True)]
    supply = Supply(task, plan.seeds, problem.steps, plan.device)
    initial, losses = losses_of(problem, task, plan.seeds, supply, runs, plan.device, plan.graph)
    rows = {
        name: {
            "losses": losses[1 + k],
            "found": [float(f"{row[k].found / problem.rate:.3g}") for row in others],
            "rolled_back": sum(row[k].rolled_back for row in others),
        }
        for k, name in enumerate(variants)
    }
    about = {"density": getattr(task, "density", False), "initial": initial, "fixed": losses[0]}
    return {**about, "seconds": round(time.perf_counter() - began, 1), "variants": rows}


def losses_of(
    problem: Problem,
    task: Any,
    seeds: Sequence[int],
    supply: Supply,
    runs: Sequence[Sequence[Run]],
    device: torch.device,
    graph: bool = True,
    after: Callable[[int], None] | None = None,
) -> tuple[float, list[list[float]]]:
    """Train ``runs[seed][column]`` to their end: the first weights' loss, and the final ones [column][seed].

    ``after(t)``: work between steps.
    """
    stack = Stack(task, seeds, len(runs[0]), device)
    auto_runs = AutoRuns(stack, problem.update(stack), runs)
    first = stack.theta[:, :1]
    initial = Validator(stack, first, graph=False)(first).mean().item()
    step = auto_runs.train_step(supply.batches, graph)
    for t in range(1, runs[0][0].steps + 1):
        step()
        auto_runs.end_rounds(t)
        if after is not None:
            after(t)
    return initial, Validator(stack, stack.theta, graph=False)(stack.theta).T.tolist()


# The table -----------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A variant on a group of problems."""

    mean: float
    """Final loss over that of the best fixed rate, geometric mean over problems."""
    worst: float
    difference: float
    """Of the logarithm to the rule as it is, mean over problems."""
    error: float
    """Its standard error."""

    @property
    def mark(self) -> str:
        """What is beyond two standard errors."""
        if not abs(self.difference) > 2 * self.error:
            return ""
        return "worse" if self.difference > 0 else "better"


def scores(content: Mapping[str, Any]) -> dict[str, float]:
    """By variant: the mean over seeds of the log of the final loss over the best fixed rate's.

    A loss counts at most as much as that of the initial weights.

    >>> variants = {"a": {"losses": [1.0, 2.0]}, "b": {"losses": [None, 2.0]}}
    >>> scores({"initial": 4.0, "fixed": [1.0, 2.0], "variants": variants})
    {'a': 0.0, 'b': 0.6931471805599453}
    """
    scored = scored_by(content)
    most = scored(content["initial"])
    return {
        name: fmean(
            math.log(min(scored(loss), most) / min(scored(best), most))
            for loss, best in zip(row["losses"], content["fixed"], strict=True)
        )
        for name, row in content["variants"].items()
    }


def table_of(contents: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Cell]]:
    """By variant and group of problems."""
    found: dict[str, dict[str, Cell]] = {}
    for group in sorted({content["group"] for content in contents}):
        logs = [scores(content) for content in contents if content["group"] == group]
        for variant in dict.fromkeys(name for row in logs for name in row):
            own = [row[variant] for row in logs if variant in row]
            pairs = [row[variant] - row[AS_IT_IS] for row in logs if variant in row and AS_IT_IS in row]
            difference = fmean(pairs) if pairs else math.nan
            error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
            cell = Cell(math.exp(fmean(own)), math.exp(max(own)), difference, error)
            found.setdefault(variant, {})[group] = cell
    return found


def markdown(table: Mapping[str, Mapping[str, Cell]], counts: Mapping[str, int]) -> str:
    """A line per variant: for each group of problems mean and worst, and the difference to the rule as it is."""
    heads = [f"{group} ({count}): mean, worst | log to as it is" for group, count in counts.items()]
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " ---: | --- |" * len(counts)]
    for variant in [name for name in VARIANTS if name in table]:
        lines.append(f"| {variant} | {' | '.join(_shown(variant, table[variant].get(group)) for group in counts)} |")
    return "\n".join(lines)


def _shown(variant: str, cell: Cell | None) -> str:
    if cell is None:
        return " | "
    level = f"{cell.mean:.3f}, {cell.worst:.2f}"
    if variant == AS_IT_IS:
        return f"{level} | "
    error = "" if math.isnan(cell.error) else f" ± {cell.error:.4f}"
    return f"{level} | {cell.difference:+.4f}{error} {cell.mark}".rstrip()


def show(folder: Path) -> str:
    """What the files say."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    groups = [content["group"] for content in contents]
    return markdown(table_of(contents), {group: groups.count(group) for group in sorted({*groups})})


# The command line ----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="dev,kin,zoo", help="dev, kin, seen, zoo, zoo100, zoo400 or names")
    parser.add_argument("--variants", help=f"some of {','.join(VARIANTS)}")
    parser.add_argument("--start", type=float, default=START, help="the guess over the best rate; with --results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="run variants again that the files have")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    parser.add_argument("--processes", type=int, default=1, help="problems at a time, a process each")
    parser.add_argument("--seconds", type=float, help="begin no problem after so many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(words)
    variants = given.variants.split(",") if given.variants else list(VARIANTS)
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants must be some of {','.join(VARIANTS)}, but got {','.join(unknown)}")
    if given.table:
        print(show(given.results))
        return
    names = named(given.workloads)
    problems = [problem_of(name) for name in names]  # whether their rates are known, before minutes pass
    until = time.time() + given.seconds if given.seconds else math.inf
    if given.processes > 1:
        own = without(words, "--processes", "--workloads", "--seconds")
        sys.exit(in_processes(Path(__file__).resolve(), own, bundled(names), given.processes, until))
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    plan = Plan(variants, given.results, torch.device(given.device), start=given.start, again=given.again)
    for problem in problems:
        if time.time() > until:
            print(f"{problem.name}: no time left", flush=True)
            continue
        content = run_problem(plan, problem)
        print(f"{problem.name}: {content['seconds']} s", flush=True)
        tidy()


if __name__ == "__main__":
    main()
