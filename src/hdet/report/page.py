"""The page of a report: one HTML file with everything inside, which opens offline, or a frame in a notebook.

jinja2 and plotly are imported when a page is made, since reading a run needs neither.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdet.errors import INSTALL, ArgumentError
from hdet.report.data import RunData, load_run, told_apart
from hdet.report.series import Figure, comparison_figures, run_figures
from hdet.report.verdict import CURE, Table, advice, compared, table_of, verdict

_FRAME = """<p>{verdict}</p>
<iframe title="hdet report" sandbox="allow-scripts allow-downloads" srcdoc="{page}" style="width: 100%; height: 720px; \
border: 0; resize: vertical"></iframe>"""
"""In a notebook: the verdict, for viewers that show no frames, and the page, high enough for the first figure.

The frame keeps its styles to itself, and its scripts from the notebook.
"""


def write_report(
    runs: Sequence[RunData],
    out: Path,
    *,
    title: str | None = None,
    table: Table | None = None,
    headline: str = "",
    figures: Sequence[Figure] = (),
) -> Path:
    """Write a report and return its path.

    One run: the full report. Several: a table and their curves over each other, then each run's own, folded.

    Args:
        runs: at least one, from :func:`hdet.report.data.load_run`.
        out: the HTML file; its folder is made, and a file that is there is replaced.
        title: None: the runs' names.
        table: one more table, before everything else.
        headline: a sentence at the top; if empty, the verdict on one run, or which of several runs ended lowest.
        figures: figures to show before those of each run; if empty, those that compare several runs.
    """
    if not runs:
        raise ArgumentError("a report needs at least one run, but got none; give the path of a journal to load_run")
    runs = told_apart(runs)
    title = title or (" / ".join(run.name for run in runs[:3]) + (" …" if len(runs) > 3 else ""))
    text = page_of(runs, title, table, headline, figures)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", errors="replace")  # a path need not be text
    return out


def page_of(
    runs: Sequence[RunData], title: str, table: Table | None = None, headline: str = "", shared: Sequence[Figure] = ()
) -> str:
    """The page as text. Without a title it has no header: it is for a frame in a page that has the verdict."""
    check_packages()
    import jinja2

    from hdet.report.figures import painted

    several, sections = len(runs) > 1, [_section(run) for run in runs]
    shared = shared or (comparison_figures(runs) if several else ())
    figures = [*shared, *(figure for section in sections for figure in section["figures"])]
    loader = jinja2.PackageLoader("hdet.report")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True)
    return environment.get_template("page.html.j2").render(
        title=title,
        headline=headline or (compared(runs) if several else verdict(runs[0])),
        alarms=[(run.name, one) for run in runs for one in run.alarms],
        cure=CURE,
        tables=[one for one in (table, table_of(runs) if several else None) if one is not None],
        shared=shared,
        sections=sections,
        log_steps=all(run.searched for run in runs),
        plots=_packed(f"[{','.join(painted(figure).to_json() for figure in figures)}]"),
        plotly=_packed_plotly(),
    )


def check_packages() -> None:
    """Raise if a page cannot be written. Call it before a long run rather than after it."""
    try:
        import jinja2  # noqa: F401
        import plotly.offline  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        text = f"a report needs jinja2 and plotly, but {package} is not installed; {INSTALL}"
        raise ArgumentError(text) from missing


def _section(run: RunData) -> dict[str, Any]:
    """One run on the page."""
    arguments = [(key, v if isinstance(v, str) else json.dumps(v, default=str)) for key, v in run.arguments.items()]
    told = {"verdict": verdict(run), "advice": advice(run), "figures": run_figures(run)}
    return {"run": run, **told, "arguments": arguments}


@functools.cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    """Deflated and in base64, which HTML does not interpret; a browser's ``DecompressionStream("deflate")`` reads it.

    >>> "<" in _packed("</script>" * 100), len(_packed("</script>" * 100)) < 40
    (False, True)
    """
    return base64.b64encode(zlib.compress(text.encode())).decode("ascii")


class Inline:
    """A run's report, made by :func:`hdet.show`: a notebook shows its page in a frame, a terminal its verdict."""

    def __init__(self, run: RunData) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"{verdict(self._run)} {advice(self._run) or ''}".rstrip()

    def _repr_html_(self) -> str:
        page = page_of([self._run], title="")
        return _FRAME.format(verdict=html.escape(verdict(self._run)), page=html.escape(page))


def show(journal: str | os.PathLike[str]) -> Inline:
    """The report of a run in a notebook: as the last line of a cell, the page of ``hdet report`` with its figures.

    It shows the run up to now: call it again to update it. Needs the extra ``report``. ``hdet.report`` is a
    package.

    Args:
        journal: the path of a journal, or of a folder with a ``journal.jsonl``.

    Raises:
        ArgumentError: there is nothing at that path, or jinja2 or plotly is not installed.
        JournalError: what is there was not written by hdet.
    """
    check_packages()
    return Inline(load_run(journal))
