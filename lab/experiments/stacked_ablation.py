"""The rows that decide about HDET, on one GPU: do replicas train more stably than plain training, and what does it?

    python lab/experiments/stacked_ablation.py --scan             # first: the border of stability of plain training
    python lab/experiments/stacked_ablation.py --seconds 580      # then every row at two rates around it
    python lab/experiments/stacked_ablation.py --table
    python lab/experiments/stacked_ablation.py --quick            # both in miniature on a CPU, in a minute

Eight replicas, 5000 steps of OneCycleLR with Adam (beta1 stays at 0.9), five seeds, T = 20 and 100; all rows of a task
train together as one stack, on the same samples, in TF32. Tasks: the feed, and a byte-level GPT on the source of
Python's standard library. Rows: plain data-parallel training; HDET (shared gradients, spread 1/9, the published
controller in relative units); the same with losses shuffled over the replicas; arms, which apply their own gradients
and are averaged every T steps, without and with the spread. The scan is plain training at a grid of rates on other
seeds. One JSON file per task in results/stacked_ablation, written after the scan, at every tenth of a run, and at its
end.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from crashes import CRASH, border, constant_loss, has_crashed, summary, table
from provenance import commit, versions
from real.ledger import save
from real_lr import tidy
from stacked import Adam, Stack, Supply, TrainStep
from stacked_replicas import Column, FusedAdam, Method, StackedReplicas
from torch import Tensor

from hdet.ensemble.published import Published
from lab.runs.placebo import Placebo
from lab.tasks import Task, task_named
from lab.tasks.task import Batch

RESULTS = Path(__file__).parent / "results" / "stacked_ablation"
SPREAD = 1 / 9
PLAIN = "plain"
METHODS = {
    PLAIN: Method("plain data-parallel", shares=True, spread=0.0),
    "hdet": Method("HDET: shared gradients, spread", True, SPREAD, lambda seed: Published()),
    "placebo": Method("the same, losses shuffled", True, SPREAD, lambda seed: Placebo(seed)),
    "arms": Method("arms, no spread", shares=False, spread=0.0),
    "arms-spread": Method("arms, spread", shares=False, spread=SPREAD),
}
"""Those that share gradients first."""
BLOCKS = 20
"""Parts of a run in which the mean train loss is written down."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how long."""

    task: str
    options: dict[str, Any]
    batch: int
    """Samples per replica and step."""
    scan: tuple[float, ...]
    """Peak rates that are tried first."""
    replicas: int = 8
    steps: int = 5000
    every: tuple[int, ...] = (20, 100)
    """T."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    scan_seeds: tuple[int, ...] = (1000, 1001, 1002)

    def make_task(self) -> Task:
        """Its batches are those of all replicas together."""
        together = self.batch * self.replicas
        more = {"horizon": self.steps * together} if self.task == "feed" else {}
        return task_named(self.task, batch_size=together, **more, **self.options)

    def arguments(self) -> dict[str, Any]:
        """As JSON has them."""
        return json.loads(json.dumps(vars(self)))  # type: ignore[no-any-return]


SETTINGS = {
    "feed": Setting("feed", {}, 64, tuple(0.01 * 1.6**k for k in range(8))),
    "text": Setting(
        "text", {"width": 128, "depth": 5, "heads": 4, "context": 64}, 4, tuple(0.003 * 1.8**k for k in range(8))
    ),
}
SMALL: dict[str, dict[str, Any]] = {
    "feed": {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1},
    "text": {"width": 16, "depth": 1, "heads": 2, "context": 16},
}


def small(setting: Setting) -> Setting:
    """The same in miniature."""
    few = {"steps": 40, "every": (4, 10), "replicas": 4, "seeds": (0, 1), "scan_seeds": (1000,), "batch": 4}
    return replace(setting, options=SMALL[setting.task], scan=setting.scan[2:7:2], **few)


def columns_of(setting: Setting, rates: Sequence[float], rows: Sequence[str]) -> list[Column]:
    """Every row at every T and rate; plain training, which never meets, only once for all T."""
    found = [
        Column(key, METHODS[key], every, rate)
        for key in rows
        for every in (setting.every[:1] if METHODS[key].is_plain else setting.every)
        for rate in rates
    ]
    return sorted(found, key=lambda column: not column.method.shares)


# Training ------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Where runs of a task are trained."""

    task: Task
    device: torch.device
    graph: bool = True
    fused: bool = True
    until: float = math.inf
    """No step is made after this moment."""

    def train(self, setting: Setting, columns: Sequence[Column], seeds: Sequence[int], replicas: int) -> Trained:
        """All runs at once, up to their end or to the end of the time."""
        began = time.perf_counter()
        batches = Supply(self.task, seeds, setting.steps, self.device).dealt(replicas)
        print(f"{setting.task}: batches made, {time.perf_counter() - began:.1f} s", flush=True)
        stack = Stack(self.task, [seed for seed in seeds for _ in range(replicas)], len(columns), self.device)
        on_gpu = self.device.type == "cuda"
        optimizer = (FusedAdam if self.fused and on_gpu else Adam)(stack.theta)
        runs = StackedReplicas(stack, optimizer, columns, replicas, setting.steps, seeds)
        step = TrainStep(stack, optimizer, batches, runs.rates, runs.share, after=runs.observe, graph=self.graph)
        runs.begin()
        print(f"{setting.task}: {told(stack, batches)}; {time.perf_counter() - began:.1f} s", flush=True)
        return self._steps(setting, stack, runs, step)

    def _steps(self, setting: Setting, stack: Stack, runs: StackedReplicas, step: TrainStep) -> Trained:
        began, done, tenth = time.perf_counter(), 0, max(1, setting.steps // 10)
        for t in range(1, setting.steps + 1):
            step()
            runs.after_step(t)
            done = t
            if t % tenth == 0:
                recent = runs.losses[t - tenth : t].mean((0, 1)).tolist()
                passed = time.perf_counter() - began
                print(
                    f"{setting.task}: step {t}, {passed:.1f} s, {1000 * passed / t:.2f} ms a step, train losses "
                    + " ".join(f"{loss:.3g}" for loss in recent),
                    flush=True,
                )
                if time.time() > self.until:
                    break
        return Trained(stack, runs, done, (time.perf_counter() - began) / max(done, 1))

    def reference(self) -> float:
        """The loss of the best constant prediction, to which a run that has crashed is compared."""
        return constant_loss([batch[-1] for batch in self.task.validation()])


def told(stack: Stack, batches: Batch) -> str:
    """Sizes, and the work of one step by the rule of six operations per weight and token, attention not counted."""
    rows, columns, weights = stack.theta.shape
    tables = sum(piece.size for piece in stack.layout if piece.group == "embedding")
    tokens = batches[1].shape[2] * (batches[1].shape[3] if batches[1].ndim > 3 else 1)
    work = 6 * (weights - tables) * tokens * rows * columns
    return f"{rows * columns} replicas of {weights} weights, {tokens} tokens each, {work / 1e12:.2f} TFLOP a step"


@dataclass
class Trained:
    """Runs that have ended."""

    stack: Stack
    runs: StackedReplicas
    steps: int
    """That were made."""
    seconds: float
    """Of one step of all runs."""

    def results(self, reference: float, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """A row for every column: losses and metrics of the consensus by seed, and who has crashed."""
        theta = self.runs.consensus()
        evaluated = Evaluation(self.stack)
        found = []
        for c, column in enumerate(self.runs.columns):
            metrics = [evaluated(theta[u, c]) for u in range(len(seeds))]
            losses = [one["loss"] for one in metrics]
            crashed = [has_crashed(loss, reference) for loss in losses]
            found.append(
                {
                    "row": column.key,
                    "label": column.method.label,
                    "T": None if column.method.is_plain else column.every,
                    "rate": column.rate,
                    "seeds": list(seeds),
                    "crashed": crashed,
                    **{name: [one[name] for one in metrics] for name in metrics[0]},
                    "train_loss": self._blocks(c),
                    "learned": [row[c].learned for row in self.runs.runs],
                    "summary": summary(crashed, losses),
                }
            )
        return found

    def _blocks(self, c: int) -> list[list[float]]:
        """Mean train losses [seed][block]."""
        whole = self.runs.losses[: self.steps, :, c].double()
        by_seed = whole.unflatten(1, (-1, self.runs.replicas)).mean(2)
        return [[float(part.mean()) for part in run.tensor_split(BLOCKS)] for run in by_seed.T]


class Evaluation:
    """Validation metrics of rows of weights; the held-out batches are made once."""

    def __init__(self, stack: Stack) -> None:
        self._stack, task = stack, stack.task
        held_out = task.validation()
        self._task = _Held(task, held_out)
        self._model = task.model(0).to(stack.device)

    @torch.no_grad()
    def __call__(self, row: Tensor) -> dict[str, float]:
        parameters = dict(self._model.named_parameters())
        for piece in self._stack.layout:
            parameters[piece.name].copy_(piece.of(row))
        return self._task.evaluate(self._model)


class _Held:
    """A task whose held-out batches are at hand."""

    def __init__(self, task: Task, held_out: list[Batch]) -> None:
        self._task, self._held_out = task, held_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def validation(self) -> list[Batch]:
        return self._held_out

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """The task's own evaluation, which asks ``self`` for its batches."""
        return type(self._task).evaluate(self, model)  # type: ignore[arg-type]


# A file per task -----------------------------------------------------------------------------------------------------


def file_of(folder: Path, setting: Setting, device: torch.device) -> tuple[Path, dict[str, Any]]:
    """The task's file, and what it has if it was made with the same arguments."""
    path = folder / f"{setting.task}.json"
    there = json.loads(path.read_text()) if path.exists() else {}
    if there.get("arguments") != setting.arguments():
        there = {}
    about = {"task": setting.task, "arguments": setting.arguments(), "crash": CRASH}
    return path, {**there, **about, "versions": versions(device), "commit": commit()}


def scan(bench: Bench, setting: Setting, path: Path, content: dict[str, Any]) -> None:
    """Plain training at every rate of the grid: a run is one replica with the whole batch."""
    columns = [Column(PLAIN, METHODS[PLAIN], setting.every[0], rate) for rate in setting.scan]
    trained = bench.train(setting, columns, setting.scan_seeds, replicas=1)
    reference = bench.reference()
    rows = trained.results(reference, setting.scan_seeds)
    rates = border([row["rate"] for row in rows], [row["summary"]["crashed"] / len(row["seeds"]) for row in rows])
    about = {"steps": trained.steps, "ms_a_step": 1000 * trained.seconds, "rows": rows, "border": list(rates)}
    content.update(reference=reference, scan=about)
    save(path, content)
    for row in rows:
        print(f"{setting.task}: rate {row['rate']:.4g} losses {row['loss']} crashed {row['crashed']}", flush=True)
    print(f"{setting.task}: border {rates}, the best constant prediction {reference:.4f}", flush=True)


def ablate(
    bench: Bench, setting: Setting, rates: Sequence[float], rows: Sequence[str], path: Path, content: dict[str, Any]
) -> None:
    """Every row at some rates."""
    columns = columns_of(setting, rates, rows)
    trained = bench.train(setting, columns, setting.seeds, setting.replicas)
    reference = bench.reference()
    content.update(
        reference=reference,
        parameters=trained.stack.theta.shape[-1],
        steps=trained.steps,
        complete=trained.steps == setting.steps,
        runs_at_once=len(columns) * len(setting.seeds),
        ms_a_step=1000 * trained.seconds,
        rows=trained.results(reference, setting.seeds),
    )
    save(path, content)
    print(table(content), flush=True)


# The command line ----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(SETTINGS), help=f"some of {','.join(SETTINGS)}")
    parser.add_argument("--rows", default=",".join(METHODS), help=f"some of {','.join(METHODS)}")
    parser.add_argument("--scan", action="store_true", help="look for the border, and no more")
    parser.add_argument("--rates", help="peak rates instead of those at the border, several by commas")
    parser.add_argument("--steps", type=int, help="of every run, instead of 5000")
    parser.add_argument("--seeds", type=int, help="how many, instead of 5")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="everything in miniature; needs --results of its own")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    parser.add_argument("--seconds", type=float, help="end runs after so many seconds; their results say so")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-fused", action="store_true", help="do not compile Adam")
    given = parser.parse_args(words)
    if given.table:
        for path in sorted(given.results.glob("*.json")):
            print(table(json.loads(path.read_text())))
        return
    names, rows = given.tasks.split(","), given.rows.split(",")
    if not {*names} <= {*SETTINGS}:
        parser.error(f"--tasks must be some of {','.join(SETTINGS)}, but got {given.tasks}")
    if not {*rows} <= {*METHODS}:
        parser.error(f"--rows must be some of {','.join(METHODS)}, but got {given.rows}")
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs --results, a folder of its own: its figures are no results")
    torch.set_num_threads(1)  # batches are made by many threads, each of which works alone
    device, until = torch.device(given.device), time.time() + given.seconds if given.seconds else math.inf
    for name in names:
        setting = small(SETTINGS[name]) if given.quick else SETTINGS[name]
        setting = replace(
            setting, steps=given.steps or setting.steps, seeds=tuple(range(given.seeds or len(setting.seeds)))
        )
        bench = Bench(setting.make_task(), device, not given.no_graph, not given.no_fused, until)
        path, content = file_of(given.results, setting, device)
        if given.scan or ("scan" not in content and not given.rates):
            scan(bench, setting, path, content)
            tidy()
        if not given.scan:
            rates = [float(word) for word in given.rates.split(",")] if given.rates else content["scan"]["border"]
            ablate(bench, setting, rates, [key for key in METHODS if key in rows], path, content)
            tidy()


if __name__ == "__main__":
    main()
