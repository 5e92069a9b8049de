"""``hdet.show``: the report of a run inside a notebook. jinja2 and plotly are imported when it is shown."""

from __future__ import annotations

import html
import os

from hdet.checks import must_be
from hdet.report.data import RunData, load_run
from hdet.report.verdict import advice, verdict

_HEIGHT = 720
"""Pixels, enough for the tiles and the first figure on a laptop's screen."""


class Inline:
    """A run's report, which a notebook shows in a frame and a terminal in a sentence. Made by :func:`hdet.show`."""

    def __init__(self, run: RunData) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"{verdict(self._run)} {advice(self._run) or ''}".rstrip()

    def _repr_html_(self) -> str:
        """The verdict, for viewers that show no frames, and the page below it.

        The frame keeps its styles to itself, and its scripts from the notebook.
        """
        from hdet.report.page import page_of

        page = page_of([self._run], title=self._run.name, framed=True)
        frame = (
            f'<iframe title="hdet report" sandbox="allow-scripts allow-downloads" srcdoc="{html.escape(page)}" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 0; resize: vertical"></iframe>'
        )
        return f"<p>{html.escape(verdict(self._run))}</p>\n{frame}"


def show(journal: str | os.PathLike[str]) -> Inline:
    """The report of a run in a notebook: as the last line of a cell, the page of ``hdet report`` with its figures.

    It shows the run up to now: call it again to update it. Needs the extra ``report``. ``hdet.report`` is a
    package.

    Args:
        journal: the path of a journal, or of a run's folder.

    Raises:
        ArgumentError: there is nothing at that path, or jinja2 or plotly is not installed.
        JournalError: what is there was not written by hdet.
    """
    from hdet.report.page import check_packages

    must_be("a path", isinstance(journal, str | os.PathLike), "give what was given as journal=", journal=journal)
    check_packages()
    return Inline(load_run(journal))
