"""A plan: one run, described completely, so that the same plan gives the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from inspect import signature
from typing import Any

from hdet.checks import shown
from hdet.ensemble.design import default_length
from hdet.errors import ArgumentError
from lab.tasks import FeedTask, Task, task_named

__all__ = ["AUTO", "Plan", "check_count"]

AUTO = "auto"
_MOST = {
    **dict.fromkeys(("steps", "warm_steps", "eval_every", "sync_every"), 10**9),
    **{"replicas": 1024, "seeds": 1000, "batch_size": 100_000},
}
"""Far more than the bundled tasks are good for, so anything above is a slip."""


@dataclass(frozen=True)
class Plan:
    """One run, trained with Adam.

    Args:
        task: "feed", "text" or "digits".
        steps: length of the run and of its schedule.
        name: for tables and reports.
        replicas: ranks that train together.
        method: "search": the rate is found while one model trains; "replicas": each rank trains at a rate of its own
            on shared gradients; "arms": on gradients of its own; "none": torch's own OneCycleLR.
        lr: peak of the schedule; "auto" in a search, and only there.
        guess: where a search begins.
        batch_size: samples per replica and step; None: the task's own.
        seed: of weights, batches, multipliers and noise.
        eval_every: steps between evaluations; None: a tenth of the run.
        sync_every: steps per round of replicas; None: a fiftieth of the run.
        spread: alpha of replicas.
        signal: what moves the rate of replicas: "loss", by hdet.Corrected(); "printed": the same by hdet.AsPrinted();
            "none": it stays; "shuffled": the losses dealt to the wrong replicas, a placebo.
        start: a checkpoint whose weights the run begins with; None: fresh ones.
        noise: nu of the noise that is added to the first weights.
        options: more arguments of the task.
        simulated: whether the ranks are rows of one tensor in one process, without torch.distributed.
    """

    task: str
    steps: int
    name: str = ""
    replicas: int = 1
    method: str = "search"
    lr: float | str = AUTO
    guess: float = 1e-3
    batch_size: int | None = None
    seed: int = 0
    eval_every: int | None = None
    sync_every: int | None = None
    spread: float = 1 / 9
    signal: str = "loss"
    start: str | None = None
    noise: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    simulated: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "replicas", "batch_size", "eval_every", "sync_every"):
            check_count(name, getattr(self, name))

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
    def explores(self) -> bool:
        """Whether ranks are replicas, which may differ and are averaged."""
        return self.method in ("replicas", "arms")

    @property
    def evaluates_every(self) -> int:
        return self.eval_every or max(1, self.steps // 10)

    @property
    def round_length(self) -> int:
        """T of replicas."""
        return self.sync_every or default_length(self.steps)


def check_count(name: str, value: int | None) -> None:
    """Raise for a number of things that no machine has or that no run ends with; None stands for a default."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name} must be an integer, at least 1, but got {name}={shown(value)}")
    if value is not None and value > _MOST[name]:
        raise ArgumentError(
            f"{name} must be at most {_MOST[name]}, but got {name}={shown(value)}; use a smaller number"
        )
