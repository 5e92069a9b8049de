"""One line of a journal: a record as JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hdet.journal.fields import check_fields

__all__ = ["SCHEMA", "decoded", "encoded"]

SCHEMA = 1
"""Version of the schema, in every header."""
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encoded(record: Mapping[str, Any]) -> bytes:
    """A line, with its end."""
    return (json.dumps(_encode(record), allow_nan=False, separators=(",", ":")) + "\n").encode()


def decoded(line: bytes) -> dict[str, Any]:
    """A record. Raises ValueError for a line that no journal has."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if b'"NaN"' in line or b'Infinity"' in line:  # most lines have none, and need not be searched
        record = _decode(record)
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("it must be an object with a kind")
    needed = {"round": "round", "resume": "step"}.get(record["kind"])
    if needed is not None and record.get(needed) is None:
        raise ValueError(f"it has no {needed!r}")
    check_fields(record)
    return record


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
