r"""Which snapshots are kept, and to which of them training is rolled back: for the search and ``hdet.Guard``. Pure.

Both keep snapshots of the last good weights, both learn from the judge of losses (:mod:`hdet.rule.judge`) that
training has diverged, and both undo a rollback that has turned out to be a false alarm, because the data have become
harder. A *round* is some steps in a row that are judged together:

================= =============================================== =====================================================
question          search (:class:`hdet.rule.decision.Rule`)         guard (:class:`~.guard_policy.GuardPolicy`)
================= =============================================== =====================================================
snapshot is due   at a round's end, after 4 steps (`is_due`)      at a look, after 8 steps or half a round (`is_due`)
rolled back to    the older of two; if a batch is to blame, the   the last one from before the losses were strange; if
                  last (`rolled_back`)                            that is no better, one further back
no snapshot       the weights stay, the rate is lowered; an error the weights stay; an error if they are NaN or
                  if they are NaN or infinite                     infinite
rate              divided by 3, then raised again by the search   as it was the first time, then times ``factor``
false alarm       the rate is raised back, the weights stay       rate and weights are as before the rollback
================= =============================================== =====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Snapshot(NamedTuple):
    """Weights, buffers and optimizer state as they were after ``step``, stored in ``slot``."""

    step: int
    slot: int


def is_due(kept: Sequence[Snapshot], t: int, spacing: int) -> bool:
    """Whether it is time for another snapshot; ``kept``: the snapshots there are, the oldest first."""
    return not kept or t - kept[-1].step >= spacing


def with_another(kept: Sequence[Snapshot], t: int) -> tuple[Snapshot, ...]:
    """The last snapshot and a new one of step ``t``, in the slot (0 or 1) that the last one does not use.

    >>> with_another(with_another((), 4), 8)
    (Snapshot(step=4, slot=0), Snapshot(step=8, slot=1))
    """
    last = tuple(kept[-1:])
    return (*last, Snapshot(t, 1 - last[0].slot if last else 0))


def rolled_back(kept: Sequence[Snapshot], latest: float, *, further: bool = False) -> tuple[Snapshot, ...]:
    """The snapshots that a rollback leaves, the oldest first; the last of them is the one to restore.

    Args:
        kept: the snapshots there are; none: the weights stay.
        latest: later snapshots may have been made after training began to diverge. If all were, the oldest must do.
        further: whether to go back by one more, if there is one.

    >>> kept = (Snapshot(4, 0), Snapshot(8, 1))
    >>> [rolled_back(kept, latest)[-1].step for latest in (9, 7, 3)], rolled_back(kept, 9, further=True)[-1].step
    ([8, 4, 4], 4)
    """
    fitting = tuple(one for one in kept if one.step <= latest) or tuple(kept[:1])
    return fitting[:-1] if further and len(fitting) > 1 else fitting
