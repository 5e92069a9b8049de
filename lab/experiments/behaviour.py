"""What the rule decides on recorded evidence: a fingerprint of its behaviour, whatever its words and names.

    python lab/experiments/behaviour.py               # prints it
    python lab/experiments/behaviour.py --record      # trains the small problems anew

Two rows of a table belong together if the rules that made them decide alike. So each run that was recorded is replayed
to the rule of now: as it was, without its losses, and with each of some faults. The fingerprint is made of the rates
after every round and of the rollbacks. What the rule is shown does not depend on what it decides.
Not seen: how evidence is measured, and the schedule's shape, to which a test holds shapes.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - so that lab is found
import torch
from auto_runs import Measured, Run
from stacked import Supply

from hdet.rule.constants import DEFAULT, LIMITS, Constants, Limits
from hdet.rule.estimate import Sums

RECORDED = Path(__file__).parent / "results" / "evidence.json"
PROBLEMS = ("softmax/sgd/100", "layers/adam/400", "factors/momentum/100", "attention/adamw/100", "line/sign/400")
STARTS = (1e-3, 1e3)
"""Of the best rate."""
SEED = 0
DIGITS = 6
"""Of each rate: the last bits are the machine's."""
RISES = {"a rise": 1 / 10, "a fast rise": 1 / 4, "a doubted rise": 1 / 30}
"""By which part of the first loss each round is above the one before it."""
FAULTS = (
    *("none", "no losses", "a first leap", "a jump", *RISES, "harder", "not finite", "a bad batch"),
    *("against", "nothing gained"),
)


def fingerprint(constants: Constants = DEFAULT, limits: Limits = LIMITS) -> str:
    """Of the rule with these numbers."""
    lines = [line for run in recorded() for fault in FAULTS for line in decisions(run, fault, constants, limits)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def decisions(run: dict[str, Any], fault: str, constants: Constants, limits: Limits) -> Iterator[str]:
    """After each round: the step, the rate of the next one, and how often the run has been rolled back."""
    replayed = Run(run["steps"], run["guess"], losses=fault != "no losses", constants=constants, limits=limits)
    for place, row in enumerate(run["rounds"]):
        if replayed.end > run["steps"]:  # a first step that is made again takes the place of a round
            return
        shown, length = _measured(row), replayed.end - replayed.begun
        if len(shown.losses) != length:
            shown = shown._replace(losses=(shown.losses * length)[:length])
        shown = spoiled(shown, fault, place, run["rounds"])
        replayed.after_round(shown)
        end = replayed.end
        rate = float(replayed.rates(end, end + 1)[0]) if end < run["steps"] else replayed.found
        yield f"{end} {rate:.{DIGITS}g} {replayed.rolled_back}"
        replayed.begin_round()


def spoiled(shown: Measured, fault: str, place: int, rounds: Sequence[dict[str, Any]]) -> Measured:
    """What a round shows if the run has this fault; most of them begin in its middle."""
    losses, middle, first = shown.losses, len(rounds) // 2, rounds[0]["losses"][0]
    if fault == "a first leap" and place == 0:
        return shown._replace(way=1e3 * shown.norm)
    if fault == "a jump" and place == middle:
        return shown._replace(losses=[1e3 + abs(loss) * 1e3 for loss in losses])
    if fault in RISES and place >= middle:
        rise = (place - middle) * RISES[fault] * abs(first)
        shown = shown._replace(losses=[loss + rise for loss in losses])
    if fault == "a bad batch" and place == middle:
        return shown._replace(way=math.inf)
    if fault == "harder" and place >= middle:
        return shown._replace(losses=[loss + 2 * abs(first) * 0.8 ** (place - middle) for loss in losses])
    if fault == "not finite" and place == middle:
        return shown._replace(losses=[math.nan] * len(losses), sums=None)
    if shown.sums is None:
        return shown
    backwards = shown.sums._replace(numerator=-0.95 * shown.sums.absolute)
    if fault in ("against", "a doubted rise") and place >= middle:
        return shown._replace(sums=backwards)
    if fault == "nothing gained" and place >= 3:
        wave = [first * (1 + 0.01 * math.sin(place + step)) for step in range(len(losses))]
        return shown._replace(losses=wave, sums=backwards)
    return shown


@cache
def recorded() -> Sequence[dict[str, Any]]:
    """The runs of the file."""
    return tuple(json.loads(RECORDED.read_text())["runs"])


def _measured(row: dict[str, Any]) -> Measured:
    """JSON has null for what is not finite."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    sums = None if row["sums"] is None else Sums(*row["sums"])
    losses, sizes = ([number(one) for one in row[name]] for name in ("losses", "sizes"))
    return Measured(number(row["way"]), number(row["norm"]), sums, losses, sizes, typical=number(row["typical"]))


def record() -> None:
    """Train the small problems on a CPU."""
    # Here, since what stores results takes its fingerprint from this file.
    from real.ledger import save

    from problems import losses_of, problem_of

    device, kept = torch.device("cpu"), []
    for name in PROBLEMS:
        problem = problem_of(f"zoo/{name}")
        task = problem.build()
        runs = [Run(problem.steps, problem.rate * start) for start in STARTS]
        supply = Supply(task, [SEED], problem.steps, device)
        losses_of(problem, task, [SEED], supply, [runs], device, graph=False)
        for run in runs:
            rounds = [{**shown._asdict(), "groups": ()} for shown in run.heard]
            kept.append({"problem": name, "steps": problem.steps, "guess": run.guess, "rounds": rounds})
    save(RECORDED, {"runs": kept})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="then every stored fingerprint is out of date")
    if parser.parse_args().record:
        record()
    print(fingerprint())


if __name__ == "__main__":
    main()
