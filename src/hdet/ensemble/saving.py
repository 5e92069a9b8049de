"""What stands in a checkpoint: plain numbers, lists and strings, with keys that never change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hdet.checks import STATE_WORDS, Rule, check_alike, in_pairs, maybe, pairs
from hdet.ensemble.controller import Controller
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.published import Published
from hdet.errors import ArgumentError

__all__ = ["CONTROLLER", "controller_from", "controller_saved"]

CONTROLLER = {
    "controller": maybe(Rule("a controller's name", lambda value: isinstance(value, str))),
    "controller_arguments": pairs,
    "controller_state": pairs,
}
"""What :func:`controller_from` needs."""

_OURS: dict[str, type[Published] | type[Normalised]] = {
    "Published": Published,
    "Normalised": Normalised,
}


def controller_saved(controller: Controller | None, state: Any) -> dict[str, Any]:
    """A controller and its state."""
    ours = isinstance(controller, tuple(_OURS.values()))
    arguments = dataclasses.asdict(controller) if ours else {}  # type: ignore[call-overload]
    return {
        "controller": type(controller).__name__ if controller is not None else None,
        "controller_arguments": in_pairs(arguments),
        "controller_state": in_pairs(state._asdict() if state is not None else {}),
    }


def controller_from(saved: Mapping[str, Any], here: Controller | None, knobs: int) -> tuple[Controller | None, Any]:
    """The controller of a checkpoint with its state. One of the user's own must be ``here``."""
    name = saved["controller"]
    if name is None:
        return None, None
    controller, what = here, f"{STATE_WORDS}, in what it says about the controller {name},"
    if name in _OURS:
        usual = dataclasses.asdict(_OURS[name]())
        controller = _OURS[name](**check_alike(saved["controller_arguments"], usual, what))
        begin = controller.init(knobs)
        return controller, begin._replace(**check_alike(saved["controller_state"], begin._asdict(), what))
    if controller is None or type(controller).__name__ != name:
        raise ArgumentError(
            f"the checkpoint was written with a controller {name}, but here it is {here!r}; "
            f"build it with auto_lr={name}(...) or controller={name}(...) before loading"
        )
    try:
        return controller, controller.init(knobs)._replace(**dict(saved["controller_state"]))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"{what} does not fit the one given here: {error}; give the one it was saved with"
        ) from error
