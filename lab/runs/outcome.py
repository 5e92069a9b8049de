"""What came of an ablation: numbers per configuration, with their spread over seeds, and the table."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from hdet._version import __version__
from hdet.report import numbers as say
from hdet.report.numbers import finite
from hdet.report.verdict import Table
from lab.runs.ablation import CRASH, PlannedRun, Row, Study

__all__ = ["as_markdown", "described", "table_of", "wilson"]

_METRICS = ("train_loss", "loss", "auc", "ne", "last_rate")


def described(study: Study, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """``ablation.json``: everything that the study depends on, and what is known so far."""
    by_key: dict[str, list[dict[str, Any]]] = {row.key: [] for row in study.rows()}
    for run in runs:
        if run.row is not None and run.folder.complete:
            by_key[run.row.key].append(_result(run))
    return {
        "arguments": study.arguments(),
        "hdet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "crash_rule": CRASH,
        "complete": all(len(found) == study.seeds for found in by_key.values()),
        "configurations": [_described_row(row, by_key[row.key]) for row in study.rows()],
    }


def _described_row(row: Row, results: list[dict[str, Any]]) -> dict[str, Any]:
    one, crashed = row.configuration, sum(result["crashed"] for result in results)
    return {
        "key": row.key,
        "label": one.label,
        "what": one.what,
        "rate": row.rate,
        "sync_every": row.every,
        "published": {"train_loss": one.published, "crashed": one.published_crash},
        "runs": results,
        "crashed": crashed,
        "crash_interval": wilson(crashed, len(results)),
        **{name: _summary([result[name] for result in results]) for name in _METRICS},
    }


def wilson(count: int, of: int) -> list[float] | None:
    """Wilson's interval of 95 % for a probability, from how often something happened.

    >>> [round(bound, 2) for bound in wilson(0, 5)], [round(bound, 2) for bound in wilson(3, 5)]
    ([0.0, 0.43], [0.23, 0.88])
    """
    if not of:
        return None
    z, share = 1.959964, count / of
    middle, wide = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    bounds = [(middle + sign * wide) / (1 + z * z / of) for sign in (-1, 1)]
    return [
        min(max(bounds[0], 0.0), share),
        max(min(bounds[1], 1.0), share),
    ]  # at 0 and 1 rounding would miss the share


def _result(run: PlannedRun) -> dict[str, Any]:
    record = run.folder.read()
    final = record.get("final") or {}
    told = {name: finite(final.get(name)) for name in ("train_loss", "loss", "last_rate")}
    told["untrained_loss"] = finite((record.get("untrained") or {}).get("loss"))  # the bar of CRASH
    told |= {name: _mean_of(final, f"{name}_") for name in ("auc", "ne")}
    own = {"seed": run.seed, "folder": run.folder.path.name, "crashed": bool(record.get("crashed"))}
    return own | told | {"seconds": record.get("seconds"), "plan": _plan_in_study(run)}


def _mean_of(final: Mapping[str, Any], prefix: str) -> float | None:
    """Over the tasks that are predicted at once."""
    values = [finite(value) for name, value in final.items() if name.startswith(prefix)]
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _plan_in_study(run: PlannedRun) -> dict[str, Any]:
    """The run's plan; the weights that it begins with by their place in the study, which may be moved."""
    arguments = run.plan.arguments()
    if run.plan.start is not None:
        arguments["start"] = Path(run.plan.start).relative_to(run.folder.path.parent.resolve()).as_posix()
    return arguments


def _summary(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation of those that are finite."""
    known = [value for value in values if value is not None]
    return {
        "mean": mean(known) if known else None,
        "spread": stdev(known) if len(known) > 1 else None,
        "count": len(known),
    }


def table_of(outcome: Mapping[str, Any]) -> Table:
    """One row per configuration, rate and T, the published numbers beside."""
    arguments = outcome["arguments"]
    rows = [
        (
            row["label"],
            row["what"],
            say.rate(row["rate"]),
            str(row["sync_every"] or say.NOTHING),
            _crashes(row),
            *(_cell(row[name], len(row["runs"])) for name in ("train_loss", "loss", "auc", "ne")),
            _published(row["published"]),
        )
        for row in outcome["configurations"]
    ]
    names = ("configuration", "", "rate", "T", "crashed (95 %)", "train loss", "validation loss", "AUC")
    columns = (*names, "normalised entropy", "published train loss")
    seeds = arguments["seeds"]
    over = "one seed, no spread known" if seeds == 1 else f"mean ± standard deviation over {seeds} seeds"
    ranks = "simulated replicas" if arguments["simulated"] else "replicas"
    caption = f"{arguments['task']}, {arguments['replicas']} {ranks}, {arguments['steps']} steps; {over}; {CRASH}; "
    return Table(columns, rows, caption + "in brackets Wilson's interval; AUC and entropy are means of the tasks")


def _crashes(row: Mapping[str, Any]) -> str:
    """How many runs, and between which shares the probability lies."""
    if row["crash_interval"] is None:
        return say.NOTHING
    low, high = row["crash_interval"]
    return f"{row['crashed']} of {len(row['runs'])} ({low:.2f} to {high:.2f})"


def _cell(summary: Mapping[str, Any], runs: int) -> str:
    """Mean ± standard deviation, and how many runs are not in it."""
    if summary["mean"] is None:
        return "not finite" if runs else say.NOTHING
    spread = "" if summary["spread"] is None else f" ± {summary['spread']:.4f}"
    lost = runs - summary["count"]
    return f"{summary['mean']:.4f}{spread}" + (f", {lost} not finite" if lost else "")


def _published(one: Mapping[str, Any]) -> str:
    if one["train_loss"] is None:
        return say.NOTHING
    return f"{one['train_loss']:.3f}{', crashed' if one['crashed'] else ''}"


def as_markdown(table: Table) -> str:
    """The table for a README."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"{text}\n\n{table.caption}\n"
