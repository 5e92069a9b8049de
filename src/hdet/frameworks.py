"""What the core must know of DeepSpeed and Lightning, also where their integrations are not in use. Imports neither.

No other file of the core names a framework.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from hdet.checks import users_level

_AUTO = "hdet.integrations.deepspeed.auto(engine, total_steps=...)"


class Partitioner(NamedTuple):
    """A framework that puts partitions in place of the model's parameters in the user's optimizer."""

    package: str
    """It may have done so once this package is imported."""
    cases: str
    """When it does so."""
    cures: Mapping[str, str]
    """What to do instead, for "search", "replicas" and "guard", and if they were "replaced" later."""


DEEPSPEED = Partitioner(
    "deepspeed",
    "as with DeepSpeed's ZeRO stages 1, 2 and 3 and its half precision",
    {
        "search": f"leave lr_scheduler out of deepspeed.initialize, and call {_AUTO} after it",
        "replicas": f"train replicas with ZeRO stage 0 in fp32, or have the rate found: {_AUTO}",
        "guard": "give hdet.integrations.deepspeed.Guard the engine",
        "replaced": f"use ZeRO stage 0, or leave lr_scheduler out of deepspeed.initialize, then call {_AUTO}",
    },
)


def partitioner() -> Partitioner | None:
    """DeepSpeed, if it is imported."""
    return DEEPSPEED if DEEPSPEED.package in sys.modules else None


def not_by_steps(config: Any) -> str | None:
    """What is wrong if Lightning does not step a scheduler at every step, by its config; None: nothing."""
    if (config.interval, config.frequency) == ("step", 1):
        return None
    return (
        f"hdet counts optimizer steps, but Lightning steps the scheduler by interval={config.interval!r}, "
        f'frequency={config.frequency}; return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, '
        '"interval": "step"}} from configure_optimizers, or return only the optimizer and give the trainer '
        "callbacks=[hdet.integrations.lightning.AutoLR()]"
    )


def warn_unless_by_steps() -> None:
    """Warn if Lightning steps the scheduler, and not at every step: the schedule would hardly move.

    Without a callback of hdet, Lightning steps schedulers by epochs unless it is told otherwise.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        config = frame.f_locals.get("config") if package in ("lightning", "pytorch_lightning") else None
        if hasattr(config, "interval") and (words := not_by_steps(config)) is not None:
            warnings.warn(words, UserWarning, stacklevel=users_level())
            return
        frame = frame.f_back
