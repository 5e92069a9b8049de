"""The rule behind ``max_lr="auto"``: what follows from what a round has shown. Pure.

One idea: the rate begins very low and is raised as long as the gradients of all steps so far, together, ask for more
(:class:`Sums`). Once it is right, steps go to and fro, gradients cancel, and nothing asks any more. The rest
is for the edges: a first step whose length nobody knows, and weights that were ruined (:mod:`hdet.rollback.judge`).

:class:`hdet.search.search.Search` carries the decisions out on one model, the experiments on a stack of them: both
follow the same rule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from hdet.events import Event, Reason
from hdet.rollback.judge import FEWEST, LIMITS, Block, Limits, LossHistory, Verdict, judge
from hdet.rollback.policy import Action, Snapshot, is_due, present, with_another
from hdet.search.constants import DEFAULT, Constants
from hdet.search.progress import Progress

FINE = 2.0**-24
"""The rounding of fp32, over the number that is rounded."""
LOWEST, HIGHEST = math.log(1e-15), math.log(1e15)
"""Bounds of log m."""


class Phase(IntEnum):
    """Where the search stands."""

    FIRST = 0
    """Before a first step whose length is known."""
    SEARCHING = 1
    """The rate is raised as long as the gradients ask for more."""
    STOPPED = 2
    """Nothing is searched: the given rate is used, on the schedule as it is."""


class State(NamedTuple):
    """Everything that a search has learned; plain numbers."""

    phase: Phase = Phase.FIRST
    level: float = math.log(DEFAULT.initial_factor)
    """log of m, the factor on the user's guess: the target is m times the schedule."""
    peak: float = 0.0
    """The step at which the schedule's rising phase ends: until there the rate is below the target."""
    ceiling: float = math.inf
    """log of what the rate over the guess may rise to, since the gradients ask for nothing more."""
    history: LossHistory = LossHistory()
    """What is remembered of the losses."""
    snapshots: tuple[Snapshot, ...] = ()
    """The ends of good rounds, the last two at most."""
    slowed_from: float = math.nan
    """The level before training was rolled back, in case that was wrong."""
    pace: float = math.nan
    """How far the first step that was measured moved the weights, over its rate; NaN after a roll back ..."""
    rate: float = math.nan
    """... and that rate."""
    excused: bool = False
    """Whether weights that were not finite were put back at the same rate: the next time it pays."""

    @property
    def peak_factor(self) -> float:
        """The factor on the guess that has been found: that of the schedule's peak."""
        return math.exp(min(self.level, self.ceiling))

    def factor(self, t: float, constants: Constants = DEFAULT) -> float:
        """The factor on the guess and the schedule at step ``t``: m r(t), and below the ceiling.

        r(t) = max(0.3, (t + 1) / (peak + 1)) until the peak, then 1.

        >>> state = State(Phase.SEARCHING, level=0.0, peak=99.0)
        >>> state.factor(9), state.factor(49), state.factor(99), state._replace(ceiling=math.log(0.7)).factor(99)
        (0.3, 0.5, 1.0, 0.7)
        """
        return min(math.exp(self.level) * self.rise(t, constants), math.exp(min(self.ceiling, HIGHEST)))

    def rise(self, t: float, constants: Constants = DEFAULT) -> float:
        """r(t)."""
        rises = self.phase is Phase.SEARCHING and t < self.peak
        return max(constants.min_rise, (t + 1) / (self.peak + 1)) if rises else 1.0

    def peaking(self, peak: float, share: float = 1.0) -> State:
        """The state on a schedule that has another peak; ``share``: how much of the level is left of it.

        >>> State(Phase.SEARCHING, level=0.0, peak=99.0).peaking(49, share=0.5).factor(50)
        0.5
        """
        left = math.log(share) if share > 0 else -math.inf
        return self._replace(peak=peak, level=max(self.level + left, LOWEST), slowed_from=self.slowed_from + left)

    def at(self, level: float) -> State:
        """The state at another level, within bounds; a ceiling goes down with it."""
        level = min(max(level, LOWEST), HIGHEST)
        return self._replace(level=level, ceiling=self.ceiling + min(level - self.level, 0.0))


class Evidence(NamedTuple):
    """What is known when a round ends; equal on all ranks."""

    span: tuple[int, int]
    """The last step of the schedule in the round, and the one after it."""
    steps: int
    """How many steps the optimizer made."""
    blocks: tuple[Block, ...] = ()
    """The losses of the round; none: none were given."""
    peak: float = 0.0
    """The step at which the schedule's rising phase ends."""
    shape: float = 1.0
    """The schedule at the round's end, over its highest value."""
    moved: float = math.nan
    """How far the weights have come since the search began, over their norm; infinite: they are no numbers."""
    estimated_level: float = -math.inf
    """log m of the rate that the gradients ask for; -inf where they say nothing."""
    straightness: float = 0.0
    """Of the way since the search began; 1: no gradient has turned yet."""
    gradients: tuple[float, ...] = ()
    """The largest number of each gradient that was sampled in the round."""
    rates: float = 0.0
    """The sum of the rates of all steps since the way began ..."""
    stretch: int = 0
    """... and how many these were."""
    made: int = 0
    """Steps that the optimizer has made in all; 0: as many as the schedule."""
    has_losses: bool = True
    """Whether ``blocks`` are losses; if not, sizes of gradients stand in their place."""
    has_fallen: bool = True
    """Whether the loss is below where it began, beyond its noise; also where nothing is known of it."""
    lost: tuple[float, float] | None = None
    """Where the loss began and where it is, if it is above that, or had fallen and is back there."""
    rounding: float = FINE
    """What rounding may move a weight by, over the weight: half a unit in its last place."""
    highest: float = math.inf
    """log of the largest m that the user allows."""

    @property
    def steps_per_call(self) -> float:
        """Of the optimizer, for each step of the schedule: Accelerate steps that once for each process.

        >>> Evidence(span=(40, 41), steps=4, made=21).steps_per_call
        0.5
        """
        calls = self.span[1] - 1  # the call that is being made may be the first one after a step
        return (self.made - 1) / calls if self.made > 1 and calls > 0 else 1.0

    @property
    def has_estimate(self) -> bool:
        """Whether the reach says anything: gradients were sampled, on a way of more than a single step.

        Without gradients the sum of rates has grown all the same, and with it the reach.
        """
        return self.gradient != 0 and self.stretch != 1

    @property
    def gradient(self) -> float:
        """The largest number of the round's gradients; 0: there were none. NaN is not hidden."""
        return largest_size(self.gradients)


def largest_size(sizes: Sequence[float]) -> float:
    """The largest of some sizes, without hiding NaN; 0 if there are none."""
    return max(sizes, key=lambda size: math.inf if math.isnan(size) else size, default=0.0)


class Decision(NamedTuple):
    """What follows from a round."""

    state: State
    action: Action = Action.NOTHING
    slot: int | None = None
    event: Event | None = None
    """What happened; None: nothing special."""
    rolled_back_to: int | None = None
    """The step whose weights training goes on from."""
    why: Reason | None = None
    """Why the search stops, if it does."""
    resets_path: bool = False
    """Whether the way that the reach is measured along begins anew."""
    is_harder: bool = False
    """Whether the data have become harder: earlier losses are no measure any more."""

    def progress(self, before: Progress, after: Progress, evidence: Evidence) -> Progress:
        """What is remembered of the losses: those of ruined weights are no progress.

        ``before``, ``after``: without the losses of the round, and with them.
        """
        if self.rolled_back_to is not None:
            return before.rolled_back(self.rolled_back_to)
        return Progress().after(evidence.blocks, evidence.span[1]) if self.is_harder else after


@dataclass(frozen=True)
class Rule:
    """The rule of one run.

    Args:
        total_steps: S, the run's length in steps of the schedule; None: nobody knows, and it is taken for 30 times the
            steps so far.
        searches: whether the rate is searched at all.
        constants, limits: the numbers; other ones in experiments.
    """

    total_steps: int | None
    searches: bool = True
    constants: Constants = DEFAULT
    limits: Limits = LIMITS

    @property
    def long_enough(self) -> bool:
        return self.total_steps is None or self.total_steps >= self.constants.min_steps

    def begin(self) -> State:
        """Before the first step."""
        return (
            State(level=math.log(self.constants.initial_factor))
            if self.searches and self.long_enough
            else self.stopped()
        )

    def stopped(self) -> State:
        """At the given rate, without a search."""
        return State(Phase.STOPPED, level=0.0)

    def remembering(self, state: State, slots: Container[int]) -> State:
        """The state where only the snapshots in some slots exist: a checkpoint may have none."""
        return state._replace(snapshots=present(state.snapshots, slots))

    def after_round(self, state: State, evidence: Evidence) -> Decision:
        """One round."""
        late = evidence.span[1] > max(evidence.peak, self.constants.min_steps)
        if state.phase is Phase.FIRST and late:
            return self._stop(Reason.NO_GRADIENT if evidence.moved > 0 else Reason.NEVER_MOVED)
        if state.phase is Phase.STOPPED or evidence.steps == 0:
            return Decision(state)  # no step: skipped, or gradients are still being accumulated
        if state.phase is Phase.FIRST:
            return self._after_first_step(state, evidence)
        if self._lags(state, evidence):
            return self._stop(Reason.RATE_IGNORED)
        falling = evidence.shape < self.constants.fall_start
        doubted = evidence.has_losses and evidence.has_estimate and evidence.estimated_level == -math.inf
        history, verdict = judge(state.history, evidence.blocks, falling=falling, doubted=doubted, limits=self.limits)
        if not math.isfinite(evidence.moved) and self._is_bad_batch(state, evidence, falling):
            return self._excused(state)
        state = state._replace(history=history)
        lost = evidence.lost if self.limits.noise < math.inf and not falling else None
        if verdict is Verdict.FINE and lost is not None and state.snapshots:
            verdict, state = Verdict.DIVERGED, state._replace(history=history.suspecting(lost[1], good=lost[0]))
        if verdict is Verdict.DIVERGED or not math.isfinite(evidence.moved):
            return self._diverged(state)
        event, is_harder = None, verdict is Verdict.FALSE_ALARM
        if is_harder and math.isfinite(state.slowed_from):
            state = state._replace(ceiling=state.ceiling + state.slowed_from - state.level).at(state.slowed_from)
            event = Event.FALSE_ALARM
        if evidence.blocks:  # a round without losses says nothing about the one before it
            state = state._replace(slowed_from=math.nan, excused=state.excused and not falling)
        if not falling:
            state = self._steered(state, evidence)
        if state.snapshots and self._is_fresh(state, evidence) and not falling:
            return Decision(state, event=event, is_harder=is_harder)  # nothing was gained that these weights have
        return self._keeping(Decision(state, event=event, is_harder=is_harder), evidence.span[1])

    def _after_first_step(self, state: State, evidence: Evidence) -> Decision:
        """The first step tells how far a step moves the weights: from then on the guess does not matter."""
        c, moved, event = self.constants, evidence.moved, Event.FIRST_STEP
        if evidence.gradient == 0 or not (moved > 0 or math.isfinite(evidence.gradient)):
            return Decision(state, resets_path=True)  # without gradients, or skipped because of them: it says nothing
        if not moved > 0:  # all of it is lost in rounding
            return Decision(state.at(state.level - math.log(c.initial_factor)), event=event, resets_path=True)
        if math.isinf(moved):
            return Decision(
                state.at(state.level + math.log(c.initial_factor)),
                Action.RESTART,
                event=Event.RESTARTED,
                resets_path=True,
            )
        longer = state.at(
            min(state.level + math.log(min(c.relative_step / moved, 1 / c.initial_factor)), evidence.highest)
        )
        least = min(max(evidence.rounding, FINE) / c.relative_step, c.relative_step / c.max_growth)
        if moved < least and longer.level > state.level:  # much of it is lost in rounding
            return Decision(longer, Action.RESTART, event=event, resets_path=True)
        found = state._replace(phase=Phase.SEARCHING, level=0.0, peak=evidence.peak)
        if evidence.rates > 0:
            found = found._replace(pace=moved / evidence.rates, rate=evidence.rates / evidence.stretch)
        rise = found.rise(evidence.span[1], c)
        found = found.at(state.level + math.log(c.relative_step) - math.log(moved) - math.log(rise))
        if moved >= c.relative_step * c.max_growth:
            return Decision(found, Action.RESTART, event=Event.RESTARTED, resets_path=True)
        return self._keeping(Decision(found, event=event, resets_path=True), evidence.span[1])

    def _lags(self, state: State, evidence: Evidence) -> bool:
        """Whether the rate was raised and the steps have not become longer: part of them has a rate of its own."""
        c = self.constants
        if not (1 < evidence.stretch <= c.lag_window and evidence.rates > 0 and evidence.moved > 0):
            return False  # steps may have the rate of the one before, as ASGD's have: one alone says nothing
        raised = evidence.rates / evidence.stretch / state.rate
        shorter = state.pace * evidence.rates / evidence.moved
        return raised >= c.lag_min_raise and shorter >= max(raised**c.lag_exponent, c.lag_wander * evidence.stretch)

    def _is_bad_batch(self, state: State, evidence: Evidence, falling: bool) -> bool:
        """Whether weights that are not finite are a batch's fault: for the first time, after losses that were fine."""
        known = [block for block in evidence.blocks if math.isfinite(block.mean)]
        verdict = judge(state.history, known, falling=falling, limits=self.limits)[1]
        can = state.snapshots and math.isnan(state.slowed_from) and not state.excused
        return bool(can) and evidence.has_losses and verdict is Verdict.FINE and evidence.lost is None

    def _excused(self, state: State) -> Decision:
        """Back to the last snapshot, at the same rate. The older one stays: the last may be about to explode."""
        back = state.snapshots[-1]
        state = state._replace(excused=True, pace=math.nan)
        return Decision(state, Action.ROLL_BACK, back.slot, Event.BAD_BATCH, rolled_back_to=back.step, resets_path=True)

    def _diverged(self, state: State) -> Decision:
        """Back to the older of the two snapshots, at a third of the rate."""
        slowed = state.at(state.level - math.log(self.constants.backoff))._replace(pace=math.nan, excused=False)
        if not state.snapshots:
            slowed = slowed._replace(history=state.history.cleared())  # these weights stay
            return Decision(slowed, Action.GO_ON, event=Event.SLOWED_DOWN, resets_path=True)
        back = state.snapshots[0]  # the last one may already be damaged
        slowed = slowed._replace(snapshots=(back,), slowed_from=state.level)
        return Decision(
            slowed, Action.ROLL_BACK, back.slot, Event.ROLLED_BACK, rolled_back_to=back.step, resets_path=True
        )

    def _steered(self, state: State, evidence: Evidence) -> State:
        """Raise the target as far as the gradients ask for it; where they do not, the rate has little left to rise."""
        is_settled = state.excused and math.isfinite(state.ceiling)  # a way that has just begun is always straight
        if is_settled or not evidence.has_estimate:
            return state
        c, end = self.constants, evidence.span[1]
        length = (self.total_steps or c.assumed_length * end) * evidence.steps_per_call
        q, most = length**-c.length_exponent, self._largest_raise(state, evidence)
        straight = evidence.straightness >= 1 - q * c.straight_tolerance
        numerator = most if straight else evidence.estimated_level + math.log(q * c.estimate_fraction) - state.level
        if numerator > 0:
            capped = min(state.ceiling - math.log(state.rise(end, c)), state.level)  # on from the rate as it is
            return state._replace(ceiling=math.inf).at(capped + min(numerator, most))
        if math.isfinite(state.ceiling):
            return state
        return state._replace(ceiling=math.log(state.factor(end, c) * max(q * c.ceiling, 1.0)))

    @staticmethod
    def _is_fresh(state: State, evidence: Evidence) -> bool:
        """Whether nothing has been gained yet, and nothing lost."""
        return not evidence.has_fallen and math.isfinite(state.pace)

    def _largest_raise(self, state: State, evidence: Evidence) -> float:
        """log of the most by which a round raises the target."""
        c = self.constants
        if self._is_fresh(state, evidence):
            return min(math.log(c.max_growth) * evidence.steps / c.min_round, math.log(c.backoff))
        rise = (evidence.peak + 1) * evidence.steps_per_call
        return min(c.max_climb * evidence.steps / max(rise, 1.0), math.log(c.max_growth))

    def _stop(self, why: Reason) -> Decision:
        return Decision(self.stopped(), event=Event.STOPPED, why=why)

    @staticmethod
    def _keeping(decision: Decision, step: int) -> Decision:
        """The decision, and remember the weights as they are, in a slot that the last snapshot does not need.

        Rounds are short at first, and an explosion takes some steps to be seen: snapshots are as far apart.
        """
        if not is_due(decision.state.snapshots, step, FEWEST):
            return decision
        kept = with_another(decision.state.snapshots, step)
        return decision._replace(state=decision.state._replace(snapshots=kept), action=Action.KEEP, slot=kept[-1].slot)


# -- how long weights are -------------------------------------------------------------------------------------------


def typical_norm(sizes: Sequence[int], norms: Sequence[float], moves: Sequence[float]) -> float:
    """The norm of weights of which no minority decides.

    Over the tensors that a step has moved; the numbers of one count for no more than those of the middle one, by how
    many numbers they have. A large output bias does not make steps look short then, nor a table that is not used.

    Args:
        sizes: how many numbers each tensor has.
        norms: how long it was.
        moves: how far it has moved.

    >>> typical_norm([4, 1, 9], norms=[2.0, 1e4, 30.0], moves=[0.1, 0.1, 0.0])
    2.23606797749979
    """
    moved = [(norm / math.sqrt(n), n) for n, norm, move in zip(sizes, norms, moves, strict=True) if n and move > 0]
    half = sum(n for each, n in moved if each > 0) / 2
    middle, counted = 0.0, 0
    for each, n in sorted(moved):
        if each > 0 and counted < half:
            middle, counted = each, counted + n
    return math.sqrt(math.fsum(n * min(each, middle) ** 2 for each, n in moved))


# -- rounds: they grow with the run ------------------------------------------------------------------------------------


def next_end(t: int, constants: Constants = DEFAULT) -> int:
    """The first end of a round after ``t`` steps. The first round is one step; one that begins at t has max(2, 0.2 t).

    >>> ends = [1]
    >>> while ends[-1] < 100:
    ...     ends.append(next_end(ends[-1]))
    >>> ends
    [1, 3, 5, 7, 9, 11, 13, 15, 18, 21, 25, 30, 36, 43, 51, 61, 73, 87, 104]
    """
    ends = _ends(1 << int(max(t, 1)).bit_length(), constants)
    return ends[bisect_right(ends, t)]


def is_sampled(step: int, length: int, constants: Constants = DEFAULT) -> bool:
    """Whether the gradient of step ``step`` of a round of so many, counted from 0, is sampled: 8 at most.

    >>> [step for step in range(40) if is_sampled(step, 40)]
    [0, 5, 10, 15, 20, 25, 30, 35]
    """
    return step % max(1, math.ceil(length / constants.max_samples)) == 0


@lru_cache(maxsize=64)
def _ends(beyond: int, constants: Constants) -> tuple[int, ...]:
    ends = [1]
    while ends[-1] <= beyond:
        ends.append(ends[-1] + max(constants.min_round, int(constants.round_growth * ends[-1])))
    return tuple(ends)


# -- the reach: what the gradients ask for -----------------------------------------------------------------------------


class Sums(NamedTuple):
    r"""Sums over the steps so far, from which the reach follows: the rate that the gradients ask for.

    Train from :math:`x_0` by steps :math:`x_{k+1} = x_k - \eta_k u_k` with gradients :math:`g_k`; the update
    :math:`u_k` is whatever the optimizer makes of them. With weights :math:`w_k`, which grow as :math:`\eta_k^2` while
    the rate rises and stay where it falls, so that the small first steps count little,

    .. math:: \hat\eta = \frac{\sum_k w_k \langle g_k, x_0 - x_k \rangle}{\langle s, \bar u \rangle},
        \quad s = \sum_k w_k g_k, \quad \bar u = \frac{x_0 - x_n}{\sum_k \eta_k}.

    The numerator is the descent that gradients still ask for along the path so far; the denominator is what the mean
    update gains per unit of the rate. While gradients agree, the estimate stays ahead of the
    rate and grows with it; once training goes to and fro they cancel, and it stops.

    In a long round only some gradients are sampled: the sums over :math:`k` are over these, the sums of rates over all
    steps.

    If all gradients were equal, the estimate would be the mean over the steps, by the same weights, of the sum of rates
    before each: :math:`\hat\eta_1 = \sum_k w_k \sum_{j<k} \eta_j / \sum_k w_k`. The ratio :math:`\kappa = \hat\eta /
    \hat\eta_1` says how straight the way was: 1 as long as nothing has turned yet.

    For :math:`u = g` this is the distance estimate of D-Adaptation over the gradient's norm, and for updates by the
    sign it is Prodigy's; written with the displacement it needs no knowledge of the optimizer.

    The unit of the sums is the weight of the last step that was sampled.
    """

    numerator: float
    """Sum of w <g, x_0 - x>."""
    denominator: float
    """<s, x_0 - x_n>."""
    rates: float
    """Sum of the rates."""
    straight: float = 0.0
    """The estimate that equal gradients would give."""


def estimate(sums: Sums) -> float:
    """The rate; 0 where the sums say nothing.

    Three equal steps of rate 1 along a constant gradient, :math:`x_0 - x_k = 0, 1, 2` and then 3.

    >>> estimate(Sums(numerator=0.0 + 1.0 + 2.0, denominator=3 * 3.0, rates=3.0))
    1.0
    """
    if not (sums.numerator > 0 and sums.denominator > 0):
        return 0.0
    return sums.numerator * sums.rates / sums.denominator


def straightness(sums: Sums) -> float:
    """kappa: 1 along a straight way, 0 where the sums say nothing.

    >>> straightness(Sums(numerator=0.0 + 1.0 + 2.0, denominator=3 * 3.0, rates=3.0, straight=(0.0 + 1.0 + 2.0) / 3))
    1.0
    """
    return estimate(sums) / sums.straight if sums.straight > 0 else 0.0


def weight_ratio(before: float, now: float) -> float:
    """What earlier sums count for when the rate goes from ``before`` to ``now``: at most as much as until then."""
    return min((before / now) ** 2, 1.0) if now > 0 else 1.0
