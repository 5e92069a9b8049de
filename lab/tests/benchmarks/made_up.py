"""Measured parts that nobody measured: all passes have a known launch time and bandwidth."""

from __future__ import annotations

from typing import Any

from cost_fit import Row, share
from cost_model import Machine, Pass, Passes

LAUNCH, BANDWIDTH = 1e-4, 2e12
"""Of every pass."""


def passes(launch: float = LAUNCH, bandwidth: float = BANDWIDTH) -> Passes:
    """All alike."""
    return Passes(*[Pass(launch, bandwidth)] * 3)


def machine(**changed: Any) -> Machine:
    """Round numbers."""
    plain: dict[str, Any] = {
        "passes": passes(launch=0.0, bandwidth=1e12),
        "tokens": 1000,
        "flops": 1e15,
        "utilisation": 0.5,
        "gpus_per_node": 8,
        "inside": 100e9,
        "between": 10e9,
        "latency": 1e-3,
        "weight_bytes": 4,
        "moment_bytes": 8,
        "sync_every": 1000,
        "keep": "device",
        "pinned": 50e9,
    }
    return Machine(**{**plain, **changed})


def measured(model: str, parameters: int, *, steps: int = 1000, compiled: bool = False) -> dict[str, Any]:
    """A row as it would be if the formulas were exact."""
    look, keep = (LAUNCH + size * parameters / BANDWIDTH for size in (20, 24))
    step, keep_host = 1e-2, LAUNCH + 12 * parameters / 50e9
    end = (keep + keep_host) / 2 + look  # the measure of a round reads as much as a look
    row = Row(model, parameters, steps, compiled, 1.0, step, look, keep, keep_host, end)
    parts = {name: 1e3 * getattr(row, name) for name in ("step", "look", "keep", "keep_host", "end")}
    return {
        "model": model,
        "parameters": parameters,
        "tensors": 100,
        "tokens": 8192,
        "steps": steps,
        "compiled": compiled,
        "ratio": 1 + share(row, look, end, steps),
        "parts_ms": parts,
    }


def document() -> dict[str, Any]:
    """A whole file."""
    rows = [
        measured("made-up-1M", 1_000_000),
        measured("made-up-10M", 10_000_000),
        measured("made-up-10M", 10_000_000, compiled=True),
        measured("made-up-100M", 100_000_000, steps=2000),
    ]
    copies = {"device": 1000.0, "pinned": 50.0, "pageable": 8.0}
    names = ("searching", "descent", "searching_host", "searching_go_back_false", "descent_go_back_false")
    memory = {
        "model": "made-up-1M",
        "parameters": 1_000_000,
        **dict(zip(names, (5.1, 3.1, 3.0, 2.1, 0.1), strict=True)),
    }
    return {"rows": rows, "memory": [memory], "copy_gb_per_s": copies, "versions": {"torch": "9.9"}}
