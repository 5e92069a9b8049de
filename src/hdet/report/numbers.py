"""Numbers as text for people, and as JSON."""

from __future__ import annotations

from typing import Any

from hdet.checks import is_finite
from hdet.journal.file import mapped

NOTHING = "–"


def finite(value: object) -> float | None:
    """A float; None for anything that is not a number, or is NaN or infinite.

    >>> finite(3), finite(float("nan")), finite(None), finite("7"), finite(True), finite(10**400)
    (3.0, None, None, None, None, None)
    """
    return float(value) if is_finite(value) else None  # type: ignore[arg-type]  # a number


def number(value: float | None, digits: int) -> str:
    """A number with this many significant digits; powers of ten if zeros would have to be counted.

    >>> number(0.0041, 2), number(3.27749, 4), number(0.1, 2), number(12345678.0, 3), number(0.0, 2)
    ('4.1e-3', '3.277', '0.1', '1.23e7', '0')
    """
    if value is None:
        return NOTHING
    if value == 0 or 1e-2 <= abs(value) < 1e5:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(power)}"


def rate(value: float | None) -> str:
    """A learning rate or another knob's value."""
    return number(value, 2)


def rates(start: float, end: float) -> tuple[str, str]:
    """Two rates, with enough digits to tell them apart.

    >>> rates(1e-3, 4.12e-3), rates(0.1, 0.1021)
    (('1e-3', '4.1e-3'), ('0.1', '0.102'))
    """
    pairs = [(number(start, digits), number(end, digits)) for digits in (2, 3, 4)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def loss(value: float | None) -> str:
    """A loss or a metric, with enough digits to compare.

    >>> loss(0.03588), loss(1.0276), loss(None)
    ('0.03588', '1.028', '–')
    """
    return number(value, 4)


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(0.0123), seconds(12.34), seconds(750), seconds(11100), seconds(59.97), seconds(None)
    ('12.3 ms', '12.3 s', '12 min 30 s', '3 h 5 min', '1 min 0 s', '–')
    """
    if value is None:
        return NOTHING
    if round(value, 1) < 60:
        return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plain_json(value: Any) -> Any:
    """Numbers that JSON does not know become null.

    >>> plain_json({"loss": float("nan"), "steps": [1, float("inf")]})
    {'loss': None, 'steps': [1, None]}
    """
    return mapped(value, lambda leaf: finite(leaf) if isinstance(leaf, float) else leaf)
