"""The file of one workload: what was measured, written after every pass, and the log of runs of *test*."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from provenance import commit

from real.bench import Outcome

TEST_LOG = "test_runs.jsonl"


class Ledger:
    """One JSON file; what is not finite is null in it.

    Args:
        path: where; what is there is kept if its arguments are the same.
        head: of the workload and how it is run.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        there = json.loads(path.read_text()) if path.exists() else {}
        if there.get("arguments") != rounded(head["arguments"]):
            there = {}
        self.content: dict[str, Any] = {"rows": {}, "skipped": {}, **there, **rounded(head)}

    def __contains__(self, name: str) -> bool:
        return name in self.content["rows"]

    def add(self, name: str, outcome: Outcome, rate: float, more: dict[str, Any]) -> None:
        """A row; ``rate`` is the best one, which starts are factors of."""
        starts = [
            {"start": start, "rate": None if start is None else start * rate, "found": found, "curves": curves}
            for start, curves, found in zip(outcome.starts, outcome.curves, outcome.found, strict=True)
        ]
        row = {"starts": starts, "seconds": outcome.seconds, "note": outcome.note, **more}
        self.content["rows"][name] = rounded(row)
        self.content["skipped"].pop(name, None)

    def skip(self, name: str, why: str) -> None:
        """A row that could not be run."""
        self.content["skipped"][name] = why

    def save(self) -> None:
        """Write the file."""
        save(self.path, self.content)


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, all of it or nothing; numbers to six digits, what is not finite is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(rounded(content), allow_nan=False) + "\n")
    os.replace(draft, path)


def rounded(value: Any, digits: int = 6) -> Any:
    """As strict JSON can hold it: what is not finite is null; losses to six digits."""
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def log_test_run(folder: Path, workload: str, rows: Iterable[str], reason: str) -> None:
    """A dated line for a run of a test workload, before it is run."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "workload": workload,
        "rows": list(rows),
        "reason": reason,
    }
    with (folder / TEST_LOG).open("a") as file:
        file.write(json.dumps(line) + "\n")


def best_rate(folder: Path, workload: str) -> float:
    """The best fixed rate, as the file of a workload has it."""
    return float(searched(folder, workload)["best"]["rate"])


def searched(folder: Path, workload: str) -> dict[str, Any]:
    """The file of a workload, which must have the grid of fixed rates."""
    path = folder / f"{workload}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "best" not in content:
        command = f"python lab/experiments/real_lr.py --workloads {workload} --rows onecycle"
        raise SystemExit(f"{path} must have the best rate, but has not. Run first: {command}")
    return content
