"""The page: one HTML file with everything inside, that opens offline."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hdet.errors import INSTALL, ArgumentError
from hdet.journal.file import mapped
from hdet.report.data import RunData
from hdet.report.figures import comparison_figures, run_figures
from hdet.report.series import events, lengthening
from hdet.report.verdict import CURE, Table, advice, compare, compared, table_of, tiles, verdict, warned


class Chapter(NamedTuple):
    """Runs that may be compared with each other: the same task, the same loss."""

    runs: Sequence[RunData]
    title: str = ""
    words: str = ""
    """What was done, below the title."""
    table: Table | None = None
    """One more table, before everything else."""


def write_report(runs: Sequence[RunData], out: Path, *, title: str | None = None, table: Table | None = None) -> Path:
    """Write a report and return its path.

    One run: the full report. Several: a table and their curves over each other, then each run's own, folded.

    Args:
        runs: at least one, from :func:`hdet.report.data.load_run`.
        out: the HTML file; its folder is made, and a file that is there is replaced.
        title: None: the run's name.
        table: one more table, before everything else.
    """
    title = title or (" / ".join(run.name for run in runs[:3]) + (" …" if len(runs) > 3 else ""))
    return write_chapters([Chapter(runs, table=table)], out, title=title)


def write_chapters(chapters: Sequence[Chapter], out: Path, *, title: str, headline: str | None = None) -> Path:
    """Write a page of several parts, each with its own table and figures, and return its path.

    Args:
        chapters: each with at least one run.
        out: the HTML file; its folder is made, and a file that is there is replaced.
        title: of the page.
        headline: what it comes to. None: what the first chapter says.
    """
    text = page_of(chapters, title=title, headline=headline)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", errors="replace")  # a path need not be text
    return out


def page_of(chapters: Sequence[Chapter], *, title: str, headline: str | None = None, framed: bool = False) -> str:
    """The page as text. ``framed``: without its head, for a frame in another page that has said what it comes to."""
    if not chapters or not all(chapter.runs for chapter in chapters):
        raise ArgumentError("a report needs at least one run, but got none; give the path of a journal to load_run")
    shown = [_shown(chapter, f"{i}-") for i, chapter in enumerate(chapters)]
    runs = [run for chapter in chapters for run in chapter.runs]
    figures = {key: figure for part in shown for key, figure in part["shared"].items()}
    figures |= {key: one for part in shown for section in part["sections"] for key, one in section["figures"].items()}
    check_packages()
    import jinja2  # late, as plotly: reading a run needs neither

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hdet.report"),
        autoescape=True,  # everything, whatever the template's name ends with
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plots = mapped({key: figure.plot for key, figure in figures.items()}, _rounded)
    return environment.get_template("page.html.j2").render(
        title=title,
        framed=framed,
        headline=headline or shown[0]["headline"],
        warned=[one for run in runs for one in warned(run)],
        cure=CURE,
        chapters=shown,
        log_steps=all(lengthening(run) for run in runs if run.rounds) and any(run.rounds for run in runs),
        has_plots=bool(figures),
        plots=_packed(json.dumps(plots, allow_nan=False, separators=(",", ":"))),
        plotly=_packed_plotly(),
    )


def check_packages() -> None:
    """Raise if a page could not be written: before a long run rather than after it."""
    try:
        import jinja2  # noqa: F401
        import plotly.offline  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ArgumentError(
            f"a report needs jinja2 and plotly, but {missing.name} is not installed; {INSTALL}"
        ) from missing


def _shown(chapter: Chapter, key: str) -> dict[str, Any]:
    """A chapter, ready for the template. Figures are by the ids under which the page's script finds them."""
    runs, several = chapter.runs, len(chapter.runs) > 1
    sections = [_section(run, f"{key}run{i}-") for i, run in enumerate(runs)]
    shared = comparison_figures(compare(runs)) if several else []
    return {
        "title": chapter.title,
        "words": chapter.words,
        "headline": compared(runs) if several else sections[0]["verdict"],
        "tables": [one for one in (chapter.table, table_of(runs) if several else None) if one is not None],
        "shared": {f"{key}all-{i}": figure for i, figure in enumerate(shared)},
        "sections": sections,
    }


def _section(run: RunData, key: str) -> dict[str, Any]:
    """One run on the page."""
    return {
        "run": run,
        "verdict": verdict(run),
        "advice": advice(run),
        "tiles": tiles(run),
        "figures": {f"{key}{i}": figure for i, figure in enumerate(run_figures(run))},
        "events": events(run),
        "setup": _setup(run),
    }


def _setup(run: RunData) -> list[tuple[str, str]]:
    """How the run was set up, for the table at its end."""
    rows = [("journal", str(run.path)), ("replicas", str(run.replicas)), ("knobs", ", ".join(run.knobs))]
    rows += [("task", run.summary.task), ("seed", str(run.summary.seed)), ("written by", run.made)]
    rows += [(f"final {key}", f"{value:.6g}") for key, value in run.summary.final.items() if value is not None]
    told = [(key, v if isinstance(v, str) else json.dumps(v, default=str)) for key, v in run.arguments.items()]
    return [(key, text) for key, text in rows if text not in ("", "0", "None")] + told


@functools.cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs())


def _rounded(value: Any) -> Any:
    """Five digits: one more than the pointer shows, in half the bytes. Whole numbers are steps, and stay."""
    return float(f"{value:.5g}") if isinstance(value, float) and not value.is_integer() else value


def _packed(text: str) -> str:
    """Deflated, then in letters that mean nothing to HTML: what ``DecompressionStream("deflate")`` of a browser reads.

    >>> "<" in _packed("</script>" * 100), len(_packed("</script>" * 100)) < 40
    (False, True)
    """
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")
