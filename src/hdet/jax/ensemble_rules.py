"""The controllers of a replica ensemble in jax, as pure functions of arrays for ``jit``, ``scan`` and ``shard_map``.

Each takes the settings of its twin in torch's package, its memory, ``signals[r]`` (lower is better), ``offsets[r, g]``
(how far replica r stood from the common value of knob g) and ``live[r]`` (which replicas count), and returns its new
memory and the moves of the knobs. :func:`corrected` serves :class:`hdet.Corrected` and :class:`hdet.AsPrinted`, whose
offsets and moves are in units of the rate, and :func:`normalised` serves :class:`hdet.Normalised`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from hdet.ensemble.normalised import NOISE, PRIOR, REST, Normalised

_LARGEST = 1e37
"""A signal above this counts as infinite, so that sums of signals do not overflow in float32."""


def comparable(signals: Array, live: Array) -> tuple[Array, Array]:
    """Signals in which what is not finite is replaced by the worst plus the range, and whether two or more are finite.

    >>> signals, enough = comparable(jnp.array([1.0, 3.0, jnp.nan, 9.0]), jnp.array([True, True, True, False]))
    >>> signals[:3].tolist(), bool(enough)
    ([1.0, 3.0, 5.0], True)
    """
    finite = live & (jnp.abs(signals) < _LARGEST)
    best, worst = jnp.min(signals, where=finite, initial=jnp.inf), jnp.max(signals, where=finite, initial=-jnp.inf)
    bad = worst + jnp.where(worst > best, worst - best, jnp.maximum(1.0, jnp.abs(worst)))
    return jnp.where(finite, signals, bad), jnp.sum(finite) >= 2


def _centred(columns: Array, live: Array) -> Array:
    """Columns less their mean over the live replicas; 0 for the others."""
    return jnp.where(live[:, None], columns - jnp.mean(columns, 0, where=live[:, None]), 0.0)


def nothing_seen(rule: Any, knobs: int) -> Any:
    """The memory before the first round: that of torch's package, with arrays in place of lists."""
    memory = rule.init(knobs)
    return type(memory)(*map(jnp.asarray, memory))


def corrected(rule: Any, memory: Any, signals: Array, offsets: Array, live: Array) -> tuple[Any, Array]:
    """The paper's rule; the memory is a velocity v per knob.

    w = softmax((Lbar - L)/sigma), Delta = sum_r w_r rho_r - mean rho, v <- beta v + (1 - beta) Delta, move = lambda v

    >>> from hdet import Corrected
    >>> signals, offsets = jnp.array([1.0, 1.0 - 0.1 * jnp.log(3)]), jnp.array([[-0.1], [0.1]])  # weights 1/4 and 3/4
    >>> memory = nothing_seen(Corrected(), knobs=1)
    >>> memory, moves = corrected(Corrected(), memory, signals, offsets, jnp.array([True, True]))
    >>> round(float(memory.velocity[0]), 6), round(float(moves[0]), 6)
    (0.005, 0.0025)
    """
    best = jnp.min(signals, where=live, initial=jnp.inf)  # in place of Lbar, which cancels
    weights = jnp.where(live, jnp.exp((best - signals) / rule.sigma), 0.0)
    delta = weights / jnp.sum(weights) @ _centred(offsets, live)
    v = rule.meta_momentum * memory.velocity + (1 - rule.meta_momentum) * delta
    return memory._replace(velocity=v), rule.meta_lr * v


def normalised(rule: Normalised, memory: Any, signals: Array, offsets: Array, live: Array) -> tuple[Any, Array]:
    """Least squares on all knobs; the memory has the fields that it has in torch.

    Slopes solve (A + kappa I) g = b;  move = -sign(g) step max(0, 1 - (c / t)^2) spread  with  t = |g| / se(g)
    """
    knobs, before = offsets.shape[1], memory.step
    spreads = jnp.max(jnp.abs(offsets), 0, where=live[:, None], initial=0.0)
    x = _centred(offsets / jnp.where(spreads > 0, spreads, 1.0), live)
    y = _standardised(signals, live)
    gram, moment = memory.gram.reshape(knobs, knobs) + x.T @ x, memory.moment + x.T @ y
    squares, rows = memory.squares + jnp.stack([y @ y, jnp.sum(live) - 1.0])
    kappa = jnp.maximum(rule.ridge * jnp.trace(gram) / knobs, 1e-12)  # without any spread nothing is learned
    covariance = jnp.linalg.inv(gram + kappa * jnp.eye(knobs))
    slopes = covariance @ moment
    residual, freedom = jnp.maximum(squares - slopes @ moment, 0.0), rows - knobs
    variance = (residual + PRIOR) / (jnp.maximum(freedom, 0.0) + PRIOR)
    errors = jnp.sqrt(variance * jnp.diag(covariance))
    threshold = rule.caution * (1 + 2.2 / jnp.maximum(freedom, 1.0))
    sure = (freedom >= 1) & (jnp.abs(slopes) > threshold * errors)
    shrunk = 1 - (threshold * errors / jnp.where(sure, slopes, 1.0)) ** 2
    direction = jnp.where(sure, -jnp.sign(slopes) * shrunk, 0.0)
    turned = direction * memory.sign
    step = jnp.clip(jnp.where(turned < 0, before / 2, before * 1.2), rule.shortest, rule.longest)
    step = jnp.where(turned == 0, before, step)
    # Forgetting: the slopes as they are, known less well, the more so the further a knob has moved.
    wider = jnp.diag(covariance) * (jnp.exp(jnp.abs(direction * step)) / REST - 1)
    reduced = jnp.linalg.inv(covariance + jnp.diag(wider))
    left = [NOISE * residual + slopes @ reduced @ slopes, jnp.where(freedom > 0, NOISE * freedom + knobs, rows)]
    sign = jnp.where(direction == 0, memory.sign, jnp.sign(direction))
    memory = type(memory)(reduced.ravel(), reduced @ slopes, jnp.stack(left), step, slopes, errors, sign)
    return memory, direction * step * spreads


def _standardised(signals: Array, live: Array) -> Array:
    """Centred signals of unit deviation; all zero if they are equal."""
    low, high = jnp.min(signals, where=live, initial=jnp.inf), jnp.max(signals, where=live, initial=-jnp.inf)
    y = _centred(((signals - low) / jnp.where(high > low, high - low, 1.0))[:, None], live)[:, 0]
    return jnp.where(high > low, y / jnp.sqrt(jnp.sum(y * y) / jnp.sum(live)), 0.0)
