"""hdet's schedulers in a loop of Hugging Face Accelerate.

``accelerator.prepare`` takes an :class:`hdet.OneCycleLR` as it is. Its wrapper makes as many scheduler steps per
optimizer step as there are processes, unless ``split_batches`` is set: ``total_steps`` counts scheduler steps, as in
torch. With :func:`prepare` it counts optimizer steps.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, TypeAlias

from torch import Tensor

from hdet.checks import must_be
from hdet.integrations.auto_lr import SCHEDULERS
from hdet.integrations.checkpoints import AccumulatingGuard, read_search, write_search
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.replica_scheduler import ReplicaScheduler

__all__ = ["Accelerator", "Guard", "PreparedScheduler", "keep_search", "prepare"]

Accelerator: TypeAlias = Any
"""An ``accelerate.Accelerator``."""


def prepare(accelerator: Accelerator, scheduler: AutoScheduler | ReplicaScheduler) -> PreparedScheduler:
    """An hdet scheduler for a loop of Accelerate. Use it in place of ``accelerator.prepare(scheduler)``.

    .. code-block:: python

        scheduler = hdet.auto(optimizer, total_steps=optimizer_steps)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        scheduler = prepare(accelerator, scheduler)

    Accelerate's own wrapper makes as many scheduler steps per optimizer step as there are processes. This one makes
    one: ``total_steps`` is the number of optimizer steps, whatever ``num_processes``, ``split_batches`` and
    accumulation are. With accumulation it gets the losses of all batches, not only of the last. ``save_state`` and
    ``load_state`` include its state and the tensors of a search.

    Args:
        accelerator: the ``accelerate.Accelerator`` of the loop.
        scheduler: an ``hdet.OneCycleLR``, a result of ``hdet.auto`` or an ``hdet.Ensemble``, made with the optimizer
            before or after ``accelerator.prepare``.
    """
    is_accelerator, cure = hasattr(accelerator, "sync_gradients"), "call prepare(accelerator, scheduler)"
    must_be("an accelerate.Accelerator", is_accelerator, cure, accelerator=accelerator)
    engine = accelerator.distributed_type
    cure = "hdet needs a loop that steps the scheduler, and whole weights on every rank: use MULTI_GPU"
    must_be("plain data parallelism", engine not in ("DEEPSPEED", "MEGATRON_LM"), cure, distributed_type=engine)
    rule = "an hdet.OneCycleLR, what hdet.auto makes, or an hdet.Ensemble"
    cure = "do not give it to accelerator.prepare(...), which takes other schedulers"
    must_be(rule, isinstance(scheduler, SCHEDULERS), cure, scheduler=scheduler)
    prepared = PreparedScheduler(accelerator, scheduler)
    accelerator.prepare_scheduler(prepared)  # for save_state and load_state
    keep_search(accelerator, prepared)
    return prepared


def keep_search(accelerator: Accelerator, prepared: Any) -> None:
    """Make ``save_state`` and ``load_state`` include the tensors of a search, beside the scheduler's state.

    .. code-block:: python

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        keep_search(accelerator, scheduler)

    With it a resumed run is bit-equal to one without a stop. :func:`prepare` calls it by itself.

    Args:
        accelerator: the ``accelerate.Accelerator`` of the loop.
        prepared: the result of its ``prepare`` for an hdet scheduler.
    """
    scheduler = getattr(prepared, "scheduler", None)
    rule, cure = "what accelerator.prepare(...) has made of an hdet scheduler", "call it after accelerator.prepare(...)"
    must_be(rule, isinstance(scheduler, SCHEDULERS), cure, prepared=prepared)
    folders: list[str] = []
    load = prepared.load_state_dict

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        load(state_dict)
        while folders:  # Accelerate has loaded the optimizer by now
            read_search(folders.pop(), scheduler)

    prepared.load_state_dict = load_state_dict
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: write_search(folder, scheduler))
    accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(folder))


class Guard(AccumulatingGuard):
    """:class:`hdet.Guard` in a loop of Accelerate: it rolls back if training has diverged.

    .. code-block:: python

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        guard = Guard(accelerator, optimizer, model)
        ...
            optimizer.step()
            guard.step(loss)

    It counts optimizer steps: with accumulation it judges the mean loss of the batches of a step. ``save_state`` and
    ``load_state`` include it, each rank's own part if weights are sharded: make it before ``load_state``.

    Args:
        accelerator: the ``accelerate.Accelerator`` of the loop.
        optimizer, model: those that ``accelerator.prepare`` returned.
        options: further arguments of :class:`hdet.Guard`.
    """

    def __init__(self, accelerator: Accelerator, optimizer: Any, model: Any, **options: Any) -> None:
        is_accelerator, cure = hasattr(accelerator, "sync_gradients"), "call Guard(accelerator, optimizer, model)"
        must_be("an accelerate.Accelerator", is_accelerator, cure, accelerator=accelerator)
        super().__init__(optimizer, model, **options)
        self._accelerator = accelerator
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.write(folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: self.read(folder))

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy. Accelerate does not copy an accelerator; its checkpoints keep the first guard, and no copy."""
        return {**super().__getstate__(), "accelerator": self._accelerator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._accelerator = state["accelerator"]

    def step(self, loss: float | Tensor | None = None) -> None:
        """Call it after every ``optimizer.step()``, on all ranks. A step counts if gradients were synchronised."""
        self.observe(loss)
        if self._accelerator.sync_gradients:
            self.end_step()


class PreparedScheduler:
    """Makes one scheduler step per optimizer step. Other attributes are the scheduler's own: ``last_epoch``, ...

    Args:
        accelerator: says whether the optimizer steps.
        scheduler: the scheduler that is stepped.
    """

    _is_accelerate_prepared = True
    """Accelerate's own mark: ``Accelerator.prepare`` leaves an object that has it as it is, and saves it."""

    def __init__(self, accelerator: Accelerator, scheduler: AutoScheduler | ReplicaScheduler) -> None:
        self.accelerator = accelerator
        self.scheduler: Any = scheduler

    def step(self, loss: float | Tensor | None = None, **more: Any) -> None:
        """Step the scheduler if the optimizer has stepped; otherwise only count the loss.

        A step that a GradScaler has skipped counts too, since all ranks must count alike.
        """
        if self.accelerator.sync_gradients or not self.accelerator.step_scheduler_with_optimizer:
            self.scheduler.step(loss, **more)
        elif loss is not None and not isinstance(loss, Integral):  # an integer is torch's epoch
            self.scheduler.observe(loss)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "accelerator"):  # a copy that is being made has neither yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)
