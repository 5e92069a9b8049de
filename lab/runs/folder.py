"""A run's folder: which files it has, and who may write them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdet.checkpoint.file import kept
from hdet.errors import ArgumentError, HdetError
from hdet.files import locked, write_atomically
from hdet.report.numbers import plain_json
from lab.runs.plan import Plan

__all__ = ["Folder"]

_PATIENCE = 20.0
"""Seconds to wait for ranks whose parent was killed: they stop at their next step."""


class Folder:
    """``run.json`` (the plan, then the result), ``journal.jsonl``, ``curve.csv``, ``checkpoint.pt``, ``ranks.log``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.summary = self.path / "run.json"
        self.journal = self.path / "journal.jsonl"
        self.curve = self.path / "curve.csv"
        self.checkpoint = self.path / "checkpoint.pt"
        self.log = self.path / "ranks.log"
        self._lock = self.path / ".lock"

    @property
    def taken(self) -> bool:
        """Whether something is here that a new run would overwrite."""
        return any(file.exists() for file in (self.summary, self.journal, self.curve)) or any(kept(self.checkpoint))

    @property
    def complete(self) -> bool:
        return self.taken and bool(self.read().get("complete"))

    def begin(self, plan: Plan, *, force: bool = False) -> None:
        """Write the plan into an empty folder; with ``force`` an earlier run is removed, and nothing else."""
        if self.path.exists() and not self.path.is_dir():
            raise ArgumentError(f"{self.path} must be a folder, but is a file; name another with --out")
        if self.taken and not force:
            raise ArgumentError(
                f"{self.path} has a run already; name another folder, go on with --resume, or replace it with --force"
            )
        for file in (self.summary, self.journal, self.curve, self.log):
            file.unlink(missing_ok=True)
        for file in list(kept(self.checkpoint)):  # and nothing that somebody else has put beside it
            file.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        head = {"task": plan.task, "name": plan.name or self.path.resolve().name, "seed": plan.seed}
        self.write({**head, "arguments": plan.arguments(), "steps": plan.steps, "complete": False})

    def plan(self) -> Plan:
        """The plan of the run that is here."""
        if not self.summary.exists():
            raise ArgumentError(f"{self.path} has no run to go on with; check the path, or leave out --resume")
        return Plan.of(self.read().get("arguments") or {})

    def read(self) -> dict[str, Any]:
        """``run.json``; empty where there is none."""
        try:
            record = json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.exists() else {}
        except ValueError as error:
            raise ArgumentError(f"{self.summary} is not JSON ({error}); replace the run with --force") from error
        return record if isinstance(record, dict) else {}

    def write(self, record: Mapping[str, Any]) -> None:
        """Replace ``run.json``."""
        write_atomically(self.summary, json.dumps(plain_json(record), indent=1) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nobody else writes here. The lock dies with its process, however that ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            if locked(file, _PATIENCE) is False:
                raise HdetError(f"another process is writing to {self.path}; stop it first, or name another folder")
            yield
