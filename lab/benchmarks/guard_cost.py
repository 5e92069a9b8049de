"""What ``hdet.Guard`` adds to plain training: time and memory of whole runs.

    python lab/benchmarks/guard_cost.py --write lab/benchmarks/results/guard_cost.json      # on a GPU, a minute
    python lab/benchmarks/guard_cost.py --device cpu --models gpt-0.8M --steps 60

As ``auto_cost.py``: a GPT trains with AdamW, fused and not, without and with a guard, in turns of some steps; a row has
the ratio of their times, and by how much the largest number of bytes that are allocated at once is higher, in units of
the weights' bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from auto_cost import Bench, counted
from gpt import SIZES


def memory(bench: Bench, every: int) -> float | None:
    """What a guard adds to the peak of a run, over the weights' bytes; None on a CPU."""
    if bench.device.type != "cuda":
        return None
    peaks = []
    for guarded in (False, True):
        gc.collect()  # an earlier run may have snapshots
        with counted(bench.device) as peak:
            bench.train(3 * every, guarded, check_every=every)
            peaks.append(peak())
    return (peaks[1] - peaks[0]) / sum(p.nbytes for p in bench.weights)


def main() -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    line.add_argument("--models", default="gpt-10M,gpt-86M")
    line.add_argument("--every", type=int, default=50, help="steps of a round (default: 50)")
    line.add_argument("--steps", type=int, default=400, help="of a run (default: 400)")
    line.add_argument("--turns", type=int, default=3)
    line.add_argument("--write", type=Path)
    given = line.parse_args()
    device, rows = torch.device(given.device), []
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {"torch": torch.__version__, "device": name, "steps": given.steps}
    for model, fused in product(given.models.split(","), (False, True)):
        bench = Bench(SIZES[model], device, fused=fused)
        bench.train(3 * given.every, True, check_every=given.every)  # all snapshots have had their memory
        ratios = bench.ratios(given.steps, given.turns, check_every=given.every)
        row: dict[str, Any] = {"model": model, "fused": fused, "check_every": given.every}
        rows.append({**row, "ratio": median(ratios), "ratios": ratios, "memory": memory(bench, given.every)})
        print(json.dumps(rows[-1]), flush=True)
        if given.write is not None:
            given.write.write_text(json.dumps({"rows": rows, "versions": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
