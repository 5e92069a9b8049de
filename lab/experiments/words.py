"""What ``hdet.auto`` says of runs that learn, and of runs that learn nothing: how often it warns of either.

    python lab/experiments/words.py                   # some minutes on one core
    python lab/experiments/words.py --kinds healthy --steps 100 --seeds 2

For each problem: how many runs warn that nothing was learned, at the schedule's peak, at the end, or at either; how
many end with the status "settled". One JSON line for each problem, and one for all of a kind.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from zoo_problems import layers

import hdet

SAYS, EARLY = "the train loss was", " so far. "


class Task(NamedTuple):
    """A model, its optimizer, and an endless row of losses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: Iterator[Tensor]


class Told(NamedTuple):
    """What a run has said."""

    at_peak: bool
    at_end: bool
    settled: bool


def adam(model: nn.Module, lr: float = 1e-5) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)


def images(count: int = 1500, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Ten classes of 64 numbers each, around a centre of their own."""
    centres = torch.randn(10, 64)
    y = torch.randint(0, 10, (count,))
    return centres[y] + noise * 3 * torch.randn(count, 64), y


def regression(noise: float = 0.05, batch: int = 64, make: Callable[..., torch.optim.Optimizer] = adam) -> Task:
    """A smooth function, with noise."""
    model = layers(6, 32, 1, between=nn.Tanh)

    def losses() -> Iterator[Tensor]:
        while True:
            x = torch.randn(batch, 6)
            y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
            yield mse_loss(model(x), y + noise * torch.randn_like(y))

    return Task(model, make(model), losses())


def classes(batch: int = 64, make: Callable[..., torch.optim.Optimizer] = adam) -> Task:
    """A network that sorts images into classes."""
    model, (x, y) = layers(64, 64, 10), images()

    def losses() -> Iterator[Tensor]:
        while True:
            k = torch.randint(0, len(x), (batch,))
            yield cross_entropy(model(x[k]), y[k])

    return Task(model, make(model), losses())


def language(batch: int = 16) -> Task:
    """The next of 32 letters, of which each follows three others more often than the rest."""
    follows = torch.randn(32, 32).mul(1.5).softmax(1)
    model = nn.Sequential(nn.Embedding(32, 24), nn.Linear(24, 32))

    def losses() -> Iterator[Tensor]:
        while True:
            x = torch.randint(0, 32, (batch,))
            yield cross_entropy(model(x), torch.multinomial(follows[x], 1)[:, 0])

    return Task(model, adam(model), losses())


def fine_tuning(batch: int = 256) -> Task:
    """Small matrices beside a trained network, as LoRA has them: what is left to gain is a few percent of the loss."""
    (x, y), body = images(4000, noise=1.3), layers(64, 64, 10)
    first = torch.optim.Adam(body.parameters(), lr=3e-3)
    for _ in range(150):
        k = torch.randint(0, len(x), (128,))
        first.zero_grad()
        cross_entropy(body(x[k]), y[k]).backward()
        first.step()
    body.requires_grad_(False)
    x = x + 0.7 * torch.randn(64)  # what is to be adapted to
    low = nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False))
    nn.init.zeros_(low[1].weight)  # type: ignore[arg-type]

    def losses() -> Iterator[Tensor]:
        while True:
            k = torch.randint(0, len(x), (batch,))
            yield cross_entropy(body[2](torch.relu(body[0](x[k]) + low(x[k]))), y[k])

    return Task(low, adam(low), losses())


def fresh_labels() -> Task:
    """Labels that have nothing to do with the images, new ones in each step."""
    model = layers(64, 64, 10)

    def losses() -> Iterator[Tensor]:
        while True:
            yield cross_entropy(model(torch.randn(64, 64)), torch.randint(0, 10, (64,)))

    return Task(model, adam(model), losses())


def dead() -> Task:
    """Layers of ReLU that let nothing through."""
    model, (x, y) = layers(64, 64, 64, 10), images()
    with torch.no_grad():
        model[2].weight.abs_().neg_()  # type: ignore[operator,union-attr]
        model[2].bias.fill_(-0.1)  # type: ignore[operator,union-attr]

    def losses() -> Iterator[Tensor]:
        while True:
            k = torch.randint(0, len(x), (64,))
            yield cross_entropy(model(x[k]), y[k])

    return Task(model, torch.optim.SGD(model.parameters(), lr=1e-3), losses())


def of_nothing(noise: float) -> Task:
    """A loss that no step changes, with gradients that are noise."""
    model = layers(6, 16, 1)

    def losses() -> Iterator[Tensor]:
        while True:
            out = model(torch.randn(16, 6)).mean() * torch.randn(())
            yield 2.3 + noise * torch.randn(()) + out - out.detach()

    return Task(model, adam(model), losses())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


KINDS: dict[str, dict[str, Callable[[], Task]]] = {
    "healthy": {
        "regression": regression,
        "regression, batches of 8": lambda: regression(batch=8),
        "regression, noisy labels": lambda: regression(noise=1.0),
        "regression, SGD": lambda: regression(make=sgd),
        "classes": classes,
        "classes, batches of 8": lambda: classes(batch=8),
        "classes, SGD": lambda: classes(make=sgd),
        "language": language,
        "fine-tuning": fine_tuning,
    },
    "hopeless": {
        "labels that are new in each step": fresh_labels,
        "dead layers": dead,
        "a loss that is noise": lambda: of_nothing(0.2),
        "a loss that is constant": lambda: of_nothing(0.0),
    },
}


def run(make: Callable[[], Task], steps: int, seed: int) -> Told:
    """One run."""
    torch.manual_seed(seed)
    task = make()
    scheduler = hdet.auto(task.optimizer, total_steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss, _ in zip(task.losses, range(steps), strict=False):
            task.optimizer.zero_grad()
            loss.backward()
            task.optimizer.step()
            scheduler.step(loss.detach())
    said = [str(one.message) for one in caught if str(one.message).startswith(SAYS)]
    found = scheduler.found
    early = [EARLY in one for one in said]
    return Told(any(early), not all(early), found.settled)  # type: ignore[union-attr]


def summed_up(told: list[Told]) -> dict[str, float]:
    """Parts of all runs."""
    rows = {
        "at_peak": [one.at_peak for one in told],
        "at_end": [one.at_end for one in told],
        "either": [one.at_peak or one.at_end for one in told],
        "settled": [one.settled for one in told],
    }
    return {"runs": len(told), **{name: round(sum(row) / len(row), 3) for name, row in rows.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--steps", nargs="+", type=int, default=[100, 300])
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    for kind in given.kinds:
        every: list[Told] = []
        for name, make in KINDS[kind].items():
            for steps in given.steps:
                told = [run(make, steps, seed) for seed in range(given.seeds)]
                every += told
                print(json.dumps({"kind": kind, "problem": name, "steps": steps, **summed_up(told)}), flush=True)
        print(json.dumps({"kind": kind, "problem": "all", **summed_up(every)}), flush=True)


if __name__ == "__main__":
    main()
