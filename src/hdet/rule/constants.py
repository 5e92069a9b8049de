"""The rule's numbers: what each means, why it has this value, and what tested it. Torch, jax and the twin import them.

LOG is ``lab/experiments/LOG.md``; its entries are named by their headings: *nothing gained yet*, *the balance of the
path*, *an estimate* and *nothing to hand over*, whose tables say what the rule loses with each number changed, and *no
gain*, *reach*, *lengths* of earlier rules. The *target* is the factor m times the schedule, S the number of steps of
the run, and "the loss has fallen" means :attr:`Progress.is_below <hdet.rule.progress.Progress.is_below>`.

:class:`Constants` has the numbers of the search, :class:`Limits` those of the judge of losses. Below them are numbers
that no experiment changes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Constants(NamedTuple):
    """The rule's numbers. An experiment may change one. A saved search has those that it began with."""

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
    """Once there is a ceiling, a round moves ``State.asked`` by this part of the way to what its estimate asks for, in
    the logarithm (LOG, an estimate)."""
    balance: float = 0.5
    """The balance of the path at the best rate of a run, at its beginning; it falls by the part of the run that is done
    (LOG, the balance of the path)."""
    straight_tolerance: float = 2.0
    """While the straightness of the path (1: no gradient has turned) is above 1 less q times this, the target is raised
    whatever the estimated rate is: few steps cannot give a high one (LOG, the first fifty steps)."""
    first_ask: float = 15.0
    """Where ``estimate_fraction`` q times the estimate first is not above the target, the rate in use times max(1, q
    times this) is what is asked for (LOG, nothing to hand over)."""

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


class Limits(NamedTuple):
    """What a round may lose before training has diverged. LOG, *nothing to hand over*, has what they cost."""

    lost: float = 0.3
    """A round has diverged only if it loses more than this part of the gain; while the schedule falls, more than all of
    it, since only an explosion may undo a trained model."""
    noise: float = 12.0
    """A rise counts only above this many deviations of a single step's noise: harder data may be ten above easy
    ones."""
    doubted: float = 3.0
    """How many, if the gradients, too, say that the path so far was wrong, and the noise is well known (LOG, a network
    that dies)."""
    leap: float = 0.0
    """The level must also rise by more than this many times the largest of its last :data:`CHANGES` changes, in either
    direction, which must all be known. 0: there is no such test."""
    as_bad: float = 0.5
    """After a rollback the data were at fault if the first losses exceed the earlier level by this part of the rise."""


LIMITS = Limits()
ROUNDS = LIMITS._replace(leap=2.0)
"""For rounds of a guard, which does not search for the rate."""
LOOKS = Limits(lost=0.0, noise=3.0, leap=2.0, as_bad=1 / 3)
"""For a guard's looks of a few steps each: a leap counts, whatever part of the gain it is (LOG, a guard that looks more
often)."""

# -- the search --------------------------------------------------------------------------------------------------------

LOWEST, HIGHEST = math.log(1e-15), math.log(1e15)
"""Bounds of log m."""
CLOSE = 1e-6
"""The difference of two logarithms that count as equal, also in fp32."""
AGAINST = -0.8
"""A balance of the path below which nearly all gradients have turned against it: nine tenths of all products are (LOG,
nothing gained yet)."""
QUIET = 3
"""Rounds without a raise after which a rate has settled in a run of unknown length, whose schedule does not fall. In
other runs, rates that had stayed as long were raised up to fifty times before the schedule fell (LOG, what a run
says)."""
FP32_ROUNDING = 2.0**-24
"""How much of a number rounding to fp32 may change, as a part of that number."""

# -- do steps follow the rate? -----------------------------------------------------------------------------------------

LAG_WINDOW = 64
"""The most steps n: later, weights near a minimum move no further at any rate."""
LAG_RAISE = 20.0
"""The least R: a smaller raise tells nothing."""
LAG_EXPONENT = 0.75
"""The exponent of R in the test; with 1, only steps that do not depend on the rate at all would fail it."""
LAG_WANDER = 3.0
"""On a path to and fro, steps that shrink as Adagrad's do move the weights less far by a factor n."""

# -- the losses of a round ---------------------------------------------------------------------------------------------

BLOCKS = 8
"""Blocks of a round, at most."""
FEWEST = BLOCKS // 2
"""Blocks that a level is made of, at least; if a round has fewer, blocks of earlier ones are added. It takes as many
steps to see an explosion: as many without a finite loss have diverged, and snapshots are as far apart."""
REMEMBERED = 6 * BLOCKS
"""Second differences that the noise is estimated from, at most."""
CHANGES = 12
"""Changes of the level that a leap is compared with. All must be known before one counts as divergence."""
UPPER_QUARTILE = 2.82
"""Of second differences a - 2 b + c of normal numbers, three quarters are below this many deviations of one of them."""
HALF = 0.6745
"""Half of all normal numbers are within this many deviations of their mean."""
FEW = 5.0
"""With n numbers the noise is multiplied by 1 + FEW / sqrt(n), since so few do not show how large it is."""

# -- has the loss fallen? ----------------------------------------------------------------------------------------------

SURE = 2.0
"""Deviations that a fall takes. Of losses that are noise alone one in eight looks as if it had fallen (LOG, what a run
says)."""
CLEAR = 4.0
"""Deviations that a fall takes if this is asked after every round, so that it is not seen by chance in one of them."""
FLAT = 2.0
"""The loss is flat beyond doubt if its fall, plus this many deviations, is still too small to count."""
LEAST = 0.02
"""A smaller part of the loss does not count: a network whose layers are dead gains as much, because its output learns
how frequent the classes are (LOG, what a run says)."""
FAR = 8.0
"""A fall of this many deviations of a single step counts however small a part it is: a loss may be counted from any
zero point."""
ROUNDED = 2.0**-22
"""The part of a loss that fp32 may lose in sums."""
RISEN = 3.0
"""If a round is above the first losses by this many deviations, no beginning includes it. If the latest losses are, the
loss has risen."""
LATEST = 0.25
"""The part of the steps whose losses are the latest."""

# -- the trapezoid of hdet.auto ----------------------------------------------------------------------------------------

RISE, HOLD = 0.3, 0.6
"""The parts of the run after which a trapezoid has risen, and after which it falls (LOG, an estimate)."""
DIV_FACTOR, FINAL_DIV_FACTOR = 25.0, 1e4
"""A run without a search begins at its peak over the first, and all end at that over the second: torch's defaults."""
CLIMB = 0.1
"""On a schedule of the user's, the search climbs for this part of the run at least (LOG, any schedule)."""


def all_numbers() -> dict[str, Any]:
    """Every number in this file by its name, of which a run that is resumed must have the same."""
    return {name: value for name, value in globals().items() if name.isupper()}
