"""What a search remembers from round to round beside tensors, and the status that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hdet.rule.constants import QUIET
from hdet.rule.decision import Decision, Evidence, Rule
from hdet.rule.enums import Phase, Reason
from hdet.rule.found import Found, Status, status_of, within
from hdet.rule.judge import Block, LossHistory
from hdet.rule.progress import Progress
from hdet.rule.state import State
from hdet.state import fields_of, from_fields, in_pairs, plain


@dataclass
class Memory:
    """What a search remembers beside tensors."""

    learned: State
    """The state of the rule."""
    lead: int = 0
    """The number of the leading parameter group, whose rate stands for all: the first one that is searched."""
    rounds: int = 0
    """Rounds that have ended."""
    is_falling: bool = False
    """Whether the schedule has fallen so far that nothing is raised any more."""
    has_losses: bool = False
    """Whether a loss was given in any round. If not, the sizes of gradients are judged in their place."""
    quiet: int = 0
    """Rounds in a row that have not raised the rate."""
    rolled_back: int = 0
    """How often training was rolled back."""
    peaks: list[float] = field(default_factory=list)
    """The schedule's highest value so far, of each parameter group; none until a round has ended."""
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

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: its fields by name, as plain numbers in lists. Snapshots are saved with their tensors."""
        return {**fields_of(self), "learned": in_pairs(fields_of(self.learned._replace(snapshots=())))}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Memory:
        """A new one from :meth:`saved`. What does not fit raises."""
        return from_fields(cls, {**state, "learned": plain(from_fields(State, dict(state["learned"])))})

    @property
    def status(self) -> tuple[Status, Reason | None]:
        """Where the search stands, and why; see :class:`Found`."""
        return status_of(
            self.learned,
            self.stopped_for,
            is_falling=self.is_falling,
            rests=self.rests,
            is_bound=self.is_bound,
            has_fallen=lambda sure: not self.progress.is_known or self.progress.has_fallen(sure),
        )

    @property
    def told(self) -> Found:
        """What was found, for people: the peak rates, which are unknown until a round has ended."""
        (status, why), factor = self.status, self.learned.peak_factor
        rates = tuple([peak * factor for peak in self.peaks])
        rate = (rates[self.lead] if rates else 0.0) or math.nan
        return Found(rate, status, self.rolled_back, rates, why.text if why else "", within(self.learned))

    def take_in(self, seen: Evidence, then: Sequence[float], now: Sequence[float], sign: float) -> Evidence:
        """What the rule gets to know.

        Args:
            seen: what all ranks have seen.
            then, now: the schedule of each parameter group, at the step that was just made and at the one to come.
            sign: what losses are multiplied by, so that lower is better: -1 if they are maximised; 0: some groups do
                that, others do not, and no loss is judged.
        """
        end, measured, guess = seen.end, seen.measured, then[self.lead]
        blocks = self._signed(seen.blocks, measured.gradients, sign)
        progress = self.progress.after(blocks, end) if self.has_losses else self.progress
        has_rate = measured.estimated_rate > 0 and guess > 0
        return seen._replace(
            blocks=blocks,
            schedule_share=self._schedule_share(then, now, climbs=end <= seen.peak),
            measured=measured._replace(
                moved=measured.moved if seen.is_finite else math.inf,
                gradients=() if measured.is_broken else measured.gradients,
            ),
            log_guess=math.log(guess) if guess > 0 else 0.0,
            estimated_log_factor=math.log(measured.estimated_rate / guess) if has_rate else -math.inf,
            has_losses=self.has_losses,
            **progress.outlook(),
        )

    def _signed(self, blocks: Sequence[Block], gradients: Sequence[float], sign: float) -> tuple[Block, ...]:
        """The losses of a round with the sign in which lower is better; if none is ever given, the logarithms of the
        gradients' sizes."""
        if blocks and not self.has_losses:
            self.has_losses = True
            self.learned = self.learned._replace(history=LossHistory())  # gradients were judged until now
        if self.has_losses:
            return tuple([Block(sign * mean, steps) for mean, steps in blocks]) if sign else ()
        sizes = gradients if self.learned.phase is Phase.SEARCHING else ()
        return tuple(Block(math.log(size) if 0 < size < math.inf else math.nan, 1) for size in sizes if size != 0)

    def _schedule_share(self, before: Sequence[float], now: Sequence[float], *, climbs: bool) -> float:
        """The schedule over its highest value so far; 1 while it climbs, even if it falls from its first step on.

        A new group, whose peak is still 0, has fallen as far as the leading one.
        """
        lead, peaks = self.lead, self.peaks or [0.0] * len(now)
        fallen = (now[lead] / peaks[lead] if peaks[lead] else 1.0) or 1.0
        rows = zip(peaks, before, now, strict=True)
        self.peaks = [max(peak or value / fallen, then, value) for peak, then, value in rows]
        return 1.0 if climbs or not self.peaks[lead] else now[lead] / self.peaks[lead]

    def note(self, rule: Rule, decision: Decision, evidence: Evidence) -> None:
        """A round has ended with this decision."""
        before, after, end = self.learned, decision.state, evidence.end
        is_raised = after.peak_factor > before.peak_factor or after.phase is not before.phase
        self.quiet = 0 if is_raised else self.quiet + 1
        self.stopped_for = decision.why or self.stopped_for
        self.learned = after
        self.rolled_back += decision.rolled_back_to is not None
        self.progress = decision.progress(self.progress, evidence)
        self.has_peaked = self.has_peaked or end >= evidence.peak
        self.is_falling = evidence.schedule_share < rule.constants.fall_start
        is_over = end == rule.total_steps if rule.total_steps else self.has_peaked and self.quiet >= QUIET
        self.rests = self.is_bound or is_over
