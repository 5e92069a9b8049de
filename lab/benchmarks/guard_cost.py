"""What ``hdet.Guard`` adds to plain training: time and memory of whole runs.

    python lab/benchmarks/guard_cost.py --write lab/benchmarks/results/guard_cost.json      # on a GPU, a minute
    python lab/benchmarks/guard_cost.py --device cpu --models gpt-0.8M --steps 60

A GPT trains with AdamW at a fixed rate, without and with a guard, in turns of some steps; a row has the ratio of their
times, and by how much the largest number of bytes that are allocated at once is higher, in units of the weights' bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import GPT, SIZES, batches, loss_of

import hdet

BLOCK = 100
"""Steps of one run before the other goes on."""
BATCHES = 16


class Training:
    """A model that trains, with a guard or without."""

    def __init__(self, model: str, device: torch.device, every: int | None) -> None:
        torch.manual_seed(0)
        self._size, self._device = SIZES[model], device
        self.model = GPT(self._size).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._guard = None if every is None else hdet.Guard(self._optimizer, self.model, check_every=every)
        self._batches = batches(self._size, BATCHES, device)
        self._made = 0

    def seconds(self, steps: int) -> float:
        """Of so many steps more, with all that the device has to do for them."""
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss = loss_of(self._size, self.model, self._batches[self._made % BATCHES])
            loss.backward()
            self._optimizer.step()
            if self._guard is not None:
                self._guard.step(loss.detach())
            self._made += 1
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def times(model: str, device: torch.device, every: int, steps: int, turns: int) -> list[float]:
    """The ratio of each turn, warm."""
    plain, guarded = Training(model, device, None), Training(model, device, every)
    for one in (plain, guarded):
        one.seconds(2 * every)  # both snapshots have their memory
    ratios = []
    for turn in range(turns):
        own: dict[Training, float] = {plain: 0.0, guarded: 0.0}
        for block in range(max(steps // BLOCK, 1)):
            for one in (plain, guarded) if (block + turn) % 2 == 0 else (guarded, plain):
                own[one] += one.seconds(min(steps, BLOCK))
        ratios.append(own[guarded] / own[plain])
    return ratios


def memory(model: str, device: torch.device, every: int) -> float | None:
    """What a guard adds to the peak of a run, over the weights' bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    peaks = []
    for own in (None, every):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        training = Training(model, device, own)
        training.seconds(3 * every)
        peaks.append(torch.cuda.max_memory_allocated(device) - held)
        weights = sum(p.nbytes for p in training.model.parameters())
        del training
    return (peaks[1] - peaks[0]) / weights


def main() -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    line.add_argument("--models", default="gpt-0.8M,gpt-86M")
    line.add_argument("--every", default="20,100", help="steps of a round (default: 20,100)")
    line.add_argument("--steps", type=int, default=400, help="of a turn (default: 400)")
    line.add_argument("--turns", type=int, default=3)
    line.add_argument("--write", type=Path)
    given = line.parse_args()
    device, rows = torch.device(given.device), []
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {"torch": torch.__version__, "device": name, "steps": given.steps}
    for model in given.models.split(","):
        for every in map(int, given.every.split(",")):
            ratios = times(model, device, every, given.steps, given.turns)
            row: dict[str, Any] = {"model": model, "check_every": every, "ratio": median(ratios), "ratios": ratios}
            rows.append({**row, "memory": memory(model, device, every)})
            print(json.dumps(rows[-1]), flush=True)
            if given.write is not None:
                given.write.write_text(json.dumps({"rows": rows, "versions": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
