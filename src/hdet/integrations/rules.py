"""What the core must know of Lightning and DeepSpeed even if their integrations are not in use. Imports neither."""

from __future__ import annotations

from types import FrameType
from typing import Any

from hdet.frameworks import PARTITIONERS, STEPPING_RULES, Partitioner

_AUTO = "hdet.integrations.deepspeed.auto(engine, total_steps=...)"


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


def _lightning(frame: FrameType) -> str | None:
    """Without a callback of hdet, Lightning steps schedulers by epochs unless it is told otherwise."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    config = frame.f_locals.get("config") if package in ("lightning", "pytorch_lightning") else None
    return not_by_steps(config) if hasattr(config, "interval") else None


STEPPING_RULES.append(_lightning)
PARTITIONERS.append(
    Partitioner(
        "deepspeed",
        "as with DeepSpeed's ZeRO stages 1, 2 and 3 and its half precision",
        {
            "search": f"leave lr_scheduler out of deepspeed.initialize, and call {_AUTO} after it",
            "replicas": f"train replicas with ZeRO stage 0 in fp32, or have the rate found: {_AUTO}",
            "guard": "give hdet.integrations.deepspeed.Guard the engine",
            "replaced": f"use ZeRO stage 0, or leave lr_scheduler out of deepspeed.initialize, then call {_AUTO}",
        },
    )
)
