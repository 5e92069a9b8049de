"""Every number of the rule behind ``max_lr="auto"``: what it means, why it is what it is, and what tested it.

LOG is ``experiments/LOG.md``; its entries are named by their headings: *prototype* (the first table of the method),
*wide fan* (the range test), *reach* ("the range test does not generalise; the reach does"), *one batch* ("one batch
decides"), *lengths* ("landing does not depend on the length by chance"). Rules read these as attributes of this
module, so that an experiment can change one.
"""

from __future__ import annotations

import math

# -- the points of a round ---------------------------------------------------------------------------------------------

POINTS = 8
"""Points of a round. Three did as well on digits; eight share out well over ranks (LOG, prototype)."""
SPREAD = 0.3
"""a: after landing, points stand at 1 - a to 1 + a times the round's displacement (LOG, prototype)."""
APART_EVERY = 3
"""In one round of so many the knobs stand apart, in the others together: the common rate matters most (LOG, reach)."""
SNAPSHOTS = 8
"""Snapshots in the mean of a round. 32 were no better and cost four times as much (LOG, reach)."""
FAN_OCTAVES = 10.5
"""The wide fan of take-off reaches 2 to this power, 1448 times the displacement (LOG, wide fan)."""

# -- rounds ------------------------------------------------------------------------------------------------------------

SHORT = 2
"""Steps of a round of take-off, however long the run is: landing must not depend on that by chance (LOG, lengths)."""
GROWING = 0.2
"""After landing a round has this part of the steps made so far. 0.15 was as good and cost more (LOG, one batch)."""
GROWING_LEAST = 8
"""... but at least so many steps (LOG, prototype)."""

# -- the first step ----------------------------------------------------------------------------------------------------

SHORTEST = 40
"""Runs of fewer steps do not take off: they would end before it does (LOG, reach)."""
BEGIN = math.log(1e-3)
"""log of the factor on the guess at which the first step is taken (LOG, prototype)."""
RELATIVE_STEP = 1e-4
"""Then a step moves the weights by this part of their norm, whatever the guess was (LOG, wide fan) ..."""
RESOLVED = 0.5
"""... or by this many units in the last place of the weights' type, if that is more: less is lost in rounding."""
TOO_FAR = 1e-2
"""A first step that moved the weights by more than this part of their norm is undone (LOG, reach)."""
TRY_HIGHER = math.log(10.0)
"""A first step that moved nothing was lost in rounding: the next is longer by this, in log."""
TRY_LOWER = math.log(1e6)
"""A first step after which the weights are no numbers is undone, and tried again lower by this, in log."""

# -- take-off ----------------------------------------------------------------------------------------------------------

FASTEST = 8.0
"""The most that the rate grows in a round (LOG, reach)."""
SLACK = 1.15
"""Growth by less than this factor counts as none (LOG, reach)."""
UNSEEN = 0.01
"""Until the loss has left the first one by this part of it, nothing has happened yet: the fan is heard (LOG, one batch)
..."""
LEAST = 2.0
"""... and the rate grows by at least this much in a round (LOG, reach)."""
NEAR = 3.0
"""A best point of the fan up to this multiple is near: so near, the reach decides (LOG, reach)."""
BY_FAN = 1 / 3
"""Beyond, the rate grows by this power of the best multiple: the best on a line is too far for a path (LOG, reach)."""
QUIET = 24
"""It has landed after so many steps without growth. Eight, then 16 were too few in short runs (LOG, lengths)."""
LONGEST = 120
"""Rounds after which it lands wherever it is (LOG, reach)."""
LATE = 0.3
"""It lands at this part of the run, wherever it is: there the schedule's rise would end (LOG, reach) ..."""
LATE_STEPS, LATE_SHORT = 40, 0.6
"""... but a short run has so many steps, or this part of it (LOG, reach)."""
UNDONE = 0.5
"""Where this part of what was gained is lost again when it lands, it lands at the level of the lowest loss (LOG, one
batch)."""

# -- a take-off that fails ---------------------------------------------------------------------------------------------

RISE = 1.0
"""A loss that stands this many times its first value above the first one is bad, twice in a row (LOG, wide fan) ..."""
RISE_AT_ONCE = 5.0
"""... and so many times as much at once (LOG, wide fan)."""
TWICE = 2
"""How often in a row a doubtful sign counts."""
BACK = math.log(4.0)
"""log of what the rate is divided by where a bad loss ends it (LOG, wide fan)."""
GAINED, FALL = 0.25, 0.5
"""A loss that was the first part of the first one below it, and then stands the second part above its lowest, twice
in a row, ends it with the weights and at the level of the lowest (LOG, one batch)."""
VISIBLE = 1e-3
"""If the weights moved by this part of their norm, points up to 1448 times as far must differ in their loss."""

# -- landing and the climb ---------------------------------------------------------------------------------------------

CEILING = math.log(0.25)
"""The weights gone back to were trained at most at this part of the found rate, in log (LOG, reach)."""
WORTH = 0.1
"""Going back at landing may cost this part of the run; where it would cost more, training goes on (LOG, reach)."""
CLIMB = 0.1
"""The climb takes at least this part of the run (LOG, reach)."""
CLIMB_FROM = 1 / 25
"""Where the guess itself is the rate, it is climbed to from this part, as torch's OneCycleLR does."""
MOMENTS = 4
"""Moments that are remembered in take-off; two afterwards (LOG, one batch)."""
ROUNDING = 1e-9
"""Levels closer than this are equal. A rate that doubles twice is four times as high: what it goes back to must not
depend on the last digit (found by the slow twin)."""

# -- after landing -----------------------------------------------------------------------------------------------------

FALLING = 0.8
"""Nothing moves once the schedule has fallen below this part of its peak: then "more" always looks better (LOG,
reach)."""
DOUBT = 3.0
"""A loss this many times the largest of a good round raises a doubt; so does half of the gain (LOG, one batch)."""
HALF = 0.5
"""The half in "half of the gain"."""
RUINED_PERHAPS, RUINED = 0.1, 0.25
"""On doubt, the weights are ruined, perhaps and certainly, where earlier ones have a loss on the same batch that is
lower by these parts of the first loss, or of their own if that is larger (LOG, one batch)."""
RUINED_ALONE = 10.0
"""Where no earlier weights are kept: ruined for certain at this many times the largest loss of a good round."""
SLOWER = 3.0
"""What the rate is divided by where the weights are ruined (LOG, one batch)."""
WORTH_KEEPING = 2.0
"""Weights whose loss is beyond this many times the first one are not kept."""

# -- the line search ---------------------------------------------------------------------------------------------------

STEP = 0.3
"""Length of a move, in log. 0.5 was worse (LOG, one batch)."""
UP, DOWN = 1.3, 0.5
"""Where the minimum on the line must lie for a move up, and down (LOG, reach)."""
PATIENCE = 2
"""Rounds in a row for a move up; one more for a move down (LOG, reach)."""
NO_MOVE = 1e-9
"""Moves that add up to less than this, in log, are rounding."""
ENOUGH_POINTS = 5
"""With fewer points the noise cannot be estimated: twice the patience."""
SURE = 3.0
"""|t| of a slope from which a round's points are believed: a smooth line gives 50 and more, shuffled points 1."""
FARTHEST = 10.0
"""The minimum on the line lies at most at this multiple of the base, and at least at its inverse."""
FAST, SLOW = 0.8, 0.95
"""How much of the mean and the mean square of a knob's deviation survives a round (LOG, prototype)."""
OWN_STEP = 0.5
"""A knob moves on its own by at most this part of a move (LOG, prototype: 0.15 of 0.3)."""
OWN_CAUTION = 2.0
"""|t| below which a knob's deviation is noise."""
WIDEST = 2.0
"""A knob's rate stays within e to this power of the common one (LOG, prototype)."""
RIDGE = 1e-2
"""Of the least squares over several knobs, relative to the mean of its diagonal."""
