"""Draws the figures of series.py with plotly. Nothing is computed here.

The colours of lines are visible on light and on dark backgrounds; the page's style sheet colours texts and grids.
"""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]

from hdet.report import numbers as say
from hdet.report.series import Figure, Style, Trace

_COLOURS = ("#3d7fd9", "#d9822b", "#2f9e7c", "#8f6fd6", "#d45a8e", "#2a9db8", "#a88930", "#7f8b99")
_DASHES = ("solid", "10px,8px", "3px,9px", "14px,6px,3px,6px")
_SETBACK, _QUIET = "#d2622a", "#8d97a3"
_STYLES: dict[Style, dict[str, Any]] = {
    "line": {"mode": "lines", "line_width": 2},
    "curve": {"mode": "lines", "line_width": 2.5},
    "dashed": {"mode": "lines", "line_width": 1.5, "line_dash": "dash"},
    "thin": {"mode": "lines", "line_width": 1, "opacity": 0.6},
    "band": {"mode": "lines", "line_width": 0, "fill": "toself", "opacity": 0.2, "hoverinfo": "skip"},
    "dots": {"mode": "markers", "marker_size": 6, "opacity": 0.6},
}
_LONGEST = 36
"""Letters of a name that a legend has room for."""
_CLEAR = "rgba(0,0,0,0)"
_AXIS = {"gridcolor": "#e0e4e9", "zerolinecolor": "#bcc4cd", "automargin": "height"}
_TEMPLATE = go.layout.Template(
    layout={
        "margin": {"l": 66, "r": 14, "t": 12, "b": 8},  # the same at the sides: steps are aligned from figure to figure
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "modebar": {"bgcolor": _CLEAR, "color": _QUIET, "activecolor": _QUIET},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": _CLEAR},
        "xaxis": {**_AXIS, "showgrid": False, "zeroline": False, "nticks": 8, "title": {"standoff": 6}},
        "yaxis": {**_AXIS, "exponentformat": "power", "title": {"standoff": 4}},
    }
)


def label(text: str) -> str:
    """A name from a file, escaped since plotly interprets some HTML in its texts; a long one loses its middle.

    >>> label("lr[<b>]"), label("lr[encoder.layers.11.attention.output]")
    ('lr[&lt;b&gt;]', 'lr[encoder.layers.…attention.output]')
    """
    fits = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-(_LONGEST // 2 - 1) :]}"
    return html.escape(fits, quote=False)


def painted(figure: Figure) -> go.Figure:
    """A figure as plotly's."""
    drawn = go.Figure(layout_template=_TEMPLATE)
    if figure.bars:
        phases, seconds = [label(phase) for phase in figure.bars], list(figure.bars.values())
        texts = [f"{say.seconds(one)}, {100 * one / sum(seconds):.1f} %" for one in seconds]
        bars = go.Bar(y=phases, x=seconds, text=texts, orientation="h", marker_color=_COLOURS[0])
        drawn.add_trace(bars.update(hovertemplate="%{y}: %{text}<extra></extra>", textangle=0, marker_opacity=0.6))
        drawn.update_layout(height=80 + 34 * len(texts), xaxis_title="seconds")
        return drawn.update_yaxes(autorange="reversed", showgrid=False, ticksuffix="  ", automargin=True)
    drawn.add_traces([_painted(trace) for trace in figure.traces])
    for one in figure.events[:100]:
        colour, dash = (_SETBACK, "dash") if one.is_setback else (_QUIET, "dot")
        drawn.add_vline(one.step, line_width=1, line_color=colour, line_dash=dash, layer="below")
    height = 360 + 12 * max(0, len(figure.traces) - 6)  # the legend grows
    drawn.update_layout(height=height, meta=figure.steps)  # the page's script sets the axis of steps to them
    if figure.is_log:
        drawn.update_yaxes(type="log", dtick=1 if figure.y_range[1] - figure.y_range[0] > 2 else "D2")
    return drawn.update_yaxes(title_text=label(figure.y_title), range=figure.y_range).update_xaxes(title_text="step")


def _painted(trace: Trace) -> go.Scatter:
    colour, texts = _COLOURS[trace.colour % len(_COLOURS)], [label(text) for text in trace.labels]
    drawn = go.Scatter(x=trace.line.x, y=trace.line.y, name=label(trace.name), showlegend=trace.in_legend)
    drawn.update(line_color=colour, marker_color=colour, fillcolor=colour, **_STYLES[trace.style])
    if trace.style == "curve":  # of two that lie on top of each other both are visible
        i = trace.colour
        drawn.line.dash = _DASHES[(i + i // len(_COLOURS)) % len(_DASHES)]
    if trace.style != "band":
        told = "%{text}, " if texts else "%{fullData.name}, "
        drawn.update(text=texts, hovertemplate=f"{told}step %{{x}}: %{{y:.4~g}}<extra></extra>")
    return drawn
