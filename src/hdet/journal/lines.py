"""Lines of a journal: their fields, and how they are written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdet.checks import shown

SCHEMA = 1
"""Version of the schema, in every header."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
Check = Callable[[Any], bool]


def check_fields(record: Mapping[str, Any]) -> None:
    """Raise ValueError with the first field that hdet does not write like that. What is missing or None is left out."""
    for name, (words, fits) in _FIELDS.get(record["kind"], {}).items():
        value = record.get(name)
        if value is not None and not fits(value):
            raise ValueError(f"its {name!r} must be {words}, but is {shown(value)}")


def check_needed(record: Mapping[str, Any], names: Sequence[str], knobs: int) -> None:
    """Raise ValueError unless a round has a step and, under each of the names, a finite number per knob."""
    check_fields({"kind": "round", **record})
    if record.get("step") is None:
        raise ValueError("it has no 'step'")
    for name in names:
        values = record.get(name)
        if values is None or len(values) < knobs or not all(v is not None and math.isfinite(v) for v in values[:knobs]):
            raise ValueError(f"its {name!r} must be {knobs} finite numbers, one per knob, but is {shown(values)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, (list, tuple)) and all(item is None or check(item) for item in value)


def _is_replica(row: Any) -> bool:
    numbers = [row.get(name) for name in ("loss", "signal", "divergence")] if isinstance(row, Mapping) else ["none"]
    lists = [row.get(name) for name in ("values", "multipliers")] if isinstance(row, Mapping) else []
    return all(n is None or _is_number(n) for n in numbers) and all(x is None or _list_of(_is_number)(x) for x in lists)


def _are_seconds(value: Any) -> bool:
    return isinstance(value, Mapping) and all(item is None or _is_number(item) for item in value.values())


_INT = ("an integer", _is_int)
_NUMBER = ("a number", _is_number)
_NUMBERS = ("a list of numbers", _list_of(_is_number))
_TEXT = ("a text", _is_text)
_DICT: tuple[str, Check] = ("an object", lambda value: isinstance(value, Mapping))
_FIELDS: dict[str, dict[str, tuple[str, Check]]] = {
    "header": {
        "hdet": _TEXT,
        "time": _TEXT,
        "replicas": _INT,
        "knobs": ("a list of texts", _list_of(_is_text)),
        "arguments": _DICT,
    },
    "resume": {"step": _INT, "replicas": _INT},
    "round": {
        "round": _INT,
        "step": _INT,
        **dict.fromkeys(("went_back_to", "total_steps"), _INT),
        "replicas": ("a list of replicas, with numbers or lists of numbers", _list_of(_is_replica)),
        "excluded": ("a list of integers", _list_of(_is_int)),
        **dict.fromkeys(("weights", "delta", "velocity", "error", "learned", "base_before", "base", "shape"), _NUMBERS),
        **dict.fromkeys(("reach", "found"), _NUMBER),
        "seconds": ("an object of numbers", _are_seconds),
        "event": _TEXT,
        "alarm": _TEXT,
    },
}


def encoded(record: Mapping[str, Any]) -> bytes:
    """A line, with its end."""
    return (json.dumps(mapped(record, _encode), allow_nan=False, separators=(",", ":")) + "\n").encode()


def decoded(line: bytes) -> dict[str, Any]:
    """A record. Raises ValueError for a line that no journal has."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b'"NaN"' in line or b'Infinity"' in line:  # most lines have none, and need not be searched
        record = mapped(record, _decode)
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("it must be an object with a kind")
    needed = {"round": "round", "resume": "step"}.get(record["kind"])
    if needed is not None and record.get(needed) is None:
        raise ValueError(f"it has no {needed!r}")
    check_fields(record)
    return record


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` applied to whatever stands in dicts and lists; tuples become lists.

    >>> mapped({"steps": (1, 2)}, str)
    {'steps': ['1', '2']}
    """
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)


def _encode(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decode(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
