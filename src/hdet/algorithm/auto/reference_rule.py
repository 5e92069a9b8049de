"""The slow twin's rule in numbers: losses in, m out, in the letters of docs/how-it-works.md, section by section.

Nothing is shared with the pilot, the take-off or the memory, except the table of constants and the design of the points
(which defines itself). It knows no tensors: :mod:`hdet.algorithm.auto.reference` trains by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hdet.algorithm.auto import constants as c
from hdet.algorithm.design import Balanced
from hdet.algorithm.linesearch_reference import Rows, line_search

__all__ = ["Copy", "Measured", "Order", "Rule", "Settings"]

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
    points: int = c.POINTS
    spread: float = c.SPREAD
    T: int | None = None
    """Steps per round after landing (``sync_every``); None: rounds that grow."""
    seed: int = 0

    @property
    def peak(self) -> float:
        """The step at which the schedule's rise ends."""
        return self.pct_start * self.S - 1

    def h(self, t: float) -> float:
        """OneCycle over its peak. Its rise is held at 1: the rule does its own warm-up."""
        floor = 1 / (self.div_factor * self.final_div_factor)
        d = (max(t, self.peak) - self.peak) / (self.S - 1 - self.peak)
        return floor + (1 - floor) * (1 + math.cos(math.pi * d)) / 2


class Copy(NamedTuple):
    """Weights and optimizer state that were kept."""

    level: float
    """log m, at which they were trained."""
    t: int


class Measured(NamedTuple):
    """What is known at the end of a round."""

    began: int
    t: int
    L: list[float]
    """Losses of the points."""
    q: float
    """|x - x0| / |x0|, to the weights as they are."""
    reach: float = 0.0
    """eta^ in take-off; 0 where it says nothing."""
    A: float = math.nan
    """On doubt, the loss of the copy before the last on the same batch."""


class Order(NamedTuple):
    """What becomes of the weights."""

    event: str | None = None
    keep: bool = False
    restart: bool = False
    back_to: int | None = None
    anew: bool = True
    """Whether x0 begins anew: take-off has one x0 in all its rounds."""


@dataclass
class Rule:
    """Where a run stands. :meth:`after_round` is the whole rule."""

    settings: Settings
    level: float = c.BEGIN
    """log m in take-off."""
    m: list[float] = field(default_factory=list)
    climb: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """(from, to, f): c goes from f to 1 between these steps."""
    measured: bool = False
    """Whether the size of a step is known: take-off has begun."""
    landed: int | None = None
    L0: float = math.nan
    Lb: float = math.inf
    level_b: float = math.inf
    """log m_b."""
    seen: bool = False
    bad: int = 0
    fallen: int = 0
    dark: int = 0
    """Rounds without any finite loss so far."""
    quiet: int = 0
    rounds: int = 0
    copies: list[Copy] = field(default_factory=list)
    scale: float = math.nan
    low: float = math.inf
    worse: int = 0
    rows: Rows = field(default_factory=Rows)

    def __post_init__(self) -> None:
        self._common(self.level)

    # -- rates, rounds and points ----------------------------------------------------------------------------------

    def course(self, t: float) -> float:
        """The course: equal ratios per step in take-off, a half cosine after landing."""
        begin, end, f = self.climb
        if t >= end:
            return 1.0
        d = (t - begin) / (end - begin)
        if self.landed is None:
            return float(f ** (1 - d))
        return f + (1 - f) * (1 - math.cos(math.pi * d)) / 2

    def rates(self, t: int) -> list[float]:
        return [
            guess * m * self.course(t) * self.settings.h(t)
            for guess, m in zip(self.settings.guess, self.m, strict=True)
        ]

    def next_end(self, t: int) -> int:
        """Where the round that begins at t ends."""
        S = self.settings.S
        if t == 0:
            return 1
        if self.landed is None:
            T = c.SHORT
        else:
            T = self.settings.T or max(c.GROWING_LEAST, int(c.GROWING * t))
        return min(t + T, S - 1) if t < S - 1 else S

    def rho(self, k: int) -> list[list[float]]:
        """rho[i][g] of the points of round k."""
        n, G = self.settings.points, len(self.m)
        if self.landed is None:
            n = 1 if self.seen else n  # the fan is heard until the loss has moved
            return [[2.0 ** (c.FAN_OCTAVES * i / max(n - 1, 1))] * G for i in range(n)]
        x = Balanced().places(n, G, self.settings.seed, k)
        if k % c.APART_EVERY == c.APART_EVERY - 1:
            return [[1 + self.settings.spread * x[i][g] for g in range(G)] for i in range(n)]
        return [[1 + self.settings.spread * x[i][0]] * G for i in range(n)]

    # -- the end of a round ----------------------------------------------------------------------------------------

    def after_round(self, k: int, now: Measured) -> Order:
        if self.landed is not None:
            return self._steered(k, now)
        if self.measured:
            return self._risen(now)
        return self._first_step(now)

    def _first_step(self, now: Measured) -> Order:
        """It measures the size of a step. From here on the guess does not matter."""
        q, L = now.q, now.L[0]
        if self._is_late(now.t):
            return self._at_the_guess(now.t, "no step has moved the weights")
        if q == 0:
            self._common(min(self.level + c.TRY_HIGHER, math.log(M_HIGH)))
            return Order("take-off")
        if math.isinf(q):
            self._common(self.level - c.TRY_LOWER)
            return Order("restarted: the first step was too long", restart=True)
        self.measured = True
        self._common(self.level + math.log(c.RELATIVE_STEP / q))
        if q >= c.TOO_FAR:
            return Order("restarted: the first step was too long", restart=True)
        if math.isfinite(L):
            self.L0 = self.Lb = L
            self.scale = abs(L)
        return self._kept(Order("take-off"), self.level, now.t)

    def _risen(self, now: Measured) -> Order:
        """One round of take-off: growth, landing, or a failure."""
        t, L, late = now.t, now.L[0], self._is_late(now.t)
        going_on = Order("take-off", anew=False)
        self.climb = (t, t + c.SHORT, 1.0)
        if now.q == 0 and not late:
            return going_on
        if now.q > c.VISIBLE and len(now.L) > 1 and len(set(now.L)) == 1 and math.isfinite(L):
            return self._at_the_guess(t, "the probe does not see the weights")
        if not math.isfinite(L) and not math.isfinite(self.L0):
            self.dark += 1
            if self.dark >= c.TWICE or late:
                return self._at_the_guess(t, "the probe's loss is not finite, whatever the weights")
            return going_on
        if not math.isfinite(self.L0):
            self.L0 = self.Lb = L
            self.scale = abs(L)
        self.rounds += 1
        level = self._level_after_a_failure(L, late)
        if level is not None:
            self._common(level)
            return self._land(t, ceiling=level, must=True)
        G = self._growth(L, now)
        before = self.level
        self.quiet = 0 if G >= c.SLACK else self.quiet + t - now.began
        good = L <= self.Lb
        if good:
            self.Lb, self.level_b = L, self.level if L < self.L0 else self.level_b  # no bound as long as that is L0
        self._common(self.level + math.log(G))
        if late or self.quiet >= c.QUIET or self.rounds >= c.LONGEST:
            if L > self.L0 - c.UNDONE * (self.L0 - self.Lb):
                self._common(min(self.level, self.level_b))
            return self._land(t, ceiling=self.level + c.CEILING, must=False)
        self.climb = (t, t + c.SHORT, 1 / G)
        return self._kept(going_on, before, t) if good else going_on

    def _level_after_a_failure(self, L: float, late: bool) -> float | None:
        """log m where the loss has exploded, or has lost what was gained; None: it has not."""
        unit = abs(self.L0)
        exploding = not L - self.L0 <= c.RISE * unit
        falling = self.L0 - self.Lb > c.GAINED * unit and L - self.Lb > c.FALL * unit
        self.bad = self.bad + 1 if exploding else 0
        self.fallen = self.fallen + 1 if falling else 0
        at_once = not L - self.L0 <= c.RISE_AT_ONCE * c.RISE * unit
        if exploding and (self.bad >= c.TWICE or late or at_once):
            return self.level - c.BACK
        if self.fallen >= c.TWICE:
            return min(self.level, self.level_b)
        return None

    def _growth(self, L: float, now: Measured) -> float:
        """G: what fan and reach ask for, within bounds."""
        L_fan = [x if math.isfinite(x) else math.inf for x in now.L]
        rho = self.rho(0)[L_fan.index(min(L_fan))][0] if not self.seen else 1.0
        G_fan = rho**c.BY_FAN if rho > c.NEAR else 1.0
        h = self.settings.h(now.t - 1)
        G_reach = now.reach / (self.settings.guess[0] * h * math.exp(self.level))
        G = max(1.0, min(max(G_fan, G_reach), c.FASTEST))
        if self.bad:
            G = 1.0
        self.seen = self.seen or abs(L - self.L0) > c.UNSEEN * abs(self.L0)
        return G if self.seen else max(G, c.LEAST)

    def _at_the_guess(self, t: int, why: str) -> Order:
        """Nothing that is seen tells anything about the rate: the guess, climbed to as OneCycle does."""
        self._common(0.0)
        self.landed, self.climb = t, (t, max(self.settings.peak, t), c.CLIMB_FROM)
        return Order(f"landed: {why}")

    def _land(self, t: int, ceiling: float, must: bool) -> Order:
        """Back to the last copy below the ceiling, where that costs little, and climb from there."""
        S = self.settings.S
        self.landed, self.climb = t, (t, t, 1.0)
        if not self.copies:
            return Order("landed: slowed down")
        fitting = [kept for kept in self.copies if kept.level <= ceiling + c.ROUNDING]
        kept = fitting[-1] if fitting else min(self.copies, key=lambda kept: kept.level)
        self.copies = [kept]
        if kept.t < t - c.WORTH * S and not must:
            return Order("landed: went on")
        f = min(1.0, math.exp(kept.level) / self.m[0])
        self.climb = (t, max(self.settings.peak, t + c.CLIMB * S), f)
        return Order(f"landed: went back to step {kept.t}", back_to=kept.t)

    # -- after landing ---------------------------------------------------------------------------------------------

    @property
    def proven(self) -> int | None:
        """The copy before the last: that of the last round may be ruined already."""
        return self.copies[-2:][0].t if self.copies else None

    def doubts(self, L: list[float]) -> bool:
        """Whether it seems to have exploded, or half of what was gained seems lost."""
        B = _lowest(L)
        exploded = math.isinf(B) or B > c.DOUBT * self.scale
        lost = self.low < self.L0 - c.HALF * abs(self.L0) and B > c.HALF * (self.L0 + self.low)
        return self.landed is not None and (exploded or lost)

    def _steered(self, k: int, now: Measured) -> Order:
        """A round after landing: go back, or keep a copy and let the line search move m."""
        B = _lowest(now.L)
        ruin = self._ruin(B, now) if self.doubts(now.L) else 0.0
        if ruin is None:
            return Order()  # no weights have a finite loss: it is the batch
        if ruin > c.RUINED_PERHAPS:
            self.worse += 1
            return self._back(B, now.t) if ruin > c.RUINED or self.worse >= c.TWICE else Order()
        self.worse = 0
        self.scale = max(self.scale, abs(B)) if math.isfinite(self.scale) else abs(B)
        self.low = min(self.low, B)
        level = math.log(max(self.m) * self.course(now.t))
        self._move(k, now)
        if B > c.WORTH_KEEPING * abs(self.L0):
            return Order()
        self.copies = self.copies[:1] + self.copies[1:][-1:]  # that of landing, and the last
        return self._kept(Order(), level, now.t)

    def _ruin(self, B: float, now: Measured) -> float | None:
        """How far B is above A, the loss of earlier weights on the same batch. None: nothing can be said."""
        if math.isfinite(now.A):
            unit = max(abs(now.A), abs(self.L0)) if math.isfinite(self.L0) else abs(now.A)
            return (B - now.A) / (unit or 1.0)
        if math.isinf(B) and (self.copies or not math.isfinite(self.scale)):
            return None
        if c.RUINED_ALONE * self.scale < B < math.inf:
            return math.inf
        return c.RUINED if B > c.DOUBT * self.scale else 0.0

    def _back(self, B: float, t: int) -> Order:
        """A third of the rate in force, and the weights of the copy before the last; next time, those of landing."""
        self.m = [_bounded(m * self.course(t) / c.SLOWER) for m in self.m]
        self.worse, self.climb = 0, (t, t, 1.0)
        if math.isfinite(B):
            self.scale = max(self.scale, B / c.DOUBT)
        t_copy = self.proven
        if t_copy is None:
            return Order("too hot: slowed down")
        self.copies = self.copies[:-2] or self.copies[:1]
        return Order(f"too hot: went back to step {t_copy}", back_to=t_copy)

    def _move(self, k: int, now: Measured) -> None:
        """The line search, while the schedule stands at its peak."""
        if self.settings.h(now.t) < c.FALLING or sum(math.isfinite(L) for L in now.L) < 2:
            return
        rows, moves = line_search(self.rows, now.L, self.rho(k))
        middle = (now.began + now.t) / 2
        rising = self.course(middle) < 1 or middle < self.settings.peak
        if rising and math.fsum(moves) > c.NO_MOVE:
            return  # below the target more always looks better, and to young weights too
        self.rows = rows
        self.m = [_bounded(m * math.exp(move)) for m, move in zip(self.m, moves, strict=True)]

    # -- small things ----------------------------------------------------------------------------------------------

    def _common(self, level: float) -> None:
        """log m of all groups."""
        self.level = level
        self.m = [_bounded(math.exp(level))] * len(self.settings.guess)

    def _is_late(self, t: int) -> bool:
        S = self.settings.S
        return t > max(c.LATE * S, min(c.LATE_STEPS, c.LATE_SHORT * S))

    def _kept(self, order: Order, level: float, t: int) -> Order:
        self.copies = [*_thinned(self.copies), Copy(level, t)]
        return order._replace(keep=True)


def _thinned(copies: list[Copy]) -> list[Copy]:
    """At most four with the next: the one whose neighbours are closest in log m goes, but never the first or the last.

    Of several the earliest, whatever their last digits.
    """
    if len(copies) < c.MOMENTS:
        return copies
    levels = [kept.level for kept in copies]
    apart = [abs(after - before) for before, after in zip(levels, levels[2:], strict=False)]
    goes = 1 + next(i for i, gap in enumerate(apart) if gap <= min(apart) + c.ROUNDING)
    return [kept for i, kept in enumerate(copies) if i != goes]


def _bounded(m: float) -> float:
    return min(max(m, M_LOW), M_HIGH)


def _lowest(L: Sequence[float]) -> float:
    """B: the lowest of the finite losses; infinite without any."""
    return min((x for x in L if math.isfinite(x)), default=math.inf)
