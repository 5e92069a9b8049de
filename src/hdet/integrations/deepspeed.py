"""DeepSpeed: ``auto`` finds the learning rate of an engine, on its ZeRO stages 0 to 3.

Its optimizer trains fp32 master weights, whole or in partitions. Written for DeepSpeed 0.19: the kind of a wrapper is
known by the attribute in which it keeps the masters.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.errors import ArgumentError
from hdet.integrations.searches import read_search, write_search
from hdet.ranks.shards import Partitioned, mark_part
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto as auto_of

__all__ = ["auto", "optimizer_of"]

Hook = Callable[..., Any]
_UNKNOWN = {
    "pipeline_parallelism": "pipeline parallelism",
    "has_moe_layers": "experts of its own on each rank",
    "mpu": "model parallelism",
    "swap_optimizer": "its optimizer's memory in NVMe",
    "zenflow": "its optimizer's memory in ZenFlow",
}
"""What hdet cannot measure or copy, by the attributes of an engine or of its optimizer."""


def auto(engine: Any, *, total_steps: int, **more: Any) -> OneCycleLR | ScheduledSearch:
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
        more: further arguments of :func:`hdet.auto`: ``schedule``, ``journal``, ``rollback``, those of
            :class:`hdet.OneCycleLR`. Momenta are not cycled.
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
    for name, what in _UNKNOWN.items():
        if getattr(engine, name, None) or getattr(engine.optimizer, name, None):
            raise ArgumentError(
                f"hdet measures and copies what ZeRO's ranks hold in memory, but this engine has {what}; leave that "
                "out, or use DeepSpeed's own schedulers"
            )


class Kept(NamedTuple):
    """Where a wrapper keeps its masters."""

    groups: list[list[Tensor]]
    """For each parameter group."""
    partitioned: bool
    """Whether each rank has a part of its own."""
    refresh: Callable[[], None]
    """Writes them to the model's parameters, those of all ranks."""
    padding: Sequence[tuple[Tensor, slice]] = ()
    """Numbers in them that are nobody's, and may be anything: partitions are of equal length."""


def masters_of(wrapper: Any) -> Kept:
    """The masters of what stands as ``engine.optimizer`` where that is not an optimizer of torch."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return Kept(_by_group(wrapper), True, lambda: _refresh_stage_3(wrapper), tuple(_padding(wrapper)))
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # stages 1 and 2
        return Kept([[p] for p in wrapper.single_partition_of_fp32_groups], True, wrapper.update_lp_params)
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # stage 1 in bf16 with fp32 gradients
        return Kept([[p] for p in wrapper.fp32_groups_flat_partition], True, wrapper.update_lp_params)
    if hasattr(wrapper, "fp32_groups"):  # stage 0 in half precision
        return Kept(wrapper.fp32_groups, False, lambda: _refresh_whole(wrapper))
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
    """What is past the end of a parameter in the last ranks' partitions: stage 3 leaves memory there as it was."""
    for number, p in enumerate(wrapper.fp32_partitioned_groups_flat):
        rank, begin = wrapper._get_sub_group_partition_rank(number), 0
        for param in wrapper.fp16_groups[number]:
            length = param.partition_numel()
            used = min(max(param.ds_numel - rank * length, 0), length)
            if used < length:
                yield p, slice(begin + used, begin + length)
            begin += length


@torch.no_grad()
def _refresh_stage_3(wrapper: Any) -> None:
    """As at the end of its step: whatever is gathered is given up, and what stays gathered is gathered anew."""
    wrapper._partition_all_parameters()
    for number in range(len(wrapper.fp32_partitioned_groups_flat)):
        wrapper._reassign_or_swap_out_partitioned_parameters(number)
    if wrapper.persistent_parameters:
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
    wrapper.invalidate_secondary_tensor()


@torch.no_grad()
def _refresh_whole(wrapper: Any) -> None:
    for masters, shown in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        torch._foreach_copy_([p.data for p in shown], masters)


class Masters(Partitioned):
    """The optimizer inside a wrapper of DeepSpeed, always with all its parameters. Nobody steps it; the engine does.

    Args:
        wrapper: ``engine.optimizer``.
        kept: where its masters are.
    """

    def __init__(self, wrapper: Any, kept: Kept) -> None:
        self._inner: Optimizer = wrapper.optimizer
        self._kept = kept
        self._rows = list(self._inner.param_groups)
        self._stepped: frozenset[int] = frozenset()
        """Ids of the parameters that have had their part of a step."""
        self.parts = [self._inner]
        self.defaults = self._inner.defaults
        self._inner.register_step_pre_hook(self._part_begins)  # before all others, which are told what it finds
        if kept.partitioned:
            for p in (p for group in kept.groups for p in group):
                mark_part(p, f"partition {dist.get_rank()} of {dist.get_world_size()}")

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]  # rows that are made anew at every call
        """The groups of the optimizer inside, with all their masters."""
        rows = self._inner.param_groups
        if len(rows) == len(self._rows):  # while stages 1 and 2 step, they show the optimizer one group
            self._rows = list(rows)
        return [_Row(row, masters) for row, masters in zip(self._rows, self._kept.groups, strict=True)]

    @property
    def state(self) -> Any:  # type: ignore[override]  # not ours
        """What the optimizer inside remembers."""
        return self._inner.state

    def refresh(self) -> None:
        """Have the model see the masters. Collective where they are partitions."""
        self._kept.refresh()

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Called before each part of a step: ZeRO steps one group after the other."""

        def heard(inner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return hook(self, args, kwargs)

        return self._inner.register_step_pre_hook(heard)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Called after each part of a step."""
        return self._inner.register_step_post_hook(lambda _, args, kwargs: hook(self, args, kwargs))

    def _part_begins(self, inner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A parameter that has had its part begins a new step. Padding is no weight, and must not be measured."""
        for p, numbers in self._kept.padding:
            p.data[numbers] = 0.0
        self.stepping = frozenset(id(p) for group in inner.param_groups for p in group["params"])
        self.continues = bool(self._stepped) and not (self._stepped & self.stepping)
        self._stepped = self._stepped | self.stepping if self.continues else self.stepping
        self._opt_called = True  # where torch's schedulers look whether the optimizer was stepped

    def step(self, closure: Any = None) -> Any:
        """Not to be called."""
        raise RuntimeError("hdet looks at the optimizer of a DeepSpeed engine and steps nothing: call engine.step()")


class _Row(UserDict[str, Any]):
    """A parameter group whose parameters are the masters; all else is read and written where it is."""

    def __init__(self, row: dict[str, Any], masters: list[Tensor]) -> None:
        self.data, self._masters = row, masters

    def __getitem__(self, name: str) -> Any:
        return self._masters if name == "params" else self.data[name]
