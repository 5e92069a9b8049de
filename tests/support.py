"""What tests show of set-ups and frameworks, written down by pytest: see docs/make_support.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["CLAIMS", "Claim", "Support", "claims_of", "merged"]


class Claim(NamedTuple):
    """One cell of one table, and the test that stands for it."""

    table: str
    row: str
    column: str
    cell: str
    test: str
    """File and function; its parameters do not count."""


CLAIMS = pytest.StashKey[list[Claim]]()
"""In the session's config: the claims of all tests that were found, chosen or not."""


def claims_of(item: pytest.Item) -> list[Claim]:
    """What the marks ``covers(table, row, column, cell="yes")`` of a test say."""
    test = item.nodeid.partition("[")[0]
    return [_claim(*mark.args, test=test, **mark.kwargs) for mark in item.iter_markers("covers")]


def _claim(table: str, row: str, column: str, cell: str = "yes", *, test: str) -> Claim:
    return Claim(table, row, column, cell, test)


class Support:
    """Gathers the outcomes of tests that carry the mark, under xdist too, and writes them into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._outcomes: dict[Claim, set[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The claims travel with the report, from another process too."""
        item.user_properties.append(("covers", [list(claim) for claim in claims_of(item)]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        for claim in dict(report.user_properties).get("covers", ()):  # type: ignore[attr-defined]
            self._outcomes.setdefault(Claim(*claim), set()).add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # of xdist: the reports go to the one that started it
            return
        before = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []
        found = [{**claim._asdict(), "outcome": _together(outcomes)} for claim, outcomes in self._outcomes.items()]
        self.path.write_text(json.dumps(merged(before, found), indent=1) + "\n", encoding="utf-8")


def merged(before: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file after a run. Files of which nothing was run keep theirs, and so do tests that were skipped:
    what needs a GPU or another package was run elsewhere."""
    key = Claim._fields
    passed = {tuple(row[name] for name in key) for row in before if row["outcome"] == "passed"}
    for row in found:
        if row["outcome"] == "skipped" and tuple(row[name] for name in key) in passed:
            row["outcome"] = "passed"
    files = {_file(row) for row in found}
    rows = [row for row in before if _file(row) not in files] + found
    return sorted(rows, key=lambda row: [row[name] for name in key])


def _file(row: dict[str, Any]) -> str:
    return str(row["test"]).partition("::")[0]


def _together(outcomes: set[str]) -> str:
    """Of all parameters of a test: one that failed is enough, and one that was run stands for those skipped."""
    return next(outcome for outcome in ("failed", "passed", "skipped") if outcome in outcomes)
