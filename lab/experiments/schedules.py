"""Does a search find the rate of other schedules than OneCycle? A small regression, on two cores.

    python lab/experiments/schedules.py
    python lab/experiments/schedules.py --quick --json

Constant, warm-up with a decay at the end (WSD), cosine with and without a warm-up. A row: the held-out loss of
``hdet.auto(optimizer, schedule=...)`` from a guess, over that of the schedule at the best of twelve fixed rates, three
to a decade; geometric mean of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR

import hdet

RATES = tuple(10 ** (k / 3 - 4) for k in range(12))
GUESSES = (1e-6, 1.0)
TARGET = 1.25
BATCH, TRAINED = 32, 1024


def schedules(steps: int) -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    """By name, each a function of an optimizer."""
    warm = 0.1 * steps

    def cosine(t: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * max(t - warm, 0) / (steps - warm)))

    return {
        "constant": lambda optimizer: ConstantLR(optimizer, 1.0, 1),
        "wsd": lambda optimizer: LambdaLR(optimizer, lambda t: min((t + 1) / warm, 1, max((steps - t) / 2 / warm, 0))),
        "cosine": lambda optimizer: CosineAnnealingLR(optimizer, steps),
        "warm-up and cosine": lambda optimizer: LambdaLR(optimizer, lambda t: min((t + 1) / warm, cosine(t))),
    }


def train(make: Callable[[torch.optim.Optimizer], Any], seed: int, steps: int, rate: float, *, searches: bool) -> float:
    """The held-out loss at the end."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2 * TRAINED, 6, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(6, 1, generator=generator))
    targets += 0.1 * torch.randn(targets.shape, generator=generator)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = hdet.auto(optimizer, schedule=make, total_steps=steps) if searches else make(optimizer)

    def loss_of(chosen: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])

    for _ in range(steps):
        loss = loss_of(torch.randint(0, TRAINED, (BATCH,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss) if searches else scheduler.step()
    with torch.no_grad():
        return loss_of(torch.arange(TRAINED, 2 * TRAINED)).item()


def ratios(steps: int, seeds: int, rates: tuple[float, ...] = RATES) -> dict[str, dict[str, float]]:
    """By schedule: the best fixed rate, and the ratio from each guess."""
    found = {}
    for name, make in schedules(steps).items():

        def mean(rate: float, searches: bool, make: Callable[[torch.optim.Optimizer], Any] = make) -> float:
            losses = [train(make, seed, steps, rate, searches=searches) for seed in range(seeds)]
            return statistics.geometric_mean([loss if math.isfinite(loss) else 1e9 for loss in losses])

        fixed = {rate: mean(rate, searches=False) for rate in rates}
        best = min(fixed, key=fixed.__getitem__)
        found[name] = {"best rate": best, **{f"from {guess:g}": mean(guess, True) / fixed[best] for guess in GUESSES}}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="300,1000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="60 steps, one seed, three rates")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", hdet.SearchWarning)
    lengths = [60] if arguments.quick else [int(word) for word in arguments.lengths.split(",")]
    seeds, rates = (1, RATES[4:11:3]) if arguments.quick else (arguments.seeds, RATES)
    tables = {steps: ratios(steps, seeds, rates) for steps in lengths}
    if arguments.json:
        print(json.dumps(tables))
        return
    for steps, rows in tables.items():
        print(f"{steps} steps")
        for name, row in rows.items():
            worst = max(value for key, value in row.items() if key.startswith("from"))
            cells = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
            print(f"  {name:20} {cells}  {'PASS' if worst <= TARGET else 'MISS'}")


if __name__ == "__main__":
    main()
