"""What a state dict is, by its keys: so that an error about a foreign one can say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import alike, check_state, number
from hdet.errors import ArgumentError

__all__ = ["check_schedule", "refuse_foreign", "what_it_is"]

_SHOWN = 8
_KNOWN: tuple[tuple[str, set[str]], ...] = (
    ("the content of a whole file of hdet.save", {"hdet", "states", "values"}),
    ("a state of hdet.Ensemble", {"hdet", "plain_lrs"}),
    ("a state of hdet.OneCycleLR", {"hdet", "_schedule_phases"}),
    ("a state of torch's OneCycleLR", {"_schedule_phases", "total_steps"}),
    ("a state of torch's CosineAnnealingLR", {"T_max", "eta_min"}),
    ("a state of torch's LambdaLR", {"lr_lambdas"}),
    ("a state of torch's ReduceLROnPlateau", {"num_bad_epochs"}),
    ("a state of torch's SequentialLR", {"_schedulers", "_milestones"}),
    ("a state of another scheduler", {"last_epoch"}),
    ("a state of an optimizer", {"state", "param_groups"}),
    ("a state of a GradScaler", {"scale", "growth_factor"}),
)


def what_it_is(state: Any) -> str:
    """In words.

    >>> what_it_is({"state": {}, "param_groups": []})
    'a state of an optimizer'
    """
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__} and no dict"
    if not state:
        return "an empty dict"
    keys = {str(key) for key in state}
    found = next((words for words, needed in _KNOWN if needed <= keys), None)
    if found is not None:
        return found
    if all(isinstance(value, Tensor) for value in state.values()):
        return "a state of a model"
    return f"a dict with the keys {sorted(keys)[:_SHOWN]}"


def refuse_foreign(state: Any, needed: set[str], own: str, expected: str) -> None:
    """Raise unless a state has the keys that are needed.

    Args:
        state: what was given.
        needed: keys.
        own: the class whose state is expected.
        expected: that and what else is taken, in words.
    """
    keys = set(state) if isinstance(state, Mapping) else set()
    if needed <= keys:
        return
    found = what_it_is(state)
    missing = f" without {sorted(needed - keys)}" if found == f"a state of {own}" else ""
    raise ArgumentError(
        f"load_state_dict() was given {found}{missing}, but {expected} was expected; give it what state_dict() of a "
        f"{own} returned, or load the whole file by hdet.load"
    )


def check_schedule(schedule: Any, state: Any) -> None:
    """Raise if a state is not one of a torch scheduler, which would take it without looking."""
    if not isinstance(schedule, LRScheduler):
        return
    own = schedule.state_dict()
    missing = sorted(key for key in own if not key.startswith("_") and key not in state)
    if missing:
        raise ArgumentError(
            f"the checkpoint's schedule is {what_it_is(state)} without {missing}, but here it is a "
            f"{type(schedule).__name__}; build the ensemble with the schedule it was saved with"
        )
    plain = {key: alike(value) for key, value in own.items() if key in state and _is_plain(value)}
    check_state(state, plain, f"the checkpoint's schedule, a {type(schedule).__name__},")


def _is_plain(value: Any) -> bool:
    """A number, a flag, or a list of numbers."""
    return number.fits(value) or isinstance(value, bool) or (isinstance(value, list) and all(map(number.fits, value)))
