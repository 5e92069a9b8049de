"""The rule's numbers: what each means, why it has this value, and what tested it.

The rule is the one behind :func:`hdet.auto` (:mod:`hdet.search.rule`).

LOG is ``lab/experiments/LOG.md``; its entries are named by their headings: *nothing gained yet*, *the balance of the
path*, *an estimate* and *nothing to hand over*, whose tables say what the rule loses with each number changed, and *no
gain*, *reach*, *lengths* of earlier rules. The numbers of three judges are elsewhere: has training diverged?
:mod:`hdet.rollback.judge`; has the loss fallen at all? :mod:`hdet.search.progress`; do steps follow the rate?
:mod:`hdet.search.lag`. The *target* is the factor m times the schedule, S the number of steps of the run, and "the loss
has fallen" means :attr:`Progress.is_below <hdet.search.progress.Progress.is_below>`.
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
    gain). A path of no more steps says nothing by its balance (LOG, nothing gained yet)."""

    # the first step
    min_steps: int = 40
    """Runs of fewer steps use the given rate: they would end before a rate is found (LOG, reach). In a run of unknown
    length the rate is below the target until this step. So many steps of a path show how long a step is."""
    initial_factor: float = 1e-3
    """The factor on the guess at which the first step is taken. If it moves nothing, it is made again at a rate higher
    by as much; if weights are NaN or infinite after it, at a rate lower by as much (LOG, reach)."""
    relative_step: float = 5e-3
    """The second step moves the weights by this part of their norm, whatever the guess was (LOG, nothing to hand over).
    It is more than half a unit in the last place of bf16, so it is not lost in rounding. A first step that was longer
    by ``max_growth`` is undone, and so is one of which more than this part may be rounding (LOG, the first fifty
    steps)."""

    # the length of the run
    length_exponent: float = 1 / 3
    """A run n times as long needs a rate lower by n to this power: q = S^-length_exponent, 0.1 for S = 1000 steps (LOG,
    nothing to hand over; the same power was found for language models)."""
    assumed_length: float = 30.0
    """A run of unknown length is taken for one of this many times the steps so far (LOG, runs without an end)."""
    estimate_fraction: float = 2.0
    """The target is raised to q times this, times the estimated rate, and further only while the path is straight (LOG,
    nothing to hand over)."""
    estimate_weight: float = 0.15
    """Once gradients have turned against the path, a round moves the target by this part of the way to what its
    estimate asks for, in the logarithm (LOG, an estimate)."""
    balance: float = 0.5
    """The balance of the path at the best rate of a run, at its beginning; it falls by the part of the run that is done
    (LOG, the balance of the path)."""
    straight_tolerance: float = 2.0
    """While the straightness of the path (1: no gradient has turned) is above 1 less q times this, the target is raised
    whatever the estimated rate is: few steps cannot give a high one (LOG, the first fifty steps)."""
    ceiling: float = 15.0
    """Where gradients first turn against the path, the rate in use times max(1, q times this) is what is asked for
    (LOG, nothing to hand over)."""

    # the prior: how long a step is at the best rate, as far as other problems tell
    prior_distance: float = 5.0
    """The norm of a step at the best rate of a run of S steps, times S to the power of ``length_exponent``: the
    geometric mean over all problems and optimizers that the rule was tuned on was 8, over small ones 5 (LOG, an
    estimate; the balance of the path)."""
    prior_weight: float = 0.4
    """The part of the way from what the evidence asks for to the prior, in the logarithm; not further than by
    ``backoff`` (LOG, an estimate)."""

    # the search
    max_growth: float = 2.0
    """The most by which a round raises the target, unless a rollback is undone (LOG, nothing to hand over). Until the
    loss has fallen, the most in ``min_round`` steps: there is nothing to lose yet. A balance that is lower by 1 lowers
    the target by as much (LOG, the balance of the path)."""
    max_climb: float = 7.5
    """Once the loss has fallen, the logarithm of the target is raised by at most this in as many steps as the schedule
    rises: a steep climb does damage (LOG, the first fifty steps)."""
    min_rise: float = 0.3
    """Until the schedule's peak the rate is below the target, by this factor at first: a rate that is good later does
    lasting damage early (LOG, nothing to hand over)."""
    fall_start: float = 0.9
    """Nothing is raised any more once the schedule has fallen below this part of its peak (LOG, one reach)."""
    backoff: float = 3.0
    """What the rate is divided by if training has diverged (LOG, nothing to hand over). Until the loss has fallen, no
    round raises the target by more."""


DEFAULT = Constants()
