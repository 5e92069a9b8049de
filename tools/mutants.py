"""Do the tests bite? Change one place that makes rates or weights, run its tests, and list what they let pass.

    python tools/mutants.py --sample 100 --seed 0

Sites and changes are cosmic-ray's: an operator, a comparison, a number, a condition. Annotations, decorators, and
whatever only makes words (``raise``, f-strings, warnings, the log) are left out. A seeded sample of sites, one
change each, is tried on copies of the repository; the working tree is never touched. Survivors are printed with their
change, and written as JSON. One that changes nothing, or nothing that matters, is explained in
``mutants_explained.toml``, by its line and what became of it. The command fails if more than ``--allowed`` survive, or
one of them unexplained.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
COVERED = {
    # ensemble: replicas that explore
    "ensemble/bases": "ensemble: scales rounds as_printed golden controllers ensemble parity",
    "ensemble/design": "ensemble: scales spread rounds golden controllers parity replicas",
    "ensemble/converge": "ensemble: golden journal_of_a_run parity ensemble replicas",
    "ensemble/elastic_replicas": "elastic: meetings",
    "ensemble/knob": "ensemble: scales spread knobs rounds normalised",
    "ensemble/knobs": "ensemble: knobs ensemble; schedulers: added_groups",
    "ensemble/normalised": "ensemble: scales normalised controllers",
    "ensemble/controller": "ensemble: golden controllers as_printed parity",
    "ensemble/replicas": "ensemble: rounds golden journal_of_a_run parity ensemble replicas",
    "ensemble/signals": "ensemble: golden probes",
    "ensemble/steering": "ensemble: scales rounds golden controllers journal_of_a_run parity ensemble replicas",
    "ensemble/warm_start": "ensemble: warm_start",
    # rule: the rule of the search in plain numbers
    "rule/constants": "search: rule golden twin parity",
    "rule/decision": "search: rounds rule golden twin parity",
    "rule/estimate": "search: estimate measure rule golden twin parity",
    "rule/found": "search: words found",
    "rule/judge": "rollback: judge guard_policy losses; search: rule twin golden parity; rollback: guard",
    "rule/progress": "search: progress twin parity",
    "rule/state": "search: rule golden twin parity",
    # search: the search for the rate
    "search/measure": "search: measure estimate pieces golden saving twin found parity",
    "search/memory": "search: words golden saving found search parity; checkpoint: search_resume",
    "search/pieces": "search: measure pieces golden saving; schedulers: late_groups; search: parity",
    "search/gathering": "search: golden rounds found ranks buffers batchnorm parity",
    "search/steps": "search: hooks written_rates rounds golden found search parity",
    "search/search": "search: hooks bounds rounds saving golden found ranks search parity; checkpoint: search_resume",
    # rollback: snapshots, the judge, the guard
    "rollback/guard": "rollback: guard guard_ranks; checkpoint: guard_resume",
    "rollback/guarded_step": "rollback: guard guard_ranks; checkpoint: guard_resume",
    "rollback/gathering": "rollback: guard guard_ranks",
    "rollback/losses": "rollback: losses; search: golden parity",
    "rollback/guard_policy": "rollback: guard_policy guard",
    "rollback/guard_state": "rollback: guard_policy guard",
    "rollback/storage": "rollback: storage snapshots; search: rollbacks; rollback: guard",
    "state": "search: saving; checkpoint: guard_resume",
    "rollback/snapshots": "rollback: storage snapshots; search: rollbacks; rollback: guard; checkpoint: guard_resume",
    # schedulers: what users construct
    "schedulers/ensemble": "schedulers: rates_without_knobs rates_table; ensemble: journal_of_a_run knobs ensemble",
    "schedulers/onecycle": "ensemble: rounds golden replicas; schedulers: against_torch rates_table; "
    "checkpoint: torch_states",
    "schedulers/given_schedule": "schedulers: given_schedule peak",
    "schedulers/schedules": "schedulers: given_schedule rates_without_knobs rates_table added_groups; "
    "ensemble: journal_of_a_run",
    "schedulers/replay": "schedulers: replay",
    "journal/reading": "journal: journal; schedulers: replay; cli: schedule; ensemble: journal_of_a_run",
    "schedulers/trapezoid": "schedulers: trapezoid lengths rates_table late_groups late_group_of_several several; "
    "search: found unknown_length golden; checkpoint: foreign setups",
    "schedulers/auto_scheduler": "schedulers: one_owner late_groups lengths several trapezoid; search: golden hooks "
    "unknown_length guesses bounds found; inputs: inputs; checkpoint: foreign setups",
    "optimizer": "schedulers: one_owner late_group_of_several order_of_several late_groups several",
}
"""What makes rates and weights, and the tests that cover it, fast ones first. "search: rule" is the test
``tests/search/test_rule.py``."""
FAMILIES = (
    "NumberReplacer",
    "ReplaceBinaryOperator",
    "ReplaceComparisonOperator",
    "ReplaceUnaryOperator",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "AddNot",
)
WORDS = ("warn", "_warn", "debug", "info", "warning", "error")
"""Functions that are given nothing but words."""
IN_WORDS = ("__repr__", "__str__", "_repr_html_", "_tell")
"""Functions that make nothing else."""
UNTRIED = "not tried"
SECONDS = 300
"""For the tests of one mutant; what takes longer hangs, and counts as caught."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    operator: str
    occurrence: int

    source: str
    """The whole file as it was."""

    @property
    def code(self) -> str:
        """The whole file as it becomes."""
        changed = mutate_code(self.source, get_operator(self.operator)(), self.occurrence)
        assert changed is not None, self
        return str(changed)

    @property
    def is_idle(self) -> bool:
        """Whether nothing that runs has changed: 1e300 + 1 is 1e300, and ``strict=`` only checks equal lengths.

        What is no Python any more says nothing about the tests.
        """
        try:
            return _what_runs(self.source) == _what_runs(self.code)
        except SyntaxError:
            return True

    @property
    def change(self) -> tuple[str, str]:
        """The line before and after; of several the first."""
        pairs = zip(self.source.splitlines(), self.code.splitlines(), strict=False)
        return next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("", ""))


def main() -> int:
    options = _parser().parse_args()
    began = time.monotonic()
    mutants = sample(options.sample, options.seed, options.only)
    print(f"{len(mutants)} mutants, seed {options.seed}, {options.jobs} at a time", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = _copies(Path(folder), options.jobs)  # edit the working tree as you like from here on
        _check_unchanged(copies, mutants, options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            until = began + 60 * options.minutes
            outcomes = list(pool.map(lambda mutant: tried(mutant, copies, until), mutants))
    explained = tomllib.loads(Path(__file__).with_name("mutants_explained.toml").read_text())["mutant"]
    pairs = [pair for pair in zip(mutants, outcomes, strict=True) if pair[1] != UNTRIED]
    mutants, outcomes = [mutant for mutant, _ in pairs], [outcome for _, outcome in pairs]
    survivors = [mutant for mutant, outcome in pairs if outcome == "survived"]
    reasons = {mutant: explanation(mutant, explained) for mutant in survivors}
    for mutant, why in reasons.items():
        before, after = mutant.change
        print(f"\n{mutant.file}:{mutant.line}  {mutant.operator}\n  - {before}\n  + {after}\n  {why or 'UNEXPLAINED'}")
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(mutants)} mutants: {len(mutants) - len(survivors)} caught, {len(survivors)} survived, ", end="")
    print(f"{sum(why is None for why in reasons.values())} of these unexplained; {minutes:.1f} minutes")
    _write(options, mutants, outcomes, reasons, minutes)
    return int(len(survivors) > options.allowed or not all(reasons.values()))


def sample(size: int, seed: int, only: str) -> list[Mutant]:
    """Sites first, and then one change of each: otherwise a plus, with its eleven changes, would count eleven times."""
    sites: dict[tuple[str, tuple[int, int]], list[Mutant]] = {}
    for file in map(_file, COVERED):
        if only in file:
            for place, mutant in _changes(file, (ROOT / file).read_text()):
                sites.setdefault((file, place), []).append(mutant)
    rng = random.Random(seed)
    order = sorted(sites)
    drawn = [rng.choice(sites[site]) for site in rng.sample(order, min(size, len(order)))]
    for i, mutant in enumerate(drawn):
        while mutant.is_idle:
            mutant = rng.choice(sites[rng.choice(order)])
        drawn[i] = mutant
    return drawn


def _changes(file: str, source: str) -> Iterator[tuple[tuple[int, int], Mutant]]:
    tree, still = get_ast(source), list(_without_effect(source))
    for name in operator_names():
        if name.removeprefix("core/").split("_")[0] not in FAMILIES:
            continue
        operator = get_operator(name)()
        places = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            if not any(begin <= place < end for begin, end in still):
                yield place, Mutant(file, place[0], name, occurrence, source)


def _without_effect(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change means nothing to rates and weights: annotations, decorators, and whatever only makes words."""
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST | None] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += getattr(node, "decorator_list", [])
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or _makes_words(node):
            parts.append(node)
        for part in parts:
            if isinstance(part, (ast.expr, ast.stmt)):
                yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)


def _makes_words(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in IN_WORDS
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) in WORDS


def _what_runs(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
    return ast.dump(tree)


def _file(name: str) -> str:
    return f"src/hdet/{name}.py"


def tests_of(file: str) -> list[str]:
    """The file's own examples, then the tests that cover it."""
    row = next(row for name, row in COVERED.items() if _file(name) == file)
    rooms = (part.strip().partition(":") for part in row.split(";"))
    return [file, *(f"tests/{room}/test_{name}.py" for room, _, names in rooms for name in names.split())]


def tried(mutant: Mutant, copies: Queue[Path], until: float) -> str:
    """``survived`` or how it was caught; none is begun after ``until``."""
    if time.monotonic() > until:
        return UNTRIED
    folder = copies.get()
    path = folder / mutant.file
    try:
        path.write_text(mutant.code)
        outcome = _tested(folder, tests_of(mutant.file))
    finally:
        path.write_text(mutant.source)
        copies.put(folder)
    print("S" if outcome == "survived" else ".", end="", flush=True)
    return outcome


def _tested(folder: Path, tests: list[str], seconds: float = SECONDS) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([f"{folder / 'src'}", f"{folder}", os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice a second would be taken for its old self
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--timeout=100",
        "-m",
        "not gpu",
    ]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode == 0:
        return "survived"
    if done.returncode not in (1, 2):  # a test failed, or could not be imported
        raise RuntimeError(f"pytest could not run: {done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:200] if failed else "failed"


def _check_unchanged(copies: Queue[Path], mutants: list[Mutant], jobs: int) -> None:
    """Without a change all tests pass, or nothing would mean anything."""
    tests = sorted({test for mutant in mutants for test in tests_of(mutant.file)[1:]})

    def passed(share: list[str]) -> str:
        folder = copies.get()
        try:
            return _tested(folder, share, seconds=3600)
        finally:
            copies.put(folder)

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = set(pool.map(passed, filter(None, (tests[job::jobs] for job in range(jobs)))))
    if outcomes != {"survived"}:
        sys.exit(f"the tests fail without any mutant: {outcomes - {'survived'}}")


def _copies(folder: Path, number: int) -> Queue[Path]:
    """One per job, without what earlier runs compiled."""
    queue: Queue[Path] = Queue()
    for job in range(number):
        copy = folder / str(job)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        queue.put(copy)
    return queue


def explanation(mutant: Mutant, rows: list[dict[str, str]]) -> str | None:
    """Of the first row that fits: part of the file's path, of the line, and of what became of it."""
    before, after = mutant.change
    for row in rows:
        if row["file"] in mutant.file and row["line"] in before and row["becomes"] in after:
            return row["why"]
    return None


def _write(
    options: argparse.Namespace,
    mutants: list[Mutant],
    outcomes: list[str],
    reasons: dict[Mutant, str | None],
    minutes: float,
) -> None:
    rows = []
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        before, after = mutant.change
        rows.append(
            {**asdict(mutant), "before": before, "after": after, "outcome": outcome, "why": reasons.get(mutant)}
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    summary = {"seed": options.seed, "minutes": round(minutes, 1), "survived": len(reasons), "mutants": rows}
    options.out.write_text(json.dumps(summary, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after so many")
    parser.add_argument("--allowed", type=int, default=10, help="how many may survive")
    parser.add_argument("--only", default="", help="only files whose path has this in it")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
