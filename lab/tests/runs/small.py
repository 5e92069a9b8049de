"""Runs so small that one takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lab.runs.folder import Folder
from lab.runs.launch import execute
from lab.runs.plan import Plan
from lab.runs.teller import Message

SMALL = {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1}


def a_plan(**own: Any) -> Plan:
    """Two dozen steps of a tiny feed model."""
    usual: dict[str, Any] = {"task": "feed", "steps": 24, "method": "replicas", "lr": 5e-3, "batch_size": 8}
    usual |= {"name": "run", "sync_every": 4, "options": SMALL, "eval_every": 100}
    return Plan(**(usual | own))


def run_here(path: Path, **own: Any) -> tuple[Folder, list[Message]]:
    """A run in a new folder, and what was told of it."""
    folder, plan, told = Folder(path), a_plan(**own), list[Message]()
    folder.begin(plan)
    execute([folder], [plan], told.append)
    return folder, told


def weights_in(folder: Folder) -> dict[str, torch.Tensor]:
    """The model's part of a checkpoint."""
    return torch.load(folder.checkpoint, weights_only=True)["states"]["model"]  # type: ignore[no-any-return]
