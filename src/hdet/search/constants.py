"""The numbers of the rule behind ``max_lr="auto"``: what it means, why it is what it is, and what tested it.

LOG is ``lab/experiments/LOG.md``; its entries are named by their headings: *nothing to hand over*, whose table says
what the rule loses with each number changed, and *no gain*, *reach*, *lengths* of earlier rules. Those of the judge of
losses stand in :mod:`hdet.rollback.judge`.
"""

from __future__ import annotations

from typing import NamedTuple


class Constants(NamedTuple):
    """The rule's numbers. An experiment may change one."""

    # rounds
    min_round: int = 2
    """Steps of a round, at least (LOG, lengths)."""
    round_growth: float = 0.2
    """A round has this part of the steps made so far (LOG, nothing to hand over)."""
    max_samples: int = 8
    """Steps of a round whose gradients are sampled, at most, evenly spread: each costs a few percent of a step (LOG, no
    gain)."""

    # the first step
    min_steps: int = 40
    """Runs of fewer steps keep to the guess: they would end before a rate is found (LOG, reach). In a run without an
    end the rate is below the target until this step."""
    initial_factor: float = 1e-3
    """The factor on the guess at which the first step is taken. One that moves nothing is tried again at a rate higher
    by as much, one after which the weights are no numbers at a rate lower by as much (LOG, reach)."""
    relative_step: float = 5e-3
    """The second step moves the weights by this part of their norm, whatever the guess was (LOG, nothing to hand over).
    It is more than half a unit in the last place of bf16, so it is not lost in rounding. A first step that was longer
    by ``max_growth`` is undone; so is one of which more than this part may be rounding (LOG, the first fifty steps)."""

    # the length of the run
    length_exponent: float = 1 / 3
    """A run n times as long wants a rate lower by n to this power: q = S^-shrink, 0.1 for 1000 steps (LOG, nothing to
    hand over; the same power was found for language models)."""
    assumed_length: float = 30.0
    """A run without an end is taken for one of so many times the steps so far (LOG, runs without an end)."""
    estimate_fraction: float = 2.5
    """The target is raised to q times this, times the reach (LOG, nothing to hand over)."""
    straight_tolerance: float = 2.0
    """While the way has turned by less than q times this, the target is raised whatever the reach: few steps cannot ask
    for much (LOG, the first fifty steps)."""
    ceiling: float = 15.0
    """Once gradients ask for nothing more, the rate rises by at most max(1, q times this) (LOG, nothing to hand
    over)."""

    # the search
    max_growth: float = 2.0
    """The most by which a round raises the target, but where a roll back is taken back (LOG, nothing to hand over). As
    long as the loss has not fallen, in ``min_round`` steps: there is nothing to ruin yet."""
    max_climb: float = 7.5
    """Once the loss has fallen, the target is raised by at most so many e-folds in as many steps as the schedule rises:
    what does damage is a steep climb (LOG, the first fifty steps)."""
    min_rise: float = 0.3
    """Until the schedule's peak the rate is below the target, by this factor at first: young weights suffer lasting
    damage at a rate that does older ones good (LOG, nothing to hand over)."""
    fall_start: float = 0.9
    """Nothing is raised any more once the schedule has fallen below this part of its peak (LOG, one reach)."""
    backoff: float = 3.0
    """What the rate is divided by where the weights are ruined (LOG, nothing to hand over). No round raises it by
    more."""

    # steps that do not follow the rate: with the mean rate since the first step raised by R >= raised, and n <= watched
    # steps made, the weights have come less far for the sum of rates, by max(R^lags, wanders * n) or more (LOG, follow)
    lag_window: int = 64
    """Later, weights that are where they belong come no further at any rate."""
    lag_min_raise: float = 20.0
    """A smaller raise tells nothing."""
    lag_exponent: float = 0.75
    """1 would be steps that do not depend on the rate at all."""
    lag_wander: float = 3.0
    """Steps that shrink as Adagrad's do come less far by n on a way to and fro."""


DEFAULT = Constants()
