"""The bound that the user gives as the scheduler's ``highest=``: rates that parameter groups never exceed. Pure.

All groups share the factor that a search finds, so that their rates keep the ratios of the guesses. The factor is held
at the value that brings the first group to its bound; the others are below theirs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from hdet.optimizer import Rate, with_added

_Rate = TypeVar("_Rate", float, Rate)


class Bounds(NamedTuple):
    """What the rates may be.

    >>> bounds = Bounds(each=(math.inf, 0.1))
    >>> bounds.factor([1.0, 0.2]), bounds.held([0.5, 0.10000000000000002])
    (0.5, [0.5, 0.1])
    """

    each: tuple[float, ...]
    """The bound of each parameter group, infinite if it has none."""
    added: float = math.inf
    """That of each group which is added in the run."""

    @property
    def lowest(self) -> float:
        """The lowest bound of all groups."""
        return min(self.each)

    def grown(self, new: Collection[int]) -> Bounds:
        """The bounds after groups were added; ``new``: their numbers among all groups."""
        return self._replace(each=tuple(with_added(self.each, dict.fromkeys(new, self.added))))

    def factor(self, schedule: Sequence[Rate], peaks: Sequence[float] = ()) -> float:
        """The largest factor on a schedule and on its peaks so far, so that a schedule falls from the bound."""
        tops = [max(map(float, row)) for row in zip(schedule, peaks or [0.0] * len(schedule), strict=True)]
        return min((bound / top for top, bound in zip(tops, self.each, strict=True) if top > 0), default=math.inf)

    def held(self, rates: Sequence[_Rate]) -> list[_Rate]:
        """The rates, lowered to their bounds if rounding has brought them above; each keeps its type."""
        rows = zip(rates, self.each, strict=True)
        return [rate.clamp(max=bound) if isinstance(rate, Tensor) else min(rate, bound) for rate, bound in rows]
