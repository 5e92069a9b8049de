"""Do the knobs find values that are known to be best, and do they stay put when there is nothing to find?

Five problems (known_problems.py), one knob each: learning rate, weight decay, label smoothing, dropout, temperature.
Virtual, gradient-isolated replicas explore a knob with the balanced design, its scale and a controller, and are
averaged after every round. From a start four times too low or too high (linear knobs: clipped to their bounds), after
60 rounds,

- *alone*: each knob must end within a factor 1.25 of the best value (linear knobs: within 0.05);
- *joint*: the same where every replica trains all five problems at once and the one signal is the sum of their losses,
  each in units of its mean excess at its two starts, so that the controller has to tell five knobs apart;
- *placebo*: with the signals shuffled over the replicas no knob may ever be further from its start than a factor 2, in
  95 % of the runs. A factor 2 is log 2 / 0.3 = 2.3 spreads of the log knobs; linear knobs may go as many of theirs.

    python lab/experiments/known_optimum.py            # a table
    python lab/experiments/known_optimum.py --json     # one JSON line
    python lab/experiments/known_optimum.py --quick    # one seed, eight replicas, few placebo runs
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from known_problems import PROBLEMS, Problem
from virtual_runs import Run, explore, fixed_value_loss

from hdet.ensemble.controller import Controller, Corrected
from hdet.ensemble.normalised import Normalised

ROUNDS = 60
OFF = 4.0
FACTOR = 1.25
DIFFERENCE = 0.05
PLACEBO_FACTOR = 2.0
PLACEBO_SPREADS = math.log(PLACEBO_FACTOR) / 0.3
PLACEBO_SHARE = 0.95
LAST = 20
JOINT_SIDES = (("below",) * 5, ("above",) * 5, ("below", "above") * 2 + ("below",), ("above", "below") * 2 + ("above",))

Row = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """A problem with what was found out about it before any controller ran."""

    problem: Problem
    best: float
    grid_best: float
    unit: float
    """Mean excess loss at the two starts: what the problem's loss is divided by in the joint run."""

    @property
    def linear(self) -> bool:
        """Whether distances are differences; otherwise they are logarithms of ratios."""
        return is_linear(self.problem)

    def distance(self, value: float, other: float) -> float:
        """How far apart two values of the knob are: |difference| or |log ratio|."""
        return abs(value - other) if self.linear else abs(math.log(value / other))

    def at(self, side: str) -> float:
        """Where a run starts."""
        factor = {"below": 1 / OFF, "best": 1.0, "above": OFF}[side]
        return self.problem.knob.start(self.best * factor)

    @property
    def tolerance(self) -> float:
        """The largest distance from the best value that counts as found."""
        return DIFFERENCE if self.linear else math.log(FACTOR)

    @property
    def leash(self) -> float:
        """How far a placebo may go."""
        return PLACEBO_SPREADS * self.problem.knob.spread if self.linear else math.log(PLACEBO_FACTOR)


class Plan(NamedTuple):
    """How much to run."""

    seeds: int
    replicas: tuple[int, ...]
    copies: int
    """Placebo runs per seed and start."""
    points: int
    """Of the grid."""


# What is known -------------------------------------------------------------------------------------------------------


def is_linear(problem: Problem) -> bool:
    """Whether the knob moves in its own units."""
    return problem.knob.scale.name == "linear"


def grid_values(problem: Problem, points: int) -> list[float]:
    """A dense grid: all of a linear knob's range, or a factor 5 to either side."""
    if is_linear(problem):
        low, high = problem.knob.bounds
        return [low + (high - low) * (i + 0.5) / points for i in range(points)]
    return [problem.algebra * 5 ** (2 * i / (points - 1) - 1) for i in range(points)]


def lowest(values: Sequence[float], losses: Sequence[float], linear: bool) -> float:
    """Where a parabola through the five points around the lowest one is lowest."""
    middle = min(max(losses.index(min(losses)), 2), len(losses) - 3)
    u = [v if linear else math.log(v) for v in values[middle - 2 : middle + 3]]
    centre = u[2]
    x = torch.tensor([a - centre for a in u], dtype=torch.double)
    y = torch.tensor(losses[middle - 2 : middle + 3], dtype=torch.double)
    _, slope, bend = torch.linalg.lstsq(torch.stack([x**0, x, x**2], 1), y).solution.tolist()
    found = centre - slope / (2 * bend)
    return found if linear else math.exp(found)


def find_out(problem: Problem, seed: int, points: int = 17) -> Known:
    """The best value on a seed's task, by algebra or from the grid, and the unit of the loss."""

    def loss(value: float) -> float:
        return fixed_value_loss(problem, value, seed)

    values = grid_values(problem, points)
    grid_best = lowest(values, [loss(v) for v in values], is_linear(problem))
    best = grid_best if problem.from_grid else problem.algebra
    known = Known(problem, best, grid_best, 1.0)
    unit = (loss(known.at("below")) + loss(known.at("above"))) / 2 - loss(best)
    return Known(problem, best, grid_best, unit)


# Runs ----------------------------------------------------------------------------------------------------------------


def run_all(knowns: Sequence[Known], replicas: int, seed: int, copies: int, controller: Controller) -> list[Row]:
    """One arrangement (one problem, or all at once): both controllers from every side, and the placebo runs."""
    joint = len(knowns) > 1
    patterns = JOINT_SIDES if joint else (("below",), ("above",))
    labels: list[tuple[str, tuple[str, ...]]] = []
    runs: list[Run] = []
    for name, rule in (("normalised", controller), ("published", Corrected())):
        for sides in patterns:
            labels.append((name, sides))
            runs.append(Run(_starts(knowns, sides), rule, 1000 * seed + len(runs)))
    for side in ("below", "best", "above"):
        for _ in range(copies):
            labels.append(("placebo", (side,) * len(knowns)))
            runs.append(Run(_starts(knowns, labels[-1][1]), controller, 1000 * seed + len(runs), shuffled=True))
    units = [known.unit if joint else 1.0 for known in knowns]
    paths = explore([known.problem for known in knowns], units, runs, replicas, ROUNDS, seed)
    arrangement = "joint" if joint else "alone"
    return [
        {"arrangement": arrangement, "replicas": replicas, "seed": seed, "controller": name, "side": sides[g]}
        | _outcome(known, [values[g] for values in path])
        for (name, sides), path in zip(labels, paths, strict=True)
        for g, known in enumerate(knowns)
    ]


def _starts(knowns: Sequence[Known], sides: Sequence[str]) -> tuple[float, ...]:
    return tuple(known.at(side) for known, side in zip(knowns, sides, strict=True))


def _outcome(known: Known, path: Sequence[float]) -> Row:
    """One knob's path in one run, in a few numbers."""
    errors = [known.distance(value, known.best) for value in path]
    return {
        "knob": known.problem.knob.name,
        "start": path[0],
        "best": known.best,
        "end": path[-1],
        "error": errors[-1],
        "tolerance": known.tolerance,
        "found": errors[-1] <= known.tolerance,
        "found_share_of_last_rounds": sum(e <= known.tolerance for e in errors[-LAST:]) / LAST,
        "furthest": max(known.distance(value, path[0]) for value in path),
        "leash": known.leash,
    }


# Judgement -----------------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def chosen(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """The rows with these entries."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def judge(rows: Sequence[Row], knob: str, arrangement: str, replicas: int) -> Row:
    """PASS or MISS of one knob in one arrangement: did every run find the best value, did the placebo stay?"""
    here = {"knob": knob, "arrangement": arrangement, "replicas": replicas}
    real, placebo = chosen(rows, controller="normalised", **here), chosen(rows, controller="placebo", **here)
    published = chosen(rows, controller="published", **here)
    far = quantile([row["furthest"] for row in placebo], PLACEBO_SHARE)
    return here | {
        "found": sum(row["found"] for row in real),
        "runs": len(real),
        "worst_error": max(row["error"] for row in real),
        "mean_error": sum(row["error"] for row in real) / len(real),
        "tolerance": real[0]["tolerance"],
        "found_by_published": sum(row["found"] for row in published),
        "placebo_runs": len(placebo),
        "placebo_q95": far,
        "placebo_mean_error": sum(row["error"] for row in placebo if row["side"] != "best")
        / sum(row["side"] != "best" for row in placebo),
        "leash": placebo[0]["leash"],
        "target": _verdict(all(row["found"] for row in real)),
        "placebo_target": _verdict(far <= placebo[0]["leash"]),
    }


def _verdict(good: bool) -> str:
    return "PASS" if good else "MISS"


def experiment(plan: Plan, controller: Controller) -> Row:
    """Everything: what is known, all runs, and the judgement."""
    began = time.monotonic()
    rows: list[Row] = []
    described: list[Row] = []
    for seed in range(plan.seeds):
        knowns = [find_out(problem, seed, plan.points) for problem in PROBLEMS]
        described += [{"seed": seed} | _described(known) for known in knowns]
        for replicas in plan.replicas:
            for arrangement in [*([known] for known in knowns), knowns]:
                rows += run_all(arrangement, replicas, seed, plan.copies, controller)
    names = [problem.knob.name for problem in PROBLEMS]
    verdicts = [
        judge(rows, name, arrangement, n) for n in plan.replicas for arrangement in ("alone", "joint") for name in names
    ]
    return {
        "experiment": "known_optimum",
        "seeds": plan.seeds,
        "rounds": ROUNDS,
        "problems": described,
        "runs": [row for row in rows if row["controller"] != "placebo"],
        "placebo": _placebo_by_seed(rows),
        "verdicts": verdicts,
        "targets": _targets(verdicts),
        "seconds": round(time.monotonic() - began, 1),
    }


def _described(known: Known) -> Row:
    problem = known.problem
    return {
        "knob": problem.knob.name,
        "scale": problem.knob.scale.name,
        "spread": problem.knob.spread,
        "best": known.best,
        "best_from": "grid" if problem.from_grid else "algebra",
        "algebra": problem.algebra,
        "grid": known.grid_best,
        "unit": known.unit,
    }


def _placebo_by_seed(rows: Sequence[Row]) -> list[Row]:
    keys = ("arrangement", "replicas", "knob", "seed")
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in chosen(rows, controller="placebo"):
        found.setdefault(tuple(row[key] for key in keys), []).append(row["furthest"])
    return [
        dict(zip(keys, key, strict=True)) | {"runs": len(far), "q95": quantile(far, PLACEBO_SHARE), "max": max(far)}
        for key, far in found.items()
    ]


def _targets(verdicts: Sequence[Row]) -> dict[str, str]:
    """One word per arrangement and number of replicas."""
    words = {}
    for row in verdicts:
        here = chosen(verdicts, arrangement=row["arrangement"], replicas=row["replicas"])
        name = f"{row['arrangement']}, {row['replicas']} replicas"
        words[name] = _verdict(all(r["target"] == "PASS" for r in here))
        words[f"placebo {name}"] = _verdict(all(r["placebo_target"] == "PASS" for r in here))
    return words


# Print ---------------------------------------------------------------------------------------------------------------


def print_tables(result: Row) -> None:
    """The same for people."""
    for p in result["problems"]:
        print(
            f"seed {p['seed']}  {p['knob']:16}{p['scale']:9}spread {p['spread']:<5} best {p['best']:.4g} "
            f"by {p['best_from']} (algebra {p['algebra']:.4g}, grid {p['grid']:.4g})"
        )
    far = {(p["arrangement"], p["replicas"], p["knob"], p["seed"]): p["q95"] for p in result["placebo"]}
    print(f"\nerror: |log(end/best)|, or |end - best| for linear knobs; {ROUNDS} rounds")
    head = (
        "knob",
        "with",
        "N",
        "controller",
        "seed",
        "start",
        "best",
        "end",
        "error",
        "allowed",
        "",
        "last",
        "placebo",
    )
    print("{:16}{:6}{:>2}  {:11}{:>4}{:>8}{:>8}{:>8}{:>7}{:>8} {:5}{:>5}{:>8}".format(*head))
    for row in sorted(result["runs"], key=lambda r: (-r["replicas"], r["arrangement"], r["knob"], r["controller"])):
        q95 = far[row["arrangement"], row["replicas"], row["knob"], row["seed"]]
        print(
            f"{row['knob']:16}{row['arrangement']:6}{row['replicas']:>2}  {row['controller']:11}{row['seed']:>4}"
            f"{row['start']:>8.3g}{row['best']:>8.3g}{row['end']:>8.3g}{row['error']:>7.3f}{row['tolerance']:>8.3f} "
            f"{'found' if row['found'] else '-':5}{row['found_share_of_last_rounds']:>5.0%}{q95:>8.3f}"
        )
    print("last: share of the last 20 rounds inside; placebo: 95 % quantile of the furthest distance from its start\n")
    for v in result["verdicts"]:
        print(
            f"{v['knob']:16}{v['arrangement']:6}N={v['replicas']}  {v['target']}: found in {v['found']}/{v['runs']} "
            f"(published {v['found_by_published']}), worst error {v['worst_error']:.3f} of {v['tolerance']:.3f}; "
            f"placebo {v['placebo_target']}: {v['placebo_q95']:.3f} of {v['leash']:.3f} in {v['placebo_runs']} runs"
        )
    print()
    for name, word in result["targets"].items():
        print(f"{word}  {name}")
    print(f"{result['seconds']} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON line instead of tables")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, eight replicas, few placebo runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small, and a second thread on a busy core slows them down by far
    plan = Plan(arguments.seeds, (8, 4), copies=7, points=17)
    if arguments.quick:
        plan = Plan(1, (8,), copies=2, points=9)
    result = experiment(plan, Normalised())
    if arguments.json:
        print(json.dumps(result))
    else:
        print_tables(result)


if __name__ == "__main__":
    main()
