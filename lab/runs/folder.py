"""A run's folder and the files in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdet.errors import ArgumentError
from hdet.files import replacing
from hdet.report.numbers import plain_json
from lab.runs.plan import Plan

__all__ = ["Folder", "write_atomically"]


def write_atomically(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


class Folder:
    """``run.json`` (the plan, then the result), ``journal.jsonl``, ``curve.csv``, ``checkpoint.pt``, ``ranks.log``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.summary = self.path / "run.json"
        self.journal = self.path / "journal.jsonl"
        self.curve = self.path / "curve.csv"
        self.checkpoint = self.path / "checkpoint.pt"
        self.log = self.path / "ranks.log"

    @property
    def _files(self) -> tuple[Path, ...]:
        return self.summary, self.journal, self.curve, self.checkpoint

    @property
    def taken(self) -> bool:
        """Whether something is here that a new run would overwrite."""
        return any(file.exists() for file in self._files)

    @property
    def complete(self) -> bool:
        return bool(self.read().get("complete"))

    def begin(self, plan: Plan) -> None:
        """Write the plan. What an earlier run has left is removed, and nothing else."""
        if self.path.exists() and not self.path.is_dir():
            raise ArgumentError(f"{self.path} must be a folder, but is a file; name another with --out")
        for file in (*self._files, self.log):
            file.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        head = {"task": plan.task, "name": plan.name, "seed": plan.seed}
        self.write({**head, "arguments": plan.arguments(), "steps": plan.steps, "complete": False})

    def read(self) -> dict[str, Any]:
        """``run.json``; empty if there is none."""
        try:
            record = json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.exists() else {}
        except ValueError as error:
            raise ArgumentError(f"{self.summary} is not JSON ({error}); replace the run with --force") from error
        return record if isinstance(record, dict) else {}

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace ``run.json``."""
        write_atomically(self.summary, json.dumps(plain_json(record), indent=1) + "\n")
