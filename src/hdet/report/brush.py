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
from hdet.report.lines import Band, Line
from hdet.report.series import Event

__all__ = ["decades", "event_lines", "filled", "heading", "label", "layout", "palette", "stroke", "word_marks"]

Part = dict[str, Any]
_COLOURS = 8
_SYMBOLS: dict[Word, tuple[str, str]] = {
    "up": ("triangle-up", "--up"),
    "down": ("triangle-down", "--down"),
    "no signal": ("circle", "--quiet"),
}
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


def layout(y_title: str, height: int = 360) -> Part:
    """What all figures share."""
    axis = {"gridcolor": "--grid", "zerolinecolor": "--axis", "linecolor": "--axis", "automargin": True}
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--text", "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "--card", "bordercolor": "--axis", "font": {"color": "--text"}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "meta": {"over": "steps"},  # the page's switch makes this axis logarithmic
        "xaxis": {**axis, "title": {"text": "step", "standoff": 6}, "showgrid": False, "nticks": 8},
        "yaxis": {**axis, "title": {"text": label(y_title), "standoff": 6}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "--axis", "activecolor": "--text"},
    }


def decades(values: Sequence[float]) -> Part:
    """A logarithmic axis, and its first view."""
    highest = max(values)
    lowest = min(v for v in values if v >= highest * 10**-_DECADES)
    view = [math.log10(lowest) - 0.1, math.log10(highest) + 0.1]
    width = view[1] - view[0]
    ticks = {"dtick": 1 if width > 2 else "D2"} if width > 0.7 else {"nticks": 6}
    return {"type": "log", "tickformat": "~g" if lowest >= 1e-3 else "~e", "range": view, **ticks}


def heading(text: str, y: float) -> Part:
    """A panel's name, at its upper left."""
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": y, "yref": "paper", "yanchor": "bottom"}
    return {**place, "text": label(text), "showarrow": False, "font": {"color": "--text", "size": 12}}


def event_lines(marked: Sequence[Event]) -> list[Part]:
    """Thin upright lines; their words are in the page's list of events."""
    place = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    style = {"color": "--axis", "width": 1, "dash": "dot"}
    return [{**place, "x0": event.step, "x1": event.step, "line": style} for event in marked[:100]]
