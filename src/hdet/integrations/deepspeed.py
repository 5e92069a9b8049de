"""DeepSpeed: ``auto`` finds the learning rate of an engine, on its ZeRO stages 0 to 3."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hdet.errors import ArgumentError
from hdet.integrations.deepspeed_masters import Masters, masters_of
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto as auto_of

__all__ = ["auto"]

_PARALLEL = {
    "pipeline_parallelism": "pipeline parallelism",
    "has_moe_layers": "experts of its own on each rank",
    "mpu": "model parallelism",
}
"""What makes ranks hold other weights than those of ZeRO's partitions, by the engine's attributes."""
_ELSEWHERE = {"swap_optimizer": "NVMe", "zenflow": "ZenFlow"}
"""Where an optimizer's memory may lie out of reach, by the wrapper's attributes."""


def auto(engine: Any, *, total_steps: int, **more: Any) -> OneCycleLR | ScheduledSearch:
    """Have the learning rate of a DeepSpeed engine found while it trains.

    .. code-block:: python

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        scheduler = auto(engine, total_steps=10_000)

    The loop stays as it is but for one line, ``scheduler.observe(loss)`` after the forward pass. ``engine.step()``
    steps the scheduler where it has stepped the optimizer, and ``engine.save_checkpoint`` holds its state. The
    optimizer's rate is a guess that may be far off. The model is known: its buffers go back with the weights.

    With ZeRO each rank measures its own partitions, and the sums are added up over the ranks.

    Args:
        engine: made by ``deepspeed.initialize`` without ``lr_scheduler`` and without a scheduler in its config.
        total_steps: optimizer steps of the run.
        more: further arguments of :func:`hdet.auto`: ``schedule``, ``journal``, ``go_back``, those of
            :class:`hdet.OneCycleLR`. Momenta are not cycled unless ``cycle_momentum=True``.
    """
    _check(engine)
    wrapper = engine.optimizer
    optimizer = wrapper if isinstance(wrapper, Optimizer) else Masters(wrapper, masters_of(wrapper))
    scheduler = auto_of(optimizer, total_steps=total_steps, **{"model": engine.module, **more})
    engine.lr_scheduler = scheduler
    return scheduler


def _check(engine: Any) -> None:
    """Raise for what is no engine, or one whose weights cannot be measured."""
    if not (hasattr(engine, "lr_scheduler") and hasattr(engine, "optimizer") and callable(getattr(engine, "step", 0))):
        raise ArgumentError(
            f"engine must be what deepspeed.initialize returns first, but got {type(engine).__name__}; call "
            "engine, *_ = deepspeed.initialize(...) and then auto(engine, ...)"
        )
    if engine.lr_scheduler is not None:
        raise ArgumentError(
            f"the engine has a scheduler already, {type(engine.lr_scheduler).__name__}; leave lr_scheduler= and the "
            'config\'s "scheduler" out of deepspeed.initialize'
        )
    for name, what in _PARALLEL.items():
        if getattr(engine, name, None):
            raise ArgumentError(
                f"hdet measures ZeRO's partitions over all ranks, but this engine has {what}; use data parallelism "
                "alone, or DeepSpeed's own schedulers"
            )
    for name, what in _ELSEWHERE.items():
        if getattr(engine.optimizer, name, False):
            raise ArgumentError(
                f"hdet copies what the optimizer remembers, but this engine keeps it in {what}; leave that out, or "
                "use DeepSpeed's own schedulers"
            )
