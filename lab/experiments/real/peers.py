"""Methods of other people: from their packages, each optional, or from ``real.stacked_peers``.

Methods that treat coordinates alike or look at whole norms see each run as one flat vector, which is exact for them and
far faster; an optimizer that knows matrices sees parameters in the model's shapes. All are views into the stack.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from stacked import Stack, captured
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from real.bench import Bench
from real.optimizers import DECAY, SGD
from real.stacked_peers import ProdigyPlus, Rule, ScheduleFree, ScheduleFreePlus
from real.torch_twins import TWINS

SCHEDULE_FREE = dict.fromkeys(SGD, 1.0)
"""The default rate of Schedule-Free: of SGD, and 0.0025 of AdamW for all others."""
WARM_UP, MECHANIC_WARM_UP = 0.05, 0.1


class Place(NamedTuple):
    """The columns of one method: its runs' weights and gradients [seed, column, parameter], and what they belong to."""

    bench: Bench
    stack: Stack
    theta: Tensor
    gradients: Tensor
    losses: Tensor
    """Of the last step: [seed, column]."""

    def seeds(self, k: int) -> list[nn.Parameter]:
        """All runs of a column as one tensor, for methods that treat every weight by itself."""
        return [_parameter(self.theta[:, k], self.gradients[:, k])]

    def flat(self, u: int, k: int) -> list[nn.Parameter]:
        """A run as one vector."""
        return [_parameter(self.theta[u, k], self.gradients[u, k])]

    def shaped(self, u: int, k: int) -> list[nn.Parameter]:
        """A run as the parameters of the model."""
        pairs = [(piece.of(self.theta[u, k]), piece.of(self.gradients[u, k])) for piece in self.stack.layout]
        return [_parameter(*pair) for pair in pairs]


def _parameter(value: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value)
    parameter.grad = gradient
    return parameter


class Peer(Protocol):
    """All runs of one method."""

    def step(self) -> None:
        """One step of each, the gradients being there."""
        ...

    def weights(self) -> Tensor:
        """What is evaluated, like the place's theta."""
        ...


class Stepped:
    """Optimizers, each of one run or of several."""

    def __init__(self, place: Place, optimizers: Sequence[Any]) -> None:
        self.place, self._optimizers = place, optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def weights(self) -> Tensor:
        return self.place.theta


class Scheduled(Stepped):
    """An optimizer for every run, with torch's schedule where there is one."""

    def __init__(
        self,
        place: Place,
        build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        shaped: bool = False,
    ) -> None:
        runs = [(u, k) for u in range(place.theta.shape[0]) for k in range(place.theta.shape[1])]
        self.parameters = {run: (place.shaped if shaped else place.flat)(*run) for run in runs}
        with _silent():
            super().__init__(place, [build(parameters) for parameters in self.parameters.values()])
        self._schedules = [schedule(optimizer) for optimizer in self._optimizers] if schedule else []

    def step(self) -> None:
        super().step()
        for schedule in self._schedules:
            schedule.step()


def _silent() -> contextlib.redirect_stdout[io.StringIO]:
    """Some packages announce their options."""
    return contextlib.redirect_stdout(io.StringIO())


class Averaged(Scheduled):
    """DoG with its polynomial-decay average."""

    def __init__(self, place: Place) -> None:
        package = import_module("dog")
        first = 1e-4 if _has_batch_norm(place.bench) else 1e-6  # as its authors advise
        super().__init__(place, lambda p: package.DoG(p, reps_rel=first))
        lists = [nn.ParameterList(parameters) for parameters in self.parameters.values()]
        self._averagers = [package.PolynomialDecayAverager(parameters) for parameters in lists]

    def step(self) -> None:
        super().step()
        for averager in self._averagers:
            averager.step()

    def weights(self) -> Tensor:
        rows = [next(averager.averaged_model.parameters()).detach() for averager in self._averagers]
        return torch.stack(rows).view_as(self.place.theta)


def _has_batch_norm(bench: Bench) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in bench.task.model(0).modules())


class Switched(Stepped):
    """Optimizers that step on other weights than those that are evaluated, and change between them."""

    def __init__(self, place: Place, optimizers: Sequence[Any]) -> None:
        super().__init__(place, optimizers)
        for optimizer in optimizers:
            optimizer.train()

    def weights(self) -> Tensor:
        for optimizer in self._optimizers:
            optimizer.eval()
        weights = self.place.theta.clone()
        for optimizer in self._optimizers:
            optimizer.train()
        return weights


def schedule_free(place: Place, rates: Sequence[float]) -> Peer:
    """Schedule-Free AdamW, or SGD, with a warm-up of 5 %; a rate per column, whose seeds step together."""
    package, name = import_module("schedulefree"), place.bench.optimizer
    options = {"warmup_steps": round(WARM_UP * place.bench.steps)}
    if name in SGD:
        kind, options = package.SGDScheduleFree, {**options, "momentum": 0.9, "weight_decay": DECAY[name]}
    else:
        kind, options = package.AdamWScheduleFree, {**options, "weight_decay": _decay(place)}
    return Switched(place, [kind(place.seeds(k), lr=rate, **options) for k, rate in enumerate(rates)])


def radam_free(place: Place) -> Peer:
    """Schedule-Free RAdam at its default rate: it needs no warm-up."""
    package = import_module("schedulefree")
    return Switched(place, [package.RAdamScheduleFree(place.seeds(0), weight_decay=_decay(place))])


class AllSeeds:
    """All runs of a column by one rule, whose step is captured on a GPU."""

    def __init__(self, place: Place, rule: Rule) -> None:
        self._rule, self._replay = rule, rule.step
        if place.bench.graph and place.theta.device.type == "cuda":
            tensors = [place.theta, *rule.state]
            first = [tensor.clone() for tensor in tensors]
            self._replay = captured(rule.step)
            for tensor, value in zip(tensors, first, strict=True):
                tensor.copy_(value)

    def step(self) -> None:
        self._replay()

    def weights(self) -> Tensor:
        return self._rule.weights()[:, None]


def prodigy_plus(place: Place) -> Peer:
    """Prodigy and Schedule-Free in one, as the package's defaults are."""
    rule = ProdigyPlus(place.theta[:, 0], place.gradients[:, 0], place.stack.layout, _decay(place))
    return AllSeeds(place, rule)


def schedule_free_plus(place: Place) -> Peer:
    """ScheduleFree+ with a warm-up of 5 %."""
    steps = place.bench.steps
    tensors = (place.theta[:, 0], place.gradients[:, 0], place.losses[:, 0])
    return AllSeeds(place, ScheduleFreePlus(*tensors, steps, round(WARM_UP * steps)))


def schedule_free_own(place: Place) -> Peer:
    """Schedule-Free around the workload's own optimizer at its customary rate, with a warm-up of 5 %."""
    bench, stack = place.bench, place.stack
    how = (lambda theta: bench.update(stack, theta), bench.customary, round(WARM_UP * bench.steps))
    return AllSeeds(place, ScheduleFree(place.theta[:, 0], place.gradients[:, 0], *how))


class Momo(Stepped):
    """MoMo around SGD with momentum, rate 1, or around Adam, rate 0.01; both constant. It is told the losses."""

    LOWEST = -10.0
    """A loss of densities is at least this; others are at least 0, as the authors advise."""

    def __init__(self, place: Place) -> None:
        package, name = import_module("momo"), place.bench.optimizer
        density = getattr(place.bench.task, "density", False)
        bound = {"lb": self.LOWEST, "use_fstar": True} if density else {"lb": 0.0}
        kind, decay = (package.Momo, DECAY[name]) if name in SGD else (package.MomoAdam, _decay(place))
        seeds = range(len(place.theta))
        super().__init__(place, [kind(place.flat(u, 0), weight_decay=decay, **bound) for u in seeds])

    def step(self) -> None:
        for optimizer, loss in zip(self._optimizers, self.place.losses[:, 0], strict=True):
            optimizer.step(loss=loss)


def cocob(place: Place) -> Peer:
    """COCOB, which has nothing to set; it treats every weight by itself, so the seeds step together."""
    return Stepped(place, [import_module("parameterfree").COCOB(place.seeds(0))])


def schedule_free_rates(optimizer: str) -> list[float]:
    """The default, and two on either side of it."""
    return [SCHEDULE_FREE.get(optimizer, 2.5e-3) * 10 ** (i / 2) for i in range(-2, 3)]


def _decay(place: Place) -> float:
    """Of methods that are a kind of AdamW: its own, unless the workload's optimizer is one of these without any."""
    return DECAY[place.bench.optimizer if place.bench.optimizer in ("adam", "nadam", "rmsprop") else "adamw"]


def _cosine(place: Place) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: CosineAnnealingLR(optimizer, place.bench.steps)


def prodigy(place: Place) -> Peer:
    """Prodigy, lr 1, cosine decay, as its authors advise."""
    package = import_module("prodigyopt")
    return Scheduled(place, lambda p: package.Prodigy(p, lr=1.0, weight_decay=_decay(place)), _cosine(place))


def dadaptation(place: Place) -> Peer:
    """D-Adaptation of SGD or Lion where the workload has it, else of Adam; lr 1, cosine decay."""
    package = import_module("dadaptation")

    def build(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        if place.bench.optimizer in SGD:
            return package.DAdaptSGD(p, lr=1.0, momentum=0.9, weight_decay=DECAY[place.bench.optimizer])  # type: ignore
        if place.bench.optimizer == "lion":
            return package.DAdaptLion(p, lr=1.0, weight_decay=DECAY["lion"])  # type: ignore
        return package.DAdaptAdam(p, lr=1.0, weight_decay=_decay(place), decouple=True)  # type: ignore

    return Scheduled(place, build, _cosine(place))


def mechanic(place: Place) -> Peer:
    """Mechanic around the workload's own optimizer at rate 1; a linear warm-up over a tenth, then linear to 0."""
    package, bench = import_module("mechanic_pytorch"), place.bench
    twin = TWINS[bench.optimizer]
    tuned = package.mechanize(twin.kind)
    rising = max(1, round(MECHANIC_WARM_UP * bench.steps))

    def factor(t: int) -> float:
        return min((t + 1) / rising, (bench.steps - t) / (bench.steps - rising))

    return Scheduled(
        place,
        lambda p: tuned(twin.groups(p, place.stack.layout), lr=1.0, **twin.options),
        lambda optimizer: LambdaLR(optimizer, factor),
        shaped=twin.shaped,
    )


class Method(NamedTuple):
    """How a method is built, and the package it comes from."""

    package: str
    build: Callable[[Place], Peer]


PEERS: dict[str, Method] = {
    "prodigy": Method("prodigyopt", prodigy),
    "dadaptation": Method("dadaptation", dadaptation),
    "dog": Method("dog", Averaged),
    "mechanic": Method("mechanic_pytorch", mechanic),
    "prodigyplus": Method("torch", prodigy_plus),
    "schedulefree-own": Method("torch", schedule_free_own),
    "schedulefreeplus": Method("torch", schedule_free_plus),
    "radamfree": Method("schedulefree", radam_free),
    "momo": Method("momo", Momo),
    "cocob": Method("parameterfree", cocob),
}
"""Methods of one column, without a rate to start from."""


def missing(package: str) -> str | None:
    """Why a package cannot be used; None if it can."""
    return f"{package} is not installed" if find_spec(package) is None else None


class Greedy:
    """GreedyLR of transformers on the stack's optimizer, smoothed, with bounds so wide that they never matter."""

    def __init__(self, starts: Sequence[float], seeds: int) -> None:
        rule = import_module("transformers.optimization").GreedyLR
        # The package moves a torch optimizer's rate: each run has one that is never stepped.
        self._handles = [
            [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate) for rate in starts] for _ in range(seeds)
        ]
        self._rules = [[rule(h, min_lr=0.0, max_lr=1e9, eps=0.0, smooth=True) for h in row] for row in self._handles]

    def step(self, losses: list[list[float]]) -> None:
        """Losses [seed][start] of the last step."""
        for row, values in zip(self._rules, losses, strict=True):
            for schedule, loss in zip(row, values, strict=True):
                schedule.step(loss)

    @property
    def rates(self) -> list[list[float]]:
        """[seed][start]"""
        return [[handle.param_groups[0]["lr"] for handle in row] for row in self._handles]
