"""The slow twin: N replicas of the whole method in one process, in the paper's letters, keeping every sequence.

Nothing here is fast, in place or shared with the library, except the permutation, which is a hash. The library only
has to agree with it, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hdet.ensemble.design import permutation

__all__ = ["Adam", "History", "Momentum", "OneCycle", "Settings", "simulate"]

Theta = list[list[Tensor]]
"""theta[g][i]: tensor i of parameter group g."""


@dataclass(frozen=True)
class OneCycle:
    """The base schedule eta(t) of one parameter group, and its momentum, as torch defines them (two phases)."""

    max_lr: float
    total_steps: int
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    base_momentum: float = 0.85
    max_momentum: float = 0.95

    @property
    def initial_lr(self) -> float:
        return self.max_lr / self.div_factor

    @property
    def min_lr(self) -> float:
        return self.initial_lr / self.final_div_factor

    @property
    def warm_up_end(self) -> float:
        return self.pct_start * self.total_steps - 1

    def eta(self, t: int) -> float:
        if t <= self.warm_up_end:
            return _cosine(self.initial_lr, self.max_lr, t / self.warm_up_end)
        return _cosine(self.max_lr, self.min_lr, self._fall(t))

    def momentum(self, t: int) -> float:
        if t <= self.warm_up_end:
            return _cosine(self.max_momentum, self.base_momentum, t / self.warm_up_end)
        return _cosine(self.base_momentum, self.max_momentum, self._fall(t))

    def _fall(self, t: int) -> float:
        return (t - self.warm_up_end) / (self.total_steps - 1 - self.warm_up_end)


def _cosine(start: float, end: float, pct: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * pct))


class Rule(Protocol):
    """One replica's optimizer: (theta, gradient, eta per group, momentum per group) -> new theta."""

    def __call__(self, theta: Theta, grad: Theta, eta: list[float], mu: list[float]) -> Theta: ...


class Momentum:
    """SGD with momentum: b <- mu b + g; theta <- theta - eta b. The first b is g."""

    def __init__(self) -> None:
        self.b: Theta | None = None

    def __call__(self, theta: Theta, grad: Theta, eta: list[float], mu: list[float]) -> Theta:
        if self.b is None:
            self.b = grad
        else:
            self.b = [
                [mu[g] * b + d for b, d in zip(bs, ds, strict=True)]
                for g, (bs, ds) in enumerate(zip(self.b, grad, strict=True))
            ]
        return [
            [x - eta[g] * b for x, b in zip(xs, bs, strict=True)]
            for g, (xs, bs) in enumerate(zip(theta, self.b, strict=True))
        ]


class Adam:
    """Adam with bias correction by the current betas, as torch does when beta1 is cycled."""

    def __init__(self, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.beta2, self.eps, self.n = beta2, eps, 0
        self.m: Theta | None = None
        self.s: Theta | None = None

    def __call__(self, theta: Theta, grad: Theta, eta: list[float], mu: list[float]) -> Theta:
        self.n += 1
        m = self.m or [[torch.zeros_like(x) for x in xs] for xs in theta]
        s = self.s or [[torch.zeros_like(x) for x in xs] for xs in theta]
        new: Theta = []
        for g, xs in enumerate(theta):
            m[g] = [mu[g] * a + (1 - mu[g]) * d for a, d in zip(m[g], grad[g], strict=True)]
            s[g] = [self.beta2 * a + (1 - self.beta2) * d * d for a, d in zip(s[g], grad[g], strict=True)]
            fix1, fix2 = 1 - mu[g] ** self.n, 1 - self.beta2**self.n
            new.append(
                [
                    x - eta[g] * (a / fix1) / ((b / fix2).sqrt() + self.eps)
                    for x, a, b in zip(xs, m[g], s[g], strict=True)
                ]
            )
        self.m, self.s = m, s
        return new


@dataclass(frozen=True)
class Settings:
    """The method's letters."""

    N: int
    S: int
    T: int
    alpha: float
    schedules: Sequence[OneCycle]
    """One per parameter group."""
    S_warm: int | None = None
    """First converge with auto-LR; None: never."""
    sigma: float = 0.1
    beta: float = 0.9
    lam: float = 0.5
    exponential: bool = False
    printed: str | None = None
    """The paper's own recursion with gamma "as printed", or with its sign "mended"; None: the corrected one."""
    seed: int = 0


@dataclass
class History:
    """Every sequence of a run."""

    eta: list[list[list[float]]] = field(default_factory=list)
    """eta[t][r][g]: the rate replica r used in step t."""
    mu: list[list[float]] = field(default_factory=list)
    """mu[t][g]: the momentum of step t."""
    loss: list[list[float]] = field(default_factory=list)
    """loss[t][r]."""
    theta: list[list[Theta]] = field(default_factory=list)
    """theta[t][r]: weights after step t, and after the converge if a round ended there."""
    m: list[list[float]] = field(default_factory=list)
    """m[k][g]: learned multiplier after round k (1 until S_warm, and always with the exponential decay)."""
    v: list[list[float]] = field(default_factory=list)
    """v[k][g]: velocity after round k."""


def simulate(
    settings: Settings,
    theta0: Theta,
    loss_and_grad: Callable[[Theta, int, int], tuple[float, Theta]],
    new_rule: Callable[[], Rule],
) -> History:
    """Train N replicas for S steps on the mean of their gradients, as DDP does.

    Args:
        settings: the letters.
        theta0: the weights all replicas start from.
        loss_and_grad: ``(theta_r, t, r) -> (loss, gradient)`` of replica r on its own batch of step t.
        new_rule: makes one replica's optimizer.
    """
    N, S, T, alpha, G = settings.N, settings.S, settings.T, settings.alpha, len(settings.schedules)
    delta = max((N - 1) / 2, 1 / 2)
    rho = [1 + alpha * (r - (N - 1) / 2) / delta for r in range(N)]

    history = History()
    theta = [[[x.clone() for x in xs] for xs in theta0] for _ in range(N)]
    rules = [new_rule() for _ in range(N)]
    m, v = [1.0] * G, [0.0] * G
    base: list[float] | None = None  # only the exponential decay has it, from S_warm on
    gamma = [0.0] * G
    k, since_converge = 0, 0
    rho_of = _assigned(rho, settings.seed, k, G)

    for t in range(S):
        base_t = base or [m[g] * settings.schedules[g].eta(t) for g in range(G)]
        eta = [[base_t[g] * rho_of[r][g] for g in range(G)] for r in range(N)]
        mu = [schedule.momentum(t) for schedule in settings.schedules]

        pairs = [loss_and_grad(theta[r], t, r) for r in range(N)]
        losses, grads = [loss for loss, _ in pairs], [grad for _, grad in pairs]
        shared = [[sum(gs) / N for gs in zip(*(grad[g] for grad in grads), strict=True)] for g in range(G)]
        theta = [rules[r](theta[r], shared, eta[r], mu) for r in range(N)]

        history.eta.append(eta)
        history.mu.append(mu)
        history.loss.append(losses)
        since_converge += 1

        step = t + 1
        if step % T == 0 or step in (S - 1, S):
            mean = [[sum(xs) / N for xs in zip(*(theta[r][g] for r in range(N)), strict=True)] for g in range(G)]
            theta = [mean for _ in range(N)]

            is_warm = settings.S_warm is not None and step >= settings.S_warm
            if is_warm and settings.printed and step % T == 0:
                base, v = _as_printed(settings, history, eta, v)
            elif is_warm and not settings.printed:
                recent = history.loss[step - since_converge :]
                L = [sum(row[r] for row in recent) / since_converge for r in range(N)]
                Lbar = sum(L) / N
                s = [(Lbar - L_r) / settings.sigma for L_r in L]
                w = [math.exp(s_r) / sum(math.exp(x) for x in s) for s_r in s]
                rel = [sum(w[r] * rho_of[r][g] for r in range(N)) - 1 for g in range(G)]
                v = [settings.beta * v[g] + (1 - settings.beta) * rel[g] for g in range(G)]
                floor = [schedule.min_lr for schedule in settings.schedules]
                if settings.exponential:
                    if base is None:
                        base = [schedule.eta(step) for schedule in settings.schedules]
                        K = math.ceil((S - step) / T) or 1
                        gamma = [1 - (floor[g] / base[g]) ** (1 / K) for g in range(G)]
                    base = [max(floor[g], base[g] * (1 - gamma[g]) * (1 + settings.lam * v[g])) for g in range(G)]
                else:
                    m = [min(max(m[g] * (1 + settings.lam * v[g]), 1e-15), 1e15) for g in range(G)]

            k, since_converge = k + 1, 0
            rho_of = _assigned(rho, settings.seed, k, G)
            history.m.append(m)
            history.v.append(v)
        history.theta.append(theta)
    return history


def _as_printed(
    settings: Settings, history: History, eta: list[list[float]], v: list[float]
) -> tuple[list[float], list[float]]:
    """Equations 4 to 8 of the paper and its Algorithm 1, at step t = kT, where replica r had the rates ``eta[r]``."""
    N, S, T, S_warm, G = settings.N, settings.S, settings.T, settings.S_warm, len(settings.schedules)
    assert S_warm is not None
    L = [sum(row[r] for row in history.loss[-T:]) / T for r in range(N)]
    Lbar = sum(L) / N
    s = [(Lbar - L[r]) / settings.sigma for r in range(N)]
    w = [math.exp(s[r]) / sum(math.exp(s[q]) for q in range(N)) for r in range(N)]
    etatilde = [sum(w[r] * eta[r][g] for r in range(N)) for g in range(G)]
    etabar = [sum(eta[r][g] for r in range(N)) / N for g in range(G)]
    Delta = [etatilde[g] - etabar[g] for g in range(G)]
    v = [settings.beta * v[g] + (1 - settings.beta) * Delta[g] for g in range(G)]
    K = (S - S_warm) / T
    f = [schedule.div_factor / schedule.final_div_factor for schedule in settings.schedules]
    if settings.printed == "mended":
        f = [schedule.final_div_factor / schedule.div_factor for schedule in settings.schedules]
    gamma = [1 - math.exp(-math.log(f[g]) / K) for g in range(G)]
    return [etabar[g] * (1 - gamma[g]) + v[g] * settings.lam for g in range(G)], v


def _assigned(rho: list[float], seed: int, k: int, G: int) -> list[list[float]]:
    """rho_of[r][g]: the multipliers after reassignment."""
    columns = [[rho[i] for i in permutation(seed, k, g, len(rho))] for g in range(G)]
    return [[columns[g][r] for g in range(G)] for r in range(len(rho))]
