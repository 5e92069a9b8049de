"""What does a badly chosen learning rate cost, and who repairs it?

A rate is started at a thousandth to a hundred times the best of a grid. Every row of the table trains from there its
own way: plain schedules, ours, controls, the published method, and what other people propose. Validation loss at the
end, relative to that of the best fixed rate with the better of two schedules, which two seeds of their own chose.

    python experiments/misset_lr.py --task text                     # full and a tenth of the length
    python experiments/misset_lr.py --task digits --optimizer sgd --length short
    python experiments/misset_lr.py --task text --rows auto,placebo --starts 0.001,1,100
    python experiments/misset_lr.py --task digits --quick           # a few minutes on two cores

Runs of a row train together as rows of one tensor (stacked.py), on a GPU if there is one. The JSON file is written
after every row; rows that it has are not run again, unless ``--again``.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import math
import platform
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from misset_bench import Bench, Outcome
from misset_data import Supply
from misset_rows import ROWS, fixed
from misset_shapes import cosine, onecycle
from misset_table import Book, add_row, print_table, summarise

import hdet
from hdet.tasks import task_named

STARTS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
FEW = (1e-2, 1.0, 100.0)
CHOOSING = 1000
"""The first of the seeds that choose; those that score count from 0."""
STEPS = {"text": (1000, 100), "feed": (1000, 100), "digits": (600, 60)}
OPTIONS: dict[str, dict[str, Any]] = {"text": {}, "feed": {"batch_size": 1024}, "digits": {}}
CENTRES = {
    ("text", "adam"): (5e-3, 5e-3),
    ("feed", "adam"): (1e-2, 1.5e-2),
    ("digits", "adam"): (1e-2, 1e-1),
    ("digits", "sgd"): (0.3, 1.0),
}
"""The middle of the grid: of long runs, and of those below 200 steps."""
PACKAGES = ("torch", "numpy", "transformers", "prodigyopt", "dadaptation", "dog-optimizer", "schedulefree")
QUICK: dict[str, dict[str, Any]] = {
    "text": {"width": 32, "depth": 1, "heads": 2, "context": 32, "batch_size": 16},
    "feed": {"users": 256, "items": 256, "history": 4, "width": 8, "depth": 1, "batch_size": 256},
    "digits": {"width": 8, "batch_size": 32},
}
QUICK_STEPS = (120, 40)


@dataclass
class Plan:
    """What to run."""

    task: str
    optimizers: list[str]
    lengths: list[str]
    seeds: list[int]
    rows: list[str]
    path: Path
    device: torch.device
    starts: tuple[float, ...] = STARTS
    choosing: list[int] = field(default_factory=lambda: [CHOOSING, CHOOSING + 1])
    points: int = 9
    """Of the grid."""
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = (0, 0)
    """Full and short."""
    again: bool = False
    graph: bool = True
    compiled: bool = False


def experiment(plan: Plan) -> Book:
    """All tables of a plan."""
    book = Book(plan.path)
    task = task_named(plan.task, **plan.options)
    longest = max(plan.steps[_index(length)] for length in plan.lengths)
    began = time.perf_counter()
    supplies = [Supply(task, seeds, longest, plan.device) for seeds in (plan.choosing, plan.seeds)]
    print(f"batches of {plan.task}: {time.perf_counter() - began:.1f} s", flush=True)
    for length in plan.lengths:
        for optimizer in plan.optimizers:
            steps = plan.steps[_index(length)]
            how = (plan.device, plan.graph, len(plan.seeds) * len(plan.starts) if plan.compiled else 0)
            choosing = Bench(task, optimizer, steps, plan.choosing, supplies[0], *how)
            bench = Bench(task, optimizer, steps, plan.seeds, supplies[1], *how, choosing)
            one_table(plan, book, bench, length)
    return book


def one_table(plan: Plan, book: Book, bench: Bench, length: str) -> None:
    """The grid, then the rows that the file does not have; saved after each."""
    key = {"task": plan.task, "optimizer": bench.optimizer, "length": length}
    arguments = {"steps": bench.steps, "seeds": plan.seeds, "choosing": plan.choosing, "points": plan.points}
    table = book.table(key, {**arguments, "options": plan.options})
    table.update(steps=bench.steps, seeds=plan.seeds, versions=versions(plan.device))
    table["factors"] = sorted({*table.get("factors", ()), *plan.starts})
    if "grid" not in table:
        choose_best(plan, table, bench)
        book.save()
    for name in dict.fromkeys(["onecycle", "cosine", *plan.rows]):
        if not _is_there(table, name, plan) or (plan.again and name in plan.rows):
            one_row(plan, table, bench, name)
            summarise(table)
            book.save()
        elif name.startswith(("auto", "placebo")) and table["rows"][name].get("library") != library():
            print(f"{plan.task} {bench.optimizer} {length} {name} is of another version of the library: see --again")


def one_row(plan: Plan, table: dict[str, Any], bench: Bench, name: str) -> None:
    """Run a row; one that cannot be run, or that breaks off, is named instead."""
    row, title = ROWS[name], f"{plan.task} {bench.optimizer} {table['length']} {name}"
    factors = _factors(row.starts, plan.starts)
    rates = [factor * table["best"]["rate"] for factor in plan.starts if None in factors or factor in factors]
    missing, began = row.missing(bench.optimizer), time.perf_counter()
    try:
        outcome = row.run(bench, rates) if missing is None else None
    except Exception as error:  # other people's packages: an hour of other rows must not be lost to one of them
        if row.package is None:
            raise
        missing, outcome = f"broke off: {error!r}", None
    _tidy()
    if outcome is None:
        table["skipped"][name] = missing
        print(f"{title}: {missing}", flush=True)
        return
    table["skipped"].pop(name, None)
    add_row(table, name, row.label, factors, outcome)
    table["rows"][name]["library"] = library()
    print(f"{title}: {time.perf_counter() - began:.1f} s", flush=True)


def choose_best(plan: Plan, table: dict[str, Any], bench: Bench) -> None:
    """Both grids of fixed rates on the choosing seeds, and the better schedule with its best rate."""
    assert bench.choosing is not None  # as experiment() builds it
    centre = CENTRES[plan.task, bench.optimizer][bench.steps < 200]
    rates = [centre * 10 ** ((i - plan.points // 2) / 2) for i in range(plan.points)]
    began = time.perf_counter()
    shapes = {"onecycle": onecycle(bench.steps), "cosine": cosine(bench.steps)}
    grids: dict[str, Outcome] = {name: fixed(bench.choosing, rates, shape) for name, shape in shapes.items()}
    _tidy()
    means = {(name, i): sum(row) / len(row) for name, out in grids.items() for i, row in enumerate(out.losses)}
    schedule, place = min(means, key=lambda key: means[key] if math.isfinite(means[key]) else math.inf)
    table["grid"] = {"rates": rates, **{name: out.losses for name, out in grids.items()}}
    table["best"] = {
        "schedule": schedule,
        "rate": rates[place],
        "loss": means[schedule, place],
        "on_edge": place in (0, len(rates) - 1),
    }
    title = f"{plan.task} {bench.optimizer} {table['length']} grid"
    found = f"best {rates[place]:.3g} with {schedule}"
    print(f"{title}: {time.perf_counter() - began:.1f} s, {found}", flush=True)


def _factors(kind: str, starts: tuple[float, ...]) -> list[float | None]:
    if kind == "none":
        return [None]
    few = [start for start in starts if start in FEW]
    return [*few] if kind == "few" and few else [*starts]


def _is_there(table: dict[str, Any], name: str, plan: Plan) -> bool:
    """Whether the file has the row, from all starts that are wanted."""
    there = {cell["start"] for cell in table["rows"].get(name, {"starts": []})["starts"]}
    return {*_factors(ROWS[name].starts, plan.starts)} <= there


def _tidy() -> None:
    """Give a row's graphs and tensors back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def versions(device: torch.device) -> dict[str, str]:
    """What it ran on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return found


def library() -> str:
    """A fingerprint of the rules, whatever their words: a row made with others does not belong into the same table."""
    folder = Path(hdet.__file__).parent
    files = [file for file in sorted((folder / "algorithm").rglob("*.py")) if "reference" not in file.name]
    rules = "".join(ast.unparse(_without_words(ast.parse(file.read_text()))) for file in files)
    return hashlib.sha256(rules.encode()).hexdigest()[:12]


def _without_words(tree: ast.Module) -> ast.Module:
    """Without docstrings; comments are not in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_word(part)]
    return tree


def _is_word(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def _index(length: str) -> int:
    return ("full", "short").index(length)


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, int(value) if value.lstrip("-").isdigit() else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=tuple(STEPS), required=True)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), help="default: adam, and sgd too for digits")
    parser.add_argument("--length", choices=("full", "short", "both"), help="default: both; quick: full")
    parser.add_argument("--seeds", type=int, help="default: 3, and 16 for digits; quick: 2")
    parser.add_argument("--choosing", type=int, help="seeds of the grid, default 2")
    parser.add_argument("--points", type=int, help="of the grid, default 9")
    parser.add_argument("--rows", help=f"some of {','.join(ROWS)}")
    parser.add_argument("--starts", help="factors on the best rate, default 0.001,0.01,0.1,1,10,100")
    parser.add_argument("--steps", type=int, help="another full length; short is a tenth of it")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the task")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="default: experiments/results/misset_TASK.json")
    parser.add_argument("--again", action="store_true", help="run rows again that the file has")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="compile the gradients: long runs on a GPU")
    parser.add_argument("--quick", action="store_true", help="tiny model, short, few seeds and starts")
    return parser


def parsed(words: list[str] | None = None) -> Plan:
    """The command line."""
    parser = _parser()
    given = parser.parse_args(words)
    quick, rows = given.quick, given.rows.split(",") if given.rows else list(ROWS)
    if not {*rows} <= {*ROWS}:
        parser.error(f"--rows must be some of {','.join(ROWS)}, but got {given.rows}")
    if given.optimizer and (given.task, given.optimizer) not in CENTRES:
        parser.error(f"--task {given.task} has no grid for --optimizer {given.optimizer}")
    steps = QUICK_STEPS if quick else STEPS[given.task]
    optimizers = ["adam", "sgd"] if given.task == "digits" and not quick else ["adam"]
    length = given.length or ("full" if quick else "both")
    count = given.seeds or (2 if quick else 16 if given.task == "digits" else 3)
    starts = tuple(map(float, given.starts.split(","))) if given.starts else FEW if quick else STARTS
    name = f"misset_{given.task}{'_quick' if quick else ''}.json"
    return Plan(
        task=given.task,
        optimizers=[given.optimizer] if given.optimizer else optimizers,
        lengths=["short", "full"] if length == "both" else [length],
        seeds=list(range(count)),
        rows=rows,
        path=given.json or Path(__file__).parent / "results" / name,
        device=torch.device(given.device),
        starts=tuple(sorted({*starts, 1.0})),
        choosing=[CHOOSING + i for i in range(given.choosing or (1 if quick else 2))],
        points=given.points or (5 if quick else 9),
        options={**(QUICK if quick else OPTIONS)[given.task], **dict(map(_option, given.options))},
        steps=(given.steps, max(given.steps // 10, 10)) if given.steps else steps,
        again=given.again,
        graph=not given.no_graph,
        compiled=given.compile,
    )


def main() -> None:
    plan = parsed()
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    book = experiment(plan)
    for table in book.tables:
        if "reference" in table:
            print_table(table)
    print(plan.path)


if __name__ == "__main__":
    main()
