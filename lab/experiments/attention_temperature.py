"""Do arms find the temperature of an attention layer? Where the best one is known, and in a GPT.

    python lab/experiments/attention_temperature.py --problems known      # minutes on one core
    python lab/experiments/attention_temperature.py --problems gpt        # 1.07 M weights; minutes on a GPU
    python lab/experiments/attention_temperature.py --problems gpt-small --rows normalised,placebo --grid 0.25,1,4
    python lab/experiments/attention_temperature.py --table

Four arms explore the knob ``hdet.knobs.module(model, Attention, "temperature")``. *known*: one attention layer whose
queries and keys are frozen learns to imitate a layer with the same queries and keys at temperature 1, from noisy
outputs: no other temperature can. *gpt*: the byte-level GPT of lab/tasks on the source of Python's standard library;
there queries and keys can learn any temperature away. Runs begin at temperatures of 1/4, 1 and 4, and are judged by the
validation loss of the mean of the arms at the base temperature. Controls: no spread at seven fixed temperatures, spread
without a controller, and signals shuffled over the arms. All runs of a problem train as one stack; a test holds it to
``hdet.Ensemble`` on four ranks. One JSON file per problem in results/attention_temperature.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from attention_problems import GROUP, PROBLEMS, Problem
from knobs.groups import Explorers, Method
from knobs.task import Knob
from provenance import commit, versions
from real.bench import mean_losses
from real.ledger import save
from shapes import onecycle
from stacked import Adam, Stack, Supply, TrainStep
from torch import Tensor

from hdet.ensemble.controller import Corrected
from hdet.ensemble.design import Rounds
from hdet.ensemble.normalised import Normalised

RESULTS = Path(__file__).parent / "results" / "attention_temperature"
ARMS, ROUNDS, SEEDS = 4, 50, 3
STARTS = (0.25, 1.0, 4.0)
GRID = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
KNOB = Knob("temperature", "loss", "log", 1.0, (1 / 64, 64.0))
STAYS = "stays"
_PROBED = Method("`Normalised()`, probe at mean weights", Normalised(), "mean", math.log(2))
ROWS = {
    STAYS: Method("no spread, it stays"),
    "spread": _PROBED._replace(label="spread of a factor 2, it stays", controller=None),
    "normalised": _PROBED,
    "placebo": _PROBED._replace(label="the same, signals shuffled", shuffled=True),
    "late": _PROBED._replace(label="`Normalised()` from the middle of the run on"),
    "corrected": Method("`Corrected()`, train loss, spread 1/9", Corrected(), "train", 1 / 9),
}
"""Spreads are in the logarithm."""


class Cell(NamedTuple):
    """A row from one start: a column of the stack."""

    row: str
    start: float

    @property
    def method(self) -> Method:
        return ROWS[self.row]


def cells(rows: Sequence[str] = tuple(ROWS), grid: Sequence[float] = GRID) -> list[Cell]:
    """The grid of fixed temperatures, and every other row from every start."""
    return [Cell(row, start) for row in rows for start in (grid if row == STAYS else STARTS)]


class Temperatures:
    """The arms of a stack [seed and arm, cell, parameter], each with a temperature of its own among its parameters.

    Args:
        stack: its rows are the arms of each seed, one after the other.
        optimizer: theirs; moments are averaged with the weights, as ``hdet.Ensemble`` does with arms.
        problem: gives the probes.
        columns: the cells.
        seeds: of the design, one for every ``ARMS`` rows.
    """

    def __init__(
        self, stack: Stack, optimizer: Adam, problem: Problem, columns: Sequence[Cell], seeds: Sequence[int]
    ) -> None:
        self.stack, self._optimizer, self._problem, self._columns = stack, optimizer, problem, list(columns)
        self.rounds = Rounds(max(1, problem.steps // ROUNDS), problem.steps)
        self._place = next(piece.start for piece in stack.layout if piece.group == GROUP)
        self.arms = [[Explorers(cell.method, KNOB, cell.start, ARMS, seed) for cell in columns] for seed in seeds]
        """[seed][cell]"""
        self.paths = [[[one.value] for one in row] for row in self.arms]
        """Base values [seed][cell][round], the starts first."""
        self._losses, self._sum = torch.zeros_like(stack.theta[..., 0]), torch.zeros_like(stack.theta)
        self._set_values()

    def begin(self) -> None:
        """Before the first step: capturing has already observed some."""
        self._losses.zero_()
        self._sum.zero_()

    def observe(self, losses: Tensor) -> None:
        """After each step, on the device."""
        self._losses.add_(losses)
        self._sum.add_(self.stack.theta)

    @torch.no_grad()
    def after_step(self, t: int) -> None:
        """The end of a round, if one ends after ``t`` steps: signals, the mean of the arms, new temperatures."""
        if not self.rounds.ends_at(t):
            return
        start, k = self.rounds.span(t)[0], self.rounds.index(t - 1)
        signals = self._signals(t - start, k).tolist()
        for tensor in (self.stack.theta, self._optimizer.first, self._optimizer.second):
            arms = tensor.unflatten(0, (-1, ARMS))
            arms.copy_(arms.mean(1, keepdim=True).expand_as(arms))
        for u, row in enumerate(self.arms):
            for c, one in enumerate(row):
                if self._columns[c].row != "late" or 2 * t >= self._problem.steps:
                    one.end_round([arm[c] for arm in signals[u]])
                else:
                    one.end_round([math.nan] * ARMS)  # the places change, the value stays
                self.paths[u][c].append(one.value)
        self._set_values()
        self.begin()

    @torch.no_grad()
    def weights(self) -> Tensor:
        """What is judged: the mean of the arms at the base temperature, [seed, cell, parameter]."""
        mean = self.stack.theta.unflatten(0, (-1, ARMS)).mean(1)
        mean[..., self._place] = _table([[one.value for one in row] for row in self.arms]).to(mean)
        return mean

    def _signals(self, steps: int, k: int) -> Tensor:
        """[seed, arm, cell], lower is better: train losses, or the probe at the mean weights of the round."""
        found = (self._losses / steps).double()
        probed = [c for c, cell in enumerate(self._columns) if cell.method.signal == "mean"]
        batch = tuple(part.to(self.stack.device) for part in self._problem.probe(k))
        if probed:
            found[:, probed] = mean_losses(self.stack, self._sum[:, probed] / steps, [batch])
        return found.unflatten(0, (-1, ARMS))

    def _set_values(self) -> None:
        values = _table([[one.values for one in row] for row in self.arms])  # [seed, cell, arm]
        self.stack.theta[..., self._place] = values.transpose(1, 2).flatten(0, 1).to(self.stack.theta)


def _table(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trained(problem: Problem, columns: Sequence[Cell], seeds: Sequence[int], device: torch.device) -> Temperatures:
    """All runs of a problem to their end."""
    stack = Stack(problem, [seed for seed in seeds for _ in range(ARMS)], len(columns), device)
    optimizer = Adam(stack.theta)
    runs = Temperatures(stack, optimizer, problem, columns, seeds)
    peaks = _table([0.0 if name == GROUP else problem.rate for name in stack.group_names]).to(stack.theta)
    factors = torch.from_numpy(onecycle(problem.steps))[: problem.steps, None, None, None].to(stack.theta)
    rates = (factors * peaks).expand(-1, *stack.theta.shape[:2], -1).contiguous()
    batches = Supply(problem, seeds, problem.steps, device).dealt(ARMS)
    step = TrainStep(stack, optimizer, batches, rates, after=runs.observe)
    runs.begin()
    began = time.perf_counter()
    for t in range(1, problem.steps + 1):
        step()
        runs.after_step(t)
        if t % max(1, problem.steps // 10) == 0:
            print(f"{problem.name}: step {t}, {time.perf_counter() - began:.0f} s", flush=True)
    return runs


def run_problem(name: str, columns: Sequence[Cell], seeds: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What the file has of one problem."""
    problem, began = PROBLEMS[name](), time.perf_counter()
    runs = trained(problem, columns, seeds, device)
    batches = [tuple(part.to(device) for part in batch) for batch in problem.validation()]
    losses = mean_losses(runs.stack, runs.weights(), batches).T.tolist()
    rows = [
        {**cell._asdict(), "losses": losses[c], "found": [row[c].value for row in runs.arms], "paths": paths}
        for c, (cell, paths) in enumerate(zip(columns, zip(*runs.paths, strict=True), strict=True))
    ]
    about = {"problem": name, "arms": ARMS, "rounds": ROUNDS, "steps": problem.steps, "seeds": list(seeds)}
    sizes = {"parameters": runs.stack.theta.shape[-1] - 1, "seconds": time.perf_counter() - began}
    return {**about, **sizes, "versions": versions(device), "commit": commit(), "rows": rows}


# The table -----------------------------------------------------------------------------------------------------------


def table(content: dict[str, Any]) -> str:
    """Markdown: validation losses over those of the best fixed temperature, seed by seed, and temperatures found."""
    fixed = {row["start"]: row["losses"] for row in content["rows"] if row["row"] == STAYS}
    best = min(fixed, key=lambda value: fmean(fixed[value]))
    about = [f"{content[word]} {word}" for word in ("parameters", "arms", "steps", "rounds")]
    about += [f"{len(content['seeds'])} seeds", content["versions"]["device"]]
    head = f"\n**{content['problem']}**: best fixed temperature {best:g}, loss {fmean(fixed[best]):.4g}; "
    lines = [head + ", ".join(about), ""]
    lines += ["| row | start | temperature at the end | loss / best fixed |", "| --- | ---: | ---: | ---: |"]
    for row in content["rows"]:
        ratios = [a / b for a, b in zip(row["losses"], fixed[best], strict=True)]
        error = f" ± {stdev(ratios) / math.sqrt(len(ratios)):.3f}" if len(ratios) > 1 else ""
        found = ", ".join(f"{value:.2g}" for value in row["found"]) if row["row"] != STAYS else f"{row['start']:g}"
        cells = [ROWS[row["row"]].label, f"{row['start']:g}", found, f"{fmean(ratios):.3f}{error}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default="known", help=f"some of {','.join(PROBLEMS)}")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {','.join(ROWS)}; {STAYS} is always there")
    parser.add_argument("--grid", default=",".join(f"{value:g}" for value in GRID), help="fixed temperatures")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(words)
    if given.table:
        for path in sorted(given.results.glob("*.json")):
            print(table(json.loads(path.read_text())))
        return
    names = given.problems.split(",")
    if not {*names} <= {*PROBLEMS}:
        parser.error(f"--problems must be some of {','.join(PROBLEMS)}, but got {given.problems}")
    rows = list(dict.fromkeys([STAYS, *given.rows.split(",")]))
    if not {*rows} <= {*ROWS}:
        parser.error(f"--rows must be some of {','.join(ROWS)}, but got {given.rows}")
    columns = cells(rows, [float(word) for word in given.grid.split(",")])
    torch.set_num_threads(1)
    for name in names:
        content = run_problem(name, columns, range(given.seeds), torch.device(given.device))
        save(given.results / f"{name}.json", content)
        print(table(content), flush=True)


if __name__ == "__main__":
    main()
