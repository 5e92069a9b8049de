"""The arguments that several faces take beside a schedule: checked, and defaults filled in."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.checks import is_int, must_be
from hdet.parameters import check_model, group_counts
from hdet.ranks.group import check_group
from hdet.ranks.shards import refuse_flat

PUBLISHED_SPREAD = 1 / 9
LONGEST = 2**53
"""Steps that a run may have: integers above are no floats, and the schedule computes with those."""


class CommonArguments(NamedTuple):
    """What the faces take beside a schedule, as the user has given it."""

    group: Any
    model: Any
    journal: Any


def check_common(common: CommonArguments, optimizer: Optimizer) -> None:
    """Raise for arguments that are of the wrong kind."""
    check_group(common.group)
    check_model(common.model)
    refuse_flat(p for group in optimizer.param_groups for p in group["params"])


def check_length(total_steps: Any) -> None:
    """Raise for what cannot be the length of a run; None: nobody knows it."""
    fits = total_steps is None or (is_int(total_steps) and 1 <= total_steps <= LONGEST)
    must_be(f"an integer from 1 to {LONGEST}, or None", fits, "leave it out if nobody knows", total_steps=total_steps)


def checked_length(sync_every: Any, default: int) -> int:
    """T of replicas that train."""
    if sync_every is None:
        return default
    fits = is_int(sync_every) and 1 <= sync_every <= LONGEST
    must_be(f"an integer, at least 1 and at most {LONGEST}", fits, f"leave it out for {default}", sync_every=sync_every)
    return int(sync_every)


def rate_names(optimizer: Optimizer) -> list[str]:
    """Of the learning rates of all parameter groups. No name changes when a group is added.

    ``lr[2]`` is that of the third group; ``lr[0.2]``, where several optimizers are seen as one, of the first one's.
    """
    counts = group_counts(optimizer)
    if len(counts) == 1:
        return [f"lr[{g}]" for g in range(counts[0])]
    return [f"lr[{part}.{g}]" for part, count in enumerate(counts) for g in range(count)]
