"""``curve.csv``: losses and the learning rate over steps, written while a run goes on."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TextIO

from hdet.files import write_atomically

__all__ = ["CurveFile"]

HEAD = "step,train_loss,validation_loss,rate"


class CurveFile:
    """One line per point, flushed at once. A run that goes on from step t keeps what is at or before t."""

    def __init__(self, path: Path, after: int) -> None:
        kept = [row for row in _rows(path) if int(row[0]) <= after]
        write_atomically(path, "\n".join([HEAD, *(",".join(row) for row in kept)]) + "\n")
        self._file: TextIO = path.open("a", encoding="utf-8")
        self.train = [(int(row[0]), float(row[1])) for row in kept if row[1]]
        """Train losses so far."""
        self.validation = [(int(row[0]), float(row[2])) for row in kept if row[2]]

    def add(
        self, step: int, train: float | None = None, validation: float | None = None, rate: float | None = None
    ) -> None:
        """A point: losses at the end of a step, and the rate that it was made with."""
        if train is not None:
            self.train.append((step, train))
        if validation is not None:
            self.validation.append((step, validation))
        cells = ("" if value is None else repr(value) for value in (train, validation, rate))
        self._file.write(",".join([str(step), *cells]) + "\n")
        self._file.flush()

    def last_tenth(self, steps: int) -> float:
        """Mean train loss over the last tenth of the run: one batch alone is noise."""
        values = [loss for step, loss in self.train if step > steps - max(1, steps // 10)]
        return math.fsum(values) / len(values) if values else math.nan

    def close(self) -> None:
        self._file.close()


def _rows(path: Path) -> list[list[str]]:
    """Complete lines without the head; one that was cut off is left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    rows = list(csv.reader(whole.splitlines()))[1:]
    return [row for row in rows if len(row) == len(HEAD.split(",")) and row[0].isdigit()]
