"""What all schedulers check: the model, the group and the weights that they are given, and states to be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hdet.checks import shown
from hdet.errors import ArgumentError
from hdet.optimizer.groups import check_model
from hdet.ranks.group import check_group
from hdet.ranks.shards import refuse_flat

_SHOWN = 8


def check_common(optimizer: Optimizer, group: Any, model: Any) -> None:
    """Raise for arguments of the wrong type, and for parameters that FSDP1 has flattened."""
    check_group(group)
    check_model(model)
    refuse_flat(p for row in optimizer.param_groups for p in row["params"])


def refuse_foreign(state: Any, needed: set[str], own: str, expected: str) -> None:
    """Raise unless a state is a dict with the keys that are needed. torch itself loads any dict without checking it.

    Args:
        state: what the user has given.
        needed: the keys.
        own: the class whose state is expected.
        expected: that state, and others that can be loaded, in words.
    """
    if not isinstance(state, Mapping) or not needed <= set(state):
        raise ArgumentError(
            f"load_state_dict() was given {state_in_words(state)}, but {expected} was expected; give it what "
            f"state_dict() of a {own} returned, or load the whole file by hdet.load"
        )


def state_in_words(state: Any) -> str:
    """Something that a user takes for a state, for messages."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    return f"a dict with the keys {shown(sorted(map(str, state))[:_SHOWN])}"


def refuse_other_groups(rates: int, optimizer: Optimizer) -> None:
    """Raise unless a state, with its number of rates, is of an optimizer with as many parameter groups."""
    groups = len(optimizer.param_groups)
    if rates != groups:
        raise ArgumentError(
            f"the checkpoint has the rates of {rates} parameter groups, but the optimizer has {groups}; build the "
            "optimizer as it was when it was saved, or load the right checkpoint"
        )
