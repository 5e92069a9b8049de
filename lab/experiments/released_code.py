"""What does the code that the authors of HDET released do, and what does their paper say?

    git clone https://github.com/hailingc/ensemble_training CHECKOUT
    python lab/experiments/released_code.py CHECKOUT

Runs CHECKOUT/src/one_cycle.py, which is theirs and no part of this repository, on four gloo ranks of this machine, and
prints one JSON line for each statement of the paper (arXiv 2604.24708): ``holds`` says whether the code does that, and
``measured`` what it does. It takes seconds on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401 - so that lab is found
import torch
import torch.distributed as dist

from lab.benchmarks.harness import run_ranks

FILE = Path("src") / "one_cycle.py"
RANKS = 4
SPREAD = 1 / 9
WIDEST = (1 + SPREAD) / (1 - SPREAD)
"""The highest rate over the lowest one in a round, as printed."""
MAX_LR = 9e-4
T = 4
WARM = 20
"""S_warm: rounds 1 to 4 end before it, the fifth at it."""
ROUNDS = 10
"""K, the rounds from S_warm to the end."""
STEPS = WARM + ROUNDS * T


class Theirs(NamedTuple):
    """The authors' scheduler on one rank."""

    rank: int
    scheduler_class: Any

    def built(self, weight: float = 1.0, **changes: Any) -> Any:
        """Their scheduler at torch's defaults, auto-LR on, for one weight."""
        parameter = torch.nn.Parameter(torch.tensor([weight]))
        optimizer = torch.optim.SGD([parameter], lr=MAX_LR, momentum=0.9)
        arguments = {
            "total_steps": STEPS,
            "ensemble_lr_spread_ratio": SPREAD,
            "model_sync_interval": T,
            "auto_lr_warmup_steps": WARM,
            "enable_auto_lr": True,
        }
        return self.scheduler_class(optimizer, max_lr=MAX_LR, **{**arguments, **changes})

    def place(self) -> dict[str, int]:
        """The arguments with which the authors' README tells the scheduler where it runs."""
        return {"rank": self.rank, "world_size": RANKS}


def rate_of(scheduler: Any) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


def on_all_ranks(value: float) -> list[float]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def trained(scheduler: Any, steps: int, loss: float = 1.0) -> None:
    """Steps without a gradient: only the scheduler changes weights."""
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step(torch.tensor(loss))


def widest(scheduler: Any, steps: int) -> float:
    """The highest rate over the lowest one among the ranks, in the step where it is largest."""
    found = 0.0
    for _ in range(steps):
        trained(scheduler, 1)
        rates = on_all_ranks(rate_of(scheduler))
        found = max(found, max(rates) / min(rates))
    return found


# What is measured: figures, and whether they are what is printed -----------------------------------------------------


def fan_out(theirs: Theirs) -> tuple[bool, dict[str, Any]]:
    """The highest rate over the lowest one, if the scheduler finds its rank by itself, and if it is told."""
    found, told = theirs.built(), theirs.built(**theirs.place())
    before = [widest(scheduler, WARM - 1) for scheduler in (found, told)]
    bases = [on_all_ranks(scheduler.base_lrs[0]) for scheduler in (found, told)]
    figures = {
        "ratio_printed": WIDEST,
        "ratio_before_s_warm": max(before),
        "ratio_of_base_lrs": max(bases[0]) / min(bases[0]),
        "ratio_of_base_lrs_if_told": max(bases[1]) / min(bases[1]),
        "ratio_after_s_warm": widest(found, 2),
    }
    return min(before) > 1 + SPREAD, figures


def averaging(theirs: Theirs) -> tuple[bool, dict[str, Any]]:
    """Four replicas at weights 0, 1, 2, 3: how far apart are they after a round, with auto-LR off and on?"""
    apart = {}
    for name, on in (("off", False), ("on", True)):
        scheduler = theirs.built(weight=float(theirs.rank), enable_auto_lr=on)
        trained(scheduler, T)
        weights = on_all_ranks(scheduler.optimizer.param_groups[0]["params"][0].item())
        apart[name] = max(weights) - min(weights)
    return apart["off"] == 0, {f"apart_with_auto_lr_{name}": value for name, value in apart.items()}


def decay(theirs: Theirs) -> tuple[bool, dict[str, Any]]:
    """The rate over K rounds of equal losses, which leave it to gamma alone, at torch's div_factor 25 and 1e4."""
    scheduler = theirs.built()
    trained(scheduler, WARM)
    first = sum(on_all_ranks(rate_of(scheduler)))
    trained(scheduler, STEPS - WARM)
    grown = sum(on_all_ranks(rate_of(scheduler))) / first
    printed = 1 - math.exp(-math.log(25 / 1e4) / ROUNDS)
    figures = {"gamma": scheduler.decay_ratio, "gamma_printed": printed, "rounds": ROUNDS, "last_over_first": grown}
    return grown < 1, figures


def epochs(theirs: Theirs) -> tuple[bool, dict[str, Any]]:
    """A drop-in takes epochs and steps_per_epoch instead of total_steps, as torch's OneCycleLR does."""
    try:
        scheduler = theirs.built(total_steps=None, epochs=2, steps_per_epoch=STEPS)
    except Exception as error:  # whatever it raises is the answer
        return False, {"raised": f"{type(error).__name__}: {error}"}
    return True, {"total_steps": scheduler.total_steps}


def global_rng(theirs: Theirs) -> tuple[bool, dict[str, Any]]:
    """Each rank seeds torch with its own number and builds the scheduler: how many numbers do they then draw?"""
    torch.manual_seed(theirs.rank)
    theirs.built()
    distinct = len(set(on_all_ranks(torch.rand(1, dtype=torch.float64).item())))
    return distinct == RANKS, {"ranks": RANKS, "different_numbers": distinct}


def sigma(theirs: Theirs) -> tuple[bool, dict[str, Any]]:
    """The default of sigma, and how far losses that are 0.01 apart pull the mean rate: 1 is to the lowest replica's."""
    default = inspect.signature(theirs.scheduler_class).parameters["loss_scale"].default
    figures = {"default": default, "printed": 0.1}
    for name, changes in (("default", {}), ("printed", {"loss_scale": 0.1})):
        scheduler = theirs.built(**changes)
        trained(scheduler, WARM)  # rates differ from here on
        rates = on_all_ranks(rate_of(scheduler))
        place = sorted(rates).index(rate_of(scheduler))
        trained(scheduler, T, loss=1 + 0.01 * place)
        mean = sum(rates) / RANKS
        figures[f"pull_at_{name}"] = -float(scheduler.velocity) / (1 - scheduler.momentum_of_lr) / (SPREAD * mean)
    return default == 0.1, figures


CHECKS: dict[str, tuple[str, Callable[[Theirs], tuple[bool, dict[str, Any]]]]] = {
    "fan-out": ("every replica has a rate of its own from the first step on", fan_out),
    "averaging without auto-LR": ("weights are averaged every T steps, with auto-LR or without", averaging),
    "decay": ("the rate falls to OneCycleLR's floor in the K rounds that are left", decay),
    "epochs": ("it is a drop-in replacement for OneCycleLR", epochs),
    "global RNG": ("nothing else of the training changes", global_rng),
    "sigma": ("sigma is 0.1", sigma),
}


def loaded(file: str) -> Any:
    """Their scheduler's class."""
    spec = importlib.util.spec_from_file_location("one_cycle", file)
    assert spec is not None  # the parent has looked
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warnings.filterwarnings("ignore", message=".*get_last_lr")  # for a call that theirs makes in every step
    return module.OneCycleAutoLR


def measure(rank: int, file: str) -> list[dict[str, Any]]:
    """All checks on one rank."""
    theirs = Theirs(rank, loaded(file))
    lines = []
    for name, (printed, check) in CHECKS.items():
        holds, figures = check(theirs)
        lines.append({"check": name, "paper": printed, "holds": holds, "measured": rounded(figures)})
    return lines


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Four digits.

    >>> rounded({"gamma": -0.820564, "rounds": 10})
    {'gamma': -0.8206, 'rounds': 10}
    """
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="folder of the authors' repository")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the ranks (default: 300)")
    given = parser.parse_args()
    file = (given.checkout / FILE).resolve()
    if not file.is_file():
        rule = f"CHECKOUT must be a checkout of github.com/hailingc/ensemble_training, with {FILE}"
        parser.error(f"{rule}, but got {given.checkout}")
    for line in run_ranks(measure, RANKS, str(file), timeout=given.timeout)[0]:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
