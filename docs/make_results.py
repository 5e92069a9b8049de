"""Tables and pictures of docs/results.md, docs/real-data.md and README.md, from the files in experiments/results.

    python docs/make_results.py

Writes the pictures into docs/images and, in the pages, what stands between the two marks; the rest of the pages is
written by hand. The same files give the same bytes.
"""

import argparse
import json
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from svg import Drawing, Point

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
import real_table

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by docs/make_results.py -->", "<!-- end -->"
README_BEGIN = "<!-- table: results -->"
LENGTHS = ("full", "short")
OPTIMIZERS = {"adam": "Adam", "sgd": "SGD with momentum 0.9"}
TASKS = {
    "text": "a byte-level GPT on Python source",
    "feed": "a ranking model on a drifting stream of users and items",
    "digits": "a BatchNorm CNN on scikit-learn's digits",
}
LINES = {
    "onecycle": ("ink", ""),
    "cosine": ("pale", ""),
    "trained": ("pale", "5 4"),
    "hypergradient": ("c3", ""),
    "greedy": ("c2", ""),
    "auto": ("c0", ""),
    "auto-linear": ("mark", ""),
}
"""Colour and dashes of the rows that have a start; those on top come last."""
ORDER = (
    *("onecycle", "cosine", "auto", "auto-linear", "trained", "placebo", "held", "hypergradient"),
    *("greedy", "prodigy", "dadaptation", "dog", "schedulefree", "schedulefree-tuned", "population"),
)
"""Of the rows of a table, whenever they were run."""
OTHERS = ORDER[ORDER.index("hypergradient") :]
"""Rows of other people's methods."""
TARGET = 0.01
"""What one rate may be above the best fixed rate."""
HIGHEST = 10.0
"""Ratios beyond this are drawn there."""

Table = dict[str, Any]


def read(folder: Path) -> list[Table]:
    """All tables, in a fixed order; quick runs are not among them."""
    files = sorted(file for file in folder.glob("misset_*.json") if not file.stem.endswith("_quick"))
    tables = [table for file in files for table in json.loads(file.read_text())["tables"] if "reference" in table]
    return sorted(tables, key=_order)


def _order(table: Table) -> tuple[int, str, int]:
    return list(TASKS).index(table["task"]), table["optimizer"], LENGTHS.index(table["length"])


# Page ----------------------------------------------------------------------------------------------------------------


def section(tables: list[Table]) -> str:
    """One task and optimizer: heading, picture, and a table per length."""
    first = tables[0]
    name = f"{first['task']}-{first['optimizer']}"
    title = f"## {_sentence(first['task'])}, {OPTIMIZERS[first['optimizer']]}"
    options = ", ".join(f"{name} {value}" for name, value in first["arguments"]["options"].items())
    about = _sentence(TASKS[first["task"]]) + (f"; {options}." if options else ".")
    picture = f"![Final validation loss against the rate that a run starts from: {name}](images/misset-{name}.svg)"
    return "\n\n".join([title, about, picture, *(part for table in tables for part in (summary(table), grid(table)))])


def summary(table: Table) -> str:
    """What a reader should take along, in numbers."""
    best, rows = table["best"], table["rows"]
    schedule = {"onecycle": "OneCycle", "cosine": "warm-up and cosine"}[best["schedule"]]
    edge = ", which is the edge of the grid" if best["on_edge"] else ""
    words = [
        f"**{table['steps']} steps, {len(table['seeds'])} seeds.** The best fixed rate is {best['rate']:.2g} with "
        f"{schedule}{edge}: validation loss {_mean(table['reference']):.4f}."
    ]
    for name in ("onecycle", "auto"):
        ratios = [cell["ratio"] for cell in rows[name]["starts"]] if name in rows else []
        if ratios:
            label = rows[name]["label"][:1].upper() + rows[name]["label"][1:]
            words.append(
                f"{label}: {_number(min(ratios, key=_or_inf))} to {_number(max(ratios, key=_or_inf))} of that."
            )
    return " ".join(words)


def grid(table: Table) -> str:
    """A Markdown table: ratio to the best fixed rate and its standard error, per start."""
    factors = table["factors"]
    head = ["started at, × best", *(_factor(factor) for factor in factors), "worst", "time"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in (table["rows"][name] for name in ORDER if name in table["rows"]):
        cells = {cell["start"]: cell for cell in row["starts"]}
        middle = len(factors) // 2
        shown = [_cell(cells.get(factor)) for factor in factors]
        if None in cells:
            shown[middle] = _cell(cells[None])
        lines.append(f"| {row['label']} | {' | '.join(shown)} | {_number(row['worst'])} | {row['time_ratio']:.2f} |")
    if table["skipped"]:
        skipped = "; ".join(f"{name} ({why})" for name, why in table["skipped"].items())
        lines += ["", f"Not run: {skipped}."]
    return "\n".join(lines)


def worst_cases(tables: list[Table]) -> str:
    """Per length: the worst ratio over all starts, methods down and tasks across; some methods have no start."""
    parts = ["## Worst case over all starts"]
    for length in LENGTHS:
        same = [table for table in tables if table["length"] == length]
        if not same:
            continue
        head = [f"{table['task']}, {OPTIMIZERS[table['optimizer']]}, {table['steps']} steps" for table in same]
        lines = ["| | " + " | ".join(head) + " |", "|" + " --- |" * (len(head) + 1)]
        for name in ORDER:
            rows = [table["rows"].get(name) for table in same]
            label = next((row["label"] for row in rows if row is not None), None)
            if label is not None:
                shown = ["" if row is None else _cell(_worst(row)) for row in rows]
                lines.append(f"| {label} | " + " | ".join(shown) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def reached(tables: list[Table]) -> str:
    """Per task and length: how far above the best fixed rate, how many starts meet the target, who is ahead."""
    head = ["task", "steps", "above the best", "starts that meet 1 %", "others with a lower worst case"]
    lines = ["## What is reached", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for table in sorted(tables, key=lambda table: LENGTHS.index(table["length"])):
        rows = table["rows"]
        cells = [f"{table['task']}, {OPTIMIZERS[table['optimizer']]}", str(table["steps"])]
        cells += _met(rows["auto"]["starts"], TARGET)
        lines.append("| " + " | ".join([*cells, _ahead(rows)]) + " |")
    return "\n".join(lines)


def _met(starts: list[Table], target: float) -> list[str]:
    """From the lowest to the highest start, in percent; how many are on target, or within two standard errors of it."""
    above = sorted(100 * (_or_inf(cell["ratio"]) - 1) for cell in starts)
    good = sum(_or_inf(cell["ratio"]) - 2 * (cell["ratio_se"] or 0.0) <= 1 + target for cell in starts)
    return [f"{above[0]:.1f} to {above[-1]:.1f} %", f"{good} of {len(starts)}"]


def _ahead(rows: dict[str, Any]) -> str:
    """Other people's methods with a lower worst case; in brackets where it is by less than two standard errors."""
    ours, found = _worst(rows["auto"]), []
    for row in (rows[name] for name in OTHERS if name in rows):
        theirs = _worst(row)
        gap = _or_inf(ours["ratio"]) - _or_inf(theirs["ratio"])
        if gap > 0:
            error = math.hypot(ours["ratio_se"] or 0.0, theirs["ratio_se"] or 0.0)
            found.append(row["label"] if gap > 2 * error else f"({row['label']})")
    return "; ".join(found) or "none"


def _worst(row: dict[str, Any]) -> dict[str, Any]:
    """The cell of the worst start."""
    return max(row["starts"], key=lambda cell: _or_inf(cell["ratio"]))


def product(rows: list[dict[str, Any]]) -> str:
    """The library itself, one model at a time."""
    head = ["task", "steps", "seeds", "loss over the best fixed rate's", "found rate over it"]
    lines = ["## The library itself", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    kept = [row for row in rows if not row.get("per_group")]  # of a rule that had a rate for every group
    for row in sorted(kept, key=lambda row: (row["task"], row["optimizer"], -row["steps"])):
        highest = [_geometric(run["highest"]) / row["best_rate"] for run in row["runs"]]
        error = row["standard_error"]
        cells = [
            f"{row['task']}, {OPTIMIZERS[row['optimizer']]}",
            str(row["steps"]),
            str(len(row["runs"])),
            _number(row["ratio"]) + (f" ± {_number(error)}" if error is not None else ""),
            f"{_geometric(highest):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def zoo(known: dict[str, Any]) -> str:
    """Many small problems: a table per length, problems down and optimizers across."""
    cells = {tuple(name.split("/")): entry for name, entry in known["scores"].items()}
    problems, optimizers, lengths = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    ratios = {key: _geometric([seed["ratio"] for seed in entry["seeds"]]) for key, entry in cells.items()}
    parts = ["## Small problems"]
    for length in lengths:
        here = sorted(ratio for key, ratio in ratios.items() if key[2] == length)
        lines = [
            f"**{length} steps.** Geometric mean {_geometric(here):.2f}, median {here[len(here) // 2]:.2f}, worst "
            f"{here[-1]:.2f}; {sum(ratio <= 1.05 for ratio in here)} of {len(here)} at or below 1.05.",
            "",
            "| | " + " | ".join(optimizers) + " |",
            "|" + " --- |" * (len(optimizers) + 1),
        ]
        for problem in problems:
            shown = [f"{ratios[problem, optimizer, length]:.2f}" for optimizer in optimizers]
            lines.append(f"| {problem} | {' | '.join(shown)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def footing(tables: list[Table]) -> str:
    """With which versions."""
    versions = sorted({", ".join(f"{k} {v}" for k, v in table["versions"].items()) for table in tables})
    return "Measured with " + "; and with ".join(versions) + "."


def fill(path: Path, begin: str, made: str) -> None:
    """Replace what a page has between the marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path.name} must have the lines {begin} and {END}")
    path.write_text(f"{before}{begin}\n{made}\n{END}{after}", encoding="utf-8")


def _cell(cell: Table | None) -> str:
    if cell is None:
        return ""
    error = cell["ratio_se"]
    return _number(cell["ratio"]) + (f" ± {_number(error)}" if error is not None else "")


def _number(value: float | None) -> str:
    if value is None:
        return "failed"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _factor(factor: float) -> str:
    return f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}"


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _geometric(values: list[float]) -> float:
    return math.exp(_mean([math.log(value) for value in values]))


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value


# Picture -------------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Two logarithmic axes."""

    left: float
    right: float
    factors: list[float]
    lowest: float
    highest: float
    top: float = 60
    bottom: float = 330

    def x(self, factor: float) -> float:
        low, high = math.log(self.factors[0]), math.log(self.factors[-1])
        return self.left + 20 + (math.log(factor) - low) / ((high - low) or 1) * (self.right - self.left - 40)

    def y(self, ratio: float | None) -> float:
        value = min(max(_or_inf(ratio), self.lowest), self.highest)
        done = math.log(value / self.lowest) / math.log(self.highest / self.lowest)
        return self.bottom - done * (self.bottom - self.top)


def draw(tables: list[Table]) -> Drawing:
    """Final loss over the best fixed rate's, against the start; a panel per length, a legend below."""
    first = tables[0]
    drawing = Drawing(900, 460, f"{first['task']}, {first['optimizer']}: final loss against the start rate")
    width = 900 / len(tables)
    shown: dict[str, str] = {}
    for number, table in enumerate(tables):
        panel = _panel(table, 60 + number * width, (number + 1) * width - 15)
        _frame(drawing, panel, f"{table['steps']} steps: loss over that of the best fixed rate")
        for name in (name for name in LINES if name in table["rows"]):
            shown[name] = table["rows"][name]["label"]
            _line(drawing, panel, table["rows"][name]["starts"], *LINES[name])
    for place, (name, label) in enumerate(shown.items()):
        x, y = 60 + place % 3 * 280, 392 + place // 3 * 24
        colour, dash = LINES[name]
        drawing.line([(x, y - 4), (x + 24, y - 4)], colour, 2.5, dash)
        drawing.text((x + 30, y), label, "start", size=12)
    return drawing


def _panel(table: Table, left: float, right: float) -> Panel:
    rows = [table["rows"][name] for name in LINES if name in table["rows"]]
    known = [cell["ratio"] for row in rows for cell in row["starts"] if cell["ratio"] is not None]
    return Panel(left, right, table["factors"], min([0.95, *known]) * 0.98, min(max([1.2, *known]) * 1.1, HIGHEST))


def _frame(drawing: Drawing, panel: Panel, title: str) -> None:
    drawing.text((panel.left - 40, panel.top - 24), title, "start", size=13)
    drawing.line([(panel.left, panel.top), (panel.left, panel.bottom), (panel.right, panel.bottom)], "pale", 1)
    drawing.line([(panel.left, panel.y(1)), (panel.right, panel.y(1))], "pale", 1, "2 4")
    for ratio in (1, 1.1, 1.25, 1.5, 2, 3, 5, 10):
        if panel.lowest <= ratio <= panel.highest and (ratio != 1.1 or panel.highest < 4):
            drawing.text((panel.left - 8, panel.y(ratio) + 4), f"{ratio:g}", "end", "pale", 12)
    for factor in panel.factors:
        drawing.text((panel.x(factor), panel.bottom + 20), f"×{_factor(factor)}", colour="pale", size=12)


def _line(drawing: Drawing, panel: Panel, cells: list[Table], colour: str, dash: str) -> None:
    points: list[Point] = [(panel.x(cell["start"]), panel.y(cell["ratio"])) for cell in cells]
    drawing.line(points, colour, 2.2, dash)
    for point in points:
        drawing.dot(point, colour, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=HERE.parent / "experiments" / "results")
    parser.add_argument("page", type=Path, nargs="?", default=HERE / "results.md")
    args = parser.parse_args()
    tables = read(args.results)
    sections = []
    for (task, optimizer), group in groupby(tables, key=lambda table: (table["task"], table["optimizer"])):
        same = list(group)
        draw(same).write(args.page.parent / "images" / f"misset-{task}-{optimizer}.svg")
        sections.append(section(same))
    for name, table_of in (("zoo", zoo), ("product", product)):
        file = args.results / f"{name}.json"
        if file.exists():
            sections.insert(0, table_of(json.loads(file.read_text())))
    sections.insert(0, worst_cases(tables))
    sections.insert(0, reached(tables))
    made = "\n\n".join([*sections, footing(tables)]) if tables else "Nothing has been measured yet."
    fill(args.page, BEGIN, f"\n{made}\n")
    if args.page == HERE / "results.md":
        real = [table for split in real_table.SHOWN for table in real_table.read(args.results / "real", split)]
        fill(HERE / "real-data.md", BEGIN, f"\n{real_table.page(args.results / 'real')}\n")
        fill(HERE.parent / "README.md", README_BEGIN, real_table.front(real))


if __name__ == "__main__":
    main()
