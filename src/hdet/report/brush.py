"""The painter's brushes: lines, bands, markers and axes as parts of plotly figures.

Colours are roles, ``--name`` or ``--name/opacity``; the page's script looks them up in its style sheet, so that one
figure serves light and dark. Names come from files: plotly reads a little HTML in texts, so they are escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.report import numbers as say
from hdet.report.data import WORDS, Word
from hdet.report.series import Band, Event, Line

Part = dict[str, Any]
Steps = tuple[float, float]
_COLOURS = 8
_SYMBOLS: dict[Word, tuple[str, str]] = {
    "up": ("triangle-up", "--up"),
    "down": ("triangle-down", "--down"),
    "no signal": ("circle", "--quiet"),
}
_DASHES = ("solid", "10px,8px", "3px,9px", "14px,6px,3px,6px")
_SLOPE = 1.5
"""Decades of the lowest curve that are shown at least."""
_DECADES = 4
"""How far below its highest point a rate is shown at first: schedules end many decades down."""


def palette(i: int) -> str:
    """The i-th line's colour."""
    return f"--c{i % _COLOURS + 1}"


def label(text: str) -> str:
    """A name from a file, safe and short enough for plotly's texts.

    >>> label("lr[<b>]")
    'lr[&lt;b&gt;]'
    """
    return html.escape(say.short(text), quote=False)


def stroke(
    points: Line, name: str, colour: str, *, dash: str = "solid", width: float = 2, form: str = ".4~g", **more: Any
) -> Part:
    """A line. ``form`` is how the pointer's number is written."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(name),
        "x": list(points.x),
        "y": list(points.y),
        "line": {"color": colour, "width": width, "dash": dash},
        "hovertemplate": f"%{{fullData.name}}<br>step %{{x}}: %{{y:{form}}}<extra></extra>",
        **more,
    }


def filled(band: Band, colour: str, **more: Any) -> list[Part]:
    """The area between two lines; none where it has no width."""
    around = band.outline()
    area = {
        "type": "scatter",
        "mode": "lines",
        "x": list(around.x),
        "y": list(around.y),
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": colour,
        "hoverinfo": "skip",
        "showlegend": False,
        **more,
    }
    return [area] if band else []


def word_marks(word: Word, rows: Iterable[tuple[str, Line]], *, form: str, **more: Any) -> Part:
    """Markers at all rounds with that verdict; ``rows`` are knobs and where theirs stand."""
    points = [(x, y, label(knob)) for knob, row in rows for x, y in zip(row.x, row.y, strict=True)]
    symbol, colour = _SYMBOLS[word]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": word,
        "legendgroup": word,
        "legendrank": 2000 + WORDS.index(word),
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "text": [knob for _, _, knob in points],
        "marker": {"symbol": symbol, "color": colour, "size": 5 if word == "no signal" else 9},
        "hovertemplate": f"%{{text}}: {word}<br>step %{{x}}: %{{y:{form}}}<extra></extra>",
        **more,
    }


def layout(y_title: str, height: int = 360, steps: Steps | None = None) -> Part:
    """What all figures share. Margins at the sides are fixed, so that figures over the same steps are aligned.

    Args:
        y_title: what the vertical axis shows.
        height: in pixels.
        steps: the first and the last step shown; None for a figure that is not over steps.
    """
    axis = {"gridcolor": "--grid", "zerolinecolor": "--axis", "linecolor": "--axis", "automargin": "height"}
    below: Part = {"title": {"text": "step", "standoff": 6}}
    views = None
    if steps is not None:
        views = {"linear": _view(*steps), "log": _view(*(math.log10(max(x, 1)) for x in steps))}
        below["range"] = views["linear"]
    return {
        "height": height,
        "margin": {"l": 66, "r": 14, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--text", "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "--card", "bordercolor": "--axis", "font": {"color": "--text"}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "meta": {"views": views},  # the page's switch changes between them
        "xaxis": {**axis, **below, "showgrid": False, "zeroline": False, "nticks": 8},
        "yaxis": {**axis, "title": {"text": label(y_title), "standoff": 4}, "tickfont": {"size": 11}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "--axis", "activecolor": "--text"},
    }


def _view(first: float, last: float) -> list[float]:
    """A little more than from the first to the last."""
    margin = 0.02 * (last - first) or 0.5
    return [first - margin, last + margin]


def dashed(i: int) -> Part:
    """The style of the i-th line: one that lies on top of another is broken in its own way, and both are seen."""
    return {"width": 2.5, "dash": _DASHES[(i + i // _COLOURS) % len(_DASHES)]}


def decades(curves: Sequence[Line], around: Sequence[float] = (), down: int = _DECADES) -> Part:
    """A logarithmic axis, and its first view: ``around``, and of the curves all but what is far below them.

    Args:
        curves: what the figure is about; at least one has a point above 0.
        around: heights of bands and dots, which may reach far above.
        down: how many decades below the highest point of all curves are shown, and more if the lowest of them needs it.
    """
    peaks = [max(y for y in one.y if y is not None) for one in curves if one]
    floor = min(max(peaks) * 10**-down, min(peak for peak in peaks if peak > 0) * 10**-_SLOPE)
    heights = [y for one in curves for y in one.y if y is not None]
    shown = [v for v in (*heights, *around) if v >= floor and v > 0]
    view = [math.log10(min(shown)) - 0.1, math.log10(max(shown)) + 0.1]
    return {"type": "log", "range": view, **_ticks(*view)}


def _ticks(low: float, high: float) -> Part:
    """Plain numbers, or powers of ten where zeros would have to be counted."""
    width, plain = high - low, low > -4 and high < 5
    words = {"tickformat": "~g"} if plain or width <= 2 else {"exponentformat": "power"}
    if width > 2:
        return {**words, "dtick": math.ceil(width / 8)}
    return {**words, **({"dtick": "D2"} if width > 0.7 else {"nticks": 6})}


def event_lines(marked: Sequence[Event]) -> list[Part]:
    """Thin upright lines, setbacks in a colour of their own; their words are in the page's list of events."""
    place = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    styles = {
        False: {"color": "--axis", "width": 1, "dash": "dot"},
        True: {"color": "--down", "width": 1, "dash": "dash"},
    }
    return [{**place, "x0": one.step, "x1": one.step, "line": styles[one.is_setback]} for one in marked[:100]]
