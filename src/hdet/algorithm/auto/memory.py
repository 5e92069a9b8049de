"""The memory of a probed run: which moments are worth going back to. Whoever carries it out copies tensors by slot."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from hdet.algorithm.auto import constants as c

__all__ = ["Memory", "Moment"]


class Moment(NamedTuple):
    """Everything that training changes, at the end of one step; its copy lies in ``slot``."""

    level: float
    """log of the factor on the guess at which these weights were trained."""
    step: int
    slot: int


class Memory(NamedTuple):
    """A few moments, in the order in which they were added.

    >>> memory = Memory().added(level=-2.0, step=5).added(level=-1.0, step=9)
    >>> memory.moments[-1]
    Moment(level=-1.0, step=9, slot=1)
    >>> memory.last_below(-1.5).step, memory.proven.step
    (5, 5)
    """

    moments: tuple[Moment, ...] = ()

    @property
    def slots(self) -> frozenset[int]:
        """The slots in use; all others are free."""
        return frozenset(moment.slot for moment in self.moments)

    @property
    def proven(self) -> Moment | None:
        """The last moment after which training went well for another round: the last one may already be damaged."""
        return self.moments[-2:][0] if self.moments else None

    def added(self, level: float, step: int) -> Memory:
        """One more moment, in a free slot; where there are too many, the one with the closest neighbours goes."""
        moments = list(self.moments)
        if len(moments) >= c.MOMENTS:
            del moments[_most_crowded([moment.level for moment in moments])]
        taken = {moment.slot for moment in moments}
        free = next(slot for slot in range(len(moments) + 1) if slot not in taken)
        return Memory((*moments, Moment(level, step, free)))

    def only(self, moment: Moment) -> Memory:
        """All other moments are forgotten."""
        return Memory((moment,))

    def ends(self) -> Memory:
        """All but the first and the last moment are forgotten."""
        return Memory((*self.moments[:1], *self.moments[1:][-1:]))

    def used(self, moment: Moment) -> Memory:
        """Training went back to this moment: the next time an earlier one is used."""
        earlier = self.moments[: self.moments.index(moment)]
        return Memory(earlier or (moment,))

    def within(self, slots: Container[int]) -> Memory:
        """Only moments whose copies exist: a checkpoint has none, and copies of other parameters are of no use."""
        return Memory(tuple(moment for moment in self.moments if moment.slot in slots))

    def last_below(self, ceiling: float) -> Moment | None:
        """The last moment at or below a level; the lowest if none is; None if nothing is remembered."""
        fitting = [moment for moment in self.moments if moment.level <= ceiling + c.ROUNDING]
        return fitting[-1] if fitting else min(self.moments, key=lambda moment: moment.level, default=None)


def _most_crowded(levels: list[float]) -> int:
    """Neither first nor last, with the closest neighbours: what is kept stays spread over the levels.

    Of several the earliest: a rate that doubles every round has them equally far apart, but for rounding.
    """
    gaps = [abs(after - before) for before, after in zip(levels, levels[2:], strict=False)]
    return 1 + next(i for i, gap in enumerate(gaps) if gap <= min(gaps) + c.ROUNDING)
