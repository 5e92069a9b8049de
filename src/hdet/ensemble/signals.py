"""Signals: the number that is compared across replicas at the end of a round, the train loss or a probe.

A probe is a loss on the same batch for all replicas, without the regularisers.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdet.checks import is_one_of, must_be, shown, takes
from hdet.copies import copies_of, copy_all_, put_back, remade, wide, write_
from hdet.errors import ArgumentError, ProbeWarning
from hdet.optimizer import check_model
from hdet.ranks.group import ReplicaGroup, arriving
from hdet.ranks.shards import local, resharded

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch) -> scalar``, everywhere in the library."""
ProbeFn = Callable[[], Tensor | float]
"""Gives a loss of the current model; a :class:`ProbeBatch` is one."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SNAPSHOTS = 32


class TrainLoss:
    """Compare replicas by the mean of the losses that they observed in the round.

    It costs nothing. It is noisy, and it prefers small learning rates, which lower the loss now and slow down progress
    later.

    >>> TrainLoss()
    TrainLoss()
    """

    kind = "TrainLoss"
    wants_mean = False

    def __repr__(self) -> str:
        return "TrainLoss()"


class ProbeLoss:
    """Compare replicas by a loss that is evaluated at the end of the round.

    Args:
        fn: gives a loss of the current model, without arguments; :class:`hdet.ProbeBatch` shares one batch among all.
        at: "replica": at the replica's own weights; "round_mean": at their mean over the round, which does not prefer
            small learning rates as the last weights do. Costs one fp32 copy of the parameters, two while it runs.

    >>> ProbeLoss(lambda: 0.5, at="round_mean").wants_mean
    True
    """

    def __init__(self, fn: ProbeFn, at: Literal["replica", "round_mean"] = "replica") -> None:
        must_be("a function without arguments that returns a loss", takes(fn), "for instance a ProbeBatch", fn=fn)
        fits = is_one_of(at, ("replica", "round_mean"))
        must_be('"replica" or "round_mean"', fits, 'leave it out for "replica"', at=at)
        self.fn = fn
        self.at = at
        self.kind = f"ProbeLoss at {at}"
        """The signal in words, which must be equal on all ranks."""
        self.wants_mean = at == "round_mean"
        """Whether the mean of the round's weights is needed."""

    def __repr__(self) -> str:
        return f"ProbeLoss({self.fn!r}, at={self.at!r})"

    def value(self, k: int, group: ReplicaGroup, parameters: Sequence[Tensor], mean: Sequence[Tensor] | None) -> float:
        """The loss of round ``k``, at the replica's own weights or at their ``mean`` over the round. Collective."""
        if isinstance(self.fn, ProbeBatch):
            with arriving(f"sharing the probe batch of round {k}"):
                self.fn.prepare(k, group)
        if mean is None:
            return probed_loss(self.fn)
        with put_back(parameters):
            write_(parameters, mean)
            return probed_loss(self.fn)


Signal = TrainLoss | ProbeLoss


class RoundMean:
    """The mean of parameters at evenly spaced steps of one round, at most 32. One fp32 copy of the parameters."""

    def __init__(self) -> None:
        self._means: dict[Tensor, Tensor] = {}
        self._count = 0

    def is_due(self, step: int, length: int) -> bool:
        """Whether step 1..length of a round of ``length`` steps is one of its snapshots; the last one always is.

        >>> mean = RoundMean()
        >>> [s for s in range(1, 101) if mean.is_due(s, 100)][:4], mean.is_due(100, 100)
        ([4, 7, 10, 13], True)
        """
        taken = min(length, _SNAPSHOTS)
        return step * taken // length > (step - 1) * taken // length

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add a snapshot. A parameter that was not in the one before, since it was frozen, has not moved until now."""
        self._means = {p: self._means[p] if p in self._means else wide(p).copy_(local(p)) for p in parameters}
        self._count += 1
        for p, mean in self._means.items():
            mean.lerp_(local(p).detach().to(mean.dtype), 1.0 / self._count)

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The mean of each parameter so far; None before the first snapshot."""
        return [self._means[p] for p in parameters] if self._count else None


def probed_loss(probe: ProbeFn) -> float:
    """The probe's loss at the weights of this moment.

    Inside ``torch.autocast`` the casts of the weights are cached, in older torch also those that are made without
    gradients, and training would go on with them: the cache is cleared.
    """
    loss = probe()
    torch.clear_autocast_cache()
    return float(_one_number(loss, "a probe", probe))


def _one_number(loss: Any, name: str, function: object) -> Tensor:
    """What a function of the user's has returned, without a graph."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach()
    if isinstance(loss, Real):
        return torch.tensor(float(loss), dtype=torch.float64)
    cure = "end it with `return loss`" if loss is None else "reduce it first, for instance by mean()"
    raise ArgumentError(f"{name} must return one real number, but {shown(function)} returned {shown(loss)}; {cure}")


@dataclass(eq=False, repr=False)
class ProbeBatch:
    """A function without arguments that gives the loss of the current model on this round's common probe batch.

    One new batch per round, drawn on one rank (its RNG states are put back), sent to the others and moved to the
    model's device, so that all replicas see the same data. No gradients. A DDP-wrapped model is unwrapped.

    The loader's position is not saved: exact resume needs a list of batches, or ``batch_fn(round)``.

    Args:
        model: the model that trains.
        loss_fn: ``loss_fn(model, batch) -> scalar``.
        loader: an iterable of batches, restarted at its end; or a function ``batch_fn(round) -> batch``. An iterator
            cannot be restarted: its last batch is then used again, with a :class:`hdet.ProbeWarning`. A batch is made
            of tensors in dicts, lists and tuples, or of objects with a method ``to(device)``.
        mode: "probe": dropout off, BatchNorm that trains on batch statistics, buffers put back afterwards (in eval
            mode weights would be judged by running statistics that lag behind them); "eval": plain eval.
        autocast: "inherit": as in the scheduler's ``step`` call, mostly off; a type such as ``torch.bfloat16``: the
            loss is evaluated in it, as in training whose forward pass is inside autocast; None: off.
    """

    model: nn.Module
    loss_fn: LossFn
    loader: Iterable[Any] | Callable[[int], Any]
    mode: Literal["probe", "eval"] = "probe"
    autocast: torch.dtype | Literal["inherit"] | None = "inherit"
    _batches: Iterator[Any] | None = field(default=None, init=False)
    _batch: Any = field(default=None, init=False)
    _round: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_model(self.model, needed=True)
        example = "for instance lambda model, batch: criterion(model(batch[0]), batch[1])"
        must_be("a function of model and batch", takes(self.loss_fn, None, None), example, loss_fn=self.loss_fn)
        loader, mode, autocast = self.loader, self.mode, self.autocast
        fits = takes(loader, 0) or (isinstance(loader, Iterable) and getattr(loader, "ndim", None) != 0)
        fits = fits and not isinstance(loader, (str, bytes, type, nn.Module))
        must_be("an iterable of batches or batch_fn(round)", fits, "for instance a DataLoader", loader=loader)
        must_be('"probe" or "eval"', is_one_of(mode, ("probe", "eval")), 'leave it out for "probe"', mode=mode)
        fits = isinstance(autocast, torch.dtype) or is_one_of(autocast, ("inherit", None))
        cure = "leave it out if loss_fn casts by itself"
        must_be('"inherit", a type such as torch.bfloat16 or None', fits, cure, autocast=autocast)

    def prepare(self, k: int, group: ReplicaGroup) -> None:
        """Draw and share the batch of round ``k``. Collective."""
        if self._round == k:
            return
        batch, failure, device = None, None, _device_of(self.model)
        if group.rank == 0:
            try:
                with rng_put_back(device):
                    batch = _moved(self._draw(k), torch.device("cpu"))
            except Exception as error:  # whatever the user's loader raises, the others must hear of it
                failure = error
        batch, reason = group.broadcast_object((batch, None if failure is None else repr(failure)))
        if failure is not None:
            raise failure
        if reason is not None:
            raise ArgumentError(f"rank 0 could not draw the probe batch of round {k}: {reason}; correct its loader")
        self._batch, self._round = _moved(batch, device), k

    def __call__(self) -> Tensor:
        """The loss at the model's weights of this moment."""
        inner, batch = unwrapped(self.model), self._batch
        device, cast = _device_of(inner), None
        if self.autocast != "inherit":
            cast = torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)
        with rng_put_back(device):
            if self._round is None:  # called by hand: a batch of this process alone, which no round will use
                batch = _moved(self._draw(0), device)
            with torch.no_grad(), resharded(inner), probing(inner, self.mode), cast or nullcontext():
                _seed(self._round or 0, device)  # torch's random numbers are the same for all replicas
                return _one_number(self.loss_fn(inner, batch), "loss_fn", self.loss_fn)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: an iterator cannot be copied, so the copy starts the loader again."""
        return {**vars(self), "_batches": None}

    def _draw(self, k: int) -> Any:
        if not isinstance(self.loader, Iterable):
            return self.loader(k)
        if isinstance(self.loader, (list, tuple)) and self.loader:
            return self.loader[k % len(self.loader)]
        for _ in range(2):  # the second time from the loader's beginning
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return batch
            self._batches = None
        if self._round is None:
            raise ArgumentError("the probe loader has no batch; give a loader with at least one")
        warnings.warn(
            f"loader, a {type(self.loader).__name__}, has ended and cannot be restarted: its last batch is used from "
            "here on; give a list of batches, a DataLoader or batch_fn(round)",
            ProbeWarning,
            stacklevel=2,
        )
        return self._batch


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose forward would communicate; compiled before or after the wrap."""
    layers, inside = [model], list(model.children())
    if len(inside) == 1 and type(model).__module__.startswith("torch."):  # that of torch.compile adds nothing
        layers += inside
    return next((one.module for one in layers if isinstance(one, nn.parallel.DistributedDataParallel)), model)


@contextmanager
def probing(model: nn.Module, mode: str) -> Iterator[None]:
    """The model as a probe needs it; modes and buffers are as before afterwards.

    Everything is in eval mode. With "probe" a BatchNorm that was training uses the statistics of the probe batch, since
    running statistics lag behind the weights. It does so without running statistics: nothing is tracked, and a
    SyncBatchNorm makes no collective, which other ranks would not join. One that was frozen stays frozen.
    """
    modules = [(m, m.training) for m in model.modules()]
    of_batch = mode == "probe"
    buffers = [(m, name, x) for m, _ in modules if of_batch for name, x in m.named_buffers(recurse=False)]
    values = copies_of([buffer for *_, buffer in buffers])
    for m, was_training in modules:
        if of_batch and was_training and isinstance(m, _BATCH_NORMS):
            m.running_mean = m.running_var = None
        m.training = False  # not eval(): some layers change their weights there
    try:
        yield
    finally:
        for m, was_training in modules:
            m.training = was_training
        copy_all_(zip((local(buffer) for *_, buffer in buffers), values, strict=True))
        for m, name, buffer in buffers:
            setattr(m, name, buffer)  # forward may have put another tensor there


@contextmanager
def rng_put_back(device: torch.device) -> Iterator[None]:
    """The global RNG states of Python, NumPy (if imported), torch and ``device`` are as before afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)
        moved.update({key: _moved(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, (list, tuple)):
        return remade(batch, [_moved(value, device) for value in batch])
    return batch


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
