r"""The slow twin of ``hdet.auto``: one process, one model, every sequence kept.

It reads like the equations, in their letters: :math:`x_k` are the weights at which step :math:`k` was made, :math:`g_k`
its gradient, :math:`\eta_k` its rate; :math:`m` is the factor on the guess, :math:`C` its ceiling; a step is made at

.. math:: \eta(t) = \text{guess} \cdot \min(m\, r(t),\, C) \cdot h(t), \quad r(t) = \max\Big(0.3,
    \frac{t + 1}{t_\text{peak} + 1}\Big) \text{ until the peak, then } 1,

where :math:`h` is OneCycle over its peak, held at 1 until there, or the trapezoid of ``hdet.auto``. With the estimated
rate :math:`\hat\eta` of :mod:`hdet.rule.estimate` and :math:`q = S^{-1/3}`, a round asks for :math:`a =
2\,q\,\hat\eta / (\text{guess} \cdot h)`, and raises :math:`m` to it. Where that is no raise for the first time,
gradients have turned: from then on :math:`A = \min(m, m\,r(t) \cdot \max(15\,q, 1))` is what is asked for, and a round
makes it :math:`A^{0.85} a^{0.15}` if :math:`a > A`, and :math:`A e^{-0.15}` if :math:`a = 0`, but no less than a third
of the largest so far. With the prior :math:`P = 8\,q / (|x - x_0| / \sum \eta \cdot \text{guess})`, the length of a
step being measured in the first 40 steps, :math:`C = A\,(P / A)^{0.4}`, not further than by 3 from :math:`A`. A round
of :math:`n` steps raises by at most :math:`\min(e^{7.5 n / (t_\text{peak} + 1)}, 2)`, and as long as the loss has not
fallen by :math:`\min(2^{n/2}, 3)`; it does raise if the path is straight, or if the loss has fallen in each eighth of
it and :math:`P` is not far below.

Nothing is shared with the search but the table of constants and the names of verdicts: the search only has to agree
with this, step by step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hdet.rule.constants import (
    AGAINST,
    BLOCKS,
    CLEAR,
    DIV_FACTOR,
    FEW,
    FEWEST,
    FINAL_DIV_FACTOR,
    FP32_ROUNDING,
    HALF,
    HIGHEST,
    HOLD,
    LAG_EXPONENT,
    LAG_RAISE,
    LAG_WANDER,
    LAG_WINDOW,
    LATEST,
    LIMITS,
    LOWEST,
    REMEMBERED,
    RISEN,
    ROUNDED,
    UPPER_QUARTILE,
)
from hdet.rule.constants import DEFAULT as c
from hdet.rule.enums import Verdict

__all__ = ["History", "Optimizer", "Run", "Seen", "Settings", "Step", "Theta", "next_end", "simulate"]

Theta = list[list[Tensor]]
"""theta[g][i]: tensor i of parameter group g."""
M_LOWEST, M_HIGHEST = math.exp(LOWEST), math.exp(HIGHEST)
"""Bounds of m."""


class Optimizer(Protocol):
    """(weights, gradient, rate of each group) -> new weights. What it remembers is its own."""

    def __call__(self, theta: Theta, g: Theta, eta: list[float], /) -> Theta: ...


@dataclass(frozen=True)
class Settings:
    """The run, as the user gives it."""

    S: int
    guess: Sequence[float]
    """The optimizer's lr, per parameter group; 0: the group is left alone."""
    ascends: Sequence[bool] = ()
    """Which groups go up along their gradients; none: all go down."""
    pct_start: float = 0.3
    div_factor: float = DIV_FACTOR
    final_div_factor: float = FINAL_DIV_FACTOR
    rollback: bool = True
    """Whether there are snapshots."""
    anneal_strategy: str = "cos"
    """"trapezoid": it is held until 0.6 S - 1, and falls by 1 - sqrt."""

    @property
    def peak(self) -> float:
        """The step at which the schedule's rise ends."""
        return self.pct_start * self.S - 1

    @property
    def searched(self) -> list[int]:
        """The groups whose rate is searched; the first one's stands for all."""
        return [g for g, guess in enumerate(self.guess) if guess > 0]

    @property
    def sign(self) -> int:
        """What becomes of the loss: 1: it is to fall, -1: to rise, 0: it depends on the group."""
        up = {bool(self.ascends) and self.ascends[g] for g in self.searched}
        return 0 if len(up) == 2 else -1 if True in up else 1

    def h(self, t: float) -> float:
        """The schedule over its peak, held at 1 until there."""
        floor = 1 / (self.div_factor * self.final_div_factor)
        if self.anneal_strategy == "trapezoid":
            hold = max(self.peak, HOLD * self.S - 1)
            return floor + (1 - floor) * (1 - math.sqrt(min((max(t, hold) - hold) / (self.S - 1 - hold), 1)))
        d = (max(t, self.peak) - self.peak) / (self.S - 1 - self.peak)
        return floor + (1 - floor) * (1 + math.cos(math.pi * d)) / 2

    def plain(self, t: float) -> float:
        """The schedule with its rise."""
        if t >= self.peak:
            return self.h(t)
        low, d = 1 / self.div_factor, t / self.peak
        return low + (1 - low) * (d if self.anneal_strategy == "trapezoid" else (1 - math.cos(math.pi * d)) / 2)

    def r(self, t: float) -> float:
        """The part of the target at which step t is made."""
        return max(c.min_rise, (t + 1) / (self.peak + 1)) if t < self.peak else 1.0


class Step(NamedTuple):
    """One step since x_0: all numbers of the groups whose rate is searched, as one vector."""

    x: Tensor
    """Where its gradient was taken."""
    g: Tensor
    after: Tensor
    """Where it led."""
    eta: float
    sampled: bool = True


class Seen(NamedTuple):
    """What the steps since x_0 have come to."""

    q: float
    """How far x is from x_0, over its typical norm; infinite: some weight is NaN or infinite."""
    estimated_rate: float = 0.0
    """eta^."""
    kappa: float = 0.0
    beta: float = 0.0
    sizes: Sequence[float] = ()
    """The largest number of each gradient that was sampled in the round."""
    eta: Sequence[float] = ()
    """The rates of all steps since x_0."""
    D: float = 0.0
    """How far x is from x_0."""
    is_broken: bool = False
    """Whether some gradient was not finite."""


class Block(NamedTuple):
    """Some steps in a row."""

    mean: float
    """The mean of their finite losses."""
    steps: int


class Copy(NamedTuple):
    """Weights and optimizer as they were at the end of step t."""

    t: int
    x: Theta
    optimizer: Optimizer


@dataclass
class History:
    """Every sequence of a run."""

    rate: list[list[float]] = field(default_factory=list)
    """rate[t][g]: the rate of step t."""
    loss: list[float | None] = field(default_factory=list)
    """loss[t]: the loss of step t."""
    theta: list[Theta] = field(default_factory=list)
    """theta[t]: the weights after step t, and after rolling back if a round ended there."""
    end: list[int] = field(default_factory=list)
    """end[k]: the step at which round k ended."""
    moved: list[float] = field(default_factory=list)
    """moved[k]: how far the weights were from x_0, over its norm."""
    estimated_rate: list[float] = field(default_factory=list)
    """estimated_rate[k]: eta^ at the end of round k."""
    kappa: list[float] = field(default_factory=list)
    """kappa[k]: how straight the path was."""
    m: list[float] = field(default_factory=list)
    """m[k]: the factor after round k."""
    C: list[float] = field(default_factory=list)
    """C[k]: its ceiling."""
    event: list[str | None] = field(default_factory=list)
    """event[k]: what happened at the end of round k, in words."""


def simulate(
    settings: Settings,
    theta0: Theta,
    loss_and_grad: Callable[[Theta, int], tuple[float | None, Theta]],
    new_optimizer: Callable[[], Optimizer],
    skipped: Callable[[int], bool] = lambda t: False,
) -> History:
    """Train for S steps of the schedule.

    Args:
        settings: the letters.
        theta0: the weights to start from.
        loss_and_grad: ``(theta, t) -> (loss, gradient)`` on the batch of step t; None: no loss is given.
        new_optimizer: makes the optimizer, without memory.
        skipped: whether the optimizer makes no step at t.
    """
    run, history = Run(settings, theta0, new_optimizer), History()
    for t in range(settings.S):
        eta = run.rates(t)
        loss, gradient = loss_and_grad(run.x, t)
        if not skipped(t):
            run.step(gradient, eta)
        if loss is not None and (run.made > run.begun or run.made == 0):  # else it is of the round before
            run.losses.append((max(run.made - run.begun - 1, 0), loss))
        if run.round_ends(t + 1):
            seen, blocks = run.seen(t + 1), run.judged(t + 1)
            history.event.append(run.end_round(t + 1, run.made - run.begun, blocks, seen))
            history.end.append(t + 1)
            history.moved.append(seen.q)
            history.estimated_rate.append(seen.estimated_rate)
            history.kappa.append(seen.kappa)
            history.m.append(run.m)
            history.C.append(run.C)
            run.next_round(seen)
        history.rate.append(eta)
        history.loss.append(loss)
        history.theta.append(run.x)
    return history


@dataclass
class Run:
    """Where a run stands. :meth:`end_round` is the whole rule."""

    settings: Settings
    x: Theta
    new_optimizer: Callable[[], Optimizer]
    phase: str = "first"
    """``first``: the size of a step is not known; ``searching``; ``stopped``: the given rate is used."""
    m: float = c.initial_factor
    C: float = math.inf
    """What has been found; infinite until gradients have turned."""
    A: float = math.inf
    """What gradients and losses ask for, from then on ..."""
    A_max: float = math.inf
    """... at most so far."""
    ruined: bool = False
    """Whether training has diverged: then only estimates raise A, and P does not."""
    P: float = math.nan
    """The prior, as it was when C was last made."""
    D1: float = math.nan
    """How far a step leads at m = 1."""
    typical: float = 1.0
    """The typical norm of the weights over their norm."""
    judge: Judge = field(default_factory=lambda: Judge())
    progress: Progress = field(default_factory=lambda: Progress())
    m_before: float = math.nan
    """Before it was lowered, in case that was wrong."""
    excused: bool = False
    """Whether training was rolled back at the same rate, because of a bad batch."""
    pace: float = math.nan
    """How far the first step moved the weights, over its rate ..."""
    eta1: float = math.nan
    """... and that rate."""
    falling: bool = False
    """Whether the schedule had fallen when the last round ended: then the path is not measured any more."""
    made: int = 0
    """Steps that the optimizer has made ..."""
    begun: int = 0
    """... and had made when this round began."""
    has_losses: bool = False
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step of the round, its loss)."""
    sizes: list[float] = field(default_factory=list)
    """The largest number of each gradient that was sampled in the round."""
    kept: list[Copy] = field(default_factory=list)
    path: list[Step] = field(default_factory=list)
    """All steps since x_0."""

    def __post_init__(self) -> None:
        self.optimizer, self.x0 = self.new_optimizer(), self.x
        if c.min_steps > self.settings.S:
            self.phase, self.m = "stopped", 1.0

    # -- steps --------------------------------------------------------------------------------------------------------

    def factor(self, t: float) -> float:
        return min(self.m * (self.settings.r(t) if self.phase == "searching" else 1.0), self.C)

    def rates(self, t: int) -> list[float]:
        """eta(t); if the given rate is used, plain OneCycle."""
        s = self.settings
        return [g * (s.plain(t) if self.phase == "stopped" else self.factor(t) * s.h(t)) for g in s.guess]

    @property
    def looks(self) -> bool:
        return self.phase == "first" or (self.phase == "searching" and not self.falling)

    def step(self, gradient: Theta, eta: list[float]) -> None:
        """Of a round of n steps every ceil(n/8)-th is sampled. Before a first step is known, only sizes are of use."""
        s, x = self.settings, self.x
        up = list(s.ascends) or [False] * len(x)
        g = [[-y if up[i] else y for y in ys] for i, ys in enumerate(gradient)]
        self.x = self.optimizer(x, g, eta)
        if self.looks:
            n = next_end(self.begun) - self.begun
            sampled = self.phase == "searching" and (self.made - self.begun) % math.ceil(n / c.max_samples) == 0
            before, slope, after = (_vector([theta[i] for i in s.searched]) for theta in (x, g, self.x))
            self.path.append(Step(before, slope, after, eta[s.searched[0]], sampled))
            if sampled or self.phase == "first":
                self.sizes.append(float(slope.abs().max()))
        self.made += 1

    def round_ends(self, t: int) -> bool:
        """After enough steps, at the schedule's last two steps, and at each until one was measured."""
        first = self.phase == "first" and self.made > self.begun
        return t >= self.settings.S - 1 or self.made == 0 or first or self.made >= next_end(self.begun)

    def seen(self, t: int) -> Seen:
        """q = |x - x_0| / |x_0|, and the rest. Nothing is measured in the descent, nor at the last end."""
        path = self.path if self.looks and t < self.settings.S else []
        if path and not any(step.sampled for step in path):
            sizes = [x.numel() for g in self.settings.searched for x in self.x[g]]
            self.typical = _typical(sizes, path[0].x, path[-1].after) or self.typical
        norm = self.typical * float(path[0].x.norm()) if path else 0.0
        q = float((path[-1].after - path[0].x).norm()) / (norm or 1.0) if path else 0.0
        if not (_vector(self.x).isfinite().all() and math.isfinite(q)):
            q = math.inf
        eta, (numerator, denominator, absolute) = [step.eta for step in path], _sums(path)
        estimated_rate = (
            numerator * math.fsum(eta) / denominator if 0 < numerator < math.inf and 0 < denominator < math.inf else 0.0
        )
        straight = _straight(path)
        is_broken = not (math.isfinite(numerator) and math.isfinite(denominator))
        sizes = self.sizes if path and not is_broken else []
        D = float((path[-1].after - path[0].x).norm()) if path else 0.0
        kappa = estimated_rate / straight if straight > 0 else 0.0
        beta = numerator / absolute if absolute > 0 and not is_broken else 0.0
        return Seen(q, estimated_rate, kappa, beta, sizes, eta, D, is_broken)

    def next_round(self, seen: Seen) -> None:
        """After a gradient that is NaN or infinite a new path begins."""
        if seen.is_broken or not self.looks:
            self.path = []
        self.begun, self.losses, self.sizes = self.made, [], []

    def judged(self, t: int) -> list[Block]:
        """The round's losses in up to eight blocks; where none is ever given, the logarithms of gradients' sizes."""
        if self.losses and not self.has_losses:
            self.has_losses, self.judge = True, Judge()
        if self.has_losses:
            sign = self.settings.sign
            return [Block(sign * L, n) for L, n in _blocks(self.losses, self.made - self.begun)] if sign else []
        sizes = self.sizes if self.phase == "searching" and t < self.settings.S else []
        return [Block(math.log(G) if math.isfinite(G) else math.nan, 1) for G in sizes if G != 0]

    # -- the rule -----------------------------------------------------------------------------------------------------

    def end_round(self, t: int, n: int, blocks: list[Block], seen: Seen) -> str | None:
        """A round of n steps ends at step t. ``blocks``: its losses."""
        s, q = self.settings, seen.q
        self.falling = t > s.peak and s.h(t) / s.h(0) < c.fall_start
        if self.phase == "first" and t > max(s.peak, c.min_steps):
            return self.stop("no_gradient" if q > 0 else "never_moved")
        if self.phase == "stopped" or n == 0:
            return None
        G = math.nan if any(map(math.isnan, seen.sizes)) else max(seen.sizes, default=0.0)
        if self.phase == "first":
            self.progress = self.progress.after(blocks, t) if self.has_losses else self.progress
            return self.first_step(t, q, G, seen.eta)
        if self.lags(q, seen.eta):
            return self.stop("rate_ignored")
        has_estimate = G != 0 and len(seen.eta) != 1  # a single step gives no estimate
        doubted = self.has_losses and has_estimate and seen.estimated_rate == 0
        progress = self.progress.after(blocks, t) if self.has_losses else self.progress
        if not math.isfinite(q) and self.innocent(blocks) and not progress.is_undone:
            return self.spare()
        verdict = self.judge.verdict(blocks, self.falling, doubted)
        if verdict is Verdict.FINE and progress.is_undone and not self.falling and self.kept:
            verdict = self.judge.suspects(progress.latest)
            self.judge.before = [progress.first]
        nowhere = has_estimate and len(seen.eta) >= c.min_steps / 2 and seen.beta < AGAINST
        nowhere = nowhere and min(self.m, self.C) > self.P / c.backoff
        if verdict is Verdict.FINE and nowhere and not progress.has_gained and not self.falling and self.kept:
            verdict = self.judge.suspects(math.nan)
            self.judge.before = []
        if verdict is Verdict.DIVERGED or not math.isfinite(q):
            return self.diverged(progress)
        self.progress, event = progress, None
        if verdict is Verdict.FALSE_ALARM:
            self.progress = Progress().after(blocks, t)
        if verdict is Verdict.FALSE_ALARM and not math.isnan(self.m_before):
            up, self.ruined = self.m_before / self.m, False
            self.m, self.C, self.A = self.m_before, self.C * up, self.A * up
            event = "false_alarm"
        if blocks:
            self.m_before, self.excused = math.nan, self.excused and not self.falling
        fallen = progress.is_below
        if not self.falling and has_estimate and not (self.excused and math.isfinite(self.C)):
            self.steer(t, n, blocks, seen, fallen)
        if fallen or math.isnan(self.pace) or self.falling or not self.kept:
            self.keep(t)
        return event

    def first_step(self, t: int, q: float, G: float, eta: Sequence[float]) -> str | None:
        """From here on a step moves the weights by 5e-3 of their norm, whatever the guess was."""
        again, self.path = "restarted", []
        if G == 0 or (q == 0 and not math.isfinite(G)):  # it says nothing
            return None
        if q == 0:
            self.set_m(self.m / c.initial_factor)
            return "first_step"
        if not math.isfinite(q):
            self.set_m(self.m * c.initial_factor)
            self.restart()
            return again
        u = max([FP32_ROUNDING, *(torch.finfo(x.dtype).eps / 2 for g in self.settings.searched for x in self.x[g])])
        if q < u / c.relative_step and q < c.relative_step / c.max_growth and self.m < M_HIGHEST:
            self.set_m(self.m * min(c.relative_step / q, 1 / c.initial_factor))
            self.restart()
            return "first_step"
        self.phase = "searching"
        self.set_m(self.m * c.relative_step / (q * self.settings.r(t)))
        self.pace, self.eta1 = q / math.fsum(eta), math.fsum(eta) / len(eta)
        if q >= c.relative_step * c.max_growth:
            self.restart()
            return again
        self.keep(t)
        return "first_step"

    def lags(self, q: float, eta: Sequence[float]) -> bool:
        """Whether x came less far, for the rates since x_0, than a way to and fro of shrinking steps would."""
        n, total = len(eta), math.fsum(eta)
        if not (1 < n <= LAG_WINDOW and q > 0):
            return False
        raised, shorter = total / n / self.eta1, self.pace * total / q
        return raised >= LAG_RAISE and shorter >= raised**LAG_EXPONENT and shorter >= LAG_WANDER * n

    def innocent(self, blocks: list[Block]) -> bool:
        """Whether nothing was wrong until the weights were NaN or infinite, for the first time."""
        finite = [block for block in blocks if math.isfinite(block.mean)]
        fine = copy.deepcopy(self.judge).verdict(finite, self.falling) is Verdict.FINE
        return self.has_losses and bool(self.kept) and math.isnan(self.m_before) and not self.excused and fine

    def spare(self) -> str:
        """To the last copy, at the same rate."""
        self.excused, self.path, self.pace = True, [], math.nan
        self.x, self.optimizer = self.kept[-1].x, copy.deepcopy(self.kept[-1].optimizer)
        self.progress = self.progress.rolled_back(self.kept[-1].t)
        return f"bad_batch {self.kept[-1].t}"

    def diverged(self, progress: Progress) -> str:
        """To the older of the two copies, at a third of the rate."""
        m, self.excused, self.ruined = self.m, False, True
        self.set_m(m / c.backoff)
        self.path, self.pace = [], math.nan
        if not self.kept:
            self.judge.suspect, self.judge.before, self.progress = math.nan, [], progress
            return "slowed_down"
        self.kept, self.m_before = self.kept[:1], m
        self.x, self.optimizer = self.kept[0].x, copy.deepcopy(self.kept[0].optimizer)
        self.progress = self.progress.rolled_back(self.kept[0].t)
        return f"rolled_back {self.kept[0].t}"

    def steer(self, t: int, n: int, blocks: list[Block], seen: Seen, fallen: bool) -> None:
        """Raise m while gradients agree; from where they turn on, C = A (P / A)^0.4 with what is asked for, A."""
        s, often = self.settings, (self.made - 1) / (t - 1) if self.made > 1 and t > 1 else 1.0
        S, guess = s.S * often, s.guess[s.searched[0]] * s.h(t - 1)  # steps left out make a shorter run
        q, eta = 1 / S**c.length_exponent, math.fsum(seen.eta)
        climb = min(math.exp(min(c.max_climb * n / max((s.peak + 1) * often, 1.0), 1.0)), c.max_growth)
        most = climb if fallen or math.isnan(self.pace) else min(c.max_growth ** (n / c.min_round), c.backoff)
        if len(seen.eta) <= c.min_steps and 0 < seen.D < math.inf and eta > 0 and not math.isnan(self.pace):
            self.D1 = seen.D / eta * guess
        P = c.prior_distance * q / self.D1
        a = c.estimate_fraction * q * seen.estimated_rate / guess
        means = [block.mean for block in blocks]
        steady = self.has_losses and len(means) == BLOCKS and all(x > y for x, y in pairwise(means))
        straight = seen.kappa >= 1 - q * c.straight_tolerance
        if straight and len(seen.eta) <= c.min_steps and not math.isnan(self.pace):
            self.m, self.C = min(self.m, self.C / s.r(t)), math.inf  # on from the rate as it is
            self.A = self.A_max = math.inf
        on = steady and not self.ruined and (self.m if math.isinf(self.C) else self.A) < P * c.backoff
        if math.isinf(self.C):
            raised = most if on or straight else a / self.m
            if raised > 1:
                self.set_m(self.m * min(raised, most))
                return
            self.A = self.A_max = min(self.m, self.factor(t) * max(c.first_ask * q, 1.0))
        elif on:
            self.A *= most
        elif (lacking := c.balance - t / s.S - seen.beta) > 0 and len(seen.eta) > c.max_samples:
            self.A = max(self.A / min(c.max_growth**lacking, most), min(self.A, self.A_max / c.backoff))
        elif (a := max(a, 0.0 if fallen or math.isnan(P + self.pace) else P)) > self.A:
            self.A *= min((a / self.A) ** c.estimate_weight, most)
        self.A_max = max(self.A_max, self.A)
        most_up = c.backoff
        if self.ruined:
            most_up = min(max(self.C / self.A, 1.0), c.backoff) if math.isfinite(self.C) else 1.0
        pull = min(max((P / self.A) ** c.prior_weight, 1 / c.backoff), most_up) if math.isfinite(P) else 1.0
        self.C, self.P = min(max(min(self.A * pull, self.C * most), M_LOWEST), M_HIGHEST), P
        self.m = max(self.m, self.C)

    def set_m(self, m: float) -> None:
        """Within bounds; what was found goes down with it, and not up."""
        m = min(max(m, M_LOWEST), M_HIGHEST)
        down = min(m / self.m, 1.0)
        self.m, self.C, self.A = m, self.C * down, self.A * down

    def keep(self, t: int) -> None:
        """Four steps apart at least: it takes as many to see an explosion."""
        if self.settings.rollback and (not self.kept or t - self.kept[-1].t >= FEWEST):
            self.kept = [*self.kept[-1:], Copy(t, self.x, copy.deepcopy(self.optimizer))]

    def restart(self) -> None:
        self.x, self.optimizer = self.x0, self.new_optimizer()

    def stop(self, why: str) -> str:
        """The given rate is used from here on."""
        self.phase, self.m, self.C, self.kept = "stopped", 1.0, math.inf, []
        return f"stopped {why}"


# Losses ---------------------------------------------------------------------------------------------------------------


@dataclass
class Judge:
    """Has training diverged? L - L_before > max(0.3 gain, 12 sigma), with the levels L of rounds."""

    fine: list[float] = field(default_factory=list)
    """L of all rounds that were fine; gain = L_1 - min L."""
    before: list[float] = field(default_factory=list)
    """L of rounds since the last one that was not; L_before is the lower of the last two."""
    blocks: list[Block] = field(default_factory=list)
    """All blocks with a finite mean, of the same rounds."""
    bends: list[list[float]] = field(default_factory=list)
    """|a - 2 b + c| sqrt(n) of neighbours, for each round that was fine: sigma is made of all but the last's."""
    silent: int = 0
    """Steps in a row without a finite loss."""
    suspect: float = math.nan
    """L of the round that has diverged, until a round has followed."""

    @property
    def known_bends(self) -> list[float]:
        return [bend for bends in self.bends[:-1] for bend in bends][-REMEMBERED:]

    @property
    def sigma(self) -> float:
        """Of a single step: three quarters of the bends are below 2.82 sigma, which is no less than half a digit."""
        bends = sorted(self.known_bends)
        if len(bends) < FEWEST:
            return math.inf
        digits = [bend for bend in bends if bend > 0]
        usual, digit = bends[3 * len(bends) // 4] / UPPER_QUARTILE, digits[1] if len(digits) > 1 else 0.0
        return max(usual, digit / 2) * (1 + FEW / math.sqrt(len(bends)))

    def verdict(self, blocks: Sequence[Block], falling: bool, doubted: bool = False) -> Verdict:
        """On a round with these losses."""
        for mean, steps in blocks:
            self.silent = 0 if math.isfinite(mean) else self.silent + steps
        known = [Block(*block) for block in blocks if math.isfinite(block[0])]
        if self.silent >= FEWEST:
            return self.suspects(math.inf)
        if not known:
            return Verdict.FINE
        every = [*self.blocks, *known]
        near = sorted(mean for mean, _ in every[-max(len(known), FEWEST) :])
        level, good = near[(len(near) - 1) // 2], min(self.before[-2:], default=math.nan)
        first = min(mean for mean, _ in known[: max(len(known) // 2, 2)])
        if math.isfinite(self.suspect) and first > good + LIMITS.as_bad * (self.suspect - good):
            self.suspect, self.before, self.blocks = math.nan, [level], known
            self.bends[-1:] = [[]] if self.bends else []
            return Verdict.FALSE_ALARM
        gain = self.fine[0] - min(self.fine) if self.fine else 0.0
        sure = doubted and not falling and len(self.known_bends) == REMEMBERED
        most = max(gain * (1.0 if falling else LIMITS.lost), self.sigma * (LIMITS.doubted if sure else LIMITS.noise))
        if len(near) >= FEWEST and level - good > most:
            return self.suspects(level)
        near_ones = every[-len(known) - 2 :]
        triples = zip(near_ones, near_ones[1:], near_ones[2:], strict=False)
        self.bends.append([abs(a - 2 * b + d) * math.sqrt(min(n1, n2, n3)) for (a, n1), (b, n2), (d, n3) in triples])
        self.fine.append(level)
        self.before, self.blocks, self.suspect = [*self.before, level], every, math.nan
        return Verdict.FINE

    def suspects(self, level: float) -> Verdict:
        """It has diverged. What it was like just before is no measure of noise."""
        self.suspect, self.blocks, self.silent = level, [], 0
        self.bends[-1:] = [[]] if self.bends else []
        return Verdict.DIVERGED


class Round(NamedTuple):
    """The losses of a round."""

    level: float
    """The median of its blocks."""
    n: int
    sigma: float
    """Of a single step; NaN: nothing is known of it."""
    end: int


@dataclass(frozen=True)
class Progress:
    """Has the loss fallen? From beginnings of the run, with means over n_1 steps, to its last quarter, over n_2:
    fall > 4 sigma sqrt(1 / n_1 + 1 / n_2)."""

    start: tuple[Block, ...] = ()
    """The first two blocks."""
    rounds: tuple[Round, ...] = ()
    last: tuple[Block, ...] = ()
    """All blocks since the last rollback."""
    fell: bool = False
    """Whether the loss had fallen at the end of any round since then."""

    def after(self, blocks: Sequence[Block], t: int) -> Progress:
        known = tuple(Block(*block) for block in blocks if math.isfinite(block[0]) and block[1])
        if not known:
            return self
        near = (*self.last, *known)[-len(known) - 2 :]
        sigmas = [
            abs(a - 2 * b + d) / math.sqrt(1 / n1 + 4 / n2 + 1 / n3) / HALF
            for (a, n1), (b, n2), (d, n3) in zip(near, near[1:], near[2:], strict=False)
        ]
        level, sigma = median(mean for mean, _ in known), median(sigmas) if sigmas else math.nan
        new = Round(level, sum(n for _, n in known), sigma, t)
        after = replace(self, start=(*self.start, *known)[:2], rounds=(*self.rounds, new), last=(*self.last, *known))
        return replace(after, fell=self.fell or after.falls_by(CLEAR * after.doubt))

    def rolled_back(self, t: int) -> Progress:
        return Progress(self.start, tuple(one for one in self.rounds if one.end <= t))

    @property
    def sigmas(self) -> list[float]:
        return [one.sigma for one in self.rounds if not math.isnan(one.sigma)]

    @property
    def doubt(self) -> float:
        return 1 + FEW / math.sqrt(max(len(self.sigmas), 1))

    @property
    def quarter(self) -> int:
        """How many rounds are the last quarter of the steps, and at least 4 of these."""
        least = max(LATEST * sum(one.n for one in self.rounds), FEWEST)
        counts = range(len(self.rounds) + 1)
        return next(
            (k for k in counts if sum(one.n for one in self.rounds[len(self.rounds) - k :]) >= least), counts[-1]
        )

    @property
    def first(self) -> float:
        return _mean(self.start)

    @property
    def latest(self) -> float:
        return _mean([one[:2] for one in self.rounds[len(self.rounds) - self.quarter :]])

    @property
    def falls(self) -> list[tuple[float, float]]:
        """Each fall from a beginning, and its deviation. No beginning includes a round above the first losses."""
        early = self.rounds[: len(self.rounds) - self.quarter]
        if len(early) < 2 or not math.isfinite(self.first):
            return []
        sigma, n0 = median(self.sigmas or [0.0]), sum(n for _, n in self.start)
        low = [one.level - self.first <= RISEN * sigma * math.sqrt(1 / n0 + 1 / one.n) for one in early]
        count = low.index(False) if False in low else len(low)
        ways = [[one[:2] for one in early[: k + 1]] for k in range(count)]
        beginnings = [list(self.start), *(way for way in ways if sum(n for _, n in way) > n0)]
        n2 = sum(one.n for one in self.rounds[len(early) :])
        deviations = [sigma * math.sqrt(1 / sum(n for _, n in way) + 1 / n2) for way in beginnings]
        return [(_mean(way) - self.latest, deviation) for way, deviation in zip(beginnings, deviations, strict=True)]

    def falls_by(self, deviations: float) -> bool:
        return any(fall > max(deviations * one, ROUNDED * abs(self.first)) for fall, one in self.falls)

    @property
    def is_below(self) -> bool:
        return math.isnan(self.first) or self.falls_by(CLEAR)

    @property
    def has_gained(self) -> bool:
        return not self.falls or any(fall > 0 for fall, _ in self.falls)

    @property
    def is_undone(self) -> bool:
        """Whether the loss is above all beginnings, or had fallen and is back."""
        risen = all(-fall > RISEN * self.doubt * one for fall, one in self.falls)
        return bool(self.falls) and (risen or (self.fell and not self.has_gained))


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """Over steps."""
    steps = sum(n for _, n in parts)
    return sum(mean * n for mean, n in parts) / steps if steps else math.nan


# The equations -------------------------------------------------------------------------------------------------------


def next_end(t: int) -> int:
    """Rounds of optimizer steps: one step, then 2 each, later a fifth of the steps so far."""
    end = 1
    while end <= t:
        end += max(c.min_round, math.floor(c.round_growth * end))
    return end


def _typical(sizes: Sequence[int], x: Tensor, after: Tensor) -> float:
    """The typical norm of x over its norm: no tensor's numbers count for more than those of the middle one.

    The middle one is that at which half of all numbers that have moved are reached, ordered by their root mean square.
    """
    tensors = [(a, b) for a, b in zip(x.split(list(sizes)), after.split(list(sizes)), strict=True) if a.numel()]
    moved = [a for a, b in tensors if not torch.equal(a, b)]
    numbers = sorted(float(a.norm()) / math.sqrt(a.numel()) for a in moved if a.norm() > 0 for _ in range(a.numel()))
    if not numbers:
        return 0.0
    middle = numbers[(len(numbers) - 1) // 2]
    squares = [a.numel() * min(float(a.norm()) / math.sqrt(a.numel()), middle) ** 2 for a in moved]
    return math.sqrt(math.fsum(squares)) / float(x.norm())


def _weights(path: list[Step]) -> list[float]:
    """w_k of the steps that were sampled: eta^2 while the rate grows."""
    sampled = [step for step in path if step.sampled]
    w = [1.0] if sampled else []
    for before, step in pairwise(sampled):
        w.append(w[-1] * max((step.eta / before.eta) ** 2, 1.0))
    return w


def _sums(path: list[Step]) -> tuple[float, float, float]:
    """The numerator, sum w_k <g_k, x_0 - x_k>, the denominator, <s, x_0 - x_n>, and sum w_k |<g_k, x_0 - x_k>|."""
    pairs = list(zip(_weights(path), [step for step in path if step.sampled], strict=True))
    products = [w * float(step.g @ (path[0].x - step.x)) for w, step in pairs]
    denominator = sum(w * float(step.g @ (path[0].x - path[-1].after)) for w, step in pairs)
    return sum(products), denominator, sum(map(abs, products))


def _straight(path: list[Step]) -> float:
    """eta^_1: what the estimated rate would be if all gradients were equal."""
    w = _weights(path)
    before = [math.fsum(step.eta for step in path[:k]) for k, step in enumerate(path) if step.sampled]
    return sum(wk * b for wk, b in zip(w, before, strict=True)) / sum(w) if w else 0.0


def _blocks(losses: list[tuple[int, float]], n: int) -> list[Block]:
    """The losses of a round of n steps: up to eight blocks of n/8 steps, each with the mean of its finite ones."""
    count = min(max(n, 1), BLOCKS)
    edges = [k * n // count for k in range(count)] + [max(n, 1)]
    found = []
    for begin, end in pairwise(edges):
        own = [loss for k, loss in losses if begin <= k < end]
        finite = [loss for loss in own if math.isfinite(loss)]
        if own:
            found.append(Block(sum(loss / len(finite) for loss in finite) if finite else math.nan, end - begin))
    return found


def _vector(theta: Theta) -> Tensor:
    return torch.cat([x.reshape(-1) for xs in theta for x in xs])
