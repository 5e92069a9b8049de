"""Which rounds of a long journal a report keeps: a picture has a thousand columns, a journal may have a million rounds.

Rounds are taken in stretches of equal length. Of each stretch the report keeps the first round and the last, the first
at which something happened, the first without a loss, and those at which a number was lowest or highest: no spike is
lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

from hdet.report.numbers import finite

MOST = 4000
"""Rounds that are kept of a journal that has more, roughly."""
Record = Mapping[str, Any]


def thinned(records: Iterable[Record], count: int) -> Iterator[Record]:
    """Some of the rounds, in their order.

    Args:
        records: the rounds.
        count: how many there are.

    >>> rounds = ({"round": k, "replicas": [{"loss": 9.0 if k == 54321 else 1.0}]} for k in range(10**5))
    >>> kept = [record["round"] for record in thinned(rounds, 10**5)]
    >>> len(kept) < 2 * MOST, 54321 in kept, (kept[0], kept[-1]) == (0, 99_999), kept == sorted(kept)
    (True, True, True, True)
    """
    records = iter(records)
    if count <= MOST:
        yield from records
        return
    stretch = list(islice(records, 1))
    length = count * (2 * len(_numbers(stretch[0])) + 4) // MOST if stretch else 0
    stretch += islice(records, length - 1)
    while stretch:
        rows = [_numbers(record) for record in stretch]
        places = {0, len(stretch) - 1, *_first(bool(record.get("event")) for record in stretch)}
        places.update(_first(row[0] is None for row in rows))
        for column in zip_longest(*rows):
            known = [(value, at) for at, value in enumerate(column) if value is not None]
            if known:
                places |= {min(known)[1], max(known)[1]}
        yield from (stretch[at] for at in sorted(places))
        stretch = list(islice(records, length))


def _first(marks: Iterable[bool]) -> list[int]:
    """The first place that is marked, if there is one."""
    return [at for at, mark in enumerate(marks) if mark][:1]


def _numbers(record: Record) -> list[float | None]:
    """What is drawn of a round: the mean loss first, None if there is none, and then what else there is."""
    replicas = record.get("replicas") or ()
    losses = [loss for row in replicas if (loss := finite(row.get("loss"))) is not None]
    found = [sum(losses) / len(losses) if losses else None]
    if len(replicas) > 1:
        found += min(losses, default=None), max(losses, default=None)
        found.append(max([finite(row.get("divergence")) or 0.0 for row in replicas]))
    found.append(record.get("estimated_rate"))
    for name in ("base", "learned", "delta"):
        found += record.get(name) or ()
    return [finite(value) for value in found]
