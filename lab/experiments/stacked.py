"""Many training runs at once on one device: the parameters of all runs are the rows of one tensor.

A run is a column (seed, configuration). Runs of one seed see the same batches, so configurations compare in pairs. A
step of all runs together is one forward and backward under ``torch.func.vmap``; batches and rates lie on the device for
the whole run, and on a GPU the step is captured once as a CUDA graph and replayed. Equal to training each run by itself
up to the order of sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import checkout  # noqa: F401 - so that lab is found
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, replace_all_batch_norm_modules_, vmap

from lab.tasks import Task

Batch = tuple[Tensor, ...]
_BLOCK = 25
"""Steps that one thread makes at a time: neighbours share an epoch's order."""


class Piece(NamedTuple):
    """One parameter of the model, as a part of a flat row."""

    name: str
    shape: torch.Size
    start: int
    size: int
    group: str

    def of(self, rows: Tensor) -> Tensor:
        """A view of it in ``rows[..., parameter]``, in its own shape."""
        return rows[..., self.start : self.start + self.size].view(*rows.shape[:-1], *self.shape)


class Stack:
    """Runs of one task: ``theta[seed, configuration, parameter]``, parameter groups side by side in one flat row.

    Args:
        task: what is trained.
        seeds: of the initial weights and of the data; one may stand there several times.
        configurations: how many runs per seed.
        device: where they train.
    """

    def __init__(self, task: Task, seeds: Sequence[int], configurations: int, device: torch.device) -> None:
        self.task, self.seeds, self.device = task, list(seeds), device
        self.clip: float | None = getattr(task, "clip", None)
        """The largest norm of a run's gradient; longer ones are scaled to it."""
        self._model = task.model(seeds[0])
        replace_all_batch_norm_modules_(self._model)  # vmap has no running statistics: batch statistics everywhere
        self._model.to(device)
        names = {id(p): name for name, p in self._model.named_parameters()}
        groups = task.groups(self._model)
        self.group_names = [str(group["name"]) for group in groups]
        self.layout: list[Piece] = []
        """Where each parameter of the model lies in a row."""
        start = 0
        for group in groups:
            for p in group["params"]:
                self.layout.append(Piece(names[id(p)], p.shape, start, p.numel(), str(group["name"])))
                start += p.numel()
        self.sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        self.column_group = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(self.sizes)).to(device)
        flat = {seed: self._flat(seed) for seed in set(seeds)}
        self.theta = torch.stack([flat[seed] for seed in seeds])[:, None].repeat(1, configurations, 1).to(device)

    def _flat(self, seed: int) -> Tensor:
        parameters = dict(self.task.model(seed).named_parameters())
        return torch.cat([parameters[name].detach().flatten() for name, *_ in self.layout])

    def loss(self, row: Tensor, batch: Batch) -> Tensor:
        """The loss of one run."""
        return self.task.loss(self.model_of(row), batch)

    def model_of(self, row: Tensor) -> torch.nn.Module:
        """The model with the weights of one run, for ``task.loss(model, batch)``: it can be called, and no more."""
        parts = torch.split(row, [piece.size for piece in self.layout])
        weights = {piece.name: part.view(piece.shape) for piece, part in zip(self.layout, parts, strict=True)}
        return _Functional(self._model, weights)  # type: ignore[return-value]

    def gradients(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients like ``theta`` and losses [seed, configuration]; the batch has one row per seed."""
        return vmap(vmap(grad_and_value(self.loss), (0, None)), (0, 0))(theta, batch)

    @torch.no_grad()
    def validation(self, theta: Tensor) -> Tensor:
        """Validation loss [seed, configuration]."""
        parts = []
        for batch in self.task.validation():
            on_device = tuple(part.to(self.device) for part in batch)
            runs = theta.flatten(0, 1).split(8)
            parts.append(torch.cat([vmap(self.loss, (0, None))(rows, on_device) for rows in runs]))
        return torch.stack(parts).double().mean(0).view(theta.shape[:2])


class _Functional:
    """A model with other weights."""

    def __init__(self, model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
        self._model, self._weights = model, weights

    def __call__(self, *inputs: Tensor) -> Tensor:
        return functional_call(self._model, self._weights, inputs)  # type: ignore[no-any-return]


# Optimizers ----------------------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """An optimizer of all runs at once."""

    @property
    def state(self) -> list[Tensor]:
        """Tensors whose first two dimensions are (seed, configuration); zero in the beginning."""
        ...

    def direction(self, gradient: Tensor) -> Tensor:
        """Take a gradient in; the step is minus the rate times what is returned."""
        ...

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """One step, in place. The rate is that of each weight; if the optimizer ``reads_groups``, of each group."""
        ...


class Adam:
    """torch's Adam for all runs: beta 0.9 and 0.999. Every run has its own counter, so one may begin anew."""

    def __init__(self, theta: Tensor) -> None:
        self.first, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count = torch.zeros(*theta.shape[:2], 1, device=theta.device, dtype=theta.dtype)

    @property
    def state(self) -> list[Tensor]:
        return [self.first, self.second, self.count]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        self.first.lerp_(gradient, 0.1)
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        denominator = (self.second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        return (self.first / (1 - 0.9**self.count)).div_(denominator)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.sub_(self.direction(gradient).mul_(rate))


class Momentum:
    """torch's SGD with momentum 0.9 for all runs (0: plain SGD)."""

    def __init__(self, theta: Tensor, momentum: float = 0.9) -> None:
        self.velocity, self.momentum = torch.zeros_like(theta), momentum

    @property
    def state(self) -> list[Tensor]:
        return [self.velocity]

    def direction(self, gradient: Tensor) -> Tensor:
        return self.velocity.mul_(self.momentum).add_(gradient)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.sub_(self.direction(gradient) * rate)


# Steps ---------------------------------------------------------------------------------------------------------------


class TrainStep:
    """One step of all runs, captured as a CUDA graph where there is one.

    Args:
        stack: the runs.
        optimizer: of all runs.
        data: the batches of all steps, each tensor [step, seed, ...].
        rates: [step, seed, configuration, group], read at every step: write to it to change what follows.
        share: makes the gradients of some runs common; None: each has its own.
        before: work on the device before each update, given the gradients and the rates [seed, configuration, group].
        after: further work on the device after each update, given the losses, without synchronisation.
        graph: whether to capture on a GPU.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: Optimizer,
        data: Batch,
        rates: Tensor,
        share: Callable[[Tensor], Tensor] | None = None,
        before: Callable[[Tensor, Tensor], None] | None = None,
        after: Callable[[Tensor], None] | None = None,
        graph: bool = True,
    ) -> None:
        self._stack, self._optimizer, self._data, self.rates = stack, optimizer, data, rates
        self._share, self._before, self._after = share, before, after
        self._clock = torch.zeros(1, dtype=torch.long, device=stack.device)
        self.losses = torch.zeros(stack.theta.shape[:2], device=stack.device, dtype=stack.theta.dtype)
        """Of the last step, at the weights before it."""
        self._replay: Callable[[], None] = self._run
        if graph and stack.device.type == "cuda":
            self._capture()

    def __call__(self) -> None:
        self._replay()

    def _run(self) -> None:
        stack = self._stack
        batch = tuple(part.index_select(0, self._clock)[0] for part in self._data)
        rate = self.rates.index_select(0, self._clock)[0]
        with tf32(True):
            gradient, losses = stack.gradients(stack.theta, batch)
        with torch.no_grad():
            if self._share is not None:
                gradient = self._share(gradient)
            if stack.clip is not None:
                gradient = _clipped(gradient, stack.clip)
            self.losses.copy_(losses)
            if self._before is not None:
                self._before(gradient, rate)
            expanded = rate if getattr(self._optimizer, "reads_groups", False) else rate[..., stack.column_group]
            self._optimizer.step_(stack.theta, gradient, expanded)
            if self._after is not None:
                self._after(self.losses)
            self._clock += 1

    def _capture(self) -> None:
        """Warm-up and capture; weights, optimizer state and clock are put back, but not what ``after`` did."""
        theta = self._stack.theta.clone()
        self._replay = captured(self._run)
        self._stack.theta.copy_(theta)
        for tensor in (*self._optimizer.state, self._clock):
            tensor.zero_()


def _clipped(gradient: Tensor, largest: float) -> Tensor:
    """As torch's ``clip_grad_norm_``, run by run."""
    return gradient * (largest / (gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """``run``, captured as a CUDA graph after two runs on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether matrix products and convolutions on a GPU may use TF32 inside."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    was = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = allowed
    try:
        yield
    finally:
        for place, value in zip(places, was, strict=True):
            place.allow_tf32 = value


class Supply:
    """Training batches of every seed and step, made once on all cores and kept on the device.

    Args:
        task: whose batches.
        seeds: one row each.
        steps: how many training batches; shorter runs use the first of them.
        device: where they lie.
        first: the step of the task's stream that is the first of theirs.
    """

    def __init__(self, task: Task, seeds: Sequence[int], steps: int, device: torch.device, first: int = 0) -> None:
        last = first + steps

        def block(seed: int, begins: int) -> list[tuple[Tensor, ...]]:
            return [task.batch(seed, step) for step in range(begins, min(begins + _BLOCK, last))]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            blocks = [[pool.submit(block, seed, t) for t in range(first, last, _BLOCK)] for seed in seeds]
            rows = [[batch for future in row for batch in future.result()] for row in blocks]
        parts = [[torch.stack(part).to(device) for part in zip(*row, strict=True)] for row in rows]
        self.batches: tuple[Tensor, ...] = tuple(torch.stack(same, 1) for same in zip(*parts, strict=True))
        """Each [step, seed, ...]."""

    def dealt(self, arms: int) -> tuple[Tensor, ...]:
        """Every batch dealt out to some arms: [step, seed and arm, ...]. What is left of it is left out."""
        whole = (part[:, :, : part.shape[2] // arms * arms] for part in self.batches)
        return tuple(part.unflatten(2, (arms, -1)).flatten(1, 2) for part in whole)
