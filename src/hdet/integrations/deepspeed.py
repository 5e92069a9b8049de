"""hdet in DeepSpeed, with ZeRO stages 0 to 3: ``auto`` finds the learning rate of an engine, ``Guard`` watches it.

An engine's optimizer is a wrapper around torch's. It trains fp32 copies of the weights, the *masters*, whole or in
partitions. Written for DeepSpeed 0.19: a wrapper's kind is known by the attribute in which it keeps the masters.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.integrations.checkpoints import AccumulatingGuard, read_search, write_search
from hdet.ranks.shards import Partitioned, mark_part
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.auto_scheduler import auto as auto_of

__all__ = ["Guard", "auto", "optimizer_of"]

_UNKNOWN = {
    "pipeline_parallelism": "pipeline parallelism",
    "has_moe_layers": "experts of its own on each rank",
    "mpu": "model parallelism",
    "swap_optimizer": "its optimizer's memory in NVMe",
    "params_in_nvme_and_cpu": "weights in NVMe",
    "zenflow": "its optimizer's memory in ZenFlow",
}
"""What hdet cannot measure or copy, by the attribute of an engine or of its optimizer that tells of it."""


def auto(engine: Any, *, total_steps: int, **more: Any) -> AutoScheduler:
    """Find the learning rate of a DeepSpeed engine while it trains.

    .. code-block:: python

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        scheduler = auto(engine, total_steps=10_000)

    Add one line to the loop: ``scheduler.observe(loss)`` after the forward pass. ``engine.step()`` steps the scheduler
    when it has stepped the optimizer. ``engine.save_checkpoint`` includes its state and the tensors of the search, with
    a file for each rank if ranks have partitions. The optimizer's rate is a guess that may be far off. The model need
    not be given: its buffers are rolled back with the weights.

    With ZeRO each rank measures its own partitions, and the results are summed over the ranks.

    Args:
        engine: made by ``deepspeed.initialize`` without ``lr_scheduler`` and without a scheduler in its config.
        total_steps: optimizer steps of the run.
        more: further arguments of :func:`hdet.auto`: ``schedule``, ``journal``, ``rollback``, ...
    """
    scheduler = auto_of(optimizer_of(engine), total_steps=total_steps, **{"model": engine.module, **more})
    engine.lr_scheduler = scheduler
    _keep(engine, lambda folder: write_search(folder, scheduler), lambda folder: read_search(folder, scheduler))
    return scheduler


class Guard(AccumulatingGuard):
    """:class:`hdet.Guard` for a DeepSpeed engine, with any schedule, on ZeRO stages 0 to 3.

    .. code-block:: python

        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        guard = Guard(engine, check_every=50)
        ...
            engine.step()
            guard.step(loss)

    It counts optimizer steps: with accumulation it judges the mean loss of the batches of a step. With ZeRO it goes by
    the norm of all ranks' gradients that DeepSpeed has computed, before they are clipped, and reads it at every step.
    ``engine.save_checkpoint`` and ``load_checkpoint`` include it, each rank's own part with ZeRO: make it before.

    Args:
        engine: made by ``deepspeed.initialize``.
        options: further arguments of :class:`hdet.Guard`.
    """

    def __init__(self, engine: Any, **options: Any) -> None:
        super().__init__(optimizer_of(engine, any_schedule=True), engine.module, **options)
        self._engine, self._steps = engine, engine.global_steps

        def read(folder: str) -> None:
            self._steps = engine.global_steps
            self.read(folder)

        _keep(engine, self.write, read)

    def step(self, loss: float | Tensor | None = None) -> None:
        """Call it after every ``engine.step()``, on all ranks. A step counts if the optimizer was stepped."""
        self.observe(loss)
        if self._engine.global_steps != self._steps:
            self._steps = self._engine.global_steps
            self.end_step()

    def __getstate__(self) -> dict[str, Any]:
        """Refused: a copy could not be one of the engine's process groups."""
        raise ArgumentError(
            "a guard of a DeepSpeed engine cannot be copied, as the engine cannot; make another engine and "
            "Guard(engine), and load a checkpoint of this one"
        )


def optimizer_of(engine: Any, *, any_schedule: bool = False) -> Optimizer:
    """What trains the weights of an engine, as an optimizer of torch; with ZeRO, that of this rank's partitions.

    Raises for what is no engine, or one whose weights cannot be measured; unless ``any_schedule``, also for one that
    has a scheduler.
    """
    is_engine = all(hasattr(engine, name) for name in ("lr_scheduler", "optimizer", "step"))
    cure = "call engine, *_ = deepspeed.initialize(...) and then auto(engine, ...) or Guard(engine)"
    must_be("what deepspeed.initialize returns first", is_engine, cure, engine=engine)
    for name, what in _UNKNOWN.items():
        if getattr(engine, name, None) or getattr(engine.optimizer, name, None):
            raise ArgumentError(
                f"hdet measures and copies what ZeRO's ranks hold in memory, but this engine has {what}; leave that "
                "out, or use DeepSpeed's own schedulers"
            )
    given, cure = engine.lr_scheduler, 'leave it, and the config\'s "scheduler", out of deepspeed.initialize'
    must_be("None, since auto makes one", given is None or any_schedule, cure, lr_scheduler=given)
    wrapper = engine.optimizer
    return wrapper if isinstance(wrapper, Optimizer) else Masters(wrapper)


def _keep(engine: Any, write: Callable[[str], None], read: Callable[[str], None]) -> None:
    """Extend the engine's saving and loading, since it saves the scheduler of one rank only, and no guard."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else tag
        write(os.path.join(save_dir, str(tag)))  # before "latest" names the checkpoint
        return save(save_dir, tag, *args, **kwargs)

    def load_checkpoint(load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        path, client = load(load_dir, *args, **kwargs)
        if path is not None:
            read(os.path.dirname(path))
        return path, client

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _masters_of(wrapper: Any) -> tuple[list[list[Tensor]], Callable[[], None]]:
    """The masters of each parameter group, and what copies those of all ranks to the model's parameters."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
        return _by_group(wrapper), partial(_refresh_stage_3, wrapper)
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # stages 1 and 2
        return [[p] for p in wrapper.single_partition_of_fp32_groups], wrapper.update_lp_params
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # stage 1 in bf16 with fp32 gradients
        return [[p] for p in wrapper.fp32_groups_flat_partition], wrapper.update_lp_params
    if hasattr(wrapper, "fp32_groups"):  # stage 0 in half precision: every rank has them all
        return wrapper.fp32_groups, partial(_refresh_whole, wrapper)
    raise ArgumentError(
        f"hdet does not know how {type(wrapper).__name__} keeps its weights; use one of DeepSpeed's ZeRO stages with "
        "an optimizer of torch"
    )


def _by_group(wrapper: Any) -> list[list[Tensor]]:
    """Stage 3 steps sub-groups of a parameter group one after the other, and shows the optimizer one at a time."""
    groups: list[list[Tensor]] = [[] for _ in wrapper.optimizer.param_groups]
    for number, p in enumerate(wrapper.fp32_partitioned_groups_flat):
        groups[wrapper.sub_group_to_group_id[number]].append(p)
    return groups


def _padding(wrapper: Any) -> Iterator[tuple[Tensor, slice]]:
    """Elements of masters that belong to no weight, since partitions are of equal length. They may be anything.

    They are past the end of a parameter in the last ranks' partitions: stage 3 does not initialise them.
    """
    for number, p in enumerate(getattr(wrapper, "fp32_partitioned_groups_flat", ())):
        begin = 0
        for param in wrapper.fp16_groups[number]:
            rank, length = dist.get_rank(param.ds_process_group), param.partition_numel()
            used = min(max(param.ds_numel - rank * length, 0), length)
            if used < length:
                yield p, slice(begin + used, begin + length)
            begin += length


@torch.no_grad()
def _refresh_stage_3(wrapper: Any) -> None:
    """As at the end of its step: free what is gathered, and gather again what stays gathered."""
    wrapper.parameter_offload.partition_all_parameters()
    rows = wrapper.fp16_partitioned_groups, wrapper.fp16_partitioned_groups_flat, wrapper.fp32_partitioned_groups_flat
    for parts, flat, masters in zip(*rows, strict=True):
        flat.data.copy_(masters.data)
        for part, values in zip(parts, wrapper.unflatten(flat, parts), strict=True):
            part.data = values.data
    if wrapper.persistent_parameters:
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
    wrapper.invalidate_secondary_tensor()


@torch.no_grad()
def _refresh_whole(wrapper: Any) -> None:
    for masters, parameters in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        torch._foreach_copy_([p.data for p in parameters], masters)


class Masters(Partitioned):
    """The optimizer inside a wrapper of DeepSpeed, always with all its parameters. Only the engine steps it.

    Args:
        wrapper: ``engine.optimizer``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self._padding = wrapper, tuple(_padding(wrapper))
        self._masters, self._refresh = _masters_of(wrapper)
        self._is_partitioned = not hasattr(wrapper, "fp32_groups")
        self.inside: Optimizer = wrapper.optimizer
        self._rows = list(self.inside.param_groups)
        self._stepped: frozenset[int] = frozenset()
        """Ids of the parameters that have had their part of a step."""
        self.defaults = self.inside.defaults
        self.inside.register_step_pre_hook(self._part_begins)  # before all others, which read what it sets
        if self._is_partitioned:
            for p in (p for masters in self._masters for p in masters):
                mark_part(p, f"partition {dist.get_rank()} of {dist.get_world_size()}")

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]  # new rows at every call
        """The groups of the optimizer inside, with all their masters."""
        rows = self.inside.param_groups
        if len(rows) == len(self._rows):  # while stages 1 and 2 step, they show the optimizer one group
            self._rows = list(rows)
        return [_Row(row, masters) for row, masters in zip(self._rows, self._masters, strict=True)]

    @property
    def state(self) -> Any:  # type: ignore[override]  # not ours
        """The state of the optimizer inside."""
        return self.inside.state

    def refresh(self) -> None:
        """Copy the masters to the model's parameters. Collective if they are partitions."""
        self._refresh()

    def gradient_norm(self) -> Tensor | None:
        """What ZeRO has computed for all ranks before the first part steps; infinite if it is not finite anywhere."""
        if not self._is_partitioned:
            return None
        norm = getattr(self._wrapper, "_global_grad_norm", None)
        cure = "a guard needs it: leave compute_grad_norm out of the config, and use DeepSpeed 0.19"
        must_be("the norm of the gradients", norm is not None, cure, global_grad_norm=norm)
        return torch.as_tensor(norm)

    def _part_begins(self, inner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which parameters step; one that has stepped already begins a new step. Clear the padding."""
        for p, numbers in self._padding:
            p.data[numbers] = 0.0
        self.stepping = frozenset(id(p) for group in inner.param_groups for p in group["params"])
        self.continues = bool(self._stepped) and not (self._stepped & self.stepping)
        self._stepped = self._stepped | self.stepping if self.continues else self.stepping
        self.hear_of_step()

    def refuse_step(self) -> None:
        """The engine steps."""
        raise RuntimeError("hdet does not step the optimizer of a DeepSpeed engine: call engine.step()")


class _Row(UserDict[str, Any]):
    """A parameter group whose parameters are the masters; all other values are the optimizer's own."""

    def __init__(self, row: dict[str, Any], masters: list[Tensor]) -> None:
        self.data, self._masters = row, masters

    def __getitem__(self, name: str) -> Any:
        return self._masters if name == "params" else self.data[name]
