"""One setting of AdamW and one of NadamW for all workloads, chosen on *dev* from a small grid.

    python lab/experiments/real_calibrate.py                                # all of dev: some minutes on one H200
    python lab/experiments/real_calibrate.py --workloads shakespeare-gpt --quick --synthetic    # two cores, no data

All settings train as one stack with the seeds that choose rates; options are those of `real_lr.py`. The loss of a
setting is divided by that of OneCycle at the best fixed rate, which the workload's file of `real_lr.py` must have, and
the setting with the lowest geometric mean over workloads is chosen. A loss counts at most as much as that of the first
weights. `calibrated.json` is written after every workload, and those that it has are not run again. `real_lr.py` reads
it from lab/experiments/results/real/ for its rows adamw-calibrated and nadamw-calibrated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from provenance import commit
from real.calibrated import FILE, GRID, RATES, ROWS, Setting, best_of, trained
from real.ledger import save, searched
from real.score import geometric_mean, scored_by
from real.workloads import WORKLOADS
from real_lr import Plan, Workbench, parsed, tidy


def ratios_of(content: Mapping[str, Any], curves: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """The final loss of each setting over the best of OneCycle, mean over seeds; ``content``: the workload's file."""
    scored = scored_by(content)
    highest = scored(content["initial"])
    best = min(fmean(map(scored, row)) for row in content["grid"]["losses"])

    def counted(loss: float) -> float:
        return scored(loss) if scored(loss) < highest else highest  # NaN is not below it

    return [fmean(counted(curve[-1]) for curve in rows) / best for rows in curves]


def choice(settings: Sequence[Setting], ratios: Mapping[str, Sequence[float]], nesterov: bool) -> dict[str, Any]:
    """The best setting of a kind, its mean, and whether the grid of rates ends there."""
    best = best_of(settings, ratios, nesterov)
    setting, mean = settings[best], geometric_mean([row[best] for row in ratios.values()])
    return {"setting": setting._asdict(), "mean": mean, "on_edge": setting.rate in (RATES[0], RATES[-1])}


def calibrate(plan: Plan, known: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """Train what the file lacks, and choose among what it has."""
    file = plan.folder / FILE.name
    head = {"grid": [[*one] for one in settings], "synthetic": plan.synthetic}
    content = json.loads(file.read_text()) if file.exists() else {}
    if any(content.get(key) != json.loads(json.dumps(value)) for key, value in head.items()):
        content = {**head, "ratios": {}}
    for name in plan.workloads:
        if (name in content["ratios"] and not plan.again) or time.time() > plan.until:
            continue
        workload = searched(plan.folder, name)
        began = time.perf_counter()
        curves, _ = trained(Workbench(plan, known[name]).choosing, settings)
        content["ratios"][name] = ratios_of(workload, curves)
        content["chosen"] = {row: choice(settings, content["ratios"], kind) for row, kind in ROWS.items()}
        save(file, {**content, "commit": commit()})
        tidy()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    return content


def main(words: list[str] | None = None) -> None:
    plan, given = parsed(words)
    closed = [name for name in plan.workloads if WORKLOADS[name].split != "dev"]
    if closed:
        raise SystemExit(f"settings are chosen on dev only, but got {', '.join(closed)}")
    plan.evaluations = 1
    torch.set_num_threads(1)  # a second thread on a busy core slows small tensors down by far
    found = calibrate(plan, WORKLOADS, GRID[::10] if given.quick else GRID)
    for row, setting in found.get("chosen", {}).items():
        print(row, setting)


if __name__ == "__main__":
    main()
