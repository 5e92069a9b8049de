"""The page: one HTML file with everything inside, that opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hdet.errors import ArgumentError
from hdet.report.comparison import Table, compare, table_of
from hdet.report.data import RunData
from hdet.report.figures import Figure, comparison_figures, run_figures
from hdet.report.series import Event, events, lengthening
from hdet.report.verdict import Tile, compared, tiles, verdict

__all__ = ["Table", "write_report"]


class Placed(NamedTuple):
    """A figure and the id under which the page's script finds it."""

    key: str
    figure: Figure


class Section(NamedTuple):
    """One run on the page."""

    run: RunData
    verdict: str
    tiles: tuple[Tile, ...]
    figures: list[Placed]
    events: tuple[Event, ...]
    setup: list[tuple[str, str]]


def write_report(runs: Sequence[RunData], out: Path, *, title: str | None = None, table: Table | None = None) -> Path:
    """Write a report and return its path.

    One run: the full report. Several: a table and their curves over each other, then each run's own, folded.

    Args:
        runs: at least one, from :func:`hdet.report.data.load_run`.
        out: the HTML file; its folder is made, and a file that is there is replaced.
        title: None: the run's name.
        table: one more table, before everything else.
    """
    if not runs:
        raise ArgumentError("a report needs at least one run, but got none; give the path of a journal to load_run")
    sections = [_section(run, i) for i, run in enumerate(runs)]
    several = len(runs) > 1
    shared = [Placed(f"all-{i}", one) for i, one in enumerate(comparison_figures(compare(runs)))] if several else []
    placed = [*shared, *(one for section in sections for one in section.figures)]
    text = _render(
        title=title or (" / ".join(run.name for run in runs[:3]) + (" …" if len(runs) > 3 else "")),
        headline=compared(runs) if several else sections[0].verdict,
        tables=[one for one in (table, table_of(runs) if several else None) if one is not None],
        shared=shared,
        sections=sections,
        log_steps=all(lengthening(run) for run in runs if run.rounds) and any(run.rounds for run in runs),
        plots={one.key: one.figure.plot for one in placed},
    )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", errors="replace")  # a path need not be text
    return out


def _section(run: RunData, i: int) -> Section:
    figures = [Placed(f"run{i}-{j}", figure) for j, figure in enumerate(run_figures(run))]
    return Section(run, verdict(run), tiles(run), figures, events(run), _setup(run))


def _setup(run: RunData) -> list[tuple[str, str]]:
    """How the run was set up, for the table at its end."""
    rows = [("journal", str(run.path)), ("replicas", str(run.replicas)), ("knobs", ", ".join(run.knobs))]
    rows += [("task", run.summary.task), ("seed", str(run.summary.seed)), ("written by", run.made)]
    rows += [(f"final {key}", f"{value:.6g}") for key, value in run.summary.final.items() if value is not None]
    return [(key, text) for key, text in rows if text not in ("", "0", "None")] + _flat(run.arguments)


def _flat(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (str(key), value if isinstance(value, str) else json.dumps(value, default=str))
        for key, value in arguments.items()
    ]


def _render(**content: Any) -> str:
    """Fill the template. Imported here: reading a run needs neither of the two."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as missing:
        raise ArgumentError(
            f"a report needs jinja2 and plotly, but {missing.name} is not installed; pip install 'hdet[report]'"
        ) from missing
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hdet.report"),
        autoescape=True,  # everything, whatever the template's name ends with
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("page.html.j2").render(plotly=get_plotlyjs(), **content)
