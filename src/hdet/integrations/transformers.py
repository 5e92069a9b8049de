"""hdet in the stock ``Trainer`` of Hugging Face transformers, and in those made from it (TRL's ``SFTTrainer``).

The Trainer never hands itself to its callbacks, and a checkpoint of the scheduler is loaded before the first of them is
called. So a callback alone cannot bring a scheduler, and there is one line more: ``attach(trainer)``. It puts functions
in front of methods of that one trainer which are documented to be overridden; the class stays as it is.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hdet.engine.probe import ProbeBatch
from hdet.errors import ArgumentError, ResumeWarning
from hdet.faces.onecycle import OneCycleLR
from hdet.integrations.lengths import check_length
from hdet.rates import Rate

try:
    from transformers import TrainerCallback
except ImportError:  # then there is no trainer to attach to, but this file can still be read by tools
    TrainerCallback = object

__all__ = ["AutoLR", "Replicas"]

Trainer: TypeAlias = Any
"""A ``transformers.Trainer``."""
_OURS = ("max_lr", "total_steps", "epochs", "steps_per_epoch", "last_epoch", "fanout", "probe", "model")
"""Arguments of ``hdet.OneCycleLR`` that :class:`AutoLR` fills in."""


class Replicas(TrainerCallback):  # type: ignore[misc]  # an optional package
    """The trained fan-out in a Trainer: for an ``hdet.OneCycleLR`` that was given by ``optimizers=``.

    .. code-block:: python

        scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler))
        Replicas().attach(trainer)
        trainer.train()

    The loss of every optimizer step is observed, undivided by accumulation. Evaluation, prediction and saving see the
    replicas' mean. In the logs ``learning_rate`` and ``hdet/rate`` are the base rate, and ``hdet/rate/0``, ... those of
    the replicas.
    """

    def __init__(self) -> None:
        self._trainer: Trainer = None
        self._loss: Tensor | float = 0.0
        """Of the micro-batches since the last optimizer step; the Trainer has divided each."""
        self._last_step: tuple[int, Rate] = (0, 0.0)
        """Step and base rate of the last optimizer step: the Trainer logs when the scheduler has gone on."""
        self._shown = False
        """Whether the weights are the replicas' mean at the moment."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, before its ``train()``; also as a callback, if it is not one yet. Gives the trainer."""
        self._check(trainer)
        self._trainer = trainer
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._with_mean(getattr(trainer, name)))
        trainer.training_step = self._observed(trainer.training_step)
        trainer.log = self._logged(trainer.log)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count losses anew. A checkpoint is loaded by now, and no step is made yet."""
        if self._trainer is None:
            name = type(self).__name__
            raise ArgumentError(
                f"{name} is a callback of this Trainer, but was not attached to it, so the scheduler is not hdet's; "
                f"write {name}(...).attach(trainer) before trainer.train()"
            )
        check_length(state.max_steps, self._scheduler, "max_steps and num_train_epochs")
        self._loss = 0.0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One model for what comes after training, where training stopped inside a round. Collective."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):  # that one is everybody's
            self._scheduler.converge()

    @property
    def _scheduler(self) -> OneCycleLR:
        scheduler: OneCycleLR = self._trainer.lr_scheduler
        return scheduler

    def _check(self, trainer: Trainer) -> None:
        _check_trainer(self, trainer)
        if not isinstance(trainer.lr_scheduler, OneCycleLR):
            raise ArgumentError(
                f"Replicas() is for a Trainer with optimizers=(optimizer, hdet.OneCycleLR(...)), but its scheduler is "
                f"{trainer.lr_scheduler!r}; give one, or use AutoLR() to have one made that finds the rate"
            )

    # -- in front of the trainer's methods ----------------------------------------------------------------------------

    def _with_mean(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method inside ``consensus()`` while training goes on; several of them call each other."""

        def shown(*args: Any, **kwargs: Any) -> Any:
            if self._shown or not self._trainer.is_in_train:
                return method(*args, **kwargs)
            with self._scheduler.consensus():
                self._shown = True
                try:
                    return method(*args, **kwargs)
                finally:
                    self._shown = False

        return shown

    def _observed(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``training_step`` gives a micro-batch's share of the step's loss: their sum is the loss undivided."""

        def observed(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            self._loss = self._loss + loss.detach()
            if self._trainer.accelerator.sync_gradients:
                self._scheduler.observe(self._loss)
                self._loss = 0.0
                self._last_step = self._scheduler.last_epoch, self._scheduler.base_lrs_now[0]
            return loss

        return observed

    def _logged(self, log: Callable[..., None]) -> Callable[..., None]:
        def logged(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "learning_rate" in logs:  # what the Trainer says of training, not of an evaluation
                logs.update(self._news(logs))
            log(logs, *args, **kwargs)

        return logged

    def _news(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What is added to the logs."""
        step, base = self._last_step[0], float(self._last_step[1])
        rows = enumerate(self._scheduler.replica_multipliers(step))
        return {"learning_rate": base, "hdet/rate": base, **{f"hdet/rate/{r}": base * row[0] for r, row in rows}}


class AutoLR(Replicas):
    """Finds the learning rate in a Trainer: ``max_lr="auto"`` in place of the Trainer's own schedule.

    .. code-block:: python

        trainer = Trainer(model, args, train_dataset=data, eval_dataset=other)
        AutoLR(probe=other).attach(trainer)
        trainer.train()

    ``args.learning_rate`` is a guess, and ``lr_scheduler_type`` and warm-up are not used. The probe's loss is that of
    the trainer's ``compute_loss``, with its collator and autocast, without label smoothing. ``trainer.lr_scheduler`` is
    an ``hdet.OneCycleLR``, saved and loaded with the trainer's checkpoints. Its logs get ``hdet/rate`` and, where
    something happened, ``hdet/event``.

    Args:
        probe: the data whose loss is compared: a data set as the trainer takes it for evaluation; "eval": the trainer's
            own ``eval_dataset``, or the name of one of several; None: samples of its ``train_dataset``. With a length,
            a round's samples depend only on the round's number, so that a resumed run sees the same ones.
        batch_size: samples of a probe. None: ``args.per_device_eval_batch_size``.
        options: further arguments of ``hdet.OneCycleLR``: ``pct_start``, ``journal``, ... Momentum is not cycled unless
            ``cycle_momentum=True``.
    """

    def __init__(self, probe: Any = None, batch_size: int | None = None, **options: Any) -> None:
        super().__init__()
        if batch_size is not None and (
            not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1
        ):
            raise ArgumentError(
                f"batch_size must be an integer, at least 1, but got batch_size={batch_size!r}; leave it out for "
                "per_device_eval_batch_size"
            )
        if taken := [name for name in _OURS if name in options]:
            raise ArgumentError(
                f"AutoLR fills in {', '.join(taken)} by itself; leave that out, or build the hdet.OneCycleLR yourself "
                "and give it by optimizers="
            )
        self.probe = probe
        self.batch_size = batch_size
        self.options = {"cycle_momentum": False, **options}
        self._made: OneCycleLR | None = None
        self._events = _Events()

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, before its ``train()``; also as a callback, if it is not one yet. Gives the trainer."""
        super().attach(trainer)
        trainer.create_scheduler = self._create_scheduler
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also tell of a run that is shorter than its checkpoint's: the Trainer lets no warning of loading through."""
        super().on_train_begin(args, state, control, **kwargs)
        restored = self._scheduler.total_steps
        if state.max_steps < restored:
            warnings.warn(
                f"the checkpoint is of a run of {restored} steps, but the trainer is to make {state.max_steps}: the "
                f"schedule of {restored} goes on, and is left before its end; resume with the max_steps that the run "
                "began with",
                ResumeWarning,
                stacklevel=2,
            )

    def _check(self, trainer: Trainer) -> None:
        _check_trainer(self, trainer)
        if trainer.lr_scheduler is not None:
            raise ArgumentError(
                f"AutoLR makes the scheduler, but this Trainer has one already: {trainer.lr_scheduler!r}; give "
                "optimizers=(optimizer, None), or attach Replicas() to a Trainer with an hdet scheduler of your own"
            )
        self._data(trainer)

    def _create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> OneCycleLR:
        """In place of the Trainer's: called when model and optimizer are ready, before a checkpoint is loaded."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise ArgumentError(
                "AutoLR needs whole weights on every rank, but this Trainer uses DeepSpeed or FSDP, which partition "
                "them; use plain data parallelism (torchrun without either), or a loop of your own with fully_shard or "
                "hdet.integrations.deepspeed"
            )
        if trainer.lr_scheduler is not None and trainer.lr_scheduler is not self._made:
            raise ArgumentError(
                f"AutoLR makes the scheduler, but this Trainer was given {trainer.lr_scheduler!r} after attach(); "
                "leave it out"
            )
        optimizer = optimizer if optimizer is not None else trainer.optimizer
        journals = self.options.get("journal")
        known = journals if isinstance(journals, (list, tuple)) else [journals]
        options = {**self.options, "journal": [*known, self._events]}
        probe = ProbeBatch(trainer.model, _Loss(trainer), self._batches())
        self._made = trainer.lr_scheduler = OneCycleLR(
            optimizer, "auto", total_steps=num_training_steps, probe=probe, **options
        )
        return self._made

    def _data(self, trainer: Trainer) -> Any:
        """The data set that is probed."""
        if self.probe is None:
            data, where = trainer.train_dataset, "train_dataset"
        elif not isinstance(self.probe, str):
            return self.probe
        else:
            data, where = trainer.eval_dataset, "eval_dataset"
            if isinstance(data, Mapping):
                if self.probe not in data:
                    raise ArgumentError(f"probe must be one of {list(data)}, but got probe={self.probe!r}")
                return data[self.probe]
            if self.probe != "eval":
                raise ArgumentError(
                    f'probe must be a data set, "eval" or None, but got probe={self.probe!r}; names are for a Trainer '
                    "with several in eval_dataset="
                )
        if data is None:
            raise ArgumentError(
                f"probe={self.probe!r} means the Trainer's {where}, but it has none; give {where}= to the Trainer, or "
                "a data set as probe="
            )
        return data

    def _batches(self) -> Any:
        """Probe batches, by the trainer's collator, drawn by a loader of their own."""
        data = self._data(self._trainer)
        size = self.batch_size or self._trainer.args.per_device_eval_batch_size
        prepared = self._trainer.get_test_dataloader(data)  # never drawn from: it is shared out over the ranks
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
            return DataLoader(data, batch_size=size, collate_fn=prepared.collate_fn)
        return _Samples(prepared.dataset, size, prepared.collate_fn)

    def _news(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        event = self._events.taken()
        return {"hdet/rate": logs["learning_rate"], **({"hdet/event": event} if event else {})}


class _Events:
    """A journal that keeps what happened until it is logged."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def write(self, record: Mapping[str, Any]) -> None:
        if record.get("event"):
            self._kept.append(record["event"])

    def taken(self) -> str:
        kept, self._kept = self._kept, []
        return "; ".join(kept)


class _Samples:
    """``batch_fn(round)``: some samples of a data set, the same ones whenever that round is drawn."""

    def __init__(self, data: Any, size: int, collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.size, self.collate = data, min(size, len(data)), collate

    def __call__(self, k: int) -> Any:
        chosen = random.Random(k).sample(range(len(self.data)), self.size)
        torch.default_generator.manual_seed(k)  # a collator may mask at random; the caller puts the state back
        return next(iter(DataLoader(self.data, batch_sampler=[chosen], collate_fn=self.collate)))


class _Loss:
    """``loss_fn(model, batch)`` by the trainer's ``compute_loss``, which is not told how many items a step has."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with _alone(self.trainer), self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(model, copy.copy(batch))  # it may take the labels out
        return loss


@contextmanager
def _alone(trainer: Trainer) -> Iterator[None]:
    """``compute_loss`` for one rank: label smoothing off, no collective, and no trace in what the trainer counts.

    Ranks share the probe's losses out, so not all of them come here; TRL's trainers gather metrics in ``compute_loss``.
    """
    kept = {name: getattr(trainer, name) for name in ("accelerator", "label_smoother")}
    counted = copy.deepcopy(getattr(trainer, "_metrics", None))
    trainer.accelerator, trainer.label_smoother = _Alone(trainer.accelerator), None
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
        if counted is not None:
            trainer._metrics = counted


class _Alone:
    """An accelerator that gathers from nobody else."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def gather(self, value: Any) -> Any:
        return value

    def gather_for_metrics(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def reduce(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def pad_across_processes(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _check_trainer(callback: Replicas, trainer: Trainer) -> None:
    name = type(callback).__name__
    if not all(hasattr(trainer, part) for part in ("callback_handler", "training_step", "lr_scheduler")):
        raise ArgumentError(
            f"attach() takes a transformers.Trainer, but got {trainer!r}; call {name}(...).attach(trainer)"
        )
    if callback._trainer is not None or any(
        other is not callback and isinstance(other, Replicas) and other._trainer is trainer
        for other in trainer.callback_handler.callbacks
    ):
        raise ArgumentError(f"a Trainer and {name} can be attached once, but one of them is already; make a new {name}")
