"""Runs whose length nobody knows: the rate is found and held, and annealed at the end. What does that lose?

    python lab/experiments/endless.py                       # minutes on one H200; writes results/endless.json
    python lab/experiments/endless.py --smoke --results endless.json     # seconds on a core, no data
    python lab/experiments/endless.py --table

Three workloads of *dev*, trained for 0.5, 1 and 2 times their length T. The measure is torch's OneCycle of that length
at the best of seven rates. A held run has ``Rule(total_steps=None)`` and learns T when it is finished: over the last
part F of the run, in which its rate falls by 1 - sqrt. It rises over its first P steps. Beside it train:

    known      the search as it is, which knows T from the first step
    fixed      the same shape at a rate that is given, the best of three: what the shape loses without any search
    placebo    a held run that tosses coins

Momentum is constant in all of them. All runs of a length are rows of one stack. The file is written after each length;
what it has is not run again, unless ``--again`` or the rule has changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import numpy as np
import torch
from auto_runs import Measured, Run
from provenance import commit, library, versions
from real.ledger import save
from real.score import scored_by
from real_lr import tidy
from shapes import Factors, held, onecycle
from stacked import Supply

from hdet.rule.decision import Decision
from problems import Problem, losses_of, problem_of

RESULTS = Path(__file__).parent / "results" / "endless.json"
WORKLOADS = ("shakespeare-gpt", "mnist-resnet-noisy", "fashion-vit")
LENGTHS = (0.5, 1.0, 2.0)
"""T over the workload's own length."""
FACTORS = tuple(2.0**k for k in range(-3, 4))
"""Of OneCycle's rates on the one that is best at the workload's own length."""
FIXED = (0.25, 0.5, 1.0)
"""The same, of held rates that are given."""
FALLS = (0.2, 0.4, 0.7)
"""F."""
STARTS = (1e-3, 100.0)
"""Guesses over the best rate. After the first step the guess does not matter."""
TARGET = 1.03
WARM = 0.1
"""The part of a run in which a held rate that is given rises."""
SMOKE = "zoo/function/adam/100"
SMALL: dict[str, Any] = {"seeds": (0,), "lengths": (0.5, 1.0), "rises": ("100, 3 t", "50, 30 t"), "falls": (0.4,)}


class Rise(NamedTuple):
    """How a held run begins."""

    peak: int
    """P."""
    ahead: int = 3
    """A length of so many times the steps so far is assumed."""


RISES = {
    "100, 3 t": Rise(100, ahead=3),
    "100, 20 t": Rise(100, ahead=20),
    "100, 30 t": Rise(100, ahead=30),
    "100, 50 t": Rise(100, ahead=50),
    "200, 30 t": Rise(200, ahead=30),
    "50, 30 t": Rise(50, ahead=30),
    "300, 3 t": Rise(300, ahead=3),
    "300, 30 t": Rise(300, ahead=30),
}


# Runs ----------------------------------------------------------------------------------------------------------------


class Held(Run):
    """A run that nobody knows the length of, until it is finished.

    Args:
        steps: T.
        guess: the user's rate.
        rise: how it begins.
        fall: F.
        placebo: as of ``Run``.
    """

    def __init__(self, steps: int, guess: float, rise: Rise, fall: float, placebo: str | None = None) -> None:
        super().__init__(steps, guess, placebo=placebo)
        self.finished = finished(steps, fall)
        self._held = self._plain = held(steps, self.finished - 1)
        self._peak, self._ahead = float(rise.peak), rise.ahead

    def rates(self, begin: int, end: int) -> Factors:
        factors = [self.state.factor(t, self.rule.constants) for t in range(begin, end)]
        return self.guess * np.array(factors) * self.shape[begin:end]

    def after_round(self, measured: Measured) -> Decision:
        steps = self.steps if self.end > self.finished else self._ahead * self.end
        self.rule = dataclasses.replace(self.rule, total_steps=steps)
        return super().after_round(measured)


class Fixed(Run):
    """The same shape at a rate that is given."""

    def __init__(self, steps: int, rate: float, fall: float) -> None:
        super().__init__(steps, rate, searches=False)
        rise = np.minimum(np.arange(1.0, steps + 2) / (WARM * steps), 1.0)
        self._plain = rise * held(steps, finished(steps, fall) - 1)


def finished(steps: int, fall: float) -> int:
    """After how many steps ``finish`` is called.

    >>> finished(100, 0.7), finished(50, 0.2)
    (30, 40)
    """
    return steps - round(fall * steps)


class Column(NamedTuple):
    """One configuration."""

    way: str
    start: float
    """The guess, or the rate that is given, over the best one."""
    build: Callable[..., Run]
    rise: str | None = None
    fall: float | None = None

    def run(self, seed: int) -> Run:
        return self.build(placebo=str(seed)) if self.way == "placebo" else self.build()


@dataclasses.dataclass
class Plan:
    """How to run."""

    results: Path
    device: torch.device
    seeds: Sequence[int] = (0, 1, 2)
    lengths: Sequence[float] = LENGTHS
    starts: Sequence[float] = STARTS
    rises: Sequence[str] = tuple(RISES)
    falls: Sequence[float] = FALLS
    again: bool = False
    until: float = math.inf
    """No length is begun after this moment."""

    def columns(self, steps: int, rate: float) -> Iterator[Column]:
        """All configurations of a length."""
        for factor in FACTORS:
            yield Column("onecycle", factor, partial(Run, steps, factor * rate, searches=False, shape=onecycle))
        for start in self.starts:
            yield Column("known", start, partial(Run, steps, start * rate))
        for fall, factor in product(self.falls, FIXED):
            yield Column("fixed", factor, partial(Fixed, steps, factor * rate, fall), fall=fall)
        searching = [
            Column("held", start, partial(Held, steps, start * rate, RISES[name], fall), name, fall)
            for name, fall, start in product(self.rises, self.falls, self.starts)
        ]
        yield from (*searching, searching[0]._replace(way="placebo"))


def run_problem(plan: Plan, problem: Problem) -> None:
    """The lengths that the file lacks; it is written after each."""
    there = _content(plan)["workloads"].get(problem.name, {"lengths": {}})["lengths"]
    wanted = [length for length in plan.lengths if plan.again or f"{length:g}" not in there]
    if not wanted:
        return
    began, task = time.perf_counter(), problem.build()
    supply = Supply(task, plan.seeds, round(max(wanted) * problem.steps), plan.device)
    print(f"{problem.name} batches: {time.perf_counter() - began:.1f} s", flush=True)
    for length in wanted:
        if time.time() > plan.until:
            print(f"{problem.name} {length:g}: no time left", flush=True)
            continue
        found = run_length(plan, problem, task, supply, round(length * problem.steps))
        content = _content(plan)
        empty = {"steps": problem.steps, "rate": problem.rate, "lengths": {}}
        content["workloads"].setdefault(problem.name, empty)["lengths"][f"{length:g}"] = found
        save(plan.results, content)
        tidy()


def _content(plan: Plan) -> dict[str, Any]:
    """What the file has, if it was made in the same way."""
    head = {
        "library": library(),
        "seeds": [*plan.seeds],
        "starts": [*plan.starts],
        "rises": [*plan.rises],
        "falls": [*plan.falls],
    }
    there = json.loads(plan.results.read_text()) if plan.results.exists() else {}
    made = {"command": "python lab/experiments/endless.py", "commit": commit(), **versions(plan.device), **head}
    return {**made, "workloads": there["workloads"] if {name: there.get(name) for name in head} == head else {}}


def run_length(plan: Plan, problem: Problem, task: Any, supply: Supply, steps: int) -> dict[str, Any]:
    """All configurations at once."""
    columns = list(plan.columns(steps, problem.rate))
    runs = [[column.run(seed) for column in columns] for seed in plan.seeds]
    began = time.perf_counter()

    def tell(t: int) -> None:
        if t % max(steps // 4, 1) == 0:
            rows, seconds = len(columns) * len(plan.seeds), time.perf_counter() - began
            print(f"{problem.name}: {t} of {steps} steps of {rows} runs, {seconds:.1f} s", flush=True)

    initial, losses = losses_of(problem, task, plan.seeds, supply, runs, plan.device, after=tell)
    rows = [
        {
            "way": column.way,
            "rise": column.rise,
            "fall": column.fall,
            "start": column.start,
            "losses": own,
            "found": [row[k].found / problem.rate for row in runs],
            "rolled_back": sum(row[k].rolled_back for row in runs),
        }
        for k, (column, own) in enumerate(zip(columns, losses, strict=True))
    ]
    about = {"steps": steps, "density": getattr(task, "density", False), "initial": initial}
    return scored({**about, "seconds": round(time.perf_counter() - began, 1), "rows": rows})


def scored(content: dict[str, Any]) -> dict[str, Any]:
    """With the best of OneCycle's rates, and for each row the mean loss over that one's.

    A loss counts at most as much as that of the first weights.

    >>> rows = [{"way": "onecycle", "start": 2.0, "losses": [1.0, 3.0]}, {"way": "held", "losses": [math.nan, 2.0]}]
    >>> content = scored({"initial": 4.0, "rows": rows})
    >>> content["best"], content["on_edge"], [row["ratio"] for row in content["rows"]]
    (2.0, True, [1.0, 1.5])
    """
    score = scored_by(content)
    most = score(content["initial"])

    def mean(row: Mapping[str, Any]) -> float:
        return fmean(min(score(loss), most) if math.isfinite(loss) else most for loss in row["losses"])

    sweep = [row for row in content["rows"] if row["way"] == "onecycle"]
    best = min(sweep, key=mean)
    rows = [{**row, "ratio": mean(row) / mean(best)} for row in content["rows"]]
    return {**content, "best": best["start"], "on_edge": best in (sweep[0], sweep[-1]), "rows": rows}


# The table -----------------------------------------------------------------------------------------------------------


Way = tuple[str, str | None, float | None]
"""Way, rise and fall: a line of the table."""


def cells_of(content: Mapping[str, Any]) -> dict[Way, list[list[float]]]:
    """By line, for each workload and length: the ratios of all starts; of rates that are given, the best one's."""
    found: dict[Way, list[list[float]]] = {}
    for length in _lengths(content).values():
        own: dict[Way, list[float]] = {}
        for row in length["rows"]:
            own.setdefault((row["way"], row["rise"], row["fall"]), []).append(row["ratio"])
        for way, ratios in own.items():
            found.setdefault(way, []).append([min(ratios)] if way[0] in ("onecycle", "fixed") else ratios)
    return found


def _lengths(content: Mapping[str, Any]) -> dict[str, Any]:
    """By the head of its column."""
    return {
        f"{name} {length['steps']}": length
        for name, one in content["workloads"].items()
        for length in one["lengths"].values()
    }


def table(content: Mapping[str, Any]) -> str:
    """In Markdown: for each workload and length the mean of the starts, then geometric mean and worst start of all."""
    lengths, cells = _lengths(content), cells_of(content)
    lines = [
        f"| way | P | F | {' | '.join(lengths)} | mean | worst start |",
        f"| --- | --- | --- |{' ---: |' * (len(lengths) + 2)}",
        f"| OneCycle's best rate | | | {' | '.join(_best(length) for length in lengths.values())} | | |",
    ]
    for (way, rise, fall), ratios in cells.items():
        if way != "onecycle":
            means = [fmean(own) for own in ratios]
            shown = [*means, geometric_mean(means), max(max(own) for own in ratios)]
            head = f"| {way} | {rise or ''} | {'' if fall is None else f'{fall:g}'} |"
            lines.append(f"{head} {' | '.join(f'{ratio:.3f}' for ratio in shown)} |")
    return "\n".join(lines)


def _best(length: Mapping[str, Any]) -> str:
    return f"{length['best']:g}{' (edge)' if length['on_edge'] else ''}"


def verdict(content: Mapping[str, Any]) -> str:
    """Of the held runs that are best where they are worst: PASS or MISS against the target."""
    worst = {way: max(map(fmean, ratios)) for way, ratios in cells_of(content).items() if way[0] == "held"}
    way = min(worst, key=worst.__getitem__)
    said = "PASS" if worst[way] <= TARGET else "MISS"
    return f"at most {TARGET} everywhere: {said}, P = {way[1]} and F = {way[2]:g} has {worst[way]:.3f}"


# The command line ----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="names of workloads, or zoo/PROBLEM/OPTIMIZER/STEPS"
    )
    parser.add_argument("--starts", default=",".join(map(str, STARTS)), help="guesses over the best rate")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no length after so many seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="run lengths again that the file has")
    parser.add_argument("--smoke", action="store_true", help="a small problem and few configurations; with --results")
    parser.add_argument("--table", action="store_true", help="print what the file says, and run nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(words)
    if given.smoke and given.results == RESULTS:
        parser.error("--smoke needs a file of its own: add --results FILE")
    if not given.table:
        starts = tuple(map(float, given.starts.split(",")))
        how = {"starts": starts, "again": given.again, "until": time.time() + given.seconds}
        plan = Plan(given.results, torch.device(given.device), **how, **(SMALL if given.smoke else {}))
        torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
        problems = map(problem_of, (SMOKE if given.smoke else given.workloads).split(","))
        for problem in sorted(problems, key=lambda problem: problem.steps):
            run_problem(plan, problem)
    content = json.loads(given.results.read_text())
    print(f"{table(content)}\n\n{verdict(content)}")


if __name__ == "__main__":
    main()
