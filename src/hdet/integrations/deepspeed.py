"""DeepSpeed: ``auto`` finds the learning rate of an engine, on its ZeRO stages 0 to 3."""

from __future__ import annotations

import os
from typing import Any

from torch.optim import Optimizer

from hdet.errors import ArgumentError
from hdet.integrations.deepspeed_masters import Masters, masters_of
from hdet.integrations.searches import read_search, write_search
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto as auto_of

__all__ = ["auto", "optimizer_of"]

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
    steps the scheduler where it has stepped the optimizer. ``engine.save_checkpoint`` holds its state, and what the
    search holds in tensors: in a file for each rank where ranks have partitions. The optimizer's rate is a guess that
    may be far off. The model is known: its buffers go back with the weights.

    With ZeRO each rank measures its own partitions, and the sums are added up over the ranks.

    Args:
        engine: made by ``deepspeed.initialize`` without ``lr_scheduler`` and without a scheduler in its config.
        total_steps: optimizer steps of the run.
        more: further arguments of :func:`hdet.auto`: ``schedule``, ``journal``, ``go_back``, those of
            :class:`hdet.OneCycleLR`. Momenta are not cycled unless ``cycle_momentum=True``.
    """
    scheduler = auto_of(optimizer_of(engine), total_steps=total_steps, **{"model": engine.module, **more})
    engine.lr_scheduler = scheduler
    _keep_search(engine, scheduler)
    return scheduler


def optimizer_of(engine: Any) -> Optimizer:
    """What trains the weights of an engine, as an optimizer of torch: where ZeRO is, with this rank's partitions."""
    _check(engine)
    wrapper = engine.optimizer
    return wrapper if isinstance(wrapper, Optimizer) else Masters(wrapper, masters_of(wrapper))


def _keep_search(engine: Any, scheduler: OneCycleLR | ScheduledSearch) -> None:
    """Put functions in front of the engine's saving and loading: what it saves of a scheduler is one rank's alone."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else tag
        write_search(os.path.join(save_dir, str(tag)), scheduler)  # before "latest" names the checkpoint
        return save(save_dir, tag, *args, **kwargs)

    def load_checkpoint(load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        path, client = load(load_dir, *args, **kwargs)
        if path is not None:
            read_search(os.path.dirname(path), scheduler)
        return path, client

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


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
