"""The ablation: the published configurations and their controls on one task, several seeds each, as plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from hdet.errors import ArgumentError
from lab.runs.folder import Folder
from lab.runs.plan import AUTO, Plan, check_count

__all__ = ["CONFIGURATIONS", "CRASH", "RATES", "Configuration", "PlannedRun", "Study"]

RATES = {"feed": (5e-3, 0.15), "text": (3e-3, 0.3), "digits": (1e-2, 3.0)}
"""Per task a good low rate of Adam, and one that is far too high: with it plain training on the feed came to nothing on
every seed tried (with 0.1 on two of three); on text and digits it is damaged."""
NU = 0.01
CRASH = "crashed: the last validation loss is not finite, or not even 1 % below that of the untrained model"


class Configuration(NamedTuple):
    """One row of the table."""

    key: str
    label: str
    what: str
    method: str = "none"
    high: bool = True
    """Whether it runs at the high rate."""
    warm: bool = False
    """Whether it begins with noisy weights of a short run at the low rate."""
    signal: str = "none"
    spread: float = 1 / 9
    published: float | None = None
    """Train loss in the paper."""
    published_crash: bool = False


CONFIGURATIONS = (
    Configuration("baseline-low", "Baseline-Low", "plain, low rate", high=False, published=3.294),
    Configuration("baseline-high", "Baseline-High", "plain, high rate", published=4.169, published_crash=True),
    Configuration(
        "warm-init", "Warm-Init", "plain, high rate, warm start", warm=True, published=4.674, published_crash=True
    ),
    Configuration(
        "hdet-no-auto-lr", "HDET without auto-LR", "fan-out and averages", "replicas", warm=True, published=3.280
    ),
    Configuration(
        "hdet-no-warm-init", "HDET without warm init", "fresh weights", "replicas", signal="loss", published=3.281
    ),
    Configuration("hdet", "HDET, full", "all of it", "replicas", warm=True, signal="loss", published=3.277),
    Configuration(
        "no-spread", "control: alpha = 0", "averages and noise, no fan-out", "replicas", warm=True, spread=0.0
    ),
    Configuration("placebo", "control: placebo", "HDET, losses shuffled", "replicas", warm=True, signal="shuffled"),
    Configuration("search", "ours: auto", "a search from the high rate", "search"),
)


class PlannedRun(NamedTuple):
    """A run of the study; without a configuration it makes the weights that others start from."""

    configuration: Configuration | None
    seed: int
    folder: Folder
    plan: Plan


@dataclass(frozen=True)
class Study:
    """The arguments of an ablation: what its table depends on.

    Args:
        task: name of the task.
        seeds: runs per configuration, with seeds 0, 1, 2 …
        steps: of each run.
        warm_steps: of the run at the low rate that warm starts begin with.
        replicas, batch_size: ranks, and samples of each per step.
        low, high: the two rates.
        options: more arguments of the task.
    """

    task: str = "feed"
    seeds: int = 3
    steps: int = 400
    warm_steps: int = 100
    replicas: int = 4
    batch_size: int | None = 64
    low: float = RATES["feed"][0]
    high: float = RATES["feed"][1]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("seeds", "replicas", "steps", "warm_steps", "batch_size"):
            check_count(name, getattr(self, name))
        if not 0 < self.low < self.high < math.inf:
            raise ArgumentError(
                f"low must be above 0 and below high, but got low={self.low} and high={self.high}; "
                "high is a rate at which plain training fails"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Study:
        """The study that :meth:`arguments` wrote."""
        if set(arguments) != {one.name for one in fields(cls)}:
            raise ArgumentError(f"the arguments of an ablation are not {sorted(arguments)}; give an ablation.json")
        return cls(**arguments)

    def arguments(self) -> dict[str, Any]:
        """As JSON can hold them."""
        return asdict(self) | {"options": dict(self.options)}

    def runs(self, out: Path) -> list[PlannedRun]:
        """All runs in their order: for each seed first the one that warm starts begin with."""
        found = []
        for seed in range(self.seeds):
            warm = Folder(out / f"warm-start-{seed}")
            # Another seed: its samples must not come again in the runs that begin with its weights.
            plan = self._plan("warm start", seed + 1000, lr=self.low, steps=self.warm_steps, method="none")
            found.append(PlannedRun(None, seed, warm, plan))
            for one in CONFIGURATIONS:
                folder = Folder(out / f"{one.key}-{seed}")
                found.append(PlannedRun(one, seed, folder, self._plan_of(one, seed, warm)))
        return found

    def _plan_of(self, one: Configuration, seed: int, warm: Folder) -> Plan:
        rate = self.high if one.high else self.low
        return self._plan(
            f"{one.label}, seed {seed}",
            seed,
            lr=AUTO if one.method == "search" else rate,
            guess=rate,
            method=one.method,
            signal=one.signal,
            spread=one.spread,
            start=str(warm.checkpoint.resolve()) if one.warm else None,
            noise=NU if one.warm else 0.0,
        )

    def _plan(self, name: str, seed: int, **own: Any) -> Plan:
        shared: dict[str, Any] = {"steps": self.steps, "replicas": self.replicas, "batch_size": self.batch_size}
        shared |= {"options": self.options, "eval_every": max(1, self.steps // 2)}
        return Plan(task=self.task, name=name, seed=seed, **(shared | own))
