"""Problems whose first fifty steps are the hard ones: the library's rule beside the best of a grid of fixed rates.

    python lab/experiments/beginnings.py                                   # on a GPU a minute; on two cores twenty
    python lab/experiments/beginnings.py --names bias-300,unused-300 --seeds 2

GPT-2 as transformers builds it, factors of a matrix, small first weights, norms that one tensor dominates, noise,
layers without norms, a bandit. All runs of a problem train as rows of one stack: every rate of the grid, ``auto`` from
a tenth of the grid's middle, the same without losses, and a placebo. One JSON line each: the mean of final losses over
that at the best rate, and the rate found over it. The bandit is scored by what it misses of the best reward.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import relu_depth
import torch
from auto_runs import Run
from relu_depth import INPUTS, WIDTH
from shapes import onecycle
from stacked import Supply
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from zoo_problems import _entropy, _mse, _source, digit_images, layers
from zoo_stack import UPDATES, ZooTask

from lab.tasks.transformer import Block
from problems import Problem, losses_of

Batch = tuple[Tensor, ...]
HELD_OUT = 2048


class Case(NamedTuple):
    """What there is to train, and how."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[torch.Generator, int], Batch]
    size: int
    """Of a batch."""
    optimizer: str
    """By its name in ``zoo_stack.UPDATES``."""
    steps: int
    rates: tuple[float, ...]
    """Fixed ones to compare with."""
    judged: Callable[[nn.Module, Batch], Tensor] | None = None
    """What is scored on held-out data, if not the loss."""


class GPT2(nn.Module):
    """As transformers builds it: weights N(0, 0.02), tied embeddings, what ends a branch smaller."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 2, length: int = 32) -> None:
        super().__init__()
        self.te, self.pe = nn.Embedding(256, width), nn.Embedding(length, width)
        blocks = [Block(width, heads, causal=True) for _ in range(layers)]
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        for table in (self.te, self.pe):
            nn.init.normal_(table.weight, std=0.02)
        for block in blocks:
            block.draw(torch.default_generator, 0.02, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.te(tokens) + self.pe.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.te.weight.T


def language(model: nn.Module, batch: Batch) -> Tensor:
    z = batch[0]
    return cross_entropy(model(z[:, :-1]).flatten(0, 1), z[:, 1:].flatten())


def pieces(g: torch.Generator, size: int) -> Batch:
    starts = torch.randint(len(_source()) - 33, (size, 1), generator=g)
    return (_source()[starts + torch.arange(33)],)


def waves(g: torch.Generator, size: int) -> Batch:
    x = torch.randn(size, 6, generator=g)
    return x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]


def shifted(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - 1e4 - batch[1]).square().mean()


def mlp(width: int, act: Any, std: float | None = None, out: int = 1, inputs: int = 6) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        m = nn.Sequential(nn.Linear(inputs, width), act(), nn.Linear(width, out))
        if std:
            for layer in (m[0], m[2]):
                nn.init.normal_(layer.weight, std=std)
                nn.init.zeros_(layer.bias)
        return m

    return build


def biased() -> nn.Module:
    m = mlp(32, nn.Tanh)()
    m[2].bias.data.fill_(1e4)
    return m


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(32, nn.Tanh)()
        self.table = nn.Parameter(torch.randn(1000, 100) * 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0.0 * self.table[0, 0]


def deep(depth: int, inputs: int = INPUTS, width: int = WIDTH, out: int = 1) -> Callable[[], nn.Module]:
    return lambda: layers(inputs, *[width] * (depth - 1), out)


U = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0))
V = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))


class Factors(nn.Module):
    def __init__(self, std: float = 0.1) -> None:
        super().__init__()
        self.u, self.v = nn.Embedding(2000, 8), nn.Embedding(500, 8)
        for e in (self.u, self.v):
            nn.init.normal_(e.weight, std=std)

    def forward(self, who: Tensor) -> Tensor:
        return (self.u(who[:, 0]) * self.v(who[:, 1])).sum(1)


def pairs(g: torch.Generator, size: int) -> Batch:
    u, v = torch.randint(2000, (size,), generator=g), torch.randint(500, (size,), generator=g)
    return torch.stack([u, v], 1), (U[u] * V[v]).sum(1) / 2.45


R = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))


def states(g: torch.Generator, size: int) -> Batch:
    x = torch.randn(size, 8, generator=g)
    gumbel = -torch.log(-torch.log(torch.rand(size, 5, generator=g).clamp(1e-9, 1 - 1e-7)))
    return x, gumbel, x @ R


def policy(model: nn.Module, batch: Batch) -> Tensor:
    x, gumbel, reward = batch
    logits = model(x)
    a = (logits.detach() + gumbel).argmax(1, keepdim=True)
    r = reward.gather(1, a)[:, 0]
    return -(logits.log_softmax(1).gather(1, a)[:, 0] * (r - r.mean())).mean()


def regret(model: nn.Module, batch: Batch) -> Tensor:
    x, _, reward = batch
    return 1 - reward.gather(1, model(x).argmax(1, keepdim=True)).mean() / reward.amax(1).mean()


def noisy(g: torch.Generator, size: int) -> Batch:
    x = torch.randn(size, 12, generator=g)
    y = 0.5 * torch.tanh(x[:, :1] + x[:, 1:2] * x[:, 2:3]) + 0.3 * x[:, 3:4]
    return x, y + 1.5 * torch.randn(size, 1, generator=g)


def digits(g: torch.Generator, size: int) -> Batch:
    x, y = digit_images()[0]
    chosen = torch.randint(len(y), (size,), generator=g)
    return x[chosen] + 0.3 * torch.randn(size, 64, generator=g), y[chosen]


def grid(low: float, high: float, per: int = 3) -> tuple[float, ...]:
    n = round(math.log10(high / low) * per)
    return tuple(low * (high / low) ** (k / n) for k in range(n + 1))


CASES: dict[str, Case] = {
    "gpt2-48-500": Case(GPT2, language, pieces, 16, "adamw", 500, grid(2e-3, 4e-2)),
    "gpt2-96-200": Case(lambda: GPT2(96, 3, 4), language, pieces, 16, "adamw", 200, grid(1e-3, 2e-2)),
    "factors-400": Case(Factors, _mse, pairs, 512, "adam", 400, grid(1e-2, 2e-1)),
    "factors-rms-800": Case(lambda: Factors(0.05), _mse, pairs, 256, "rmsprop", 800, grid(3e-3, 1e-1)),
    "small-gelu-300": Case(mlp(256, nn.GELU, 0.01), _mse, waves, 32, "adam", 300, grid(1e-3, 3e-1)),
    "small-tanh-300": Case(mlp(32, nn.Tanh, 0.003), _mse, waves, 32, "adam", 300, grid(1e-2, 1.0)),
    "small-gelu-1000": Case(mlp(256, nn.GELU, 0.01), _mse, waves, 32, "adam", 1000, grid(1e-3, 3e-1)),
    "small-mom-300": Case(mlp(64, nn.Tanh, 0.03), _mse, waves, 64, "momentum", 300, grid(1e-2, 3.0)),
    "bias-300": Case(biased, shifted, waves, 32, "adam", 300, grid(1e-2, 1.0)),
    "unused-300": Case(Unused, _mse, waves, 32, "adam", 300, grid(1e-2, 1.0)),
    "noisy-300": Case(mlp(64, nn.ReLU, inputs=12), _mse, noisy, 32, "adam", 300, grid(1e-4, 1e-1)),
    "noisy-1000": Case(mlp(64, nn.ReLU, inputs=12), _mse, noisy, 32, "adam", 1000, grid(1e-4, 1e-1)),
    "relu4-sgd-300": Case(deep(4), _mse, relu_depth.batch, 64, "sgd", 300, grid(1e-3, 1.0)),
    "relu4-mom-100": Case(deep(4), _mse, relu_depth.batch, 64, "momentum", 100, grid(1e-3, 1.0)),
    "relu6-adam-300": Case(deep(6), _mse, relu_depth.batch, 64, "adam", 300, grid(1e-4, 1e-1)),
    "relu6-mom-300": Case(deep(6), _mse, relu_depth.batch, 64, "momentum", 300, grid(1e-3, 1.0)),
    "bandit-300": Case(deep(3, 8, 32, 5), policy, states, 64, "adam", 300, grid(3e-4, 1e-1), regret),
    "bandit-1000": Case(deep(3, 8, 32, 5), policy, states, 64, "adam", 1000, grid(3e-4, 1e-1), regret),
    "digits-mom-300": Case(deep(3, 64, 128, 10), _entropy, digits, 64, "momentum", 300, grid(1e-3, 1.0)),
    "waves-adamw-1200": Case(mlp(64, nn.Tanh), _mse, waves, 32, "adamw", 1200, grid(1e-3, 1e-1)),
}


class BeginningTask(ZooTask):
    """What a stack asks of a task.

    Args:
        name: of one of :data:`CASES`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.case = name, CASES[name]
        self.batch_size = self.case.size

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.case.model()

    def batch(self, seed: int, step: int) -> Batch:
        return self.case.batch(torch.Generator().manual_seed(10**6 * seed + step), self.case.size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        is_held_out = len(batch[0]) == HELD_OUT
        return self.case.judged(model, batch) if self.case.judged and is_held_out else self.case.loss(model, batch)

    def validation(self) -> list[Batch]:
        return [self.case.batch(torch.Generator().manual_seed(2**40), HELD_OUT)]


def case_of(name: str, seeds: int, device: torch.device, steps: int | None = None) -> dict[str, Any]:
    """One problem: every row's mean loss over that of the best fixed rate, and what was found over that rate."""
    task, case = BeginningTask(name), CASES[name]
    length, guess = steps or case.steps, 0.1 * case.rates[len(case.rates) // 2]
    problem = Problem(name, length, 1.0, lambda: task, lambda stack: UPDATES[case.optimizer](stack.theta))
    rows = {"auto": {}, "auto-alone": {"losses": False}, "placebo": {"placebo": name}}

    def runs() -> list[Run]:
        fixed = [Run(length, rate, searches=False, shape=onecycle) for rate in case.rates]
        return [*fixed, *(Run(length, guess, **options) for options in rows.values())]  # type: ignore[arg-type]

    all_runs = [runs() for _ in range(seeds)]
    supply = Supply(task, range(seeds), length, device)  # type: ignore[arg-type]
    _, losses = losses_of(problem, task, range(seeds), supply, all_runs, device)
    means = [fmean(loss if math.isfinite(loss) else math.inf for loss in row) for row in losses]
    best = min(range(len(case.rates)), key=means.__getitem__)
    found = {"problem": name, "best_rate": case.rates[best], "loss": means[best], "seeds": seeds, "steps": length}
    for k, row in enumerate(rows, start=len(case.rates)):
        rates = [own[k].found / case.rates[best] for own in all_runs]
        each = [loss / means[best] for loss in losses[k]]
        found[row] = {"ratio": means[k] / means[best], "each": each, "found": rates}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default=",".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.names.split(","):
        print(json.dumps(case_of(name, given.seeds, torch.device(given.device))), flush=True)


if __name__ == "__main__":
    main()
