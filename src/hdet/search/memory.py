"""What a search remembers from round to round beside tensors, and the status that follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hdet.events import Reason
from hdet.rollback.judge import Block, LossHistory
from hdet.search.progress import CLEAR, SURE, Progress
from hdet.search.reporting import Found, Status
from hdet.search.rule import Decision, Phase, State


@dataclass
class Memory:
    """What a search remembers beside tensors."""

    found: State
    """The state of the rule."""
    rounds: int = 0
    """Rounds that have ended."""
    highest: float = 0.0
    """The schedule's highest value so far, of the leading group."""
    is_falling: bool = False
    """Whether the schedule has fallen so far that nothing is raised any more."""
    has_losses: bool = False
    """Whether a loss was given in any round. If not, the sizes of gradients are judged in their place."""
    quiet: int = 0
    """Rounds in a row that have not raised the rate."""
    rolled_back: int = 0
    """How often training was rolled back."""
    peaks: list[float] = field(default_factory=list)
    """The schedule's highest value so far, of each parameter group."""
    stopped_for: Reason | None = None
    """Why the search has stopped, if it has."""
    rests: bool = False
    """Whether the rate is to stay, though the schedule has not fallen yet."""
    is_bound: bool = False
    """Whether the rate is at the bound that the user gave."""
    has_settled: bool = False
    """Whether the log has said that the rate has settled."""
    has_peaked: bool = False
    """Whether the schedule has reached its peak."""
    progress: Progress = field(default_factory=Progress)
    """The losses, from the first on; none if gradients are judged in their place."""

    @property
    def status(self) -> tuple[Status, Reason | None]:
        """Where the search stands, and why; see :class:`Found`."""
        if self.found.phase is Phase.STOPPED:
            return ("too short" if self.stopped_for is Reason.TOO_SHORT else "stopped"), self.stopped_for
        if self.found.phase is Phase.FIRST or not (self.is_falling or self.rests):
            return "searching", None
        if self.progress.is_known and not self.progress.has_fallen(SURE if self.is_falling else CLEAR):
            return ("stopped", Reason.NOT_FALLEN) if self.is_falling else ("searching", None)
        return "settled", Reason.AT_BOUND if self.is_bound else None

    @property
    def told(self) -> Found:
        """What was found, for people."""
        status, why = self.status
        return Found(self.rate, status, self.rolled_back, self.rates, why.text if why else "")

    @property
    def rate(self) -> float:
        """The peak rate that was found, of the leading group; NaN until a round has ended."""
        return self.highest * self.found.peak_factor if self.highest else math.nan

    @property
    def rates(self) -> tuple[float, ...]:
        """The peak rate of each parameter group; none until a round has ended."""
        return tuple(peak * self.found.peak_factor for peak in self.peaks)

    def note(self, decision: Decision) -> None:
        """A round has ended with this decision."""
        after = decision.state
        is_raised = after.peak_factor > self.found.peak_factor or after.phase is not self.found.phase
        self.quiet = 0 if is_raised else self.quiet + 1
        self.rolled_back += decision.rolled_back_to is not None
        self.stopped_for = decision.why or self.stopped_for
        self.found = after

    def judged(self, blocks: Sequence[Block], gradients: Sequence[float], sign: float) -> tuple[Block, ...]:
        """The losses of a round, lower is better; if none is ever given, the logarithms of the gradients' sizes.

        ``sign``: -1 if the loss is maximised; 0: some groups do that, others do not.
        """
        if blocks and not self.has_losses:
            self.has_losses = True
            self.found = self.found._replace(history=LossHistory())  # gradients were judged until now
        if self.has_losses:
            return tuple(Block(sign * mean, steps) for mean, steps in blocks) if sign else ()
        sizes = gradients if self.found.phase is Phase.SEARCHING else ()
        return tuple(Block(math.log(size) if 0 < size < math.inf else math.nan, 1) for size in sizes if size != 0)

    def shape(self, before: Sequence[float], now: Sequence[float], lead: int, *, climbs: bool) -> float:
        """The schedule over its highest value so far; 1 while it climbs, even if it falls from its first step on.

        Args:
            before, now: the schedule of each parameter group, at the step that was made and at the one to come. A new
                group, whose peak is still 0, has fallen as far as the leading one.
            lead: the leading group.
            climbs: whether the schedule still rises.
        """
        fallen = (now[lead] / self.highest if self.highest else 1.0) or 1.0
        rows = zip(self.peaks or [0.0] * len(now), before, now, strict=True)
        self.peaks = [max(peak or value / fallen, then, value) for peak, then, value in rows]
        self.highest = max(self.highest, before[lead], now[lead])
        return 1.0 if climbs or not self.highest else now[lead] / self.highest
