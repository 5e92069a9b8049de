"""The tables of what works with what say what the tests' marks say, and what came of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import CLAIMS, Claim, merged

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))
try:
    import make_support
finally:
    sys.path.remove(str(DOCS))


def test_the_page_has_the_tables_of_the_file() -> None:
    rows = json.loads(make_support.RESULTS.read_text(encoding="utf-8"))
    text = make_support.PAGE.read_text(encoding="utf-8")
    assert make_support.page(text, rows) == text, "python docs/make_support.py"


def test_the_file_has_what_the_marks_of_all_tests_say(request: pytest.FixtureRequest) -> None:
    """Of the files that were collected with this one; of all of them in `make test`."""
    found = request.config.stash[CLAIMS]
    if any("::" in argument for argument in request.config.args):
        pytest.skip("some tests of a file only: its other marks are not known")
    files = {claim.test.partition("::")[0] for claim in found}
    rows = json.loads(make_support.RESULTS.read_text(encoding="utf-8"))
    written = {Claim(**{name: row[name] for name in Claim._fields}) for row in rows}
    assert {claim for claim in written if claim.test.partition("::")[0] in files} == set(found), (
        "run `python docs/make_support.py --run` with the file whose marks have changed"
    )


def _row(test: str, outcome: str, cell: str = "yes", column: str = "DDP") -> dict[str, str]:
    return {"table": "t", "row": "a", "column": column, "cell": cell, "test": test, "outcome": outcome}


def test_what_was_not_run_keeps_its_outcome_and_what_is_gone_goes() -> None:
    before = [_row("x.py::gpu", "passed"), _row("x.py::gone", "passed"), _row("y.py::other", "failed")]
    found = [_row("x.py::gpu", "skipped"), _row("x.py::new", "failed")]
    outcomes = {row["test"]: row["outcome"] for row in merged(before, found)}
    assert outcomes == {"x.py::gpu": "passed", "x.py::new": "failed", "y.py::other": "failed"}


def test_a_failure_stands_on_the_page() -> None:
    rows = [_row("1", "passed", "fp32"), _row("2", "failed", "bf16"), _row("3", "skipped", "fp16", "one process")]
    rows += [_row("4", "skipped", column="other"), _row("5", "failed", column="third")]
    assert make_support.table(rows, ("framework", "where")).splitlines() == [
        "| framework | where |",
        "| --- | --- |",
        "| a | one process (fp16: not run); DDP (bf16: **fails**, fp32); other (not run); third (**fails**) |",
    ]
