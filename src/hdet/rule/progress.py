r"""Has the train loss fallen? The losses from the first step on, and what follows from them. Pure.

There are two judges of losses because they answer two questions: :mod:`hdet.rule.judge` compares a round with those
just before it, and says whether training has diverged; this one compares the run with its beginning, and says whether
anything was learned at all.

The latest quarter of the steps is compared with beginnings of the run: the first two blocks, at a rate that is
negligible, and all longer ones that end before that quarter. The loss has fallen (:meth:`Progress.has_fallen`, for the
status and the warnings) if one of them is above it by more than the noise of the two means, and by more than a part of
the loss itself or by far more than single steps differ:

.. math:: \text{beginning} - \text{latest} > \max(2\,\sigma \sqrt{1/n_1 + 1/n_2},\ \min(0.02\,|\text{beginning}|,\
    8\,\sigma)).

If this is asked after every round, 4 deviations take the place of 2. The rule of the search asks for something else
when it says "until the loss has fallen" (:attr:`Progress.is_below`): 4 deviations, by however little.

A *block* is some steps in a row with the mean of their losses, up to eight in a round; a *stretch* is the losses of a
round. Long beginnings are for runs that learn slowly under a large noise. A stretch after a rise of the loss does not
count as a beginning: a loss that explodes and comes back has not fallen. Lower is better: the caller negates losses
that are maximised.

If the loss is above all beginnings, or had fallen and is back where it began, what was learned is *undone*: the network
is dead, or about to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

from hdet.rule.constants import CLEAR, FAR, FEW, FEWEST, FLAT, HALF, LATEST, LEAST, RISEN, ROUNDED, SURE
from hdet.rule.judge import Block


class Stretch(NamedTuple):
    """The losses of a round."""

    level: float
    """The median of its blocks: single batches far above the others do not count."""
    steps: int
    noise: float
    """The standard deviation of a single step's loss, by its blocks' distances from the line through their neighbours;
    NaN: nothing is known of it."""
    end: int = 0
    """The step of the schedule at which it ended."""


class Progress(NamedTuple):
    """The losses so far; plain numbers."""

    start: tuple[Block, ...] = ()
    """The first two blocks."""
    stretches: tuple[Stretch, ...] = ()
    """One for each round, without those that were rolled back."""
    last: tuple[Block, ...] = ()
    """The last two blocks: the noise of short rounds needs neighbours."""
    fell: bool = False
    """Whether the loss had clearly fallen at the end of any round since the last rollback."""

    def after(self, blocks: Sequence[Block], end: int = 0) -> Progress:
        """A round has ended with these losses, at a step of the schedule.

        >>> progress = Progress()
        >>> for loss in (2.3, 2.4, 2.2, 2.3, 1.6, 1.1, 0.8, 0.9):
        ...     progress = progress.after([Block(loss, 2)])
        >>> progress.has_fallen(), round(progress.first, 2), round(progress.latest, 2)
        (True, 2.35, 0.85)
        """
        known = tuple(block for block in blocks if math.isfinite(block.mean) and block.steps)
        if not known:
            return self
        neighbours = (*self.last, *known)
        noises = [_noise(*three) for three in zip(neighbours, neighbours[1:], neighbours[2:], strict=False)]
        steps = sum(block.steps for block in known)
        new = Stretch(median(block.mean for block in known), steps, median(noises) if noises else math.nan, end)
        start = (*self.start, *known)[:2]
        after = self._replace(start=start, stretches=(*self.stretches, new), last=neighbours[-2:])
        return after._replace(fell=self.fell or after._is_below(after._doubt))

    def rolled_back(self, step: int) -> Progress:
        """The losses after a rollback to the weights of ``step``."""
        kept = tuple(one for one in self.stretches if one.end <= step)
        return self._replace(stretches=kept, last=(), fell=False)

    @property
    def first(self) -> float:
        """The loss at the beginning; NaN: none is known."""
        return _mean(self.start)[0]

    @property
    def latest(self) -> float:
        """The loss as it is now; NaN: none is known."""
        return _mean(_latest(self.stretches))[0]

    @property
    def _falls(self) -> tuple[_Fall, ...]:
        return _falls(self.start, self.stretches)

    @property
    def is_known(self) -> bool:
        """Whether there are enough losses to compare."""
        return bool(self._falls)

    def has_fallen(self, sure: float = SURE) -> bool:
        """Whether the loss is lower than it was, beyond its noise. Not if nothing is known."""
        return any(one.fall > max(sure * one.noise, one.least) for one in self._falls)

    @property
    def is_below(self) -> bool:
        """Whether the loss is clearly lower than it was, by however little: a constant added to it does not matter,
        except for what rounding may lose. Also true if it is not known how it was."""
        return math.isnan(self.first) or self._is_below(1.0)

    def _is_below(self, doubt: float) -> bool:
        least = ROUNDED * abs(self.first)
        return any(one.fall > max(CLEAR * doubt * one.noise, least) for one in self._falls)

    @property
    def _doubt(self) -> float:
        """What the noise is multiplied by, since few rounds do not show how large it is."""
        return 1 + FEW / math.sqrt(max(len(_noises(self.stretches)), 1))

    @property
    def has_gained(self) -> bool:
        """Whether the loss is lower than it was, if only by chance. Also true if it is not known how it was."""
        return not (self.is_known and all(one.fall <= 0 for one in self._falls))

    @property
    def is_flat(self) -> bool:
        """Whether the loss has certainly not fallen. If neither this nor :attr:`has_fallen` holds, more steps will
        tell."""
        return self.is_known and all(one.fall + FLAT * one.noise <= one.least for one in self._falls)

    @property
    def undone(self) -> tuple[float, float] | None:
        """Where the loss began and where it is, if it is above that beyond its noise, or back there after a fall."""
        falls, doubt = self._falls, RISEN * self._doubt
        has_risen = all(-one.fall > doubt * one.noise for one in falls)
        is_undone = falls and (has_risen or (self.fell and not self.has_gained))
        return (self.first, self.latest) if is_undone else None

    def outlook(self) -> dict[str, Any]:
        """The losses and what the rule asks of them, by the names of :class:`~hdet.rule.decision.Evidence`."""
        return {"progress": self, "is_below": self.is_below, "has_gained": self.has_gained, "undone": self.undone}


class _Fall(NamedTuple):
    """The latest losses, compared with a beginning of the run."""

    fall: float
    """How far the loss has fallen since then."""
    noise: float
    """The standard deviation of that."""
    least: float
    """The least that counts."""


@lru_cache(maxsize=1)  # the end of a round asks four times
def _falls(start: tuple[Block, ...], stretches: tuple[Stretch, ...]) -> tuple[_Fall, ...]:
    """A comparison for each beginning; none if there are too few losses."""
    latest = _latest(stretches)
    (first, few), (now, steps) = _mean(start), _mean(latest)
    if not (math.isfinite(first) and len(stretches) > len(latest) + 1):
        return ()
    noise = median(_noises(stretches) or [0.0])
    beginnings, total, many = [(first, few)], 0.0, 0
    for one in stretches[: len(stretches) - len(latest)]:
        if not one.level - first <= RISEN * (noise * math.sqrt(1 / few + 1 / one.steps)):
            break
        total, many = total + one.level * one.steps, many + one.steps
        if many > few:
            beginnings.append((total / many, many))
    falls = []
    for mean, many in beginnings:
        least = max(min(LEAST * abs(mean), FAR * noise), ROUNDED * abs(mean))
        falls.append(_Fall(mean - now, noise * math.sqrt(1 / many + 1 / steps), least))
    return tuple(falls)


def _latest(stretches: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    """The last quarter of the steps."""
    least = max(LATEST * sum([one.steps for one in stretches]), FEWEST)
    steps, count = 0, 0
    while steps < least and count < len(stretches):
        count += 1
        steps += stretches[-count].steps
    return stretches[len(stretches) - count :]


def _noises(stretches: tuple[Stretch, ...]) -> list[float]:
    return [one.noise for one in stretches if not math.isnan(one.noise)]


def _noise(a: Block, b: Block, c: Block) -> float:
    """A single step's deviation from three neighbours: half of them are within ``HALF``."""
    return abs(a.mean - 2 * b.mean + c.mean) / math.sqrt(1 / a.steps + 4 / b.steps + 1 / c.steps) / HALF


def _mean(parts: Sequence[Block | Stretch]) -> tuple[float, int]:
    """The mean over steps, and their number."""
    steps = sum([one.steps for one in parts])
    return (math.fsum([one[0] * one.steps for one in parts]) / steps if steps else math.nan), steps
