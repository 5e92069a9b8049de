"""Probes: a loss on the same batch for all replicas, without the regularisers."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hdet.checks import is_one_of, must_be, shown, takes
from hdet.errors import ArgumentError, ProbeWarning
from hdet.parameters import check_model, copies_of, copy_all_
from hdet.ranks.group import ReplicaGroup
from hdet.ranks.shards import local, resharded

_END = object()
LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch) -> scalar``, everywhere in the library."""
ProbeFn = Callable[[], Tensor | float]
"""Gives a loss of the current model; a :class:`ProbeBatch` is one."""


def probed_loss(probe: ProbeFn) -> Tensor:
    """The probe's loss at the weights of this moment, a scalar.

    Inside ``torch.autocast`` the casts of the weights are cached, in older torch also those that are made without
    gradients, and training would go on with them: the cache is cleared.
    """
    loss = probe()
    torch.clear_autocast_cache()
    number = _one_number(loss, "a probe", probe)
    return number.reshape(()).clone()  # the same memory may hold the next loss, as in a captured graph


def _one_number(loss: Any, name: str, function: object) -> Tensor:
    """What a function of the user's has returned, without a graph."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach()
    if isinstance(loss, Real):
        return torch.tensor(float(loss), dtype=torch.float64)
    cure = "end it with `return loss`" if loss is None else "reduce it first, for instance by mean()"
    raise ArgumentError(f"{name} must return one real number, but {shown(function)} returned {shown(loss)}; {cure}")


class ProbeBatch:
    """A function without arguments that gives the loss of the current model on this round's common probe batch.

    One new batch per round, drawn on one rank (its RNG states are put back), moved to the model's device and broadcast
    as tensors, so that all replicas see the same data. No gradients. A DDP-wrapped model is unwrapped.

    The loader's position is not saved: exact resume needs a list of batches, or ``batch_fn(round)``.

    Args:
        model: the model that trains.
        loss_fn: ``loss_fn(model, batch) -> scalar``.
        loader: an iterable of batches, restarted at its end; or a function ``batch_fn(round) -> batch``. An iterator
            cannot be restarted: its last batch is then used again, with a :class:`hdet.ProbeWarning`.
        mode: "probe": dropout off, BatchNorm that trains on batch statistics, buffers put back afterwards (in eval
            mode weights would be judged by running statistics that lag behind them); "eval": plain eval.
        autocast: "inherit": as in the scheduler's ``step`` call, mostly off; a type such as ``torch.bfloat16``: the
            loss is evaluated in it, as in training whose forward pass is inside autocast; None: off.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        loader: Iterable[Any] | Callable[[int], Any],
        mode: Literal["probe", "eval"] = "probe",
        autocast: torch.dtype | Literal["inherit"] | None = "inherit",
    ) -> None:
        check_model(model, needed=True)
        example = "for instance lambda model, batch: criterion(model(batch[0]), batch[1])"
        must_be("a function of model and batch", takes(loss_fn, None, None), example, loss_fn=loss_fn)
        must_be('"probe" or "eval"', is_one_of(mode, ("probe", "eval")), 'leave it out for "probe"', mode=mode)
        no_batches = isinstance(loader, (str, bytes, type, nn.Module)) or getattr(loader, "ndim", None) == 0
        fits = not no_batches and (takes(loader, 0) or isinstance(loader, Iterable))
        must_be("an iterable of batches or batch_fn(round)", fits, "for instance a DataLoader", loader=loader)
        fits = isinstance(autocast, torch.dtype) or is_one_of(autocast, ("inherit", None))
        cure = "leave it out if loss_fn casts by itself"
        must_be('"inherit", a type such as torch.bfloat16 or None', fits, cure, autocast=autocast)
        self.model = model
        self.autocast = autocast
        self.loss_fn = loss_fn
        self.loader = loader
        self.mode = mode
        self._batches: Iterator[Any] | None = None
        self._drawn = 0
        """Batches of a loader so far; 0 again once it was told that there are no more."""
        self._batch: Any = None
        self._round: int | None = None

    def prepare(self, k: int, group: ReplicaGroup) -> None:
        """Draw and share the batch of round ``k``. Collective."""
        if self._round == k:
            return
        batch, device = None, _device_of(self.model)
        failure: Exception | None = None
        if group.rank == 0:
            try:
                with rng_put_back(device):
                    batch = _moved(self._draw(k), device)
            except Exception as error:  # whatever the user's loader raises, the others must hear of it
                failure = error
        reason = group.broadcast_object(None if failure is None else repr(failure))
        if failure is not None:
            raise failure
        if reason is not None:
            raise ArgumentError(f"rank 0 could not draw the probe batch of round {k}: {reason}; correct its loader")
        self._batch, self._round = _shared(batch, group, device), k

    def __call__(self) -> Tensor:
        """The loss at the model's weights of this moment."""
        inner = unwrapped(self.model)
        batch, device = self._batch, _device_of(inner)
        with rng_put_back(device):
            if self._round is None:  # called by hand: a batch of this process alone, which no round will use
                batch = _moved(self._draw(0), device)
            with torch.no_grad(), resharded(inner), probing(inner, self.mode), self._cast(device):
                _seed(self._round or 0, device)  # what is random is the same for all replicas
                return _one_number(self.loss_fn(inner, batch), "loss_fn", self.loss_fn)

    def _cast(self, device: torch.device) -> AbstractContextManager[Any]:
        if isinstance(self.autocast, torch.dtype):
            return torch.autocast(device.type, self.autocast)
        return nullcontext() if self.autocast is not None else torch.autocast(device.type, enabled=False)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: an iterator cannot be copied, so the copy starts the loader again."""
        return {**vars(self), "_batches": None}

    def _draw(self, k: int) -> Any:
        if callable(self.loader) and not isinstance(self.loader, Iterable):
            return self.loader(k)
        if isinstance(self.loader, (list, tuple)) and self.loader:
            return self.loader[k % len(self.loader)]
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            batch = next(self._batches, _END)
            if batch is not _END:
                self._drawn += 1
                return batch
            self._batches = None
        if self._round is None:
            raise ArgumentError("the probe loader has no batch; give a loader with at least one")
        if self._drawn:
            kind = type(self.loader).__name__
            warnings.warn(
                f"loader, a {kind}, has ended after {self._drawn} batches and cannot be begun again: its last batch is "
                "used from here on; give a list of batches, a DataLoader or batch_fn(round)",
                ProbeWarning,
                stacklevel=2,
            )
            self._drawn = 0
        return self._batch


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose forward would communicate; compiled before or after the wrap."""
    found, layer = model, model
    while True:
        if isinstance(layer, nn.parallel.DistributedDataParallel):
            found = layer = layer.module
        elif isinstance(inside := getattr(layer, "_orig_mod", None), nn.Module):  # torch.compile's wrapper
            layer = inside
        else:
            return found


@contextmanager
def probing(model: nn.Module, mode: str) -> Iterator[None]:
    """The model as a probe needs it; modes and buffers are as before afterwards.

    A BatchNorm that was training uses the statistics of the probe batch. It does so in eval mode and without running
    statistics: nothing is tracked, and a SyncBatchNorm makes no collective, which other ranks would not join. One that
    was frozen stays frozen.
    """
    was_training = [(m, m.training) for m in model.modules()]
    norms = [m for m, training in was_training if training and isinstance(m, _BatchNorm)] if mode == "probe" else []
    statistics = [(m, m.running_mean, m.running_var) for m in norms]
    for m, _ in was_training:
        m.training = False  # not eval(): some layers change their weights there
    for m in norms:
        m.running_mean = m.running_var = None
    buffers = [
        (m, name, buffer)
        for m in (model.modules() if mode == "probe" else ())
        for name, buffer in m.named_buffers(recurse=False)
    ]
    values = copies_of([buffer for *_, buffer in buffers])
    try:
        yield
    finally:
        for m, flag in was_training:
            m.training = flag
        for m, mean, variance in statistics:
            m.running_mean, m.running_var = mean, variance
        copy_all_(zip((local(buffer) for *_, buffer in buffers), values, strict=True))
        for m, name, buffer in buffers:
            m._buffers[name] = buffer  # forward may have put another tensor there


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
    """Seed what :func:`rng_put_back` puts back."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    return _mapped(batch, lambda tensor: tensor.to(device).contiguous())


def _shared(batch: Any, group: ReplicaGroup, device: torch.device) -> Any:
    """Rank 0's batch on every rank. Tensors travel as tensors, the rest pickled."""
    outline = _mapped(batch, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    outline = group.broadcast_object(outline)

    def filled(tensor: Tensor) -> Tensor:
        mine = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        group.broadcast_(mine)
        return mine

    return _mapped(batch if group.rank == 0 else outline, filled)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``change`` applied to every tensor in mappings, lists, (named) tuples and dataclasses, in a fixed order."""
    if isinstance(value, Mapping):
        changed = {key: _mapped(item, change) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(changed)  # type: ignore[call-arg]
        clone = copy.copy(value)  # some cannot be made from a dict alone: defaultdict
        clone.update(changed)
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _mapped(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
