"""Small problems of many kinds, for rules that must hold where nobody has tuned them. Pure functions of a seed."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from real.models.recurrent import GRU
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH = 64

Batch = tuple[Tensor, Tensor]


class Problem(NamedTuple):
    """What there is to train."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[torch.Generator, int], Batch]
    """``batch(generator, size)``: fresh training samples."""
    held_out: Callable[[], Batch]


class Sign(torch.optim.Optimizer):
    """Steps of equal length in every coordinate, by the sign of a momentum (signSGD with momentum)."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moving = self.state[p].setdefault("momentum", torch.zeros_like(p))
                moving.lerp_(p.grad, 1 - group["momentum"])
                p.sub_(moving.sign(), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.1),
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "sign": Sign,
    "rmsprop": torch.optim.RMSprop,
}


def _mse(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def _entropy(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch[0])
    return cross_entropy(output.flatten(0, -2), batch[1].flatten())


def _fresh(draw: Callable[[torch.Generator, int], Batch]) -> Callable[[], Batch]:
    return lambda: draw(torch.Generator().manual_seed(2**40), 2000)


def _smooth_function(g: torch.Generator, size: int) -> Batch:
    x = torch.randn(size, 6, generator=g)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
    return x, y + 0.05 * torch.randn(size, 1, generator=g)


def _stretched_line(g: torch.Generator, size: int) -> Batch:
    """Linear regression; the inputs' variances span three decades."""
    scales = torch.logspace(0, -1.5, 30)
    x = torch.randn(size, 30, generator=g) * scales
    y = (x / scales.sqrt()).sum(1, keepdim=True)
    return x, y + 0.3 * torch.randn(size, 1, generator=g)


@cache
def digit_images() -> tuple[Batch, Batch]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(images, dtype=torch.float32)[order] / 16 - 0.3) / 0.38
    y = torch.tensor(labels)[order]
    return (x[:1300], y[:1300]), (x[1300:], y[1300:])


def _some_digits(g: torch.Generator, size: int) -> Batch:
    """Half a pixel of noise, so that none is seen twice."""
    x, y = digit_images()[0]
    chosen = torch.randint(len(y), (size,), generator=g)
    return x[chosen] + 0.5 * torch.randn(size, 64, generator=g), y[chosen]


def _digits_themselves(g: torch.Generator, size: int) -> Batch:
    x = _some_digits(g, size)[0]
    return x, x


@cache
def _ratings() -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(300, 6, generator=g) @ torch.randn(6, 300, generator=g) / math.sqrt(6)


def _some_ratings(g: torch.Generator, size: int) -> Batch:
    who = torch.randint(300, (size, 2), generator=g)
    return who, _ratings()[who[:, 0], who[:, 1]] + 0.3 * torch.randn(size, generator=g)


@cache
def _source() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in ("argparse.py", "inspect.py", "typing.py"))
    return torch.tensor(list(text.replace(b"    ", b"\t")), dtype=torch.long).clamp(max=127)


def some_source(g: torch.Generator, size: int) -> Batch:
    starts = torch.randint(len(_source()) - 18, (max(size // 4, 1), 1), generator=g)
    rows = _source()[starts + torch.arange(17)]
    return rows[:, :-1], rows[:, 1:]


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(300, 8), nn.Embedding(300, 8)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, who: Tensor) -> Tensor:
        return (self.users(who[:, 0]) * self.items(who[:, 1])).sum(1)


class Recurrent(nn.Module):
    """A GRU, written out: torch's does not run under vmap. Its weights are drawn as torch draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru, self.head = nn.Embedding(128, 24), GRU(24, 32), nn.Linear(32, 128)
        for p in self.gru.parameters():
            nn.init.uniform_(p, -1 / math.sqrt(32), 1 / math.sqrt(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.table(x)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(128, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        self.norm, self.mix, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.block, self.head = _Residual(32), nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.place
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mix(self.norm(h)).chunk(3, -1))
        later = torch.ones(16, 16, dtype=torch.bool, device=x.device).triu(1)
        mixed = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf).softmax(-1) @ v
        return self.head(self.block(h + self.out(mixed.transpose(1, 2).flatten(2))))


def layers(*widths: int, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), between()]
    return nn.Sequential(*parts[:-1])


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def _problem(
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
    draw: Callable[[torch.Generator, int], Batch],
    held_out: Callable[[], Batch] | None = None,
) -> Problem:
    return Problem(model, loss, draw, held_out or _fresh(draw))


def _unseen_digits() -> Batch:
    return digit_images()[1]


PROBLEMS: dict[str, Problem] = {
    "function": _problem(lambda: layers(6, 32, 1, between=nn.Tanh), _mse, _smooth_function),
    "line": _problem(lambda: nn.Linear(30, 1), _mse, _stretched_line),
    "softmax": _problem(lambda: nn.Linear(64, 10), _entropy, _some_digits, _unseen_digits),
    "layers": _problem(lambda: layers(64, 64, 64, 10), _entropy, _some_digits, _unseen_digits),
    "residual": _problem(
        lambda: nn.Sequential(
            nn.Linear(64, 32), *[_Residual(32) for _ in range(4)], nn.LayerNorm(32), nn.Linear(32, 10)
        ),
        _entropy,
        _some_digits,
        _unseen_digits,
    ),
    "convolution": _problem(_convolutions, _entropy, _some_digits, _unseen_digits),
    "autoencoder": _problem(lambda: layers(64, 32, 8, 32, 64, between=nn.Tanh), _mse, _digits_themselves),
    "factors": _problem(_Factors, _mse, _some_ratings),
    "recurrent": _problem(Recurrent, _entropy, some_source),
    "attention": _problem(Attending, _entropy, some_source),
}


def model_of(problem: Problem, seed: int) -> nn.Module:
    """Its weights as drawn with the seed; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return problem.model()
