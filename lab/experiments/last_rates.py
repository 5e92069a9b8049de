"""HDET's controller as printed, as released, corrected and normalised: where does each leave the rate?

    git clone https://github.com/hailingc/ensemble_training CHECKOUT
    python lab/experiments/last_rates.py CHECKOUT            # a table; --json for one JSON line; about a minute
    python lab/experiments/last_rates.py                     # without the released code, which is not vendored here

Four gloo ranks train nothing: each reports a loss of 1 + slope (rho - 1), rho being its rate over the mean of all, so
that a slope above 0 favours low rates. K = 10 and 50 rounds follow S_warm. Printed is the mean rate in the last step
over the rate at S_warm, and over OneCycleLR's own last rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - so that lab is found
import torch
import torch.distributed as dist
from released_code import FILE, MAX_LR, RANKS, SPREAD, T, Theirs, loaded, on_all_ranks, rate_of

import hdet
from lab.benchmarks.harness import run_ranks

WARM = 20
"""S_warm."""
ROUNDS = (10, 50)
SLOPES = (0.0, 1.0, -1.0)
Build = Callable[[int], Any]
"""A scheduler for a run of so many steps."""


def ours(**rule: Any) -> Build:
    """hdet's, with one of its controllers."""

    def build(steps: int) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=MAX_LR, momentum=0.9)
        shared: dict[str, Any] = {"sync_every": T, "auto_lr_start": WARM, "spread": SPREAD}
        return hdet.OneCycleLR(optimizer, MAX_LR, steps, **shared, **rule)

    return build


def released(theirs: Theirs, **changes: Any) -> Build:
    """The authors'."""
    return lambda steps: theirs.built(total_steps=steps, auto_lr_warmup_steps=WARM, **changes)


OURS: dict[str, Build] = {
    "printed, gamma mended": ours(auto_lr=hdet.AsPrinted()),
    "printed": ours(auto_lr=hdet.AsPrinted(mend_gamma=False)),
    "corrected, exponential": ours(decay="exponential"),
    "corrected": ours(),
    "normalised": ours(auto_lr=hdet.Normalised()),
}


def ended(scheduler: Any, steps: int, slope: float) -> tuple[float, float]:
    """The mean rate of the ranks in the step before S_warm, and in the last one."""
    warm = last = math.nan
    for t in range(steps):
        rate = rate_of(scheduler)
        rates = on_all_ranks(rate)
        last = sum(rates) / RANKS
        warm = last if t == WARM - 1 else warm
        scheduler.optimizer.step()
        scheduler.step(torch.tensor(1 + slope * (rate / last - 1 if last else 0.0)))
    return warm, last


def plain(steps: int) -> float:
    """OneCycleLR's own rate in the last step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=MAX_LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, MAX_LR, steps)
    for _ in range(steps - 1):
        optimizer.step()
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


def measure(rank: int, file: str | None) -> list[dict[str, Any]]:
    """All rows on one rank."""
    builds = dict(OURS)
    if file is not None:
        theirs = Theirs(rank, loaded(file))
        builds["released"] = released(theirs)
        builds["released, sigma as printed"] = released(theirs, loss_scale=0.1)
    rows = []
    for name, build in builds.items():
        for rounds in ROUNDS:
            steps = WARM + rounds * T
            for slope in SLOPES:
                warm, last = ended(build(steps), steps, slope)
                dist.barrier()
                row = {"controller": name, "rounds": rounds, "slope": slope, "last_over_first": last / warm}
                rows.append({**row, "last_over_onecycle": last / plain(steps)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line per controller, a column per K and slope."""
    heads = [f"K = {rounds}, slope {slope:g}" for rounds in ROUNDS for slope in SLOPES]
    lines = [f"| last rate over that at S_warm | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    for name in dict.fromkeys(row["controller"] for row in rows):
        cells = [f"{row['last_over_first']:.2g}" for row in rows if row["controller"] == name]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", metavar="CHECKOUT", help="folder of the authors' repository")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for the ranks (default: 600)")
    given = parser.parse_args()
    file = None if given.checkout is None else (given.checkout / FILE).resolve()
    if file is not None and not file.is_file():
        rule = f"CHECKOUT must be a checkout of github.com/hailingc/ensemble_training, with {FILE}"
        parser.error(f"{rule}, but got {given.checkout}")
    rows = run_ranks(measure, RANKS, None if file is None else str(file), timeout=given.timeout)[0]
    print(json.dumps({"ranks": RANKS, "steps_per_round": T, "rows": rows}) if given.json else table(rows), flush=True)


if __name__ == "__main__":
    main()
