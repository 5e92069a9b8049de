"""The ablation: the paper's configurations, their controls, and arms, on one task, several seeds each, as plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from hdet.errors import ArgumentError
from lab.runs.folder import Folder
from lab.runs.plan import AUTO, Plan, check_count

__all__ = ["CONFIGURATIONS", "CRASH", "LOW", "SMALL", "Configuration", "PlannedRun", "Row", "Study"]

LOW, HIGH = 5e-3, (0.04, 0.06)
"""A good low rate of Adam, and rates around the border of stability, at which plain training crashes in some runs."""
SMALL = {"users": 1008, "items": 1008, "history": 8, "width": 32, "depth": 1}
"""A feed of 0.10 M weights, for the simulated study."""
NU = 0.01
CRASH = "crashed: the last validation loss is not finite, or not even 1 % below that of the untrained model"


class Configuration(NamedTuple):
    """A way to train; a row of the table for each rate and each T."""

    key: str
    label: str
    what: str
    method: str = "none"
    low: bool = False
    """Whether it also runs at the low rate."""
    high: bool = True
    """Whether it runs at the high rates."""
    warm: bool = False
    """Whether it begins with noisy weights of a short run at the low rate."""
    signal: str = "none"
    spread: float = 1 / 9
    published: float | None = None
    """Train loss in the paper."""
    published_crash: bool = False

    @property
    def meets(self) -> bool:
        """Whether it depends on T."""
        return self.method in ("replicas", "arms")


def _replicas(key: str, label: str, what: str, **own: Any) -> Configuration:
    return Configuration(key, label, what, "replicas", **own)


def _arms(key: str, label: str, what: str, **own: Any) -> Configuration:
    return Configuration(key, label, what, "arms", **own)


CONFIGURATIONS = (
    Configuration("baseline-low", "Baseline-Low", "plain, low rate", low=True, high=False, published=3.294),
    Configuration("baseline-high", "Baseline-High", "plain, high rate", published=4.169, published_crash=True),
    Configuration(
        "warm-init", "Warm-Init", "plain, warm start", low=True, warm=True, published=4.674, published_crash=True
    ),
    _replicas("hdet-no-auto-lr", "HDET without auto-LR", "fan-out and averages", warm=True, published=3.280),
    _replicas("printed-cold", "HDET without warm init, as printed", "fresh weights", signal="printed", published=3.281),
    _replicas("printed", "HDET, full, as printed", "all of it", low=True, signal="printed", warm=True, published=3.277),
    _replicas("corrected-cold", "HDET without warm init, corrected", "fresh weights", signal="loss", published=3.281),
    _replicas("corrected", "HDET, full, corrected", "all of it", low=True, signal="loss", warm=True, published=3.277),
    _replicas("no-spread", "control: HDET with equal rates", "averages and noise, no fan-out", warm=True, spread=0.0),
    _replicas("placebo", "control: HDET with losses shuffled", "all of it", warm=True, signal="shuffled"),
    _arms("arms", "arms", "own gradients, averages, no fan-out", low=True, spread=0.0),
    _arms("arms-spread", "arms, with rates of their own", "own gradients, averages, fan-out", low=True),
    _arms("arms-corrected", "arms, HDET corrected", "own gradients, all but the warm start", signal="loss"),
    _arms("arms-placebo", "arms, losses shuffled", "the same, losses shuffled", signal="shuffled"),
    Configuration("search", "`hdet.auto`", "a search from the high rate", "search"),
)


class Row(NamedTuple):
    """A configuration at one rate and one T."""

    configuration: Configuration
    rate: float
    every: int | None
    """T; None where replicas do not meet."""

    @property
    def key(self) -> str:
        """A name for files."""
        return f"{self.configuration.key}-{self.rate:g}" + (f"-T{self.every}" if self.every else "")

    @property
    def label(self) -> str:
        """A name for people."""
        return f"{self.configuration.label}, {self.rate:g}" + (f", T = {self.every}" if self.every else "")


class PlannedRun(NamedTuple):
    """A run of the study; without a row it makes the weights that others start from."""

    row: Row | None
    seed: int
    folder: Folder
    plan: Plan


@dataclass(frozen=True)
class Study:
    """The arguments of an ablation: what its table depends on.

    Args:
        task: name of the task.
        seeds: runs per row, with seeds 0, 1, 2 …
        steps: of each run.
        warm_steps: of the run at the low rate that warm starts begin with.
        replicas, batch_size: ranks, and samples of each per step.
        low: a rate at which plain training does well.
        high: rates at which it is in danger.
        rounds: T, steps per round, one after the other.
        options: more arguments of the task.
        simulated: whether ranks are simulated in one process; the search always has real ones.
    """

    task: str = "feed"
    seeds: int = 5
    steps: int = 200
    warm_steps: int = 100
    replicas: int = 4
    batch_size: int | None = 16
    low: float = LOW
    high: tuple[float, ...] = HIGH
    rounds: tuple[int, ...] = (4, 20)
    options: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    simulated: bool = True

    def __post_init__(self) -> None:
        for name in ("seeds", "replicas", "steps", "warm_steps", "batch_size"):
            check_count(name, getattr(self, name))
        for length in self.rounds:
            check_count("sync_every", length)
        if not self.high or not 0 < self.low < min(self.high) or not max(self.high) < math.inf:
            raise ArgumentError(
                f"low must be above 0 and below high, but got low={self.low} and high={list(self.high)}; "
                "high are rates at which plain training may fail"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Study:
        """The study that :meth:`arguments` wrote."""
        if set(arguments) != {one.name for one in fields(cls)}:
            raise ArgumentError(f"the arguments of an ablation are not {sorted(arguments)}; give an ablation.json")
        several = {name: tuple(arguments[name]) for name in ("high", "rounds")}
        return cls(**{**arguments, **several})

    def arguments(self) -> dict[str, Any]:
        """As JSON can hold them."""
        return asdict(self) | {"options": dict(self.options), "high": list(self.high), "rounds": list(self.rounds)}

    def rows(self) -> list[Row]:
        """The rows of the table, in its order: rates from low to high, T within them."""
        return [
            Row(one, rate, every)
            for one in CONFIGURATIONS
            for rate in ((self.low,) if one.low else ()) + (self.high if one.high else ())
            for every in (self.rounds if one.meets else (None,))
        ]

    def runs(self, out: Path) -> list[PlannedRun]:
        """All runs in their order: for each seed first the one that warm starts begin with."""
        found = []
        for seed in range(self.seeds):
            warm = Folder(out / f"warm-start-{seed}")
            # Another seed: its samples must not come again in the runs that begin with its weights.
            plan = self._plan("warm start", seed + 1000, lr=self.low, steps=self.warm_steps, method="none")
            found.append(PlannedRun(None, seed, warm, plan))
            for row in self.rows():
                found.append(PlannedRun(row, seed, Folder(out / f"{row.key}-{seed}"), self._plan_of(row, seed, warm)))
        return found

    def _plan_of(self, row: Row, seed: int, warm: Folder) -> Plan:
        one = row.configuration
        return self._plan(
            f"{row.label}, seed {seed}",
            seed,
            lr=AUTO if one.method == "search" else row.rate,
            guess=row.rate,
            method=one.method,
            signal=one.signal,
            spread=one.spread,
            sync_every=row.every,
            start=str(warm.checkpoint.resolve()) if one.warm else None,
            noise=NU if one.warm else 0.0,
        )

    def _plan(self, name: str, seed: int, **own: Any) -> Plan:
        shared: dict[str, Any] = {"steps": self.steps, "replicas": self.replicas, "batch_size": self.batch_size}
        shared |= {"options": self.options, "eval_every": max(1, self.steps // 2)}
        shared |= {"simulated": self.simulated and own["method"] != "search"}
        return Plan(task=self.task, name=name, seed=seed, **(shared | own))
