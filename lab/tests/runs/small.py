"""Small runs in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lab.runs.folder import Folder
from lab.runs.launch import execute
from lab.runs.plan import Plan
from lab.runs.run import Outcome
from lab.runs.teller import Message

SMALL = {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1}


def a_plan(**own: Any) -> Plan:
    """Two dozen steps of a tiny feed model."""
    usual: dict[str, Any] = {"task": "feed", "steps": 24, "method": "replicas", "lr": 5e-3, "batch_size": 8}
    usual |= {"sync_every": 4, "options": SMALL, "eval_every": 100}
    return Plan(**(usual | own))


def run_here(folder: Folder, tell: Any = None) -> tuple[Outcome, list[Message]]:
    """Go on with what is in the folder; how it ended, and what was told."""
    told: list[Message] = []

    def hear(message: Message) -> None:
        told.append(message)
        if tell is not None:
            tell(message)

    return execute([folder], folder.plan(), hear), told


def new_run(path: Path, **own: Any) -> Folder:
    """A folder with a plan."""
    folder = Folder(path)
    folder.begin(a_plan(**own))
    return folder


def weights_in(folder: Folder) -> dict[str, torch.Tensor]:
    """The model's part of a checkpoint."""
    return torch.load(folder.checkpoint, weights_only=True)["states"]["model"]  # type: ignore[no-any-return]
