"""Plain networks of ReLU layers without norms, under SGD and Adam: where ``hdet.auto`` fails, and by how much.

    python lab/experiments/relu_depth.py              # seven minutes on one core
    python lab/experiments/relu_depth.py --kinds adam --depths 4 --steps 60 --seeds 1

A regression on sin(x), eight inputs, batches of 64. Final loss over that of the best of eleven fixed OneCycle rates,
half a decade apart, from 1/1000, 1 and 100 times that rate. One JSON line for each case, all of them in
lab/experiments/results/relu_depth.json with --write.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn, optim

import hdet

RESULTS = Path(__file__).parent / "results" / "relu_depth.json"
KINDS: dict[str, Any] = {
    "sgd": lambda parameters, lr: optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: optim.Adam(parameters, lr=lr),
}
GRID = [10 ** (e / 2) for e in range(-8, 3)]
STARTS = (1e-3, 1.0, 100.0)
INPUTS, WIDTH, BATCH = 8, 64, 64


def network(depth: int, seed: int) -> nn.Sequential:
    """``depth`` linear layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(INPUTS, WIDTH), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, INPUTS, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def trained(kind: str, depth: int, steps: int, rate: float, seed: int, *, auto: bool) -> tuple[float, float]:
    """The final loss on other data, and the peak rate: ``rate``, or what was found from it."""
    model = network(depth, seed)
    optimizer = KINDS[kind](model.parameters(), rate)
    scheduler: Any
    if auto:
        scheduler = hdet.auto(optimizer, total_steps=steps)
    else:
        scheduler = hdet.OneCycleLR(optimizer, rate, total_steps=steps, cycle_momentum=False)
    stream = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = batch(stream, BATCH)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    x, y = batch(torch.Generator().manual_seed(10**6), 4096)
    with torch.no_grad():
        final = float(nn.functional.mse_loss(model(x), y))
    found = scheduler.search.learned.peak_factor if auto else 1.0
    return final if math.isfinite(final) else math.inf, rate * found


def case(kind: str, depth: int, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """One network at one length: the best fixed rate, and what the search makes of each start."""
    means = {rate: fmean(trained(kind, depth, steps, rate, seed, auto=False)[0] for seed in seeds) for rate in GRID}
    best = min(means, key=means.__getitem__)
    runs = {
        str(start): [trained(kind, depth, steps, best * start, seed, auto=True) for seed in seeds] for start in STARTS
    }
    return {
        "kind": kind,
        "depth": depth,
        "steps": steps,
        "best_rate": best,
        "best_loss": means[best],
        "ratios": {start: [loss / means[best] for loss, _ in rows] for start, rows in runs.items()},
        "found": {start: [rate / best for _, rate in rows] for start, rows in runs.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="sgd,momentum,adam")
    parser.add_argument("--depths", default="4,6")
    parser.add_argument("--steps", default="100,300")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hdet.SearchWarning)
    rows = []
    for kind in given.kinds.split(","):
        for depth in map(int, given.depths.split(",")):
            for steps in map(int, given.steps.split(",")):
                rows.append(case(kind, depth, steps, range(given.seeds)))
                print(json.dumps(rows[-1]), flush=True)
    if given.write:
        command = "python lab/experiments/relu_depth.py --write"
        RESULTS.write_text(json.dumps({"command": command, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
