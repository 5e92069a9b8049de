"""Made-up runs: journals whose numbers a person can check, with everything that a journal may hold."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdet.journal import SCHEMA, Journal

__all__ = ["a_header", "a_round", "searched_folder", "trained_journal", "write_folder", "write_journal"]


def a_header(knobs: Sequence[str] = ("lr[0]",), replicas: int = 2, /, **arguments: Any) -> dict[str, Any]:
    return {
        "kind": "header",
        "schema": SCHEMA,
        "hdet": "0.0.0",
        "time": "2026-11-15T02:31:33+00:00",
        "replicas": replicas,
        "knobs": list(knobs),
        "arguments": arguments,
    }


def a_round(k: int, losses: Sequence[float | None] = (1.0, 2.0), knobs: int = 1, **more: Any) -> dict[str, Any]:
    """A round of ten steps in which nothing was learned: base 0.1, replicas spread evenly by 10 %."""
    n = len(losses)
    rho = [1.0 + 0.1 * (2 * r / (n - 1) - 1 if n > 1 else 0.0) for r in range(n)]
    replicas = [
        {"loss": x, "signal": x, "values": [0.1 * m] * knobs, "multipliers": [m] * knobs, "divergence": 0.01}
        for x, m in zip(losses, rho, strict=True)
    ]
    whole = {"round": k, "step": 10 * (k + 1), "replicas": replicas, "excluded": [], "weights": None, "delta": None}
    whole |= {"velocity": None, "error": None, "learned": [1.0] * knobs, "base_before": [0.1] * knobs}
    whole |= {"base": [0.1] * knobs, "seconds": {"train": 8.0, "probe": 1.0, "gather": 0.5, "controller": 0.1}}
    whole["seconds"]["converge"] = 0.4
    return {"kind": "round", **whole, **more}


def write_journal(path: Path, *records: dict[str, Any]) -> Path:
    journal = Journal(path)
    for record in records:
        journal.write(record)
    journal.close()
    return path


def write_folder(folder: Path, *records: dict[str, Any], curve: str | None = None, **run: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if records:
        write_journal(folder / "journal.jsonl", *records)
    if run:
        (folder / "run.json").write_text(json.dumps(run))
    if curve is not None:
        (folder / "curve.csv").write_text(curve)
    return folder


def trained_journal(path: Path, rounds: int = 40, replicas: int = 4, knobs: Sequence[str] = ("lr[0]", "lr[1]")) -> Path:
    """A one-cycle run of the published method: losses fall, nothing much is learned, replica 2 is lost once."""
    chance = random.Random(0)
    records, m = [], 1.0
    for k in range(rounds):
        rho = [1 + (2 * r / (replicas - 1) - 1) / 9 for r in range(replicas)]
        chance.shuffle(rho)
        plain = [0.1 * math.sin(math.pi * (k + d) / (rounds + 0.1)) ** 2 + 1e-6 for d in (0.9, 1.0)]
        losses = [2.0 * math.exp(-3 * k / rounds) + 0.3 + 0.03 * chance.gauss(0, 1) for _ in rho]
        before, delta = m, 0.004 * chance.gauss(0.4, 1)
        m *= 1 + delta if k > 10 else 1
        rows = [
            {
                "loss": loss,
                "signal": loss,
                "values": [before * plain[0] * x] * len(knobs),
                "multipliers": [x] * len(knobs),
                "divergence": abs(x - 1) * 0.1 * math.exp(-k / rounds),
            }
            for loss, x in zip(losses, rho, strict=True)
        ]
        record = a_round(k, losses, len(knobs), replicas=rows, step=20 * (k + 1), learned=[m] * len(knobs))
        record |= {"base_before": [before * plain[0]] * len(knobs), "base": [m * plain[1]] * len(knobs)}
        record |= {"delta": [delta] * len(knobs) if k > 10 else None, "velocity": [delta / 10] * len(knobs)}
        if k == 25:
            record["excluded"], record["replicas"][2]["loss"] = [2], math.nan
        records.append(record)
    arguments = {"max_lr": 0.1, "total_steps": 20 * rounds, "spread": 1 / 9, "sync_every": 20, "decay": "schedule"}
    return write_journal(path, a_header(knobs, replicas, **arguments), *records)


GROUPS = ("lr[embedding]", "lr[transformer]", "lr[head]")
_GOAL = 4.1
_LENGTHS = [4] * 5 + [max(8, int(12 * 1.09**k)) for k in range(33)]
_RUINED = 20
"""The round after which the run goes back."""


def searched_folder(folder: Path, seed: int = 1, final: float = 3.277) -> Path:
    """A search over three groups from a rate that is too low: a first step, weights put back once, a resume."""
    chance, total = random.Random(seed), sum(_LENGTHS)
    m, records = 0.001, []
    for k in range(len(_LENGTHS)):
        records.append(_searched_round(k, m, final, chance))
        m = records[-1]["learned"][0]
    told = {"guess": [1e-3] * len(GROUPS), "schedule": "CosineAnnealingLR", "schedule_every": 1}
    header = a_header(GROUPS, 1, **told, rollback=True, total_steps=total)
    resume = {"kind": "resume", "time": "2026-11-15T03:00:00+00:00", "step": records[29]["step"], "replicas": 1}
    return write_folder(folder, header, *records[:30], resume, *records[30:])


def _searched_round(k: int, m: float, final: float, chance: random.Random) -> dict[str, Any]:
    """One round of the search: gradients ask for more until the goal is reached, and once training is ruined."""
    step, total, knobs = sum(_LENGTHS[: k + 1]), sum(_LENGTHS), len(GROUPS)
    shape = [1e-3 * (0.5 + 0.5 * math.cos(math.pi * min(t / total, 0.995))) for t in (step - 1, step)]
    asked = min(2.5 * m, _GOAL / 0.7) if k > 0 and m < _GOAL else 0.0
    learned = m / 3 if k == _RUINED else m * min(max(0.7 * asked / m, 1.0), 2.0)
    back = sum(_LENGTHS[: _RUINED - 1]) if k == _RUINED else None
    loss = 1.8 * math.exp(-4 * step / total) + final
    loss += 0.02 * chance.gauss(0, 1) + (2.0 if k == _RUINED else 0.0)
    row = {"loss": loss, "signal": loss, "divergence": 0.0}
    row |= {"values": [m * shape[0]] * knobs, "multipliers": [1.0] * knobs}
    return a_round(k, [loss], knobs) | {
        "replicas": [row],
        "step": step,
        "learned": [learned] * knobs,
        "base_before": [m * shape[0]] * knobs,
        "base": [learned * shape[1]] * knobs,
        "shape": [shape[1]] * knobs,
        "estimated_rate": asked * shape[0],
        "event": "first_step" if k == 0 else "rolled_back" if k == _RUINED else None,
        "rolled_back_to": back,
        "seconds": {"train": 0.3 * _LENGTHS[k], "gather": 0.02, "controller": 1e-3},
    }
