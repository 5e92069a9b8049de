"""What came of the cases, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from tests.faults.trial import Result

__all__ = ["tables"]

_HEAD = ("what", "tried", "lost", "bit-equal", "buffers too", "rank named", "seconds until noticed")
_WAYS = {"trained": "replica ensemble", "search": "search", "arms": "arms"}
_OTHERS = {"silent": "silent or late", "late": "silent or late"}
"""What the page calls a fault that no process dies of; a disk that is full or read-only is the other kind."""


def tables(results: list[Result]) -> dict[str, str]:
    """Markdown by name: kills, by what was trained, and the other faults."""
    killed = [result for result in results if result.fault == "killed"]
    others = [result for result in results if result.fault != "killed"]
    ways = dict.fromkeys(_in_words(way, inside) for way in _WAYS for inside in (False, True))
    return {
        "kills": _table([*_rows(killed, _way, ways), _row("all kills", killed)]),
        "others": _table(_rows(others, _fault, sorted({_fault(result) for result in others}))),
    }


def _table(rows: list[list[str]]) -> str:
    lines = [_HEAD, ["---", *["---:"] * (len(_HEAD) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _rows(results: list[Result], name: Callable[[Result], str], names: Iterable[str]) -> list[list[str]]:
    found = [(one, [result for result in results if name(result) == one]) for one in names]
    return [_row(one, those) for one, those in found if those]


def _row(name: str, results: list[Result]) -> list[str]:
    seconds = [result.seconds for result in results if result.seconds is not None]
    counts = [
        len(results),
        sum(result.lost for result in results),
        sum(result.bit_equal for result in results),
        sum(result.buffers_equal for result in results),
        sum(result.named for result in results),
    ]
    return [name, *map(str, counts), f"{median(seconds):.2f}, {max(seconds):.2f}" if seconds else ""]


def _way(result: Result) -> str:
    return _in_words(result.way, result.inside_rounds)


def _in_words(way: str, inside: bool) -> str:
    if way == "search":
        return f"{_WAYS[way]}, saved anywhere"
    return f"{_WAYS[way]}, saved {'inside rounds' if inside else 'at ends of rounds'}"


def _fault(result: Result) -> str:
    return f"{_OTHERS.get(result.fault, 'full disk or read-only folder')}, {result.point}"
