"""What works with what, in docs/frameworks.md, from the outcomes of tests.

    python docs/make_support.py --run               # run the tests that carry the mark, then write the tables
    python docs/make_support.py --run tests/search  # those of a folder or a file; the others keep their outcomes
    python docs/make_support.py                     # write the tables again from docs/support.json

A test says what it shows by a mark, at the function or at one of its parameters::

    @pytest.mark.covers("frameworks", "Lightning, search", "DDP", "bf16")
    @pytest.mark.covers("setups", "tied weights", "from a guess 100 times too low")

which is the table, the row, the column and what is shown there (left out: "yes"). The row of a framework is its name
and what is run, "search" or "replicas"; the column is how the model is shared out, and the last argument is the
precision. Of set-ups the page lists the rows alone. New rows and columns need nothing but marks.
Tests that fail say so on the page; a test that is skipped (no GPU, a package that is missing) leaves the outcome it
had, else the page says that it was not run.

``docs/support.json`` has the outcomes. tests/docs/test_support.py checks that file and page say what the marks say.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "support.json", HERE / "frameworks.md"
END = "<!-- end -->"
TABLES = {"frameworks": ("framework, what is run", "where, in fp32 if nothing else is said"), "setups": None}
"""Every table, and its head; set-ups are a list without one."""
COLUMNS = ("one process", "DDP", "FSDP2", "HSDP", "tensor parallel", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""Their order; others follow by name."""
OTHERWISE = {"failed": "**fails**", "skipped": "not run"}
"""What stands in the cell of a test that did not pass."""

Row = dict[str, Any]


def table(rows: list[Row], head: tuple[str, str]) -> str:
    """One table, as Markdown: for each row the columns, each followed by what was shown there."""
    cells: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        cells.setdefault(row["row"], {}).setdefault(row["column"], set()).add(_cell(row))
    lines = [head, ("---", "---")]
    for name in sorted(cells, key=_order):
        columns = sorted(cells[name], key=_order)
        lines.append((name, "; ".join(_shown(column, cells[name][column]) for column in columns)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(column: str, cells: set[str]) -> str:
    return column if cells in ({"yes"}, {"fp32"}) else f"{column} ({', '.join(sorted(cells))})"


def _order(name: str) -> tuple[int, str]:
    return (COLUMNS.index(name) if name in COLUMNS else len(COLUMNS)), name.strip("`").lower()


def listed(rows: list[Row]) -> str:
    """The rows alone, each with what was not shown."""
    cells: dict[str, set[str]] = {}
    for row in rows:
        cells.setdefault(row["row"], set()).add(_cell(row))
    return "; ".join(_shown(name, cells[name]) for name in sorted(cells, key=_order))


def _cell(row: Row) -> str:
    """What the test shows, if it has shown it."""
    if row["outcome"] == "passed":
        return str(row["cell"])
    otherwise = OTHERWISE[row["outcome"]]
    return otherwise if row["cell"] == "yes" else f"{row['cell']}: {otherwise}"


def page(text: str, rows: list[Row]) -> str:
    """The page with its tables filled."""
    for name, head in TABLES.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise SystemExit(f"{PAGE.name} must have the lines <!-- table: {name} --> and {END}")
        found = [row for row in rows if row["table"] == name]
        made = table(found, head) if head else listed(found)
        text = f"{before}{begin}{made}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the tests first")
    parser.add_argument("paths", nargs="*", default=["tests"], help="which of them")
    given = parser.parse_args()
    if given.run:
        options = ["-q", "-m", "covers", f"--support={RESULTS}", *given.paths]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=HERE.parent, check=False)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
