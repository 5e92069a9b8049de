"""The slow twin of ``max_lr="auto"``: one process, one replica, every sequence kept.

In the letters of docs/how-it-works.md, and in float64: nothing is rounded away. The rule itself, in numbers, is
:mod:`hdet.algorithm.auto.reference_rule`; here one trains by it. Nothing is shared with the engine, which only has to
agree, step by step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from hdet.algorithm import published_reference
from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.reference_rule import Measured, Order, Rule, Settings

__all__ = ["History", "Settings", "simulate"]

Theta = list[list[Tensor]]
"""theta[g][i]: tensor i of parameter group g."""
Probe = Callable[[Theta, int], float]
"""``(theta, k) -> loss`` on the probe batch of round k."""


class Step(NamedTuple):
    """One step of training: where the gradient was taken, the gradient, the rate of the first group, where it led."""

    x: Theta
    g: Theta
    eta: float
    after: Theta


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
    rho: list[list[list[float]]] = field(default_factory=list)
    """rho[k][i][g]: the points of round k."""
    probe: list[list[float]] = field(default_factory=list)
    """probe[k][i]: their losses."""
    m: list[list[float]] = field(default_factory=list)
    """m[k][g]: what was learned, after round k."""
    level: list[float] = field(default_factory=list)
    """level[k]: log m of take-off after round k; it stays where it landed."""
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
        probe: ``(theta, k) -> loss`` on the probe batch of round k; take-off has that of round 0 throughout.
        new_optimizer: makes the optimizer, without memory.
    """
    rule, history, optimizer = Rule(settings), History(), new_optimizer()
    x = theta0
    kept: dict[int, tuple[Theta, published_reference.Rule]] = {}
    path: list[Step] = []  # since x0
    began, end, k = 0, 1, 0
    for t in range(settings.S):
        rates = rule.rates(t)
        loss, g = loss_and_grad(x, t)
        after = optimizer(x, g, rates, [settings.mu] * len(rates))
        path.append(Step(x, g, rates[0], after))
        x = after
        if t + 1 == end:
            rho = rule.rho(k)
            now = _measure(rule, k, began, t + 1, path, probe, kept)
            order = rule.after_round(k, now)
            if order.keep:
                kept[t + 1] = x, copy.deepcopy(optimizer)
            if order.restart:
                x, optimizer = path[0].x, new_optimizer()
            if order.back_to is not None:
                x, optimizer = kept[order.back_to][0], copy.deepcopy(kept[order.back_to][1])
            path = [] if order.anew else path
            _append_round(history, rule, order, end=t + 1, rho=rho, probe=now.L)
            began, end, k = t + 1, rule.next_end(t + 1), k + 1
        history.rate.append(rates)
        history.loss.append(loss)
        history.theta.append(x)
    return history


def _append_round(
    history: History, rule: Rule, order: Order, *, end: int, rho: list[list[float]], probe: list[float]
) -> None:
    history.end.append(end)
    history.rho.append(rho)
    history.probe.append(probe)
    history.m.append(list(rule.m))
    history.level.append(rule.level)
    history.event.append(order.event)


def _measure(
    rule: Rule,
    k: int,
    began: int,
    t: int,
    path: list[Step],
    probe: Probe,
    kept: dict[int, tuple[Theta, published_reference.Rule]],
) -> Measured:
    """Losses at x0 + rho D, and what else the rule wants to know."""
    x0, x = path[0].x, path[-1].after
    taking_off = rule.landed is None
    towards = x if taking_off else _round_mean(path)
    batch = 0 if taking_off else k
    L = [probe(_point(x0, towards, rho), batch) for rho in rule.rho(k)]
    reach = _reach(path) if taking_off and rule.measured else 0.0
    A = math.nan
    if rule.doubts(L) and rule.proven is not None:
        A = probe(kept[rule.proven][0], batch)
    q = _norm(_less(x, x0)) / (_norm(x0) or 1.0)
    return Measured(began, t, L, q if math.isfinite(q) else math.inf, reach, A)


def _round_mean(path: list[Step]) -> Theta:
    """The mean of up to 8 evenly spaced weights of the round; the last is one of them."""
    T = len(path)
    n = min(T, c.SNAPSHOTS)
    taken = [path[i - 1].after for i in range(1, T + 1) if i * n // T > (i - 1) * n // T]
    groups = range(len(taken[0]))
    return [[sum(xs[1:], xs[0]) / n for xs in zip(*(theta[g] for theta in taken), strict=True)] for g in groups]


def _reach(path: list[Step]) -> float:
    """eta^: at which rate one step would go as far as all steps of take-off, together, ask for."""
    x0, x = path[0].x, path[-1].after
    w = [1.0]
    for before, step in pairwise(path):
        w.append(w[-1] * max((step.eta / before.eta) ** 2, 1.0))  # eta^2 while the rate grows
    asked = sum(wk * _inner(step.g, _less(x0, step.x)) for wk, step in zip(w, path, strict=True))
    way = _less(x0, x)
    gained = sum(wk * _inner(step.g, way) for wk, step in zip(w, path, strict=True))
    if not (math.isfinite(asked) and math.isfinite(gained)) or asked <= 0 or gained <= 0:
        return 0.0
    return asked / (gained / math.fsum(step.eta for step in path))


def _point(x0: Theta, x: Theta, rho: list[float]) -> Theta:
    """x0 + rho D with D = x - x0 and a rho per group; written so that it is x to the last bit where rho is 1."""
    return [[b + (r - 1) * (b - a) for a, b in zip(xs, ys, strict=True)] for xs, ys, r in zip(x0, x, rho, strict=True)]


def _less(a: Theta, b: Theta) -> Theta:
    return [[x - y for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def _inner(a: Theta, b: Theta) -> float:
    return sum(float((x * y).sum()) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True))


def _norm(a: Theta) -> float:
    return math.sqrt(_inner(a, a))
