"""Do the tests bite? Change a rule in one place, run the tests that cover it, and list what they let pass.

    python tools/mutants.py --sample 100 --seed 0

Sites and changes are cosmic-ray's: an operator, a comparison, a number, a condition. A seeded sample of sites, one
change each, is tried on copies of the repository; the working tree is never touched. Survivors are printed with their
change, and written as JSON. One that changes nothing, or nothing that matters, is explained in
``mutants_explained.toml``, by its line and what became of it. The command fails if more than ``--allowed`` survive, or
one of them unexplained.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import tomllib
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ("bases", "design", "published")
"""Files of the published method: its histories and parity catch a fault of theirs, too."""
SOURCES = (
    *(f"src/hdet/ensemble/{name}.py" for name in (*PUBLISHED, "knob", "normalised")),
    *(f"src/hdet/auto/{name}.py" for name in ("constants", "rule", "saving")),
    "src/hdet/rollback/losses.py",
    "src/hdet/rollback/ruin.py",
    "tests/auto/twin.py",
    "tests/ensemble/twin.py",
)
"""What is pure: the rules of the ensemble, of a search, and of going back, and their twins."""
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
AUTO = {
    "constants": ("rule", "golden", "twin", "parity"),
    "rule": ("rule", "reach", "rounds", "twin", "golden", "measure", "parity"),
    "saving": ("saving", "checkpoints"),
    "twin": ("twin", "rounds", "parity"),
}
"""Tests in tests/auto of the files in auto/, fast ones first."""
SECONDS = 600
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
        _check_unchanged(copies, mutants)
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(lambda mutant: tried(mutant, copies), mutants))
    explained = tomllib.loads(Path(__file__).with_name("mutants_explained.toml").read_text())["mutant"]
    survivors = [m for m, outcome in zip(mutants, outcomes, strict=True) if outcome == "survived"]
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
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        file = path.relative_to(ROOT).as_posix()
        if only in file:
            for place, mutant in _changes(file, path.read_text()):
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
    tree, still = get_ast(source), _annotations(source)
    for name in operator_names():
        if name.removeprefix("core/").split("_")[0] not in FAMILIES:
            continue
        operator = get_operator(name)()
        places = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            if not any(begin <= place < end for begin, end in still):
                yield place, Mutant(file, place[0], name, occurrence, source)


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change means nothing to a running program."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.expr):
                end = (part.end_lineno or 0, part.end_col_offset or 0)
                found.append(((part.lineno, part.col_offset), end))
    return found


def _what_runs(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
    return ast.dump(tree)


def tests_of(file: str, folder: Path) -> list[str]:
    """Fast ones first: the file's own examples, then those of its room, then histories and parity."""
    path = Path(file)
    room, name = path.parent.name, path.stem
    if room == "auto":
        return [file, *(f"tests/auto/test_{test}.py" for test in AUTO[name])]
    if room == "rollback":
        return [file, f"tests/rollback/test_{name}.py", "tests/auto/test_golden.py", "tests/auto/test_parity.py"]
    if name == "twin":  # a twin that trains: only parity can catch a fault of its
        return [file, "tests/ensemble/test_parity.py"]
    rules = [f"tests/ensemble/test_{kind}.py" for kind in ("controllers", "normalised", "rounds", "scales", "spread")]
    histories = [f"tests/ensemble/test_{kind}.py" for kind in ("golden", "parity")] if name in PUBLISHED else []
    return [file, *rules, *histories]


def tried(mutant: Mutant, copies: Queue[Path]) -> str:
    """``survived`` or how it was caught."""
    folder = copies.get()
    path = folder / mutant.file
    try:
        path.write_text(mutant.code)
        outcome = _tested(folder, tests_of(mutant.file, folder))
    finally:
        path.write_text(mutant.source)
        copies.put(folder)
    print("S" if outcome == "survived" else ".", end="", flush=True)
    return outcome


def _tested(folder: Path, tests: list[str]) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
        "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice a second would be taken for its old self
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=100"]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode == 0:
        return "survived"
    if done.returncode not in (1, 2):  # a test failed, or could not be imported
        raise RuntimeError(f"pytest could not run: {done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:200] if failed else "failed"


def _check_unchanged(copies: Queue[Path], mutants: list[Mutant]) -> None:
    """Without a change all tests pass, or nothing would mean anything."""
    folder = copies.get()
    tests = {test for mutant in mutants for test in tests_of(mutant.file, folder)[1:]}
    outcome = _tested(folder, sorted(tests))
    if outcome != "survived":
        sys.exit(f"the tests fail without any mutant: {outcome}")
    copies.put(folder)


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
    parser.add_argument("--allowed", type=int, default=10, help="how many may survive")
    parser.add_argument("--only", default="", help="only files whose path has this in it")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
