"""hdet in the stock ``Trainer`` of Hugging Face transformers, and in its subclasses (TRL's ``SFTTrainer``).

A Trainer takes hdet's schedulers by ``optimizers=``. It steps them without a loss, and evaluates and saves each
replica's own weights. The callbacks here add the loss, the model and the mean of the replicas.

The Trainer does not give itself to its callbacks, and it loads a scheduler's checkpoint before it calls the first of
them. So a callback alone cannot bring a scheduler, and users write one line more: ``attach(trainer)``. It wraps methods
of that one trainer; the class stays as it is. A search is saved in a file beside the scheduler's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from transformers import TrainerCallback

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.integrations.auto_lr import Finish, check_length, length_from, mean_of, options_of_auto
from hdet.integrations.checkpoints import AccumulatingGuard, read_search, write_search
from hdet.integrations.deepspeed import optimizer_of
from hdet.journal.sinks import EventSink
from hdet.schedulers.auto_scheduler import AutoScheduler, auto

__all__ = ["AutoLR", "Guard"]

Trainer: TypeAlias = Any
"""A ``transformers.Trainer``."""


class _Attached(TrainerCallback):  # type: ignore[misc]  # an optional package
    """Wraps methods of a Trainer, and sums the loss of every optimizer step."""

    _trainer: Trainer = None
    _loss: Tensor | float = 0.0
    """Of the micro-batches since the last optimizer step; the Trainer has divided each."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, also as a callback if it is not one yet. Call it before ``train()``. Returns it.

        A trainer may have a guard beside replicas, but neither twice.
        """
        name, handler = type(self).__name__, getattr(trainer, "callback_handler", None)
        others = [one for one in handler.callbacks if isinstance(one, type(self))] if handler is not None else []
        is_first = self._trainer is None and not any(one._trainer is trainer for one in others)
        rule = f"a transformers.Trainer, to which {name} can be attached once"
        cure = f"call {name}(...).attach(trainer), one for each Trainer"
        must_be(rule, handler is not None and is_first, cure, trainer=trainer)
        self._trainer = trainer
        if self not in others:
            trainer.add_callback(self)
        self._wrap("training_step", self._train)
        self._wrap("_save_optimizer_and_scheduler", self._then, self._save)
        self._wrap("_load_optimizer_and_scheduler", self._then, self._load)
        return trainer

    def _wrap(self, name: str, wrapper: Callable[..., Any], *arguments: Any) -> None:
        """Have ``wrapper`` called in place of a method of this one trainer, with the method as first argument."""
        setattr(self._trainer, name, partial(wrapper, getattr(self._trainer, name), *arguments))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after a checkpoint was loaded, before the first step."""
        name = type(self).__name__
        cure = f"without it, it gets no losses: write {name}(...).attach(trainer) before trainer.train()"
        must_be("attached to its Trainer", self._trainer is not None, cure, callback=name)
        self._loss = 0.0

    def _train(self, training_step: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """A step returns a micro-batch's share of the loss: the sum of them is the undivided loss."""
        loss = training_step(*args, **kwargs)
        self._loss = self._loss + loss.detach()
        if self._trainer.accelerator.sync_gradients:
            total, self._loss = self._loss, 0.0
            self._observe(total)
        return loss

    def _then(self, method: Callable[..., None], then: Callable[[str], None], folder: str | None) -> None:
        """The Trainer's method writes or reads optimizer and scheduler; ``then`` does the same with hdet's own file."""
        method(folder)
        if folder is not None:
            then(folder)

    # What subclasses do with the loss of the coming optimizer step, and with the folder of a checkpoint:

    def _observe(self, loss: Tensor | float) -> None: ...
    def _save(self, folder: str) -> None: ...
    def _load(self, folder: str) -> None: ...


class AutoLR(_Attached):
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
    then AutoLR takes no arguments but ``finish``. Evaluation, prediction and saving use the mean of the replicas. In
    the logs ``learning_rate`` is then the rate of the first replica; the journal has all.

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
        given = [trainer.lr_scheduler] if getattr(trainer, "lr_scheduler", None) is not None else []
        cure = "give optimizers=(optimizer, None), and AutoLR(schedule=...) for a schedule of your own"
        options = options_of_auto(given, self.options, cure)
        super().attach(trainer)
        for name in ("evaluate", "predict", "save_model"):
            self._wrap(name, self._with_mean)
        if options is not None:
            self.options, trainer.lr_scheduler = options, None
            self._wrap("create_scheduler", self._create_scheduler)
            given_by = length_from("max_steps and num_train_epochs of the TrainingArguments", options)
            trainer._load_optimizer_and_scheduler = given_by(trainer._load_optimizer_and_scheduler)
        handler = trainer.callback_handler
        handler.call_event = partial(self._let_fall, handler.call_event)
        self._wrap("log", self._log)
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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save the final weights, if the rate has fallen because of ``finish``."""
        if self.finish is not None and self._scheduler.last_epoch >= self._scheduler.total_steps:
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"

    @property
    def _scheduler(self) -> Any:
        return self._trainer.lr_scheduler

    def _observe(self, loss: Tensor | float) -> None:
        self._scheduler.observe(loss)

    def _save(self, folder: str) -> None:
        write_search(folder, self._scheduler)

    def _load(self, folder: str) -> None:
        read_search(folder, self._scheduler)

    def _with_mean(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """While training goes on, evaluate and save the mean of the replicas."""
        with mean_of(self._scheduler) if self._trainer.is_in_train else nullcontext():
            return method(*args, **kwargs)

    def _create_scheduler(self, _: Any, num_training_steps: int, optimizer: Any = None) -> AutoScheduler:
        """In place of the Trainer's: it is called when model and optimizer exist, before a checkpoint is loaded."""
        trainer = self._trainer
        _check_sharding(trainer, optimizer)
        if trainer.is_deepspeed_enabled:
            optimizer = optimizer_of(trainer.accelerator.deepspeed_engine_wrapped.engine)
        journals = [self.options.get("journal"), EventSink(lambda record, event: self._events.append(event))]
        steps = num_training_steps if self.finish is None or "schedule" in self.options else None
        known = {"total_steps": steps, "model": trainer.model, **self.options, "journal": journals}
        trainer.lr_scheduler = made = auto(optimizer or trainer.optimizer, **known)
        return made

    def _let_fall(self, call: Callable[..., Any], event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """The Trainer calls it for every event, and with it all callbacks, any of which may request a stop.

        With ``finish``, the rate falls before that.
        """
        control = call(event, args, state, control, **more)
        self._is_between = event == "on_step_end" or (self._is_between and event != "on_step_begin")
        if self.finish is not None and self._is_between and self._trainer.is_in_train:
            requested, left = control.should_training_stop, state.max_steps - state.global_step
            control.should_training_stop = self.finish.stops(self._scheduler, requested=requested, left=left)
        return control

    def _log(self, log: Callable[..., None], logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs of training also have the peak rate found so far, the status of the search, and what has happened."""
        if "learning_rate" in logs:  # not those of an evaluation
            logs |= {"hdet/event": "; ".join(self._events)} if self._events else {}
            self._events.clear()
            found = self._scheduler.found if isinstance(self._scheduler, AutoScheduler) else None
            if found is not None and not math.isnan(found.rate):
                logs |= {"hdet/found": found.rate, "hdet/status": found.status}
                if len(set(found.rates)) > 1:
                    logs |= {f"hdet/found/{g}": rate for g, rate in enumerate(found.rates)}
        log(logs, *args, **kwargs)


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

    guard: AccumulatingGuard
    """The guard, once ``train()`` has begun."""
    _folder: str | None = None
    """The checkpoint from which training resumes."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the guard, and resume that of a checkpoint: the optimizer exists, and no step is made yet."""
        super().on_train_begin(args, state, control, **kwargs)
        self.guard = AccumulatingGuard(self._trainer.optimizer, self._trainer.model, **self.options)
        if self._folder is not None:
            self.guard.read(self._folder)
            self._folder = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the steps of optimizer and scheduler. If a round ends here, this is a collective."""
        self.guard.end_step()

    def _observe(self, loss: Tensor | float) -> None:
        self.guard.observe(loss)

    def _save(self, folder: str) -> None:
        self.guard.write(folder)

    def _load(self, folder: str) -> None:
        self._folder = folder


def _check_sharding(trainer: Trainer, optimizer: Any) -> None:
    """Raise if the Trainer shards weights in a way in which no rate can be searched."""
    version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) if trainer.is_fsdp_enabled else 2
    cure = 'FSDP1 flattens weights before it shards them; give fsdp_config={"fsdp_version": 2}'
    must_be("2", version == 2, cure, fsdp_version=version)
    if trainer.is_deepspeed_enabled and optimizer is not None:  # DeepSpeed makes it, and then asks for a scheduler
        raise ArgumentError(
            'AutoLR looks at an optimizer of torch, but the DeepSpeed config has an "optimizer"; leave that and the '
            '"scheduler" out of the config: the Trainer makes the optimizer by itself'
        )
