"""Which rounds of a long journal a report keeps: a picture has a thousand columns, a journal may have a million rounds.

Rounds are taken in stretches of equal length. Of each stretch the report keeps the first round, the first at which
something happened, the first without a loss, and those at which a number was lowest or highest: no spike is lost.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

MOST = 4000
"""Rounds that are kept of a journal that has more, roughly."""
_LARGEST = sys.float_info.max
Record = Mapping[str, Any]


class Thinner:
    """Takes the rounds of a journal one by one and keeps some.

    Args:
        rounds: how many there are, or a few more.

    >>> thinner = Thinner(10**5)
    >>> for k in range(10**5):
    ...     thinner.add({"round": k, "replicas": [{"loss": 9.0 if k == 54321 else 1.0}]})
    >>> kept = [record["round"] for record in thinner.kept()]
    >>> len(kept) < 2 * MOST, 54321 in kept, (kept[0], kept[-1]) == (0, 99_999), kept == sorted(kept)
    (True, True, True, True)
    """

    def __init__(self, rounds: int) -> None:
        self._rounds, self._length = rounds, 0
        self._kept: list[Record] = []
        self._stretch = _Stretch()
        self._last: Record | None = None

    def add(self, record: Record) -> None:
        """The next round."""
        self._last = record
        if self._rounds <= MOST:
            self._kept.append(record)
            return
        numbers = _numbers(record)
        if not self._length:
            self._length = math.ceil(self._rounds * (2 * len(numbers) + 3) / MOST)
        self._stretch.add(record, numbers)
        if self._stretch.count == self._length:
            self._kept += self._stretch.kept
            self._stretch = _Stretch()

    def kept(self) -> list[Record]:
        """The rounds that are kept, in their order; the last one always is."""
        kept = [*self._kept, *self._stretch.kept]
        return kept if self._last is None or (kept and kept[-1] is self._last) else [*kept, self._last]


class _Stretch:
    """Some rounds in a row, and which of them stand out."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[str, tuple[int, Record]] = {}
        """The first rounds of some kinds, with their places."""
        self._lowest: list[tuple[float, int, Record]] = []
        self._highest: list[tuple[float, int, Record]] = []
        """Of each number its value, the place of the round, and the round."""

    def add(self, record: Record, numbers: list[float | None]) -> None:
        at, self.count = self.count, self.count + 1
        if at == 0:
            self._first["begins"] = at, record
        if record.get("event") and "happened" not in self._first:
            self._first["happened"] = at, record
        if numbers[0] is None and "has no loss" not in self._first:
            self._first["has no loss"] = at, record
        while len(self._lowest) < len(numbers):  # a group may have been added
            self._lowest.append((math.inf, at, record))
            self._highest.append((-math.inf, at, record))
        for c, value in enumerate(numbers):
            if value is None or not -_LARGEST <= value <= _LARGEST:
                continue
            if value < self._lowest[c][0]:
                self._lowest[c] = value, at, record
            if value > self._highest[c][0]:
                self._highest[c] = value, at, record

    @property
    def kept(self) -> list[Record]:
        places = dict(self._first.values())
        places |= {at: record for _, at, record in (*self._lowest, *self._highest)}
        return [places[at] for at in sorted(places)]


def _numbers(record: Record) -> list[float | None]:
    """What is drawn of a round: the mean loss first, None if there is none, and then what else there is."""
    replicas = record.get("replicas") or ()
    losses = [loss for row in replicas if (loss := row.get("loss")) is not None and -_LARGEST <= loss <= _LARGEST]
    found = [sum(losses) / len(losses) if losses else None]
    if len(replicas) > 1:
        found += min(losses, default=None), max(losses, default=None)
        found.append(max([row.get("divergence") or 0.0 for row in replicas]))
    found.append(record.get("estimated_rate"))
    for name in ("base", "learned", "delta"):
        found += record.get(name) or ()
    return found
