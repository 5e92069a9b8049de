"""Tables of README.md, docs/results.md, docs/real-data.md and docs/algoperf.md, from lab/experiments/results.

    python docs/make_results.py

Writes, in the pages, what stands between the two marks, and the profiles into docs/images; the rest of the pages is
written by hand. The same files give the same bytes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab" / "experiments"))
import real_table
import rehearsal
from real.score import geometric_mean

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by docs/make_results.py -->", "<!-- end -->"
README_BEGIN = "<!-- table: results -->"
REHEARSAL_BEGIN = "<!-- table: rehearsal -->"


def zoo(known: dict[str, Any]) -> str:
    """Many small problems: a line per length, and a table with problems down, optimizers across, lengths in a cell."""
    cells = {tuple(name.split("/")): entry for name, entry in known["scores"].items()}
    problems, optimizers, lengths = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    ratios = {key: geometric_mean([seed["ratio"] for seed in entry["seeds"]]) for key, entry in cells.items()}
    parts = ["## Small problems"]
    for length in lengths:
        here = sorted(ratio for key, ratio in ratios.items() if key[2] == length)
        parts.append(
            f"**{length} steps.** Geometric mean {geometric_mean(here):.2f}, median {here[len(here) // 2]:.2f}, worst "
            f"{here[-1]:.2f}; {sum(ratio <= 1.05 for ratio in here)} of {len(here)} at or below 1.05."
        )
    lines = [
        f"| {' / '.join(lengths)} steps | " + " | ".join(optimizers) + " |",
        "|" + " --- |" * (len(optimizers) + 1),
    ]
    for problem in problems:
        cells = [
            "/".join(f"{ratios[problem, optimizer, length]:.2f}" for length in lengths) for optimizer in optimizers
        ]
        lines.append(f"| {problem} | {' | '.join(cells)} |")
    return "\n\n".join([*parts, "\n".join(lines)])


def fill(path: Path, begin: str, made: str) -> None:
    """Replace what a page has between the marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path.name} must have the lines {begin} and {END}")
    path.write_text(f"{before}{begin}\n{made}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=HERE.parent / "lab" / "experiments" / "results")
    parser.add_argument("page", type=Path, nargs="?", default=HERE / "results.md")
    args = parser.parse_args()
    file = args.results / "zoo.json"
    made = zoo(json.loads(file.read_text())) if file.exists() else "Nothing has been measured yet."
    fill(args.page, BEGIN, f"\n{made}\n")
    if args.page == HERE / "results.md":
        fill(HERE / "real-data.md", BEGIN, f"\n{real_table.page(args.results / 'real', compact=True)}\n")
        fill(HERE.parent / "README.md", README_BEGIN, real_table.front(real_table.of_splits(args.results / "real")))
        fill(HERE / "algoperf.md", REHEARSAL_BEGIN, rehearsal.page(args.results / "algoperf"))


if __name__ == "__main__":
    main()
