"""The table of one task, optimizer and length: what was measured, what follows from it, its file and its print."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from misset_bench import Outcome

__all__ = ["Book", "add_row", "mean_and_error", "plain", "print_table", "summarise"]

Table = dict[str, Any]


class Book:
    """All tables of a file. Written after every row, so that a killed run leaves what it had.

    Args:
        path: of the JSON file; tables that are there are kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables: list[Table] = json.loads(path.read_text())["tables"] if path.exists() else []

    def table(self, key: Table, arguments: Table) -> Table:
        """The table of a key; a new one where there is none or its arguments were others."""
        for number, table in enumerate(self.tables):
            if all(table[name] == value for name, value in key.items()):
                if table["arguments"] == arguments:
                    return table
                del self.tables[number]
                break
        self.tables.append({**key, "arguments": arguments, "rows": {}, "skipped": {}})
        return self.tables[-1]

    def save(self) -> None:
        """Write the file, all of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        content = {"experiment": "misset_lr", "tables": [plain(table) for table in self.tables]}
        draft.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(draft, self.path)


def add_row(table: Table, name: str, label: str, factors: Sequence[float | None], outcome: Outcome) -> None:
    """What a row gave, for each start (None: it has none)."""
    starts = [
        {
            "start": factor,
            "rate": None if factor is None else factor * table["best"]["rate"],
            "losses": losses,
            "found": found,
        }
        for factor, losses, found in zip(factors, outcome.losses, outcome.found, strict=True)
    ]
    table["rows"][name] = {
        "label": label,
        "starts": starts,
        "seconds": outcome.seconds,
        "run_steps": outcome.run_steps,
    }


def summarise(table: Table) -> None:
    """Means, standard errors and ratios from the losses; all in place."""
    rows, best = table["rows"], table["best"]
    if best["schedule"] not in rows:
        return
    reference = next(cell for cell in rows[best["schedule"]]["starts"] if cell["start"] == 1)
    table["reference"] = reference["losses"]
    plain = rows["onecycle"]
    for row in rows.values():
        for cell in row["starts"]:
            cell["mean"], cell["se"] = mean_and_error(cell["losses"])
            ratios = [_ratio(a, b) for a, b in zip(cell["losses"], reference["losses"], strict=True)]
            cell["ratio"], cell["ratio_se"] = mean_and_error(ratios)
            cell["failed"] = sum(not _finite(loss) for loss in cell["losses"])
        row["worst"] = max((_or_inf(cell["ratio"]) for cell in row["starts"]), default=math.inf)
        own, other = row["seconds"] / row["run_steps"], plain["seconds"] / plain["run_steps"]
        row["time_ratio"] = own / other


def mean_and_error(values: Sequence[float | None]) -> tuple[float, float]:
    """Mean and standard error of the mean; infinite where a value is not finite.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    numbers = [_or_inf(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        return math.inf, math.inf
    return fmean(numbers), stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan


def print_table(table: Table) -> None:
    """For people: final validation loss over the best fixed rate's, per start."""
    best, factors = table["best"], table["factors"]
    print(
        f"\n{table['task']}, {table['optimizer']}, {table['steps']} steps, {len(table['seeds'])} seeds: validation "
        f"loss relative to the best fixed rate, {best['rate']:.3g} with {best['schedule']}"
        f"{' (at the edge of the grid)' if best['on_edge'] else ''}, by the rate it starts from"
    )
    print(f"{'':32}" + "".join(f"{f'x{factor:g}':>14}" for factor in factors) + f"{'worst':>8}{'time':>6}")
    for row in table["rows"].values():
        cells = {cell["start"]: cell for cell in row["starts"]}
        if set(cells) == {None}:
            shown = _cell(cells[None]).center(14 * len(factors))
        else:
            shown = "".join(f"{_cell(cells[factor]) if factor in cells else '':>14}" for factor in factors)
        print(f"{row['label']:32}{shown}{_number(row['worst']):>8}{row['time_ratio']:>6.2f}")
    for name, why in table["skipped"].items():
        print(f"{name:32}skipped: {why}")


def _cell(cell: Table) -> str:
    error = cell["ratio_se"]
    return _number(cell["ratio"]) + (f" ({error:.3f})" if _finite(error) else "")


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else "failed"


def _ratio(loss: float | None, reference: float | None) -> float:
    if reference is None or loss is None or not math.isfinite(loss) or not reference > 0:
        return math.inf
    return loss / reference


def _or_inf(value: float | None) -> float:
    return value if value is not None and not math.isnan(value) else math.inf


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def plain(value: Any, digits: int = 17) -> Any:
    """As strict JSON can hold it: what is not finite is null."""
    if isinstance(value, dict):
        return {name: plain(item, digits) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
