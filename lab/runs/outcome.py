"""What came of an ablation: numbers per configuration, with their spread over seeds, and the table."""

from __future__ import annotations

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
from lab.runs.ablation import CONFIGURATIONS, CRASH, PlannedRun, Study

__all__ = ["as_markdown", "described", "table_of"]

_LOSSES = ("train_loss", "loss")


def described(study: Study, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """``ablation.json``: everything that the study depends on, and what is known so far."""
    by_key: dict[str, list[dict[str, Any]]] = {one.key: [] for one in CONFIGURATIONS}
    for run in runs:
        if run.configuration is not None and run.folder.complete:
            by_key[run.configuration.key].append(_result(run))
    rows = [
        {
            "key": one.key,
            "label": one.label,
            "what": one.what,
            "published": {"train_loss": one.published, "crashed": one.published_crash},
            "runs": by_key[one.key],
            "crashed": sum(result["crashed"] for result in by_key[one.key]),
            **{loss: _summary([result[loss] for result in by_key[one.key]]) for loss in _LOSSES},
        }
        for one in CONFIGURATIONS
    ]
    return {
        "arguments": study.arguments(),
        "hdet": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "crash_rule": CRASH,
        "complete": all(len(found) == study.seeds for found in by_key.values()),
        "configurations": rows,
    }


def _result(run: PlannedRun) -> dict[str, Any]:
    record = run.folder.read()
    final = record.get("final") or {}
    losses = {name: finite(final.get(name)) for name in _LOSSES}
    own = {"seed": run.seed, "folder": run.folder.path.name, "crashed": bool(record.get("crashed"))}
    return own | losses | {"seconds": record.get("seconds"), "plan": _plan_in_study(run)}


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
    """One row per configuration, the published numbers beside."""
    arguments = outcome["arguments"]
    rows = [
        (
            row["label"],
            row["what"],
            say.rate(arguments["low"] if row["key"] == "baseline-low" else arguments["high"]),
            _cell(row["train_loss"], len(row["runs"])),
            _cell(row["loss"], len(row["runs"])),
            f"{row['crashed']} of {len(row['runs'])}" if row["crashed"] else "–",
            _published(row["published"]),
        )
        for row in outcome["configurations"]
    ]
    columns = ("configuration", "", "rate", "train loss", "validation loss", "crashed", "published train loss")
    seeds = arguments["seeds"]
    over = "one seed, no spread known" if seeds == 1 else f"mean ± standard deviation over {seeds} seeds"
    caption = f"{arguments['task']}, {arguments['replicas']} replicas, {arguments['steps']} steps; {over}; {CRASH}"
    return Table(columns, rows, caption)


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
