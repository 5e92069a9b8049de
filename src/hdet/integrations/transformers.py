"""hdet in the stock ``Trainer`` of Hugging Face transformers, and in its subclasses (TRL's ``SFTTrainer``).

A Trainer takes hdet's schedulers by ``optimizers=``. It steps them without a loss, and evaluates and saves each
replica's own weights. The callbacks here add the loss, the model and the mean of the replicas.

The Trainer does not give itself to its callbacks, and it loads a scheduler's checkpoint before it calls the first of
them. So a callback alone cannot bring a scheduler, and users write one line more: ``attach(trainer)``. It wraps methods
of that one trainer; the class stays as it is. A search is saved in a file beside the scheduler's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import shown
from hdet.errors import ArgumentError, ResumeWarning
from hdet.integrations.checkpoints import read_guard, read_search, write_guard, write_search
from hdet.integrations.deepspeed import optimizer_of
from hdet.integrations.lengths import Finish, loading_length
from hdet.journal.sinks import EventSink
from hdet.parameters import Rate, unwrapped
from hdet.rollback.guard import Guard as PlainGuard
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto

try:
    from transformers import TrainerCallback
except ImportError:  # then there is no trainer to attach to, but tools can still import this file
    TrainerCallback = object

__all__ = ["AutoLR", "Guard", "Replicas"]

Trainer: TypeAlias = Any
"""A ``transformers.Trainer``."""
_OURS = ("max_lr", "total_steps", "epochs", "steps_per_epoch", "last_epoch", "model")
"""Arguments of a scheduler that :class:`AutoLR` fills in."""


class _Attached(TrainerCallback):  # type: ignore[misc]  # an optional package
    """Wraps methods of a Trainer, and sums the loss of every optimizer step."""

    def __init__(self) -> None:
        self._trainer: Trainer = None
        self._loss: Tensor | float = 0.0
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
        if not hasattr(trainer, "callback_handler"):
            raise ArgumentError(
                f"attach() takes a transformers.Trainer, but got {shown(trainer)}; call {name}(...).attach(trainer)"
            )
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
            cure = "resume with max_steps={steps}, or the num_train_epochs that make as many"
            with loading_length("max_steps and num_train_epochs of the TrainingArguments", cure, "AutoLR(finish=...)"):
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

    def __init__(self, finish: int | None = None) -> None:
        super().__init__()
        self.finish = Finish(finish)
        self._in_consensus = False
        """Whether the weights are the mean of the replicas at the moment."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, also as a callback if it is not one yet. Call it before ``train()``. Returns it."""
        super().attach(trainer)
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._with_mean(getattr(trainer, name)))
        trainer.log = self._logged(trainer.log)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a schedule that is too short for the run."""
        super().on_train_begin(args, state, control, **kwargs)
        self.finish.check(self._scheduler, state.max_steps, "max_steps and num_train_epochs")

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

    def _more_logs(self) -> dict[str, Any]:
        """What is added to the Trainer's logs."""
        return {}

    # -- wrappers of the trainer's methods ----------------------------------------------------------------------------

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

    def _logged(self, log: Callable[..., None]) -> Callable[..., None]:
        def logged(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "learning_rate" in logs:  # these are logs of training, not of an evaluation
                logs.update(self._more_logs())
            log(logs, *args, **kwargs)

        return logged


class Replicas(_Scheduling):
    """A replica ensemble in a Trainer: for an ``hdet.OneCycleLR`` that was given by ``optimizers=``.

    .. code-block:: python

        scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)
        trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler))
        Replicas().attach(trainer)
        trainer.train()

    The loss of every optimizer step is observed, not divided by the accumulation steps. Evaluation, prediction and
    saving use the replicas' mean. In the logs ``learning_rate`` and ``hdet/rate`` are the base rate, and
    ``hdet/rate/0``, ... the rates of the replicas.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_step: tuple[int, Rate] = (0, 0.0)
        """Step and base rate of the last optimizer step: the Trainer logs after the scheduler has stepped."""

    def _check(self, trainer: Trainer) -> None:
        super()._check(trainer)
        if not isinstance(trainer.lr_scheduler, OneCycleLR):
            raise ArgumentError(
                f"Replicas() is for a Trainer with optimizers=(optimizer, hdet.OneCycleLR(...)), but its scheduler is "
                f"{shown(trainer.lr_scheduler)}; give one, or use AutoLR() to have one made that finds the rate"
            )

    def _observe(self, loss: Tensor | float) -> None:
        super()._observe(loss)
        self._last_step = self._scheduler.last_epoch, self._scheduler.base_lrs_now[0]

    def _more_logs(self) -> dict[str, Any]:
        step, base = self._last_step[0], float(self._last_step[1])
        rows = enumerate(self._scheduler.replica_multipliers(step))
        return {"learning_rate": base, "hdet/rate": base, **{f"hdet/rate/{r}": base * row[0] for r, row in rows}}


class AutoLR(_Scheduling):
    """Finds the learning rate in a Trainer: ``max_lr="auto"`` in place of the Trainer's own schedule.

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
    ``optimizers=`` has a search, an ``hdet.OneCycleLR`` or a result of ``hdet.auto``, AutoLR gives that one the loss;
    then AutoLR takes no arguments but ``finish``.

    With ``finish`` the rate is constant once it is found, and falls before training stops: when
    ``EarlyStoppingCallback``, or any code that sets ``control.should_training_stop``, requests a stop, or before
    ``max_steps``.

    Args:
        finish: number of steps over which the rate falls at the end. None: the schedule falls by itself.
        options: further arguments of ``hdet.auto``: ``journal``, ``rollback``, ``schedule``, a function from an
            optimizer to its scheduler; without ``schedule`` also those of ``hdet.OneCycleLR``. Momentum is not cycled.
    """

    def __init__(self, *, finish: int | None = None, **options: Any) -> None:
        super().__init__(finish)
        if taken := [name for name in _OURS if name in options]:
            raise ArgumentError(
                f"AutoLR fills in {', '.join(taken)} by itself; leave that out, or build the hdet.OneCycleLR yourself "
                "and give it by optimizers="
            )
        self.options = options
        self._made: OneCycleLR | ScheduledSearch | None = None
        self._events: list[str] = []
        """What has happened since the Trainer last logged."""
        self._ended_at = -1
        """The step after which the rate had fallen."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, also as a callback if it is not one yet. Call it before ``train()``. Returns it."""
        super().attach(trainer)
        if self.finish.steps is not None:
            trainer._maybe_log_save_evaluate = self._finished(trainer._maybe_log_save_evaluate)
        if not isinstance(trainer.lr_scheduler, (OneCycleLR, ScheduledSearch, type(None))):
            self.options["schedule"], trainer.lr_scheduler = trainer.lr_scheduler, None
        if trainer.lr_scheduler is None:
            trainer.create_scheduler = self._create_scheduler
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also warn if the run is shorter than its checkpoint's, since the Trainer hides warnings while it loads."""
        super().on_train_begin(args, state, control, **kwargs)
        self._ended_at = -1
        scheduler = self._scheduler
        if not isinstance(scheduler, OneCycleLR) or scheduler.last_epoch == 0:
            return
        if state.max_steps < scheduler.total_steps < math.inf:
            warnings.warn(
                f"the checkpoint is of a run of {scheduler.total_steps} steps, but the trainer is to make "
                f"{state.max_steps}: the schedule of {scheduler.total_steps} goes on, and training stops before "
                "its end; resume with the max_steps that the run began with",
                ResumeWarning,
                stacklevel=2,
            )

    def _check(self, trainer: Trainer) -> None:
        super()._check(trainer)
        given = trainer.lr_scheduler
        ours = isinstance(given, (OneCycleLR, ScheduledSearch))
        if given is not None and not ours and (isinstance(given, ReduceLROnPlateau) or "schedule" in self.options):
            raise ArgumentError(
                f"AutoLR takes one schedule whose rates are known in advance, but this Trainer has {shown(given)}; "
                "give optimizers=(optimizer, None), and AutoLR(schedule=...) for a schedule of your own"
            )
        if ours and self.options:
            raise ArgumentError(
                f"this Trainer has a scheduler of hdet already, so {', '.join(self.options)} of AutoLR would not be "
                "used; give them to that scheduler, or give optimizers=(optimizer, None)"
            )

    def _create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> OneCycleLR | ScheduledSearch:
        """In place of the Trainer's: it is called when model and optimizer exist, before a checkpoint is loaded."""
        trainer = self._trainer
        _check_sharding(trainer, optimizer)
        if trainer.lr_scheduler is not None and trainer.lr_scheduler is not self._made:
            raise ArgumentError(
                f"AutoLR makes the scheduler, but this Trainer was given {shown(trainer.lr_scheduler)} after attach(); "
                "leave it out"
            )
        if trainer.is_deepspeed_enabled:
            optimizer = optimizer_of(trainer.accelerator.deepspeed_engine_wrapped.engine)
        optimizer = optimizer if optimizer is not None else trainer.optimizer
        journals = [self.options.get("journal"), EventSink(self._keep_event)]
        options = {**self.options, "model": trainer.model, "journal": journals}
        steps = num_training_steps if self.finish.steps is None or "schedule" in options else None
        self._made = trainer.lr_scheduler = auto(optimizer, total_steps=steps, **options)
        return self._made

    def _finished(self, method: Callable[..., None]) -> Callable[..., None]:
        """The Trainer calls the method after all callbacks of a step. Evaluates and saves if the rate has fallen."""

        def finished(*args: Any, **kwargs: Any) -> None:
            trainer, state, scheduler = self._trainer, self._trainer.state, self._trainer.lr_scheduler
            if self.finish.is_over(scheduler) and state.global_step > self._ended_at:  # the epoch ends here too
                self._ended_at = state.global_step
                trainer.control.should_evaluate |= trainer.args.eval_strategy == "steps"
                trainer.control.should_save |= trainer.args.save_strategy == "steps"
            method(*args, **kwargs)
            requested, left = trainer.control.should_training_stop, state.max_steps - state.global_step
            trainer.control.should_training_stop = self.finish.stops(scheduler, requested=requested, left=left)

        return finished

    def _keep_event(self, record: Mapping[str, Any], event: str) -> None:
        self._events.append(event)

    def _more_logs(self) -> dict[str, Any]:
        """The peak rate found so far and the status of the search; if groups differ, also all their rates."""
        logs, found = {"hdet/event": "; ".join(self._events)} if self._events else {}, self._scheduler.found
        self._events.clear()
        if found is None or math.isnan(found.rate):
            return logs
        rates = {f"hdet/found/{g}": rate for g, rate in enumerate(found.rates) if len(set(found.rates)) > 1}
        return {"hdet/found": found.rate, "hdet/status": found.status, **rates, **logs}


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
        super().__init__()
        self.options = options
        self.guard: PlainGuard | None = None
        """The guard, once ``train()`` has begun."""
        self._step_loss: Tensor | float | None = None
        """The loss of the current step."""
        self._folder: str | None = None
        """The checkpoint from which training resumes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the guard, and resume that of a checkpoint: the optimizer exists, and no step is made yet."""
        super().on_train_begin(args, state, control, **kwargs)
        folder, self._folder, self._step_loss = self._folder, None, None
        self.guard = PlainGuard(self._trainer.optimizer, self._trainer.model, **self.options)
        if folder is not None:
            read_guard(folder, self.guard, unwrapped(self._trainer.optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the steps of optimizer and scheduler. If a round ends here, this is a collective."""
        loss, self._step_loss = self._step_loss, None
        if self.guard is not None:
            self.guard.step(loss)

    def _observe(self, loss: Tensor | float) -> None:
        self._step_loss = loss

    def _save(self, folder: str) -> None:
        if self.guard is not None:
            write_guard(folder, self.guard, unwrapped(self._trainer.optimizer))

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
