"""The fault matrix: 200 kills and other faults, each with a new start and a comparison with the undisturbed run.

    python -m tests.faults.matrix                 # all of it, then the tables and docs/what-it-survives.md
    python -m tests.faults.matrix --minutes 10    # as many as fit
    python -m tests.faults.matrix --page          # the page again from tests/faults/results.json

The cases are the same every time. Results are written after each, so that a run can be stopped at any moment.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tests.faults.cases import kills, others
from tests.faults.table import tables
from tests.faults.trial import Result, try_it

__all__ = ["PAGE", "RESULTS", "filled", "read"]

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.json", HERE.parents[1] / "docs" / "what-it-survives.md"
_END = "<!-- end -->"


def read() -> list[Result]:
    """What was found the last time."""
    return [Result(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def filled(page: str, results: list[Result]) -> str:
    """The page with its tables."""
    for name, table in tables(results).items():
        before, begin, rest = page.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition(_END)
        if not (begin and end):
            raise SystemExit(f"{PAGE.name} must have the lines <!-- table: {name} --> and {_END}")
        page = f"{before}{begin}{table}\n{end}{after}"
    return page


def _run(minutes: float) -> list[Result]:
    """The cases, until the time is up."""
    until, results = time.monotonic() + 60 * minutes, list[Result]()
    cases = [*others(), *kills()]
    for number, case in enumerate(cases, 1):
        if time.monotonic() > until:
            print(f"the time is up: {len(results)} of {len(cases)} cases were tried")
            break
        results.append(try_it(case))
        print(f"{number}/{len(cases)} {case}: {_in_words(results[-1])}", flush=True)
        RESULTS.write_text(_encoded(results), encoding="utf-8")
    return results


def _in_words(result: Result) -> str:
    if not result.came_back:
        return f"LOST: {result.told}"
    end = "bit-equal" if result.bit_equal else "close" if result.close else "WORSE"
    return f"{end}, noticed after {'never' if result.seconds is None else f'{result.seconds:.2f} s'}"


def _encoded(results: list[Result]) -> str:
    """One line per case, so that changes can be read."""
    return "[\n" + ",\n".join(json.dumps(result.as_dict()) for result in results) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="no case begins later")
    parser.add_argument("--page", action="store_true", help="only make the page again")
    given = parser.parse_args()
    results = read() if given.page else _run(given.minutes)
    for table in tables(results).values():
        print(f"\n{table}")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
