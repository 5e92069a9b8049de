"""What lab/experiments/study.py trains: the ways to train, the three tasks, and the same in miniature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import checkout  # noqa: F401 - so that lab is found
from real.problems.recommender import Recommender
from stacked_replicas import Method
from study_table import LABELS

from hdet.ensemble.controller import Corrected
from lab.runs.placebo import Placebo
from lab.tasks import Task, task_named

__all__ = ["CLIP", "ROWS", "SETTINGS", "SPREAD", "Setting", "small"]

SPREAD, CLIP = 1 / 9, 1.0
ROWS = {
    "plain": Method(LABELS["plain"], True, 0.0),
    "clipped": Method(LABELS["clipped"], True, 0.0, clip=CLIP),
    "shared": Method(LABELS["shared"], True, SPREAD, lambda seed: Corrected()),
    "placebo": Method(LABELS["placebo"], True, SPREAD, lambda seed: Placebo(seed)),
    "arms": Method(LABELS["arms"], False, 0.0),
    "arms-spread": Method(LABELS["arms-spread"], False, SPREAD),
    "arms-steered": Method(LABELS["arms-steered"], False, SPREAD, lambda seed: Corrected()),
    "arms-last": Method(LABELS["arms-last"], False, 0.0, apart=(0.8, 1.0)),
    "arms-first": Method(LABELS["arms-first"], False, 0.0, apart=(0.0, 0.2)),
}


@dataclass(frozen=True)
class Setting:
    """What is trained, and how long."""

    task: str
    options: dict[str, Any]
    batch: int
    """Samples per replica and step."""
    centre: float
    """Of the rates that are scanned."""
    replicas: int = 8
    steps: int = 5000
    every: tuple[int, ...] = (20, 100, 1000)
    phased: tuple[int, ...] = (20, 100)
    """T of arms for a part of the run."""
    octaves: int = 6
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    chosen_by: tuple[int, ...] = (1000,)

    def make_task(self, batches: int = 1) -> Task:
        """Its batches are those of all replicas together, so many of them at once."""
        together = self.batch * self.replicas
        if self.task == "movielens":
            return Recommender("movielens-tasks", batch_size=together * batches, **self.options)
        more = {"horizon": self.steps * together} if self.task == "feed" else {}
        return task_named(self.task, batch_size=together * batches, **more, **self.options)


SETTINGS = {
    "feed": Setting("feed", {"users": 8000, "items": 8000, "width": 56, "depth": 2}, 64, 0.004),
    "text": Setting("text", {"width": 128, "depth": 5, "heads": 4, "context": 64}, 4, 0.002),
    "movielens": Setting("movielens", {}, 8, 0.001),
}
SMALL: dict[str, dict[str, Any]] = {
    "feed": {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1},
    "text": {"width": 16, "depth": 1, "heads": 2, "context": 16},
    "movielens": {"width": 4, "hidden": 8, "synthetic": True},
}


def small(setting: Setting) -> Setting:
    """The same in miniature."""
    few: dict[str, Any] = {"steps": 40, "every": (4, 10), "phased": (4,), "octaves": 1, "replicas": 2, "batch": 4}
    return replace(setting, options=SMALL[setting.task], seeds=(0, 1), **few)
