"""What the integrations say about training frameworks, so that the core names none. They add to both lists below."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NamedTuple

from hdet.checks import users_level


class Partitioner(NamedTuple):
    """A framework that puts partitions in place of the model's parameters in the user's optimizer."""

    package: str
    """It may have done so once this package is imported."""
    cases: str
    """When it does so."""
    cures: Mapping[str, str]
    """What to do instead, for "search", "replicas" and "guard", and if they were "replaced" later."""


PARTITIONERS: list[Partitioner] = []
STEPPING_RULES: list[Callable[[FrameType], str | None]] = []
"""Each says what is wrong if a frame is its framework's and does not step a scheduler at every step; else None."""


def partitioner() -> Partitioner | None:
    """The one whose package is imported."""
    return next((one for one in PARTITIONERS if one.package in sys.modules), None)


def warn_unless_by_steps() -> None:
    """Warn if a framework steps the scheduler, and not at every step: the schedule would hardly move."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for rule in STEPPING_RULES:
            if (words := rule(frame)) is not None:
                warnings.warn(words, UserWarning, stacklevel=users_level())
                return
        frame = frame.f_back
