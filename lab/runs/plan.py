"""A plan: one run, described completely, so that the same plan gives the same run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from inspect import signature
from typing import Any

from hdet.checks import shown
from hdet.ensemble.design import default_length
from hdet.errors import ArgumentError
from lab.tasks import FeedTask, Task, task_named

__all__ = ["AUTO", "METHODS", "OPTIMIZERS", "SIGNALS", "Plan", "check_count", "usual_rate"]

AUTO = "auto"
METHODS = ("search", "replicas", "none")
OPTIMIZERS = ("adam", "sgd")
SIGNALS = ("loss", "none", "shuffled")
_MOST = {
    **dict.fromkeys(("steps", "warm_steps", "eval_every", "sync_every"), 10**9),
    **{"replicas": 1024, "seeds": 1000, "batch_size": 100_000},
}
"""Far more than the bundled tasks are good for: what is above is a slip."""
_USUAL = {"feed": 5e-3, "text": 3e-3, "digits": 1e-2}


def usual_rate(task: str, optimizer: str) -> float:
    """A rate that is known to work for a task: of Adam, and ten times as much for SGD with momentum."""
    return _USUAL.get(task, 1e-3) * (10 if optimizer == "sgd" else 1)


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        task: "feed", "text" or "digits".
        steps: length of the run and of its schedule.
        name: for tables and reports.
        replicas: ranks that train together.
        method: "search": the rate is found while one model trains; "replicas": each rank trains at a rate of its own,
            as published; "none": torch's own OneCycleLR.
        lr: peak of the schedule; "auto" in a search, and only there.
        guess: where a search begins.
        optimizer: "adam" or "sgd" (with momentum 0.9).
        batch_size: samples per replica and step; None: the task's own.
        seed: of weights, batches, multipliers and noise.
        eval_every: steps between evaluations; None: a tenth of the run.
        sync_every: steps per round of replicas; None: a fiftieth of the run.
        spread: alpha of replicas.
        signal: what moves the rate of replicas: "loss"; "none": it stays; "shuffled": the losses dealt to the wrong
            replicas, a placebo.
        start: a checkpoint whose weights the run begins with; None: fresh ones.
        noise: nu of the noise that is added to the first weights.
        device: "auto", "cpu" or "cuda".
        options: more arguments of the task.
    """

    task: str
    steps: int
    name: str = ""
    replicas: int = 1
    method: str = "search"
    lr: float | str = AUTO
    guess: float = 1e-3
    optimizer: str = "adam"
    batch_size: int | None = None
    seed: int = 0
    eval_every: int | None = None
    sync_every: int | None = None
    spread: float = 1 / 9
    signal: str = "loss"
    start: str | None = None
    noise: float = 0.0
    device: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("signal", self.signal, SIGNALS)
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        for name in ("steps", "replicas", "batch_size", "eval_every", "sync_every"):
            check_count(name, getattr(self, name))
        if not (isinstance(self.seed, int) and abs(self.seed) < 2**63):
            raise ArgumentError(f"seed must be an integer of 64 bits, but got seed={shown(self.seed)}; for instance 0")
        if not 0 <= self.spread <= 1:
            raise ArgumentError(
                f"spread must be at least 0 and at most 1, but got spread={self.spread}; published: 1/9"
            )
        if self.lr == AUTO and self.method != "search":
            raise ArgumentError(
                f"lr=auto needs method=search, but got method={self.method}; give a number, such as "
                f"lr={usual_rate(self.task, self.optimizer):g}"
            )
        if self.lr != AUTO and self.method == "search":
            raise ArgumentError(
                f"method=search finds the rate, but got lr={shown(self.lr)}; use lr=auto, and the number as guess"
            )
        for name in ("guess",) if self.lr == AUTO else ("lr", "guess"):
            _rate(name, getattr(self, name))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Plan:
        """The plan that :meth:`arguments` wrote."""
        known = {one.name for one in fields(cls)}
        unknown = sorted(set(arguments) - known)
        if unknown or not {"task", "steps"} <= set(arguments):
            raise ArgumentError(
                f"a plan has a task, steps and known arguments, but got {sorted(arguments)}; it was written by another "
                "version of hdet, or by hand"
            )
        return cls(**arguments)

    def arguments(self) -> dict[str, Any]:
        """As JSON can hold them."""
        return asdict(self) | {"options": dict(self.options)}

    def make_task(self) -> Task:
        """The task, its held-out samples after the last that this run trains on. Raises for bad options."""
        options = dict(self.options)
        if self.batch_size is not None:
            options["batch_size"] = self.batch_size
        if self.task == "feed" and "horizon" not in options:
            size = options.get("batch_size") or signature(FeedTask).parameters["batch_size"].default
            options["horizon"] = self.steps * self.replicas * size
        return task_named(self.task, **options)

    @property
    def evaluates_every(self) -> int:
        return self.eval_every or max(1, self.steps // 10)

    @property
    def round_length(self) -> int:
        """T of replicas; torch's own runs save as often."""
        return self.sync_every or default_length(self.steps)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(known)}, but got {name}={value}")


def check_count(name: str, value: int | None) -> None:
    """Raise for a number of things that no machine has or that no run ends with; None stands for a default."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name} must be an integer, at least 1, but got {name}={shown(value)}")
    if value is not None and value > _MOST[name]:
        raise ArgumentError(
            f"{name} must be at most {_MOST[name]}, but got {name}={shown(value)}; use a smaller number"
        )


def _rate(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name} must be a finite number above 0, but got {name}={value}; for instance 1e-3")
