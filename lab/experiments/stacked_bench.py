"""Where ensembles of a task are trained together, and what comes out of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from crashes import constant_loss, has_crashed, summary
from stacked import Adam, Stack, Supply, TrainStep
from stacked_replicas import Column, FusedAdam, StackedReplicas
from torch import Tensor

from lab.tasks import Task
from lab.tasks.task import Batch

__all__ = ["Bench", "Trained"]

BLOCKS = 20
"""Parts of a run in which the mean train loss is written down."""
_TIMED = 30
"""Steps by which the time of a run is estimated."""
_ROUNDS = 1.15
"""What the ends of rounds may add to it."""


@dataclass
class Bench:
    """Where runs of a task are trained.

    Args:
        task: the problem; its batches are those of all replicas together.
        device: where.
        graph: whether a step is captured on a GPU.
        fused: whether Adam is compiled on a GPU.
        until: the moment at which a run is ended, looked at after every tenth of it.
        first: the step of the task's stream with which runs begin.
    """

    task: Task
    device: torch.device
    graph: bool = True
    fused: bool = True
    until: float = math.inf
    first: int = 0
    _made: tuple[list[int], int, Supply] | None = field(default=None, init=False, repr=False)
    """The last batches, their seeds and steps: making them can take as long as a run."""

    def train(
        self,
        columns: Sequence[Column],
        seeds: Sequence[int],
        replicas: int,
        steps: int,
        each: Callable[[int, Tensor], None] = lambda t, theta: None,
    ) -> Trained:
        """All runs at once, up to their end or to the end of the time.

        Args:
            columns: what is trained.
            seeds: of the runs of each column.
            replicas: of each run.
            steps: of each run.
            each: is given the step and the weights after it.
        """
        stack, runs, step = self._begun(columns, seeds, replicas, steps)
        began, done, tenth = time.perf_counter(), 0, max(1, steps // 10)
        for t in range(1, steps + 1):
            step()
            runs.after_step(t)
            each(t, stack.theta)
            done = t
            if t % tenth == 0:
                recent = runs.losses[t - tenth : t].mean((0, 1)).tolist()  # waits for the device
                passed = time.perf_counter() - began
                pace = f"step {t}, {passed:.1f} s, {1000 * passed / t:.2f} ms a step"
                self._say(f"{pace}, train losses {' '.join(f'{loss:.3g}' for loss in recent)}")
                if time.time() > self.until:
                    break
        return Trained(stack, runs, done, (time.perf_counter() - began) / done)

    def seconds_of(self, columns: Sequence[Column], seeds: Sequence[int], replicas: int, steps: int) -> float:
        """An estimate for all runs, from their first steps."""
        steps_made = min(_TIMED, steps)
        _, runs, step = self._begun(columns, seeds, replicas, steps_made)
        began = time.perf_counter()
        for _ in range(steps_made):
            step()
        runs.losses.sum().item()  # waits for the device
        return _ROUNDS * (time.perf_counter() - began) / steps_made * steps

    def supply(self, seeds: Sequence[int], steps: int) -> Supply:
        """Batches of at least so many steps; those of the last call, if they serve."""
        if self._made is None or self._made[0] != list(seeds) or self._made[1] < steps:
            self._made = None  # their memory is free before new ones are made
            self._made = list(seeds), steps, Supply(self.task, seeds, steps, self.device, self.first)
        return self._made[2]

    def reference(self) -> float:
        """The loss of the best constant prediction, to which a run that has crashed is compared."""
        known = getattr(self.task, "constant_loss", None)
        return constant_loss([batch[-1] for batch in self.task.validation()]) if known is None else float(known)

    def _begun(
        self, columns: Sequence[Column], seeds: Sequence[int], replicas: int, steps: int
    ) -> tuple[Stack, StackedReplicas, TrainStep]:
        began = time.perf_counter()
        batches = self.supply(seeds, steps).dealt(replicas)
        self._say(f"batches of {steps} steps, {time.perf_counter() - began:.1f} s")
        stack = Stack(self.task, [seed for seed in seeds for _ in range(replicas)], len(columns), self.device)
        fused = self.fused and self.device.type == "cuda"
        optimizer = FusedAdam(stack.theta, stack.column_group) if fused else Adam(stack.theta)
        runs = StackedReplicas(stack, optimizer, columns, replicas, steps, seeds)
        step = TrainStep(stack, optimizer, batches, runs.rates, runs.share, after=runs.observe, graph=self.graph)
        runs.begin()
        self._say(f"{work_of(stack, batches)}; ready after {time.perf_counter() - began:.1f} s")
        return stack, runs, step

    def _say(self, words: str) -> None:
        print(f"{self.task.name}: {words}", flush=True)


def work_of(stack: Stack, batches: Batch) -> str:
    """Sizes, and the work of one step by the rule of six operations per weight and token, attention not counted."""
    rows, columns, weights = stack.theta.shape
    tables = sum(piece.size for piece in stack.layout if piece.group == "embedding")
    seen = batches[1].shape  # the text that follows, or the feed's history: [step, row, sample, place]; or items
    tokens = math.prod(seen[2:])
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

    def results(self, reference: float, seeds: Sequence[int], theta: Tensor | None = None) -> list[dict[str, Any]]:
        """A row for every column: losses and metrics of the consensus by seed, and who has crashed.

        Args:
            reference: the loss of the best constant prediction.
            seeds: of the runs.
            theta: other weights [seed, column, parameter] in place of the consensus.
        """
        theta = self.runs.consensus() if theta is None else theta
        evaluated, found = Evaluation(self.stack), []
        for c, column in enumerate(self.runs.columns):
            metrics = [evaluated(theta[u, c]) for u in range(len(seeds))]
            losses = [one["loss"] for one in metrics]
            crashed = [has_crashed(loss, reference) for loss in losses]
            about = {"row": column.key, "label": column.method.label, "rate": column.rate}
            about |= {"T": None if column.method.is_plain else column.every, "seeds": list(seeds)}
            found.append(
                {
                    **about,
                    "crashed": crashed,
                    "summary": summary(crashed, losses),
                    **{name: [one[name] for one in metrics] for name in metrics[0]},
                    "train_loss": self._blocks(c),
                    "learned": [row[c].learned for row in self.runs.runs],
                }
            )
        return found

    def _blocks(self, c: int) -> list[list[float]]:
        """Mean train losses [seed][block]."""
        whole = self.runs.losses[: self.steps, :, c].double()
        by_seed = whole.unflatten(1, (-1, self.runs.replicas)).mean(2)
        return [[float(part.mean()) for part in run.tensor_split(BLOCKS)] for run in by_seed.T]


class Evaluation:
    """The task's metrics for rows of weights; its held-out batches are made once."""

    def __init__(self, stack: Stack) -> None:
        self._layout, self._task = stack.layout, _HeldOut(stack.task)
        self._model = stack.task.model(0).to(stack.device)

    @torch.no_grad()
    def __call__(self, row: Tensor) -> dict[str, float]:
        parameters = dict(self._model.named_parameters())
        for piece in self._layout:
            parameters[piece.name].copy_(piece.of(row))
        return self._task.evaluate(self._model)


class _HeldOut:
    """A task whose held-out batches are at hand."""

    def __init__(self, task: Task) -> None:
        self._task, self._batches = task, task.validation()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def validation(self) -> list[Batch]:
        return self._batches

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """The task's own evaluation, which asks ``self`` for the batches."""
        return type(self._task).evaluate(self, model)  # type: ignore[arg-type]
