"""Do arms find the temperature of an attention layer? Where the best one is known, and in a small GPT.

    python lab/experiments/attention_temperature.py            # both, three seeds; half an hour on two cores
    python lab/experiments/attention_temperature.py --quick --results quick
    python lab/experiments/attention_temperature.py --table

The knob is ``hdet.knobs.module(model, Attention, "temperature")``, explored by ``hdet.Ensemble`` on four gloo ranks
that are four arms, as a user would write it. *known*: one attention layer whose queries and keys are frozen learns to
imitate a layer with the same queries and keys at temperature 1, from noisy outputs: only the temperature 1 can do that.
*gpt*: the byte-level GPT of lab/tasks on the source of Python's standard library; all temperatures can be learned away
by queries and keys. Runs begin at temperatures of 1/4, 1 and 4, and are judged by the validation loss of the mean of
the arms at the base temperature. Controls: no spread at seven fixed temperatures, spread without a controller, and
signals shuffled over the arms. One JSON file in results, written after every problem.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol

import checkout  # noqa: F401 - so that lab is found
import torch
from provenance import commit, versions
from real.ledger import save
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.ensemble.design import permutation
from hdet.ensemble.published import Update
from lab.benchmarks.harness import run_ranks
from lab.tasks import TextTask
from lab.tasks.streams import generator_of
from lab.tasks.task import Batch
from lab.tasks.transformer import Attention

RESULTS = Path(__file__).parent / "results" / "attention_temperature.json"
ARMS, ROUNDS = 4, 50
STARTS = (0.25, 1.0, 4.0)
GRID = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BOUNDS = (1 / 64, 64.0)
WIDE, PUBLISHED = math.log(2), 1 / 9
"""Spreads: a factor 2 to both sides, and the published one."""


# Problems ------------------------------------------------------------------------------------------------------------


class Problem(Protocol):
    """What is trained."""

    steps: int
    rate: float
    """The peak of OneCycle, with Adam."""

    def model(self, seed: int) -> nn.Module: ...

    def batch(self, seed: int, step: int, arm: int) -> Batch: ...

    def probe(self, seed: int, k: int) -> Batch:
        """Of round ``k``, the same for all arms; never trained on."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def judged(self, model: nn.Module) -> float:
        """The validation loss."""
        ...


class Known:
    """Imitate a frozen attention layer of temperature 1: queries and keys are given, values and output are learned."""

    width, heads, length, noise, size = 16, 2, 12, 0.3, 16
    sharp = 0.354
    """Deviation of the weights of queries and keys, by which scores have a deviation of 2."""

    def __init__(self, steps: int = 600, rate: float = 1e-2) -> None:
        self.steps, self.rate = steps, rate

    @cached_property
    def teacher(self) -> Attention:
        return self._layer("teacher")

    def model(self, seed: int) -> nn.Module:
        layer, fixed = self._layer("student", seed), 2 * self.width  # queries and keys come first
        with torch.no_grad():
            layer.joint.weight[:fixed] = self.teacher.joint.weight[:fixed]
        mask = (torch.arange(3 * self.width) >= fixed).float()
        layer.joint.weight.register_hook(lambda gradient: gradient * mask[:, None])
        layer.joint.bias.register_hook(lambda gradient: gradient * mask)
        return layer

    def batch(self, seed: int, step: int, arm: int) -> Batch:
        return self._samples(self.size, self.noise, "train", seed, step, arm)

    def probe(self, seed: int, k: int) -> Batch:
        return self._samples(4 * self.size, self.noise, "probe", seed, k)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return mse_loss(model(batch[0]), batch[1])

    @torch.no_grad()
    def judged(self, model: nn.Module) -> float:
        """Against the outputs without noise."""
        return float(self.loss(model, self._samples(512, 0.0, "validation")))

    def _layer(self, *words: str | int) -> Attention:
        generator, layer = generator_of("known", *words), Attention(self.width, self.heads, causal=False)
        with torch.no_grad():
            layer.joint.weight.normal_(0, self.sharp, generator=generator)
            layer.out.weight.normal_(0, 1 / math.sqrt(self.width), generator=generator)
            layer.joint.bias.zero_()
            layer.out.bias.zero_()
        return layer

    @torch.no_grad()
    def _samples(self, count: int, noise: float, *words: str | int) -> Batch:
        generator = generator_of("known", *words)
        x = torch.randn(count, self.length, self.width, generator=generator)
        return x, self.teacher(x) + noise * torch.randn(x.shape, generator=generator)


class SmallGPT:
    """Predict the next byte of Python source; probes are windows of a stream that nobody trains on."""

    def __init__(self, steps: int = 600, rate: float = 3e-3, width: int = 48, size: int = 8) -> None:
        self.steps, self.rate = steps, rate
        self._task = TextTask(width=width, depth=2, heads=4, context=48, batch_size=size)

    @cached_property
    def _held_out(self) -> tuple[list[Batch], list[Batch]]:
        """Probes and validation: every second held-out batch."""
        batches = self._task.validation()
        return batches[::2], batches[1::2]

    def model(self, seed: int) -> nn.Module:
        return self._task.model(seed)

    def batch(self, seed: int, step: int, arm: int) -> Batch:
        return self._task.batch(seed, step, arm, ARMS)

    def probe(self, seed: int, k: int) -> Batch:
        probes = self._held_out[0]
        return probes[k % len(probes)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._task.loss(model, batch)

    @torch.no_grad()
    def judged(self, model: nn.Module) -> float:
        return fmean(float(self.loss(model, batch)) for batch in self._held_out[1])


PROBLEMS: dict[str, type[Known] | type[SmallGPT]] = {"known": Known, "gpt": SmallGPT}


# Rows ----------------------------------------------------------------------------------------------------------------


class ShuffledState(NamedTuple):
    """Rounds so far, and the state of the controller inside."""

    rounds: list[float]
    inside: Any


class Shuffled:
    """A placebo: the controller inside gets the signals of other replicas."""

    def __init__(self, seed: int) -> None:
        self._seed, self._inside = seed, hdet.Normalised()

    def init(self, knobs: int) -> ShuffledState:
        return ShuffledState([0.0], self._inside.init(knobs))

    def update(self, state: ShuffledState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        k = int(state.rounds[0])
        order = permutation(self._seed, k + 1, -1, len(signals))  # no knob's own permutation
        update = self._inside.update(state.inside, [signals[r] for r in order], offsets)
        return update._replace(state=ShuffledState([k + 1.0], update.state))


class Row(NamedTuple):
    """A way to train."""

    label: str
    spread: float
    scale: str = "log"
    controller: str = "none"
    probes: bool = True


ROWS = {
    "stays": Row("no spread, the temperature stays", 0.0),
    "spread": Row("spread of a factor 2, the temperature stays", WIDE),
    "normalised": Row("`Normalised()`, probe at mean weights", WIDE, controller="normalised"),
    "placebo": Row("the same, signals shuffled", WIDE, controller="shuffled"),
    "published": Row("`Published()`, train loss, spread 1/9", PUBLISHED, "relative", "published", probes=False),
}


class Run(NamedTuple):
    """One run."""

    problem: str
    row: str
    start: float
    seed: int


def train(problem: Problem, run: Run, rank: int) -> dict[str, Any]:
    """What a user writes, on one rank."""
    row, arms = ROWS[run.row], hdet.arms(ARMS)
    model = problem.model(run.seed)
    for layer in (m for m in model.modules() if isinstance(m, Attention)):
        layer.temperature = run.start
    ddp = DistributedDataParallel(model, process_group=arms.gradients)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.rate)
    probe = hdet.ProbeBatch(model, problem.loss, partial(problem.probe, run.seed))
    controllers: dict[str, Any] = {"none": False, "normalised": hdet.Normalised(), "published": hdet.Published()}
    ensemble = hdet.Ensemble(
        optimizer,
        torch.optim.lr_scheduler.OneCycleLR(optimizer, problem.rate, problem.steps),
        [hdet.knobs.module(model, Attention, "temperature", spread=row.spread, scale=row.scale, bounds=BOUNDS)],  # type: ignore[arg-type]
        sync_every=max(1, problem.steps // ROUNDS),
        total_steps=problem.steps,
        signal=hdet.ProbeLoss(probe, at="round_mean") if row.probes else hdet.TrainLoss(),
        controller=(controllers | {"shuffled": Shuffled(run.seed)})[row.controller],
        group=arms,
        model=model,
        seed=run.seed,
    )
    path = [run.start]
    for step in range(problem.steps):
        loss = problem.loss(ddp, problem.batch(run.seed, step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
        (value,) = ensemble.base_values.values()
        path += [value] if value != path[-1] else []
    for layer in (m for m in model.modules() if isinstance(m, Attention)):
        layer.temperature = value  # the last step was the end of a round: the arms' weights are equal
    return {**run._asdict(), "found": value, "loss": problem.judged(model), "path": path}


def train_all(rank: int, runs: Sequence[Run], how: dict[str, Any]) -> list[dict[str, Any]]:
    """One run after the other on one rank."""
    torch.set_num_threads(1)
    problems = {name: PROBLEMS[name](**how) for name in {run.problem for run in runs}}
    found = []
    for run in runs:
        found.append(train(problems[run.problem], run, rank))
        if rank == 0:
            last = found[-1]
            print(f"{' '.join(map(str, run))}: {last['found']:.3g}, {last['loss']:.4f}", flush=True)
    return found


def runs_of(problem: str, seeds: Sequence[int], grid: Sequence[float] = GRID) -> list[Run]:
    """The grid of fixed temperatures, and every other row from every start."""
    cells = [("stays", value) for value in grid] + [(row, start) for row in ROWS if row != "stays" for start in STARTS]
    return [Run(problem, row, start, seed) for seed in seeds for row, start in cells]


# The table -----------------------------------------------------------------------------------------------------------


def table(content: dict[str, Any]) -> str:
    """Markdown: validation losses over that of the best fixed temperature, seed by seed, and temperatures found."""
    lines: list[str] = []
    for name, runs in content["problems"].items():
        fixed = {value: _losses(runs, "stays", value) for value in GRID if _losses(runs, "stays", value)}
        best = min(fixed, key=lambda value: fmean(fixed[value].values()))
        lines += ["", f"**{name}**: best fixed temperature {best:g}, loss {fmean(fixed[best].values()):.4f}", ""]
        lines += ["| row | start | temperature at the end | loss / best fixed |", "| --- | ---: | ---: | ---: |"]
        for row, about in ROWS.items():
            for start in fixed if row == "stays" else STARTS:
                losses = _losses(runs, row, start)
                ratios = [losses[seed] / fixed[best][seed] for seed in losses]
                found = [run["found"] for run in runs if (run["row"], run["start"]) == (row, start)]
                error = f" ± {stdev(ratios) / math.sqrt(len(ratios)):.3f}" if len(ratios) > 1 else ""
                values = ", ".join(f"{value:.2g}" for value in found) if row != "stays" else f"{start:g}"
                lines.append(f"| {about.label} | {start:g} | {values} | {fmean(ratios):.3f}{error} |")
    return "\n".join(lines)


def _losses(runs: Sequence[dict[str, Any]], row: str, start: float) -> dict[int, float]:
    return {run["seed"]: run["loss"] for run in runs if (run["row"], run["start"]) == (row, start)}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default=",".join(PROBLEMS), help=f"some of {','.join(PROBLEMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="one seed of 20 steps; needs --results of its own")
    parser.add_argument("--table", action="store_true", help="print what the file says, and run nothing")
    given = parser.parse_args(words)
    if given.table:
        print(table(json.loads(given.results.read_text())))
        return
    names = given.problems.split(",")
    if not {*names} <= {*PROBLEMS}:
        parser.error(f"--problems must be some of {','.join(PROBLEMS)}, but got {given.problems}")
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs --results, a file of its own: its figures are no results")
    how, seeds = ({"steps": 20}, range(1)) if given.quick else ({}, range(given.seeds))
    content = json.loads(given.results.read_text()) if given.results.exists() else {"problems": {}}
    content |= {"arms": ARMS, "rounds": ROUNDS, "versions": versions(torch.device("cpu")), "commit": commit()}
    for name in names:
        began, runs = time.perf_counter(), runs_of(name, seeds)
        content["problems"][name] = run_ranks(train_all, ARMS, runs, how, timeout=7200.0)[0]
        content.setdefault("seconds", {})[name] = time.perf_counter() - began
        content.setdefault("steps", {})[name] = PROBLEMS[name](**how).steps
        save(given.results, content)
    print(table(content))


if __name__ == "__main__":
    main()
