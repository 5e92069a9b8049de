"""The rules of a replica ensemble in jax: reassignment by the hash of torch's package, and three controllers.

Pure functions of arrays, for ``jit``, ``scan`` and ``shard_map``. Each controller takes its memory, ``signals[r]``
(lower is better), ``live[r]`` (which replicas count) and where the replicas stood. :func:`corrected` and
:func:`normalised` do in jax what :class:`hdet.Corrected` and :class:`hdet.Normalised` do in torch, and take their
settings from them; :func:`as_printed` is the paper to the letter.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hdet.checks import is_finite, must_be
from hdet.ensemble import controller
from hdet.ensemble.controller import Corrected
from hdet.ensemble.normalised import NOISE, PRIOR, REST, Normalised

# -- reassignment -----------------------------------------------------------------------------------------------------

_DIGITS = 10
"""Digits of the largest round, an int32."""
_PRIMES = [p for p in range(2, 312) if all(p % d for d in range(2, p))]
# The constants of SHA-256 are the first 32 bits after the point of cube roots and square roots of primes.
_ADDED = np.array([int(p ** (1 / 3) % 1 * 2**32) for p in _PRIMES], np.uint32)
_FIRST = np.array([int(p**0.5 % 1 * 2**32) for p in _PRIMES[:8]], np.uint32)


def permutations(seed: int, k: Array, knobs: int, n: int) -> Array:
    """The permutation of ``range(n)`` for each knob in round ``k``, as :func:`hdet.ensemble.design.permutation` has it.

    Replicas are ranked by the SHA-256 of the text "seed:k:knob:r"; round 0 is the identity. The hash is computed on the
    device, so a run compiles once, whatever the number of its rounds.

    Args:
        seed, knobs, n: plain integers; of seed at most 28 digits, since one block of SHA-256 takes 55 characters.
        k: the round, an int32; it may be traced.

    Returns:
        int32, of shape (knobs, n).

    >>> from hdet.ensemble.design import permutation
    >>> permutations(0, jnp.int32(7), knobs=1, n=4)[0].tolist() == permutation(seed=0, k=7, knob=0, n=4)
    True
    """
    words = _digests(_blocks(f"{seed}:".encode(), k, knobs, n))
    ranked = jnp.lexsort(tuple(words[..., i] for i in range(7, -1, -1)))  # the last key counts most
    return jnp.where(k == 0, jnp.arange(n), ranked).astype(jnp.int32)


def _blocks(head: bytes, k: Array, knobs: int, n: int) -> Array:
    """The padded texts as words of 32 bits: (knobs, n, 16). Only the digits of ``k`` are not known beforehand."""
    powers = np.array([10**i for i in range(_DIGITS - 1, -1, -1)], np.int32)
    length = jnp.maximum(jnp.sum(k >= powers), 1)  # of k, in digits
    digits = jnp.where(np.arange(_DIGITS, 0, -1) <= length, k // powers % 10 + ord("0"), 0)
    tails = [[_bytes(f":{knob}:{r}".encode() + b"\x80") for r in range(n)] for knob in range(knobs)]
    end = len(head) + length
    text = (
        _bytes(head) + jnp.roll(jnp.pad(digits, (0, 64 - _DIGITS)), end - _DIGITS) + jnp.roll(np.array(tails), end, -1)
    )
    words = jnp.sum(text.reshape(knobs, n, 16, 4).astype(jnp.uint32) << np.array([24, 16, 8, 0], np.uint32), -1)
    bits = 8 * (jnp.sum(text > 0, -1) - 1)
    return words.astype(jnp.uint32).at[..., 15].set(bits.astype(jnp.uint32))


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text.ljust(64, b"\0"), np.uint8).astype(np.int32)


def _turned(x: Array, *by: int) -> Array:
    """The exclusive or of copies whose bits are rotated to the right."""
    return functools.reduce(operator.xor, ((x >> i) | (x << (32 - i)) for i in by))


def _digests(blocks: Array) -> Array:
    """SHA-256 of messages of one block each: (..., 16) -> (..., 8)."""

    def one_round(carry: tuple[Array, Array], added: Array) -> tuple[tuple[Array, Array], None]:
        w, (a, b, c, d, e, f, g, h) = carry
        t1 = h + _turned(e, 6, 11, 25) + ((e & f) ^ (~e & g)) + added + w[0]
        t2 = _turned(a, 2, 13, 22) + ((a & b) ^ (a & c) ^ (b & c))
        new = w[0] + w[9] + (_turned(w[1], 7, 18) ^ (w[1] >> 3)) + (_turned(w[14], 17, 19) ^ (w[14] >> 10))
        return (jnp.concatenate([w[1:], new[None]]), jnp.stack([t1 + t2, a, b, c, d + t1, e, f, g])), None

    first = jnp.broadcast_to(_FIRST[:, None, None], (8, *blocks.shape[:2]))
    (_, last), _ = lax.scan(one_round, (jnp.moveaxis(blocks, -1, 0), first), jnp.asarray(_ADDED))
    return jnp.moveaxis(first + last, 0, -1)


# -- signals ----------------------------------------------------------------------------------------------------------


def comparable(signals: Array, live: Array) -> tuple[Array, Array]:
    """Signals in which what is not finite is replaced by the worst plus the range, and whether two or more are finite.

    >>> signals, enough = comparable(jnp.array([1.0, 3.0, jnp.nan, 9.0]), jnp.array([True, True, True, False]))
    >>> signals[:3].tolist(), bool(enough)
    ([1.0, 3.0, 5.0], True)
    """
    finite = live & jnp.isfinite(signals)
    best, worst = jnp.min(signals, where=finite, initial=jnp.inf), jnp.max(signals, where=finite, initial=-jnp.inf)
    bad = worst + jnp.where(worst > best, worst - best, jnp.maximum(1.0, jnp.abs(worst)))
    return jnp.where(finite, signals, bad), jnp.sum(finite) >= 2


def _centred(columns: Array, live: Array) -> Array:
    """Columns less their mean over the live replicas; 0 for the others."""
    return jnp.where(live[:, None], columns - jnp.mean(columns, 0, where=live[:, None]), 0.0)


# -- controllers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsPrinted(controller.AsPrinted):
    """:class:`hdet.AsPrinted`, with the two factors of OneCycleLR that an optax schedule does not have.

    Args:
        sigma, meta_momentum, meta_lr, mend_gamma: as in :class:`hdet.AsPrinted`.
        div_factor, final_div_factor: f_div and f_final; torch's defaults.
    """

    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("div_factor", "final_div_factor"):
            fits = is_finite(value := getattr(self, name)) and value > 0
            must_be("a finite number above 0", fits, "torch has 25 and 1e4", **{name: value})

    @property
    def ratio(self) -> float:
        """f_div / f_final, which :meth:`gamma` takes."""
        return self.div_factor / self.final_div_factor


def corrected(
    rule: Corrected | AsPrinted, memory: Any, signals: Array, offsets: Array, live: Array
) -> tuple[Any, Array]:
    """The rule of :class:`hdet.Corrected`: the memory (a velocity v per knob), and the moves, per knob.

    w = softmax((Lbar - L)/sigma), Delta = sum_r w_r rho_r - mean rho, v <- beta v + (1 - beta) Delta, move = lambda v

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


def as_printed(
    rule: AsPrinted, memory: Any, base: Array, gamma: Array, signals: Array, values: Array, live: Array
) -> tuple[Any, Array]:
    """One round of the printed rule: the memory (a velocity per knob), and the new base, in units of the knob.

    Delta = sum_r w_r eta_r - mean eta_r,  v <- beta v + (1 - beta) Delta,  base <- base (1 - gamma) + lambda v

    ``values[r, g]`` is eta_r, the value at which replica r has trained.
    """
    memory, move = corrected(rule, memory, signals, values, live)  # it takes the mean of the values away
    return memory, base * (1 - gamma) + move


def nothing_seen(rule: Corrected | AsPrinted | Normalised, knobs: int) -> Any:
    """The memory before the first round: that of torch's package, with arrays in place of lists."""
    memory = rule.init(knobs)
    return type(memory)(*map(jnp.asarray, memory))


def normalised(rule: Normalised, memory: Any, signals: Array, offsets: Array, live: Array) -> tuple[Any, Array]:
    """The rule of :class:`hdet.Normalised`: the memory, with the fields that it has in torch, and the moves, per knob.

    Slopes solve (A + kappa I) g = b;  move = -sign(g) step max(0, 1 - (c / t)^2) spread  with  t = |g| / se(g)
    """
    knobs, before = offsets.shape[1], memory.step
    spreads = jnp.max(jnp.abs(offsets), 0, where=live[:, None], initial=0.0)
    x = _centred(offsets / jnp.where(spreads > 0, spreads, 1.0), live)
    y = _standardised(signals, live)
    gram, moment = memory.gram.reshape(knobs, knobs) + x.T @ x, memory.moment + x.T @ y
    squares, rows = memory.squares + jnp.stack([y @ y, jnp.sum(live) - 1.0])
    kappa = rule.ridge * jnp.trace(gram) / knobs
    known = kappa > 0  # without any spread there is nothing to learn from
    covariance = jnp.linalg.inv(gram + jnp.where(known, kappa, 1.0) * jnp.eye(knobs))
    slopes = covariance @ moment
    residual, freedom = jnp.maximum(squares - slopes @ moment, 0.0), rows - knobs
    variance = (residual + PRIOR) / (jnp.maximum(freedom, 0.0) + PRIOR)
    errors = jnp.sqrt(variance * jnp.diag(covariance))
    threshold = rule.caution * (1 + 2.2 / jnp.maximum(freedom, 1.0))
    sure = known & (freedom >= 1) & (jnp.abs(slopes) > threshold * errors)
    shrunk = 1 - (threshold * errors / jnp.where(sure, slopes, 1.0)) ** 2
    direction = jnp.where(sure, -jnp.sign(slopes) * shrunk, 0.0)
    turned = direction * memory.sign
    step = jnp.clip(jnp.where(turned < 0, before / 2, before * 1.2), rule.shortest, rule.longest)
    step = jnp.where(turned == 0, before, step)
    # Forgetting: the slopes as they are, known less well, the more so the further a knob has moved.
    wider = jnp.diag(covariance) * (jnp.exp(jnp.abs(direction * step)) / REST - 1)
    less = jnp.linalg.inv(covariance + jnp.diag(wider))
    left = [NOISE * residual + slopes @ less @ slopes, jnp.where(freedom > 0, NOISE * freedom + knobs, rows)]
    sign = jnp.where(direction == 0, memory.sign, jnp.sign(direction))
    after = type(memory)(less.ravel(), less @ slopes, jnp.stack(left), step, slopes, errors, sign)
    kept = memory._replace(gram=gram.ravel(), moment=moment, squares=jnp.stack([squares, rows]))
    return jax.tree.map(lambda new, old: jnp.where(known, new, old), after, kept), direction * step * spreads


def _standardised(signals: Array, live: Array) -> Array:
    """Centred signals of unit deviation; all zero if they are equal. No finite signal overflows."""
    half = signals / 2
    low, high = jnp.min(half, where=live, initial=jnp.inf), jnp.max(half, where=live, initial=-jnp.inf)
    differ = high > low
    y = _centred(((half - low) / jnp.where(differ, high - low, 1.0))[:, None], live)[:, 0]
    deviation = jnp.sqrt(jnp.sum(y * y) / jnp.sum(live))
    return jnp.where(differ, y / jnp.where(differ, deviation, 1.0), 0.0)
