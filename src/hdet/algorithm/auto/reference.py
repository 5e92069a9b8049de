"""The slow twin of ``max_lr="auto"``: one process, one replica, every sequence kept.

In the letters of docs/how-it-works.md, and in float64: nothing is rounded away. Nothing is shared with the pilot or the
engine except the table of constants; they only have to agree, step by step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hdet.algorithm import published_reference
from hdet.algorithm.auto import constants as c

__all__ = ["History", "Settings", "simulate"]

Theta = list[list[Tensor]]
"""theta[g][i]: tensor i of parameter group g."""
Probe = Callable[[Theta, int], float]
"""``(theta, k) -> loss`` on the probe batch of round k."""
M_LOW, M_HIGH = 1e-15, 1e15


@dataclass(frozen=True)
class Settings:
    """The run, as the user gives it."""

    S: int
    guess: Sequence[float]
    """The optimizer's lr, per parameter group."""
    mu: float = 0.9
    """The optimizer's momentum or beta1: it is not cycled here."""
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    resolution: float = 2.0**-52
    """Of float64."""

    @property
    def peak(self) -> float:
        """The step at which the schedule's rise ends."""
        return self.pct_start * self.S - 1

    def h(self, t: float) -> float:
        """OneCycle over its peak. Its rise is held at 1: the rule does its own warm-up."""
        floor = 1 / (self.div_factor * self.final_div_factor)
        d = (max(t, self.peak) - self.peak) / (self.S - 1 - self.peak)
        return floor + (1 - floor) * (1 + math.cos(math.pi * d)) / 2

    def rise(self, t: float) -> float:
        """r(t): the part of the target at which step t is made, once the size of a step is known."""
        return max(min((t + 1) / (self.peak + 1), 1.0) ** c.RISE, c.LEAST_RISE) if self.peak > 0 else 1.0


class Step(NamedTuple):
    """One step of training: where the gradient was taken, the gradient, the rate of the first group, where it led."""

    x: Theta
    g: Theta
    eta: float
    after: Theta
    heard: bool = True
    """Whether its gradient counts: every n-th of a round does, so that there are 8 at most."""


class Copy(NamedTuple):
    """Weights and optimizer as they were at the end of step t."""

    t: int
    x: Theta
    optimizer: published_reference.Rule


@dataclass
class History:
    """Every sequence of a run."""

    rate: list[list[float]] = field(default_factory=list)
    """rate[t][g]: the rate of step t."""
    loss: list[float] = field(default_factory=list)
    """loss[t]: the loss of training in step t."""
    theta: list[Theta] = field(default_factory=list)
    """theta[t]: the weights after step t, and after going back if a round ended there."""
    end: list[int] = field(default_factory=list)
    """end[k]: the step at which round k ended."""
    probe: list[float] = field(default_factory=list)
    """probe[k]: the loss of the weights at its end."""
    before: list[float] = field(default_factory=list)
    """before[k]: that of the weights of a round ago, on the same batch."""
    reach: list[float] = field(default_factory=list)
    """reach[k]: the rate that the gradients ask for."""
    m: list[float] = field(default_factory=list)
    """m[k]: what was learned, after round k."""
    event: list[str | None] = field(default_factory=list)
    """event[k]: what happened at the end of round k, in words."""


def simulate(
    settings: Settings,
    theta0: Theta,
    loss_and_grad: Callable[[Theta, int], tuple[float, Theta]],
    probe: Probe,
    new_optimizer: Callable[[], published_reference.Rule],
) -> History:
    """Train for S steps.

    Args:
        settings: the letters.
        theta0: the weights to start from.
        loss_and_grad: ``(theta, t) -> (loss, gradient)`` on the batch of step t.
        probe: ``(theta, k) -> loss`` on the probe batch of round k.
        new_optimizer: makes the optimizer, without memory.
    """
    run, history = _Run(settings, theta0, new_optimizer), History()
    start, end, k = 0, 1, 0
    for t in range(settings.S):
        rates = run.rates(t)
        loss, g = loss_and_grad(run.x, t)
        after = run.optimizer(run.x, g, rates, [settings.mu] * len(rates))
        n = -(-(end - start) // c.HEARD)
        run.path.append(Step(run.x, g, rates[0], after, heard=(t - start) % n == 0))
        run.x = after
        if t + 1 == end:
            now = probe(run.x, k)
            before = probe(run.kept[-1].x, k) if run.kept else math.nan
            q = run.moved() if not run.fallen else 0.0
            looks = run.searching and not run.fallen
            reach, straight = (_reach(run.path), _straight(run.path)) if looks else (0.0, 0.0)
            G = _largest([step.g for step in run.path[start - end :] if step.heard])
            lost = looks and not all(map(math.isfinite, _sums(run.path)))
            history.event.append(run.end_round(t + 1, end - start, now, before, q, reach, straight, G))
            if lost:  # some gradient was not finite: the way begins anew
                run.path = []
            history.end.append(end)
            history.probe.append(now)
            history.before.append(before)
            history.reach.append(reach)
            history.m.append(run.m)
            start, end, k = end, _next_end(t + 1, settings.S), k + 1
        history.rate.append(rates)
        history.loss.append(loss)
        history.theta.append(run.x)
    return history


@dataclass
class _Run:
    """Where a run stands. :meth:`end_round` is the whole rule."""

    settings: Settings
    x: Theta
    new_optimizer: Callable[[], published_reference.Rule]
    level: float = c.BEGIN
    """log m."""
    searching: bool = False
    """Whether the size of a step is known."""
    alarmed: bool = False
    """Whether the guess is kept to."""
    L0: float = math.nan
    worse: int = 0
    idle: int = 0
    dark: int = 0
    seen: bool = False
    pace: float = math.nan
    """How far the first step moved the weights, over its rate."""
    eta1: float = math.nan
    """That rate."""
    fallen: bool = False
    """Whether the schedule had fallen when the last round ended: then nobody looks at the way any more."""
    kept: list[Copy] = field(default_factory=list)
    path: list[Step] = field(default_factory=list)
    """All steps since x0."""

    def __post_init__(self) -> None:
        self.optimizer = self.new_optimizer()
        if self.settings.S < c.SHORTEST:
            self.level, self.alarmed = 0.0, True

    @property
    def m(self) -> float:
        return math.exp(self.level)

    def rates(self, t: int) -> list[float]:
        """eta(t) = guess m r(t) h(t); where the guess is kept to, plain OneCycle."""
        s = self.settings
        if self.alarmed:
            d = min(t / s.peak, 1.0) if s.peak > 0 else 1.0
            low = 1 / s.div_factor
            plain = 1 + (low - 1) * (1 + math.cos(math.pi * d)) / 2 if t < s.peak else s.h(t)
            return [guess * plain for guess in s.guess]
        r = s.rise(t) if self.searching else 1.0
        return [guess * self.m * r * s.h(t) for guess in s.guess]

    def end_round(
        self, t: int, n: int, L: float, A: float, q: float, reach: float, straight: float, G: float
    ) -> str | None:
        """n: steps of the round; L, A: losses of x and of the copy of a round ago on one batch; q: how far x is from
        x0, over its norm; straight: eta^_1; G: the largest number of the round's gradients that were heard."""
        if self.alarmed:
            return None
        if not self.searching:
            late = t > max(self.settings.peak, c.SHORTEST)
            return self.first_step(t, L, q, G) if not late else self.keep_to_guess(_never(q))
        self.fallen = self.settings.h(t) < c.FALLING
        self.seen = self.seen or (math.isfinite(A) and L != A)
        if not math.isfinite(L) and not math.isfinite(self.L0):
            self.dark += 1
            why = "the probe's loss is not finite, whatever the weights"
            return self.keep_to_guess(why) if self.dark >= c.TWICE else None
        if q > c.VISIBLE and not self.seen and L == A:
            return self.keep_to_guess("the probe does not see the weights")
        if self.lags(q):
            return self.keep_to_guess("steps do not follow the rate")
        ruin = self.ruin(L, A)
        if ruin > c.WORSE:
            self.worse += 1
            return self.go_back() if self.worse >= c.TWICE or ruin > c.RUINED else None
        kappa = reach / straight if straight > 0 else 0.0
        return self.go_on(t, n, L, A, reach, kappa, G) if math.isfinite(L) else None

    def first_step(self, t: int, L: float, q: float, G: float) -> str | None:
        """From here on a step moves the weights by 2e-3 of their norm, whatever the guess was."""
        x0, again = self.path[0].x, "restarted: the first step was too long"
        if G == 0 or (q == 0 and not math.isfinite(G)):  # it says nothing
            self.path = []
            return None
        if q == 0:
            self.set_level(self.level + c.TRY_HIGHER)
            self.path = []
            return "first step"
        if not math.isfinite(q):
            self.set_level(self.level - c.TRY_LOWER)
            self.restart(x0)
            return again
        step = max(c.RELATIVE_STEP, c.RESOLVED * self.settings.resolution)
        self.set_level(self.level + math.log(step / (q * self.settings.rise(t))))
        self.searching = True
        eta = [step.eta for step in self.path]
        self.pace, self.eta1 = q / math.fsum(eta), math.fsum(eta) / len(eta)
        self.fallen = self.settings.h(t) < c.FALLING
        if q >= c.TOO_FAR:
            self.restart(x0)
            return again
        self.L0 = L if math.isfinite(L) else math.nan
        self.path = []
        self.keep(t)
        return "first step"

    def lags(self, q: float) -> bool:
        """Whether x came less far, for the rates since x0, than a way to and fro of shrinking steps would."""
        eta = [step.eta for step in self.path]
        n, total = len(eta), math.fsum(eta)
        if not (0 < n <= c.WATCHED and q > 0):
            return False
        raised, shorter = total / n / self.eta1, self.pace * total / q
        return raised >= c.RAISED and shorter >= raised**c.LAGS and shorter >= c.WANDERS * n

    def ruin(self, L: float, A: float) -> float:
        if not math.isfinite(L):
            return math.inf if math.isfinite(A) or not self.kept else 0.0
        return (L - A) / (abs(self.L0) or 1.0) if math.isfinite(A) else 0.0

    def go_back(self) -> str:
        """To the copy of two rounds ago, at a third of the rate."""
        self.set_level(self.level - math.log(c.SLOWER))
        self.worse, self.idle, self.path, self.pace = 0, 0, [], math.nan
        if not self.kept:
            return "too hot: slowed down"
        self.kept = self.kept[:1]
        self.x, self.optimizer = self.kept[0].x, copy.deepcopy(self.kept[0].optimizer)
        return f"too hot: went back to step {self.kept[0].t}"

    def go_on(self, t: int, n: int, L: float, A: float, reach: float, kappa: float, G: float) -> str | None:
        """Raise the target to 0.7 of the reach, at most twofold; twofold while the way is straight."""
        self.worse = 0
        if not math.isfinite(self.L0):
            self.L0 = L
        self.keep(t)
        if self.settings.h(t) < c.FALLING or G == 0:
            return None
        asked = c.HEED * reach / (self.settings.guess[0] * self.settings.h(t - 1) * math.exp(self.level))
        raised = c.FASTEST if kappa >= c.STRAIGHT else min(max(asked, 1.0), c.FASTEST)
        self.set_level(self.level + math.log(raised))
        self.idle = self.idle + 1 if raised == 1.0 and L > A and n >= c.JUDGED else 0
        if self.idle < c.IDLE:
            return None
        self.idle = 0
        self.set_level(self.level - math.log(c.FASTEST))
        return "no gain: half the rate"

    def set_level(self, level: float) -> None:
        self.level = min(max(level, math.log(M_LOW)), math.log(M_HIGH))

    def moved(self) -> float:
        """q."""
        x0 = self.path[0].x
        return _norm(_less(self.x, x0)) / (_norm(x0) or 1.0)

    def keep(self, t: int) -> None:
        self.kept = [*self.kept[-1:], Copy(t, self.x, copy.deepcopy(self.optimizer))]

    def restart(self, x0: Theta) -> None:
        self.x, self.optimizer, self.path = x0, self.new_optimizer(), []

    def keep_to_guess(self, why: str) -> str:
        self.level, self.alarmed, self.searching, self.kept = 0.0, True, False, []
        return f"kept to the guess: {why}"


def _never(q: float) -> str:
    return (
        "weights moved, but no gradient was seen before the schedule's peak" if q else "no step has moved the weights"
    )


def _next_end(t: int, S: int) -> int:
    """A round that begins at t has max(2, 0.2 t) steps; the last rounds end at S - 1 and S."""
    return S if t >= S - 1 else min(t + max(c.SHORT, int(c.GROWING * t)), S - 1)


def _sums(path: list[Step]) -> tuple[float, float]:
    """What gradients ask for along the way, and what they have gained by it."""
    x0, x = path[0].x, path[-1].after
    heard, w = [step for step in path if step.heard], _weights(path)
    asked = sum(wk * _inner(step.g, _less(x0, step.x)) for wk, step in zip(w, heard, strict=True))
    way = _less(x0, x)
    return asked, sum(wk * _inner(step.g, way) for wk, step in zip(w, heard, strict=True))


def _reach(path: list[Step]) -> float:
    """eta^: at which rate one step would go as far as all steps since x0, together, ask for."""
    asked, gained = _sums(path)
    if not (math.isfinite(asked) and math.isfinite(gained)) or asked <= 0 or gained <= 0:
        return 0.0
    return asked / (gained / math.fsum(step.eta for step in path))


def _straight(path: list[Step]) -> float:
    """eta^_1: what the reach would be had all gradients been one."""
    w = _weights(path)
    s = [math.fsum(step.eta for step in path[:k]) for k, step in enumerate(path) if step.heard]
    return math.fsum(wk * sk for wk, sk in zip(w, s, strict=True)) / math.fsum(w) if w else 0.0


def _weights(path: list[Step]) -> list[float]:
    """w_k of the steps that are heard: eta^2 while the rate grows."""
    heard = [step for step in path if step.heard]
    w = [1.0] if heard else []
    for before, step in pairwise(heard):
        w.append(w[-1] * max((step.eta / before.eta) ** 2, 1.0))
    return w


def _less(a: Theta, b: Theta) -> Theta:
    return [[x - y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def _inner(a: Theta, b: Theta) -> float:
    return sum(float((x * y).sum()) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True))


def _largest(gs: list[Theta]) -> float:
    return float(torch.cat([torch.zeros(1), *(x.abs().flatten() for g in gs for xs in g for x in xs)]).max())


def _norm(a: Theta) -> float:
    return math.sqrt(_inner(a, a))
