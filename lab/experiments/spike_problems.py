"""Runs for ``spikes.py`` that are well, but whose losses rise by themselves: what a guard must let pass.

Each is a second of training on made-up data: a function of a seed and a number of steps. Losses rise because data
become harder, at once or in waves, because a term of the loss is given more weight, because a rate is restarted,
because an adversary becomes better, or because a policy becomes surer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts

FAR = 10**6
"""The number of held-out batches."""


class Training(NamedTuple):
    """What is trained."""

    parts: list[tuple[Optimizer, nn.Module]]
    """Each with a guard of its own."""
    losses: Callable[[int], list[Tensor]]
    """Make a step of each part; their losses."""
    score: Callable[[], float]
    """Of the end, lower is better."""
    changes: Callable[[int], bool] = lambda t: False
    """Before which steps something was changed on purpose, of which a guard is told."""


def drawn(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def network(seed: int, widths: list[int]) -> nn.Sequential:
    """ReLU layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Regression:
    """A function of eight numbers, with noise: the batches, the model and the loss of a task."""

    def __init__(
        self, noise: Callable[[float], float] = lambda part: 0.0, width: Callable[[float], float] | None = None
    ):
        self._noise, self._width = noise, width or (lambda part: 1.0)

    def model(self, seed: int) -> nn.Module:
        return network(seed, [8, 64, 64, 1])

    def batch(self, seed: int, step: int, part: float = 0.0, size: int = 64) -> tuple[Tensor, Tensor]:
        draw = drawn(seed, step)
        x = torch.randn(size, 8, generator=draw) * self._width(part)
        y = x[:, :1].exp().clamp(max=5) + (2 * x[:, 1:2]).sin() * x[:, 2:3] + 0.5 * (x[:, 3:4] > 0) * x[:, 4:5]
        return x, (y - 1.5) / 1.5 + self._noise(part) * torch.randn(size, 1, generator=draw)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": self.loss(model, Regression().batch(0, FAR, size=4000)).item()}


def _single(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    score: Callable[[], float],
    rate: float,
    schedule: Callable[[Optimizer], Any] | None,
) -> Training:
    optimizer = Adam(model.parameters(), lr=rate)
    stepped = schedule(optimizer) if schedule is not None else None

    def step(t: int) -> list[Tensor]:
        value = loss(t)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if stepped is not None:
            stepped.step()
        return [value.detach()]

    return Training([(optimizer, model)], step, score)


def _regression(
    seed: int,
    steps: int,
    task: Regression,
    weight: Callable[[float], float] = lambda part: 1.0,
    schedule: Callable[[Optimizer], Any] | None = None,
    rate: float = 1e-2,
) -> Training:
    model = task.model(seed)
    return _single(
        model,
        lambda t: task.loss(model, task.batch(seed, t, t / steps)) * weight(t / steps),
        lambda: task.evaluate(model)["loss"],
        rate,
        schedule or (lambda optimizer: CosineAnnealingLR(optimizer, steps)),
    )


def curriculum(seed: int, steps: int) -> Training:
    """Noise grows in four stages."""
    return _regression(seed, steps, Regression(noise=lambda part: 0.3 * int(4 * part)))


def wider(seed: int, steps: int) -> Training:
    """Inputs become wider in three stages: a new domain, on which the loss is ten times as high at first."""
    return _regression(seed, steps, Regression(width=lambda part: 0.4 + 0.3 * int(3 * part)))


def sawtooth(seed: int, steps: int) -> Training:
    """Eight times, data become harder and harder, and then easy again."""
    return _regression(seed, steps, Regression(noise=lambda part: 8 * part % 1))


def restarts(seed: int, steps: int) -> Training:
    """A rate with warm restarts."""
    restarted = lambda optimizer: CosineAnnealingWarmRestarts(optimizer, max(steps // 6, 10))  # noqa: E731
    return _regression(seed, steps, Regression(), schedule=restarted, rate=3e-2)


def reweighted(seed: int, steps: int) -> Training:
    """After half the run the loss has four times the weight."""
    return _regression(seed, steps, Regression(), weight=lambda part: 1.0 if part < 0.5 else 4.0)


def adversaries(seed: int, steps: int) -> Training:
    """A GAN on eight points of a circle; both have a guard."""
    maker, judge = network(seed, [4, 32, 32, 2]), network(seed + 1, [2, 32, 32, 1])
    makes, judges = (Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.999)) for one in (maker, judge))
    entropy = functional.binary_cross_entropy_with_logits

    def real(number: int, size: int = 64) -> Tensor:
        draw = drawn(seed, number)
        angle = torch.randint(8, (size,), generator=draw) * math.pi / 4
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(size, 2, generator=draw)

    def made(number: int, size: int = 64) -> Tensor:
        return maker(torch.randn(size, 4, generator=drawn(seed, FAR + 1 + number)))

    def step(t: int) -> list[Tensor]:
        x, fake = real(t), made(t)
        told = entropy(judge(x), torch.ones(64, 1)) + entropy(judge(fake.detach()), torch.zeros(64, 1))
        judges.zero_grad()
        told.backward()
        judges.step()
        fooled = entropy(judge(fake), torch.ones(64, 1))
        makes.zero_grad()
        fooled.backward()
        makes.step()
        return [fooled.detach(), told.detach()]

    @torch.no_grad()
    def score() -> float:
        fake = made(FAR, 2000)
        return ((fake.norm(dim=1) - 1).square().mean() + fake.mean(0).square().sum()).item()

    return Training([(makes, maker), (judges, judge)], step, score)


def policy(seed: int, steps: int) -> Training:
    """A policy gradient with a baseline, on a bandit with contexts: the loss says nothing about the reward."""
    model, gains = network(seed, [6, 32, 32, 4]), torch.randn(6, 4, generator=torch.Generator().manual_seed(77))

    def loss(t: int) -> Tensor:
        draw = drawn(seed, t)
        x = torch.randn(64, 6, generator=draw)
        chances = model(x).log_softmax(1)
        taken = torch.multinomial(chances.exp().detach(), 1, generator=draw)
        reward = (x @ gains).gather(1, taken)
        return -(chances.gather(1, taken) * (reward - reward.mean())).mean()

    @torch.no_grad()
    def score() -> float:
        x = torch.randn(4000, 6, generator=drawn(seed, FAR))
        return 5 - (model(x).softmax(1) * (x @ gains)).sum(1).mean().item()

    return _single(model, loss, score, 1e-2, None)


def annealed(seed: int, steps: int, jumps: bool = False) -> Training:
    """A variational autoencoder whose second term is given more and more weight; ``jumps``: all of it, or none."""
    encoder, decoder = network(seed, [16, 64, 64, 8]), network(seed + 1, [4, 64, 64, 16])
    model, mixed = nn.ModuleList([encoder, decoder]), torch.randn(4, 16, generator=torch.Generator().manual_seed(3))

    def bound(number: int, size: int, weight: float) -> Tensor:
        draw = drawn(seed, number)
        x = torch.tanh(torch.randn(size, 4, generator=draw) @ mixed) + 0.05 * torch.randn(size, 16, generator=draw)
        mean, spread = encoder(x).chunk(2, 1)
        code = mean + (spread / 2).exp() * torch.randn(mean.shape, generator=draw)
        divergence = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1).mean()
        return 10 * (decoder(code) - x).square().sum(1).mean() + weight * divergence

    def weight(part: float) -> float:
        return float(int(4 * part) % 2) if jumps else min(1.0, 2 * part)

    def score() -> float:
        with torch.no_grad():
            return bound(FAR, 2000, 1.0).item()

    return _single(model, lambda t: bound(t, 64, weight(t / steps)), score, 3e-3, None)


def switched(seed: int, steps: int) -> Training:
    """The same; the term comes and goes."""
    return annealed(seed, steps, jumps=True)


def heads(seed: int, steps: int) -> Training:
    """After half the run the last layer is drawn anew."""
    model, task = Regression().model(seed), Regression()

    def loss(t: int) -> Tensor:
        if t == steps // 2:
            model[-1].load_state_dict(network(seed + 1, [64, 1]).get_submodule("0").state_dict())  # type: ignore[index]
        return task.loss(model, task.batch(seed, t))

    cosine = lambda optimizer: CosineAnnealingLR(optimizer, steps)  # noqa: E731
    made = _single(model, loss, lambda: task.evaluate(model)["loss"], 1e-2, cosine)
    return made._replace(changes=lambda t: t == steps // 2)


FAMILIES: dict[str, Callable[[int, int], Training]] = {
    "curriculum": curriculum,
    "wider": wider,
    "sawtooth": sawtooth,
    "restarts": restarts,
    "reweighted": reweighted,
    "adversaries": adversaries,
    "policy": policy,
    "annealed": annealed,
    "switched": switched,
    "heads": heads,
}
