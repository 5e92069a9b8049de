"""hdet in the stock ``Trainer`` of Hugging Face transformers, and in its subclasses (TRL's ``SFTTrainer``).

A Trainer takes hdet's schedulers by ``optimizers=``. It steps them without a loss, and evaluates and saves each
replica's own weights. The callbacks here add the loss, the model and the mean of the replicas.

The Trainer does not give itself to its callbacks, and it loads a scheduler's checkpoint before it calls the first of
them. So a callback alone cannot bring a scheduler, and users write one line more: ``attach(trainer)``. It wraps methods
of that one trainer; the class stays as it is. A search is saved in a file beside the scheduler's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.integrations.checkpoints import read_search, write_search
from hdet.integrations.deepspeed import optimizer_of
from hdet.integrations.guards import AccumulatingGuard
from hdet.integrations.lengths import Finish, check_length, length_from
from hdet.journal.sinks import EventSink
from hdet.schedulers.auto import auto
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.onecycle import OneCycleLR

try:
    from transformers import TrainerCallback
except ImportError:  # then there is no trainer to attach to, but tools can still import this file
    TrainerCallback = object

__all__ = ["AutoLR", "Guard", "Replicas"]

Trainer: TypeAlias = Any
"""A ``transformers.Trainer``."""


class _Attached(TrainerCallback):  # type: ignore[misc]  # an optional package
    """Wraps methods of a Trainer, and sums the loss of every optimizer step."""

    _trainer: Trainer = None
    _loss: Tensor | float = 0.0
    """Of the micro-batches since the last optimizer step; the Trainer has divided each."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, also as a callback if it is not one yet. Call it before ``train()``. Returns it."""
        self._check(trainer)
        self._trainer = trainer
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        trainer.training_step = self._summed(trainer.training_step)
        trainer._save_optimizer_and_scheduler = self._followed(trainer._save_optimizer_and_scheduler, self._save)
        trainer._load_optimizer_and_scheduler = self._followed(trainer._load_optimizer_and_scheduler, self._load)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after a checkpoint was loaded, before the first step."""
        if self._trainer is None:
            name = type(self).__name__
            raise ArgumentError(
                f"{name} is a callback of this Trainer, but was not attached to it, so it gets no losses; write "
                f"{name}(...).attach(trainer) before trainer.train()"
            )
        self._loss = 0.0

    def _check(self, trainer: Trainer) -> None:
        """Raise for a trainer that cannot be joined: it may have a guard beside AutoLR, but neither twice."""
        name, kind = type(self).__name__, Guard if isinstance(self, Guard) else _Scheduling
        cure = f"call {name}(...).attach(trainer)"
        must_be("a transformers.Trainer", hasattr(trainer, "callback_handler"), cure, trainer=trainer)
        there = [one._trainer for one in trainer.callback_handler.callbacks if isinstance(one, kind)]
        if self._trainer is not None or any(other is trainer for other in there):
            raise ArgumentError(
                f"a Trainer and {name} can be attached once, but one of them is already; make a new {name}"
            )

    def _summed(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``training_step`` returns a micro-batch's share of the step's loss: the sum of them is the undivided loss."""

        def summed(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            self._loss = self._loss + loss.detach()
            if self._trainer.accelerator.sync_gradients:
                total, self._loss = self._loss, 0.0
                self._observe(total)
            return loss

        return summed

    def _followed(self, method: Callable[..., None], then: Callable[[str], None]) -> Callable[..., None]:
        """The Trainer's method writes or reads optimizer and scheduler; ``then`` does the same with hdet's own file."""

        def followed(folder: str | None) -> None:
            method(folder)
            if folder is not None:
                then(folder)

        return followed

    # What subclasses do with the loss of the coming optimizer step, and with the folder of a checkpoint:

    def _observe(self, loss: Tensor | float) -> None: ...
    def _save(self, folder: str) -> None: ...
    def _load(self, folder: str) -> None: ...


class _Scheduling(_Attached):
    """Gives the Trainer's scheduler the loss, and evaluates and saves the mean of the replicas."""

    finish: Finish | None = None
    _in_consensus = False
    """Whether the weights are the mean of the replicas at the moment."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, also as a callback if it is not one yet. Call it before ``train()``. Returns it."""
        super().attach(trainer)
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._with_mean(getattr(trainer, name)))
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a schedule that is too short for the run, or that cannot be finished."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.finish is None:
            check_length(self._scheduler, state.max_steps, "max_steps and num_train_epochs")
        else:
            self.finish.check(self._scheduler)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave one model behind, even if training has stopped inside a round. Collective."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):  # all ranks load that one
            self._scheduler.converge()

    @property
    def _scheduler(self) -> Any:
        return self._trainer.lr_scheduler

    def _observe(self, loss: Tensor | float) -> None:
        self._scheduler.observe(loss)

    def _save(self, folder: str) -> None:
        write_search(folder, self._scheduler)

    def _load(self, folder: str) -> None:
        read_search(folder, self._scheduler)

    def _with_mean(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method inside ``consensus()`` during training; some of these methods call each other."""

        def with_mean(*args: Any, **kwargs: Any) -> Any:
            if self._in_consensus or not self._trainer.is_in_train:
                return method(*args, **kwargs)
            with self._scheduler.consensus():
                self._in_consensus = True
                try:
                    return method(*args, **kwargs)
                finally:
                    self._in_consensus = False

        return with_mean


class Replicas(_Scheduling):
    """A replica ensemble in a Trainer: for an ``hdet.OneCycleLR`` that was given by ``optimizers=``.

    .. code-block:: python

        scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler))
        Replicas().attach(trainer)
        trainer.train()

    The loss of every optimizer step is observed, not divided by the accumulation steps. Evaluation, prediction and
    saving use the replicas' mean. In the logs ``learning_rate`` is the rate of the first replica; the journal has all.
    """

    def _check(self, trainer: Trainer) -> None:
        super()._check(trainer)
        given, cure = trainer.lr_scheduler, "give one by optimizers=, or use AutoLR(), which makes one"
        must_be("an hdet.OneCycleLR", isinstance(given, OneCycleLR), cure, lr_scheduler=given)


class AutoLR(_Scheduling):
    """Finds the learning rate in a Trainer: ``hdet.auto`` in place of the Trainer's own schedule.

    .. code-block:: python

        trainer = Trainer(model, args, train_dataset=data)
        AutoLR().attach(trainer)
        trainer.train()

    ``args.learning_rate`` is a guess, and ``lr_scheduler_type`` and warm-up are not used. ``trainer.lr_scheduler`` is
    made by :func:`hdet.auto`, and saved and loaded with the trainer's checkpoints. It gets the trainer's model and the
    loss of every optimizer step, not divided by the accumulation steps. The logs get ``hdet/found``, the peak rate
    found so far (``learning_rate`` is that of the step), ``hdet/status``, the status of the search, and, if something
    has happened, ``hdet/event``.

    The rate is found on ``schedule=``, or on a scheduler of torch or transformers in ``optimizers=``. If
    ``optimizers=`` has a scheduler of ``hdet.auto``, or an ``hdet.OneCycleLR``, AutoLR gives that one the loss;
    then AutoLR takes no arguments but ``finish``.

    With ``finish`` the rate is constant once it is found, and falls before training stops: when
    ``EarlyStoppingCallback``, or any code that sets ``control.should_training_stop``, requests a stop, or before
    ``max_steps``.

    Args:
        finish: number of steps over which the rate falls at the end. None: the schedule falls by itself.
        options: further arguments of ``hdet.auto``: ``journal``, ``rollback``, ``schedule``, a function from an
            optimizer to its scheduler, and others. The default of ``total_steps`` is the number of steps that the
            Trainer makes.
    """

    def __init__(self, *, finish: int | None = None, **options: Any) -> None:
        self.finish = None if finish is None else Finish(finish)
        self.options = options
        self._events: list[str] = []
        """What has happened since the Trainer last logged."""
        self._is_between = False
        """Whether the Trainer is between two steps of the optimizer."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, also as a callback if it is not one yet. Call it before ``train()``. Returns it."""
        super().attach(trainer)
        if not isinstance(trainer.lr_scheduler, (AutoScheduler, OneCycleLR, type(None))):
            self.options["schedule"], trainer.lr_scheduler = trainer.lr_scheduler, None
        if trainer.lr_scheduler is None:
            trainer.create_scheduler = self._create_scheduler
            trainers = self.options.get("total_steps") is None
            source = "max_steps and num_train_epochs of the TrainingArguments" if trainers else "total_steps of AutoLR"
            trainer._load_optimizer_and_scheduler = length_from(source)(trainer._load_optimizer_and_scheduler)
        if self.finish is not None:
            trainer.callback_handler.call_event = self._finished(trainer.callback_handler.call_event, self.finish)
        trainer.log = self._logged(trainer.log)
        return trainer

    def _check(self, trainer: Trainer) -> None:
        super()._check(trainer)
        given, options = trainer.lr_scheduler, self.options
        is_ours = isinstance(given, (AutoScheduler, OneCycleLR))
        is_known = given is None or is_ours or not (isinstance(given, ReduceLROnPlateau) or "schedule" in options)
        cure = "give optimizers=(optimizer, None), and AutoLR(schedule=...) for a schedule of your own"
        must_be("one schedule whose rates are known in advance", is_known, cure, lr_scheduler=given)
        rule, cure = "empty, because this Trainer has a scheduler of hdet already", "give them to that scheduler"
        must_be(rule, not (is_ours and options), cure, options=options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save the final weights, if the rate has fallen because of ``finish``."""
        if self.finish is not None and self._scheduler.last_epoch >= self._scheduler.total_steps:
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"

    def _create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> AutoScheduler:
        """In place of the Trainer's: it is called when model and optimizer exist, before a checkpoint is loaded."""
        trainer = self._trainer
        _check_sharding(trainer, optimizer)
        if trainer.is_deepspeed_enabled:
            optimizer = optimizer_of(trainer.accelerator.deepspeed_engine_wrapped.engine)
        optimizer = optimizer if optimizer is not None else trainer.optimizer
        journals = [self.options.get("journal"), EventSink(self._keep_event)]
        steps = num_training_steps if self.finish is None or "schedule" in self.options else None
        known = {"total_steps": steps, "model": trainer.model, **self.options, "journal": journals}
        trainer.lr_scheduler = made = auto(optimizer, **known)
        return made

    def _finished(self, call_event: Callable[..., Any], finish: Finish) -> Callable[..., Any]:
        """The Trainer calls it for every event, and with it all callbacks, any of which may request a stop."""

        def finished(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control = call_event(event, args, state, control, **kwargs)
            self._is_between = event == "on_step_end" or (self._is_between and event != "on_step_begin")
            if self._is_between and self._trainer.is_in_train:
                requested, left = control.should_training_stop, state.max_steps - state.global_step
                control.should_training_stop = finish.stops(self._scheduler, requested=requested, left=left)
            return control

        return finished

    def _keep_event(self, record: Mapping[str, Any], event: str) -> None:
        self._events.append(event)

    def _logged(self, log: Callable[..., None]) -> Callable[..., None]:
        """Logs of training also have the peak rate found so far, the status of the search, and what has happened."""

        def logged(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            found = self._scheduler.found if isinstance(self._scheduler, AutoScheduler) else None
            if "learning_rate" in logs:  # not those of an evaluation
                logs |= {"hdet/event": "; ".join(self._events)} if self._events else {}
                self._events.clear()
                if found is not None and not math.isnan(found.rate):
                    logs |= {"hdet/found": found.rate, "hdet/status": found.status}
                    several = len(set(found.rates)) > 1
                    logs |= {f"hdet/found/{g}": rate for g, rate in enumerate(found.rates) if several}
            log(logs, *args, **kwargs)

        return logged


class Guard(_Attached):
    """:class:`hdet.Guard` in a Trainer: it rolls back if training has diverged, with the Trainer's own schedule.

    .. code-block:: python

        trainer = Trainer(model, args, train_dataset=data)
        Guard(check_every=50).attach(trainer)
        trainer.train()

    It judges the loss of every optimizer step, not divided by the accumulation steps. It is saved in the trainer's
    checkpoints as ``hdet_guard.pt``, each rank's own part if weights are sharded.

    Args:
        options: ``check_every``, ``factor``, ``recover`` and ``max_rollbacks`` of :class:`hdet.Guard`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.guard: AccumulatingGuard | None = None
        """The guard, once ``train()`` has begun."""
        self._folder: str | None = None
        """The checkpoint from which training resumes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the guard, and resume that of a checkpoint: the optimizer exists, and no step is made yet."""
        super().on_train_begin(args, state, control, **kwargs)
        self.guard = AccumulatingGuard(self._trainer.optimizer, self._trainer.model, **self.options)
        folder, self._folder = self._folder, None
        if folder is not None:
            self.guard.read(folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the steps of optimizer and scheduler. If a round ends here, this is a collective."""
        if self.guard is not None:
            self.guard.end_step()

    def _observe(self, loss: Tensor | float) -> None:
        if self.guard is not None:
            self.guard.observe(loss)

    def _save(self, folder: str) -> None:
        if self.guard is not None:
            self.guard.write(folder)

    def _load(self, folder: str) -> None:
        self._folder = folder


def _check_sharding(trainer: Trainer, optimizer: Any) -> None:
    """Raise if the Trainer shards weights in a way in which no rate can be searched."""
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 1:
        raise ArgumentError(
            "AutoLR needs FSDP2, but this Trainer uses FSDP1, which flattens weights before it shards them; give "
            'fsdp_config={"fsdp_version": 2}'
        )
    if trainer.is_deepspeed_enabled and optimizer is not None:  # DeepSpeed makes it, and then asks for a scheduler
        raise ArgumentError(
            'AutoLR looks at an optimizer of torch, but the DeepSpeed config of this Trainer has an "optimizer"; leave '
            'that and the "scheduler" out of the config: the Trainer makes the optimizer by itself'
        )
