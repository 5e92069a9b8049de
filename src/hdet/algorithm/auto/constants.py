"""Every number of the rule behind ``max_lr="auto"``: what it means, why it is what it is, and what tested it.

LOG is ``experiments/LOG.md``; its entries are named by their headings: *no gain* ("a longer first step, and half the
rate where nothing is gained"), *one reach* ("one reach from the first step to the end of the climb"), whose tables say
what the rule loses without each part, *follow* ("steps that do not follow the rate"), and *reach*, *one batch*,
*lengths* of earlier rules. Rules read these as
attributes of this module, so that an experiment can change one.
"""

from __future__ import annotations

import math

# -- rounds ------------------------------------------------------------------------------------------------------------

SHORT = 2
"""Steps of a round, at least (LOG, lengths); four were as good (LOG, one reach)."""
GROWING = 0.2
"""A round has this part of the steps made so far. 0.15 and 0.3 were as good (LOG, one reach)."""

# -- the first step ----------------------------------------------------------------------------------------------------

SHORTEST = 40
"""Runs of fewer steps keep to the guess: they would end before a rate is found (LOG, reach)."""
BEGIN = math.log(1e-3)
"""log of the factor on the guess at which the first step is taken (LOG, prototype)."""
RELATIVE_STEP = 2e-3
"""Then a step moves the weights by this part of their norm, whatever the guess was. 1e-3 and 3e-3 were as good; with
1e-4 a run of 100 steps is half gone before its rate is found (LOG, no gain) ..."""
RESOLVED = 0.5
"""... or by this many units in the last place of the weights' type, if that is more: less is lost in rounding."""
TOO_FAR = 1e-2
"""A first step that moved the weights by more than this part of their norm is undone (LOG, reach)."""
TRY_HIGHER = math.log(10.0)
"""A first step that moved nothing was lost in rounding: the next is longer by this, in log."""
TRY_LOWER = math.log(1e6)
"""A first step after which the weights are no numbers is undone, and tried again lower by this, in log."""
VISIBLE = 1e-2
"""If the weights moved by this part of their norm, and no probe loss has ever changed, the probe does not see them."""

# -- the search --------------------------------------------------------------------------------------------------------

HEED = 0.7
"""The target is raised to this part of the reach. 0.5 was as good, 0.35 and 1 a little worse (LOG, one reach)."""
STRAIGHT = 0.8
"""While the way is as straight as this, the target is raised whatever the reach: few steps cannot ask for much. Without
it runs of 100 steps end before they have found their rate (LOG, one reach)."""
FASTEST = 2.0
"""The most by which a round raises it. 1.5 is too slow for some, 3 too fast for others (LOG, one reach)."""
RISE = 0.7
"""Until the schedule's peak the rate is the target times this power of the part of the way: young weights suffer
lasting damage at a rate that does older ones good. 0.5 was as good; 0 and 1 were worse (LOG, one reach) ..."""
LEAST_RISE = 0.3
"""... but at least this part of the target: in a long run it would rise by far more, and nothing has asked for it. 0.03
and 0.1 were as good (LOG, one reach)."""
FALLING = 0.9
"""Nothing is raised any more once the schedule has fallen below this part of its peak (LOG, one reach)."""
IDLE = 2
"""After so many rounds in a row in which the gradients did not ask for more and the loss rose, the target is divided by
FASTEST: the rate was overdone. One and three were worse (LOG, no gain)."""
JUDGED = 16
"""A round of fewer steps says nothing about that: momentum carries weights further than their gradients ask. With 0 or
8, runs with momentum are slowed down for nothing (LOG, no gain)."""
HEARD = 8
"""Steps of a round whose gradients are listened to, at most, evenly spread: each look costs a few percent of a
step. 16 and all were as good (LOG, no gain)."""

# -- too hot -----------------------------------------------------------------------------------------------------------

WORSE, RUINED = 0.1, 0.25
"""Weights whose loss is above that of a round ago, on the same batch, by these parts of the first loss are perhaps and
certainly ruined (LOG, one batch)."""
TWICE = 2
"""How often in a row a doubtful sign counts."""
SLOWER = 3.0
"""What the rate is divided by where the weights are ruined (LOG, one batch)."""

# -- steps that do not follow the rate -------------------------------------------------------------------------------

WATCHED = 64
"""Along a way of so many steps it is asked whether they became longer as the rate was raised. Later, weights that are
where they belong come no further at any rate (LOG, follow) ..."""
RAISED = 20.0
"""... once it was raised by this. They did not where the weights have come less far, for their rates, than ..."""
LAGS = 0.75
"""... by this power of the raise ..."""
WANDERS = 3.0
"""... and by so many times the number of steps: steps that shrink as Adagrad's do come less far by that number on a way
to and fro. On the zoo, with 20 optimizers, it was 1.6 times that at most where the power was reached."""
