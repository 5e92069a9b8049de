"""Many runs of K arms each as rows of one stack: ``theta[seed and arm, configuration, parameter]``.

Every arm has gradients of its own, from its part of the batch. At the end of a round a group says from whose weights
its arms go on. Optimizer states stay with the arm, but where it takes over the weights of one other arm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from real.bench import evaluated_at, mean_losses
from stacked import Batch, Optimizer
from torch import Tensor

from knobs.groups import Method, group_of
from knobs.stack import KnobBench, KnobStack

__all__ = ["Arms"]


class Arms:
    """All arms of a stack.

    Args:
        bench: whose seeds, knob and length.
        stack: the runs, ``arms`` rows for each seed.
        optimizer: theirs.
        columns: for each configuration the row and the guess.
        arms: K.
    """

    def __init__(
        self,
        bench: KnobBench,
        stack: KnobStack,
        optimizer: Optimizer,
        columns: Sequence[tuple[Method, float]],
        arms: int,
    ) -> None:
        self._stack, self._optimizer, self.arms = stack, optimizer, arms
        self._methods = [method for method, _ in columns]
        knob = bench.task.knob
        self.groups = [[group_of(method, knob, start, arms, seed) for method, start in columns] for seed in bench.seeds]
        """[seed][configuration]"""
        self.paths = [[[group.value] for group in row] for row in self.groups]
        """Their values [seed][configuration][round], the starts first."""
        self._ends = [evaluated_at(bench.steps, min(method.rounds, bench.steps)) for method in self._methods]
        self._losses = torch.zeros_like(stack.values)
        self._sum = torch.zeros_like(stack.theta)
        self._began = [0] * len(columns)
        self._probe: list[Batch] = [tuple(part.to(stack.device) for part in batch) for batch in bench.task.probe]
        self._set_values(range(len(columns)))

    def begin(self) -> None:
        """Before the first step: capturing has already observed some."""
        self._losses.zero_()
        self._sum.zero_()

    def observe(self, losses: Tensor) -> None:
        """After each step, on the device."""
        self._losses.add_(losses)
        self._sum.add_(self._stack.theta)

    def after_step(self, t: int) -> None:
        """Rounds that end here."""
        ending = [c for c, ends in enumerate(self._ends) if t in ends]
        if not ending:
            return
        signals = self._signals(t, ending)
        for place, c in enumerate(ending):
            for u, row in enumerate(self.groups):
                sources = row[c].end_round(signals[u, :, place].tolist())
                self._go_on(u, c, sources)
                self.paths[u][c].append(row[c].value)
            self._began[c] = t
        self._losses[:, ending] = 0
        self._sum[:, ending] = 0
        self._set_values(ending)

    @torch.no_grad()
    def weights(self) -> Tensor:
        """What is evaluated: [seed, configuration, parameter]."""
        theta = self._by_arm(self._stack.theta)
        found = _finite_mean(theta)
        for u, row in enumerate(self.groups):
            for c, group in enumerate(row):
                if group.best is not None:
                    found[u, c] = theta[u, group.best, c]
        return found

    def _signals(self, t: int, ending: list[int]) -> Tensor:
        """[seed, arm, ending configuration], lower is better."""
        steps = torch.tensor([t - self._began[c] for c in ending], device=self._stack.device)
        found = (self._losses[:, ending] / steps).double()
        for kind, weights in (("last", self._stack.theta), ("mean", self._sum)):
            own = [place for place, c in enumerate(ending) if self._methods[c].signal == kind]
            if own:
                rows = weights[:, [ending[place] for place in own]]
                rows = rows / steps[own][:, None] if kind == "mean" else rows
                found[:, own] = mean_losses(self._stack, rows, self._probe)
        return self._by_arm(found)

    @torch.no_grad()
    def _go_on(self, u: int, c: int, sources: list[int] | None) -> None:
        own = slice(u * self.arms, (u + 1) * self.arms)
        theta = self._stack.theta
        if sources is None:
            theta[own, c] = _finite_mean(theta[None, own, c])
        else:
            for tensor in (theta, *self._optimizer.state):
                tensor[own, c] = tensor[own, c][sources]

    def _set_values(self, columns: Sequence[int]) -> None:
        values = [[[group.values[r] for group in row] for r in range(self.arms)] for row in self.groups]
        table = torch.tensor(values).flatten(0, 1).to(self._stack.values)
        self._stack.values[:, list(columns)] = table[:, list(columns)]

    def _by_arm(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self.arms))


def _finite_mean(theta: Tensor) -> Tensor:
    """The mean over dimension 1 of the arms whose weights are finite; not a number where there are none."""
    finite = theta.isfinite().all(-1, keepdim=True)
    return torch.where(finite, theta, 0.0).sum(1) / finite.sum(1)
