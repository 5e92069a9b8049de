"""A probe for a LightningModule: its loss on batches that do not train, without a trace of having been asked."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hdet.engine.probe import ProbeBatch
from hdet.errors import ArgumentError
from hdet.rollback.storage import leaves

__all__ = ["check_probe", "loader_named", "part_of_lightning", "probe_of"]

_OTHERS = 'give probe=loader, any iterable of batches, or probe="{other}"'


def check_probe(probe: object) -> None:
    """Raise for what no probe can be made of."""
    known = probe in ("train", "val") if isinstance(probe, str) else isinstance(probe, Iterable) or callable(probe)
    if not known:
        raise ArgumentError(
            f'probe must be "train", "val", an iterable of batches or a function batch_fn(round) -> batch, but got '
            f'probe={probe!r}; give probe="val" for the batches that you validate on'
        )


def probe_of(trainer: Any, module: Any, probe: Any) -> ProbeBatch:
    """A probe of the module that trains, on batches from where ``probe`` says."""
    if isinstance(probe, ProbeBatch):
        return probe
    if isinstance(probe, Iterable):  # a string is one too
        return ProbeBatch(module, _quiet_loss, _Batches(trainer, module, probe))
    return ProbeBatch(module, _quiet_loss, lambda k: _transferred(trainer, module, probe(k)))


def part_of_lightning(trainer: Any, path: str) -> Any:
    """A module of the package that the trainer is from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root, _, _ = type(trainer.fit_loop).__module__.partition(".loops.")
    return importlib.import_module(f"{root}.{path}")


# -- batches ----------------------------------------------------------------------------------------------------------


class _Batches:
    """Batches as training gets them, by an iterator of its own.

    The loader is looked up at every pass: Lightning makes loaders late, and may make them anew.
    """

    def __init__(self, trainer: Any, module: Any, source: Any) -> None:
        self._trainer = trainer
        self._module = module
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        loader = _own_pass(self._loader())
        generators = _generators(loader)
        with _put_back(generators):
            batches = iter(loader)
        while True:
            with _put_back(generators):
                batch = next(batches, self)
            if batch is self:
                return
            yield _transferred(self._trainer, self._module, batch)

    def _loader(self) -> Any:
        return loader_named(self._trainer, self._source) if isinstance(self._source, str) else self._source


def loader_named(trainer: Any, name: str) -> Any:
    """The trainer's loader "train" or "val", if a probe can use it."""
    if name == "train":
        return _single(trainer.train_dataloader, "train", "val")
    return _single(trainer.val_dataloaders, "val", "train")


def _single(loaders: Any, name: str, other: str) -> Any:
    """The one loader that there is."""
    cure = _OTHERS.format(other=other)
    if isinstance(loaders, (list, tuple)) and len(loaders) == 1:
        loaders = loaders[0]
    if loaders is None or (isinstance(loaders, (list, tuple)) and not loaders):
        raise ArgumentError(f'probe="{name}" needs a {name} dataloader, but the trainer uses none; {cure}')
    if isinstance(loaders, (list, tuple, Mapping)):
        raise ArgumentError(f'probe="{name}" takes one loader, but the trainer has {len(loaders)}; {cure}')
    if isinstance(loaders, Iterator):
        raise ArgumentError(
            f'probe="{name}" begins the loader anew, but {loaders!r} is an iterator: its batches would be missing in '
            f"training; {cure}"
        )
    return loaders


def _own_pass(loader: Any) -> Any:
    """A DataLoader without workers that shares nothing with the one that trains: persistent workers have one pass."""
    if not isinstance(loader, DataLoader):
        return loader
    own = copy.copy(loader)
    own._iterator, own.num_workers, own.timeout, own.prefetch_factor = None, 0, 0, None
    return own


def _generators(loader: Any) -> list[torch.Generator]:
    """Those of a loader's own: what is drawn from them for a probe would change the order in which training goes."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def _put_back(generators: list[torch.Generator]) -> Iterator[None]:
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _transferred(trainer: Any, module: Any, batch: Any) -> Any:
    """The batch through the precision plugin and the user's transfer hooks, as Lightning's training loop does it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


# -- the loss ---------------------------------------------------------------------------------------------------------


def _quiet_loss(module: Any, batch: Any) -> Tensor:
    """The module's ``probe_loss(batch)``, or its ``training_step``, in the precision of training."""
    trainer = module.trainer
    with _silenced(trainer), trainer.precision_plugin.train_step_context():
        twin = _twin(module)
        own = getattr(twin, "probe_loss", None)
        loss = own(batch) if callable(own) else _step_loss(twin, batch)
    if not isinstance(loss, Tensor):
        what = "probe_loss" if callable(own) else "training_step"
        raise ArgumentError(
            f"the probe needs a loss, but {what} of {type(module).__name__} returned {loss!r}; define "
            "probe_loss(self, batch), which returns a tensor of one element"
        )
    return loss


def _step_loss(twin: Any, batch: Any) -> Any:
    names = list(inspect.signature(twin.training_step).parameters)
    if "dataloader_iter" in names:
        raise ArgumentError(
            "the probe cannot call training_step(dataloader_iter), which draws batches by itself; define "
            "probe_loss(self, batch) in the module"
        )
    result = twin.training_step(batch, 0) if len(names) > 1 else twin.training_step(batch)
    return result.get("loss") if isinstance(result, Mapping) else result


@contextmanager
def _silenced(trainer: Any) -> Iterator[None]:
    """Inside, what is sent to the trainer's loggers goes nowhere."""
    loggers, should_stop = trainer.loggers, trainer.should_stop
    dummy = part_of_lightning(trainer, "loggers.logger").DummyLogger
    trainer.loggers = [dummy() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers, trainer.should_stop = loggers, should_stop


def _twin(module: Any) -> Any:
    """A module with the same weights whose attributes, lists and metrics are its own, and which logs nothing.

    Other ranks may not be probing: nothing in it communicates.
    """
    twin = _apart(module, _metric_types())
    for name in ("log", "log_dict", "print"):
        vars(twin)[name] = _nothing
    vars(twin)["all_gather"] = _as_it_is
    if vars(module).get("_compiler_ctx") is not None:  # compiled functions are bound to the module itself
        for name in ("forward", "training_step"):
            vars(twin).pop(name, None)
    return twin


def _apart(module: nn.Module, metrics: tuple[type, ...]) -> nn.Module:
    twin = copy.copy(module)
    vars(twin).update({name: _own(value) for name, value in vars(module).items()})
    for name, child in module._modules.items():
        if child is not None and isinstance(child, metrics):
            twin._modules[name] = _alone(_metric_copy(child))
        elif child is not None and any(isinstance(part, metrics) for part in child.modules()):
            twin._modules[name] = _apart(child, metrics)
    return twin


def _own(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _metric_copy(metric: nn.Module) -> nn.Module:
    """A deep copy; torch refuses one of tensors that hang in a graph, as a metric's last value does."""
    tensors = [tensor for part in metric.modules() for tensor in leaves(vars(part))]
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in tensors}
    return copy.deepcopy(metric, memo)


def _alone(metric: nn.Module) -> nn.Module:
    """A metric that does not wait for other ranks."""
    for part in metric.modules():
        for name in ("dist_sync_on_step", "sync_on_compute", "_to_sync"):
            if name in vars(part):
                vars(part)[name] = False
    return metric


def _metric_types() -> tuple[type, ...]:
    """torchmetrics' classes, where somebody has imported them."""
    torchmetrics = sys.modules.get("torchmetrics")
    return () if torchmetrics is None else (torchmetrics.Metric, torchmetrics.MetricCollection)


def _nothing(*_: Any, **__: Any) -> None:
    """Takes the place of ``log``."""


def _as_it_is(data: Any, *_: Any, **__: Any) -> Any:
    """Takes the place of ``all_gather``."""
    return data
