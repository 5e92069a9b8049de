"""What a step of the entry costs over one of its optimizer alone: two runs of a GPT in turns of some steps.

    python lab/algoperf/cost.py --steps 2000 --write lab/algoperf/cost.json     # on a GPU
    python lab/algoperf/cost.py --model gpt-0.8M --steps 100                    # a CPU

The entry is NAdamW, `hdet.auto` with its losses, and the average of the weights; beside it NAdamW at a fixed rate.
Evaluations are not counted, as in the benchmark. Longer runs pay less: rounds grow with the run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "lab" / "benchmarks")]

from auto_cost import RATE, Bench  # noqa: E402 - the script is run by its path
from gpt import SIZES  # noqa: E402

import hdet  # noqa: E402
from lab.algoperf.training import BETAS, GUESS, WEIGHT_DECAY, Average, NAdamW, share_of  # noqa: E402


class Entered:
    """What the submission does after a step of the optimizer."""

    def __init__(self, optimizer: NAdamW, model: torch.nn.Module, steps: int) -> None:
        self.scheduler = hdet.auto(optimizer, schedule=lambda t: share_of(t, steps), total_steps=steps)
        self._average, self._t = Average(model, steps), 0

    def step(self, loss: Tensor) -> None:
        self.scheduler.step(loss)
        if self._t % self._average.every == 0:
            self._average.look(self.scheduler.found.rolled_back)
        self._t += 1


class EntryBench(Bench):
    """Runs with NAdamW, alone and as the entry has it."""

    def begin(self, steps: int, auto: bool, **more: Any) -> tuple[Any, Any]:
        self.restart()
        optimizer = NAdamW(self.weights, GUESS if auto else RATE, BETAS, weight_decay=WEIGHT_DECAY)
        if auto:
            return optimizer, Entered(optimizer, self.model, steps)
        return optimizer, ConstantLR(optimizer, factor=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SIZES), default="gpt-86M")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=1, help="runs of each kind")
    parser.add_argument("--write", type=Path, help="the result as JSON")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = EntryBench(SIZES[given.model], device)
    for auto in (True, False):
        bench.train(60, auto)  # kernels are loaded
    found = {
        "model": given.model,
        "steps": given.steps,
        "ratios": bench.ratios(given.steps, given.turns),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print(json.dumps(found))
    if given.write is not None:
        given.write.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
