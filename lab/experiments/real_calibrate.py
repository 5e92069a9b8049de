"""One setting of AdamW and one of NadamW for all workloads, chosen on *dev* and *kin* from a small grid.

    python lab/experiments/real_calibrate.py --seconds 500                # on one H200; again: what is not there yet
    python lab/experiments/real_calibrate.py --quick --synthetic          # two cores, no data

Every setting trains on every workload with the seeds that choose rates (`real_lr.py`); the one with the lowest
geometric mean of final losses wins. A loss counts at most as much as that of the first weights. The losses and the two
settings are in lab/experiments/results/real/calibrated.json, which `real_lr.py` reads for its rows adamw-calibrated and
nadamw-calibrated; workloads of *seen* and *test* are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from provenance import commit
from real.bench import Bench
from real.calibrated import FILE, GRID, LABELS, Setting, best_of, trained
from real.ledger import save
from real.targets import APART
from real.workloads import WORKLOADS
from real_lr import CHOOSING, Plan, Workbench, named, tidy

OPEN = ("dev", "kin")
"""The splits that may be tuned on."""
AHEAD = {"adamw-calibrated": False, "nadamw-calibrated": True}


def names_of(words: str, known: dict[str, Any]) -> list[str]:
    """The workloads that splits and names stand for; an error for those that are not open."""
    names = named(words, known)
    closed = [name for name in names if name not in known or known[name].split not in OPEN]
    if closed:
        raise SystemExit(f"settings are chosen on workloads of dev and kin only, but got {', '.join(closed)}")
    return [name for name in names if name not in APART]


def losses_of(bench: Bench, settings: Sequence[Setting], density: bool) -> dict[str, list[float]]:
    """By row: the final loss with every setting, mean over seeds; exp(loss) where it is one of densities."""
    highest = _scored(bench.initial(), density)
    found = {}
    for name, ahead in AHEAD.items():
        curves, _ = trained(bench, settings, [ahead] * len(settings))
        finals = [[_scored(curve[-1], density) for curve in row] for row in curves]
        found[name] = [fmean(loss if loss < highest else highest for loss in row) for row in finals]
        tidy()
    return found


def _scored(loss: float, density: bool) -> float:
    """Infinite for NaN, too."""
    if not math.isfinite(loss):
        return math.inf
    return math.exp(min(loss, 700.0)) if density else loss


def calibrate(plan: Plan, file: Path, settings: Sequence[Setting] = GRID) -> dict[str, Any]:
    """Train what the file lacks, choose among what it has, and write it after every workload."""
    grid = [list(setting) for setting in settings]
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if content.get("grid") != grid or content.get("synthetic") != plan.synthetic:
        content = {"grid": grid, "synthetic": plan.synthetic, "losses": {}}
    for name in plan.workloads:
        if name in content["losses"] or time.time() > plan.until:
            continue
        began = time.perf_counter()
        workbench = Workbench(plan, WORKLOADS[name])
        density = getattr(workbench.task, "density", False)
        content["losses"][name] = losses_of(workbench.choosing, settings, density)
        content["chosen"] = {
            row: settings[best_of({w: rows[row] for w, rows in content["losses"].items()})]._asdict() for row in LABELS
        }
        save(file, {**content, "commit": commit()})
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    return content


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="dev,kin", help="of dev and kin")
    parser.add_argument("--file", type=Path, help="default lab/experiments/results/real/calibrated.json")
    parser.add_argument("--synthetic", action="store_true", help="stand-ins of the same shapes instead of data")
    parser.add_argument("--quick", action="store_true", help="four settings, short runs, one seed, for two cores")
    parser.add_argument("--seconds", type=float, help="begin no workload after so many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(sys.argv[1:] if words is None else words)
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    small = given.quick or given.synthetic
    plan = Plan(
        workloads=names_of(given.workloads, WORKLOADS),
        rows=[],
        folder=FILE.parent,
        device=torch.device(given.device),
        choosing=list(CHOOSING[:1] if given.quick else CHOOSING),
        evaluations=1,
        longest=20 if given.quick else None,
        samples=8 if given.quick else None,
        synthetic=given.synthetic,
        until=time.time() + given.seconds if given.seconds else float("inf"),
    )
    file = given.file or (FILE.parent.with_name("real_quick") / FILE.name if small else FILE)
    found = calibrate(plan, file, GRID[::8] if given.quick else GRID)
    for row, setting in found.get("chosen", {}).items():
        print(row, setting)
    print(file)


if __name__ == "__main__":
    main()
