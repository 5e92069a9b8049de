"""What came of the cases, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from tests.faults.traps import POINTS
from tests.faults.trial import Result

__all__ = ["tables"]

_HEAD = (
    *("what", "tried", "came back", "bit-equal", "buffers too", "close", "lost", "rank named", "noticed by torch"),
    *("seconds until noticed: median", "worst"),
)
_WAYS = {"trained": "replicas train apart, shared gradients", "search": 'search, `max_lr="auto"`', "arms": "arms"}


def tables(results: list[Result]) -> dict[str, str]:
    """Markdown by name: kills by what was trained, kills by where, and the other faults."""
    killed = [result for result in results if result.fault == "killed"]
    others = [result for result in results if result.fault != "killed"]
    return {
        "ways": _table(
            killed, _way, dict.fromkeys(_in_words(way, inside) for way in _WAYS for inside in (False, True))
        ),
        "points": _table(killed, lambda result: result.point, POINTS),
        "others": _table(others, _fault, sorted({_fault(result) for result in others})),
    }


def _table(results: list[Result], name: Callable[[Result], str], names: Iterable[str]) -> str:
    rows = [(one, [result for result in results if name(result) == one]) for one in names]
    lines = [_row(one, found) for one, found in [*rows, ("all", results)] if found]
    return "\n".join("| " + " | ".join(line) + " |" for line in [_HEAD, ["---", *["---:"] * (len(_HEAD) - 1)], *lines])


def _row(name: str, results: list[Result]) -> list[str]:
    seconds = [result.seconds for result in results if result.seconds is not None]
    counts = [
        len(results),
        sum(result.came_back for result in results),
        sum(result.bit_equal for result in results),
        sum(result.buffers_equal for result in results),
        sum(result.close for result in results),
        sum(result.lost for result in results),
        sum(result.named for result in results),
        sum(result.by_torch for result in results),
    ]
    times = [f"{median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["", ""]
    return [name, *map(str, counts), *times]


def _way(result: Result) -> str:
    return _in_words(result.way, result.inside_rounds)


def _in_words(way: str, inside: bool) -> str:
    if way == "search":
        return f"{_WAYS[way]}, saved anywhere"
    return f"{_WAYS[way]}, saved {'inside rounds' if inside else 'at ends of rounds'}"


def _fault(result: Result) -> str:
    return f"{result.fault}, {result.point}"
