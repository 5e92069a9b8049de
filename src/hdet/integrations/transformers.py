"""hdet in the stock ``Trainer`` of Hugging Face transformers, and in those made from it (TRL's ``SFTTrainer``).

A Trainer takes hdet's schedulers by ``optimizers=``. It steps them without a loss, and evaluates and saves each
replica's own weights. This module adds the loss, the model and the replicas' mean.

The Trainer never hands itself to its callbacks, and a checkpoint of the scheduler is loaded before the first of them is
called. So a callback alone cannot bring a scheduler, and there is one line more: ``attach(trainer)``. It puts functions
in front of methods of that one trainer; the class stays as it is. A search is a file beside the scheduler's.
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
from hdet.events import event_of
from hdet.integrations.deepspeed import optimizer_of
from hdet.integrations.lengths import Ending, check_length, lengths_in
from hdet.integrations.searches import read_guard, read_search, write_guard, write_search
from hdet.parameters import Rate, unwrapped
from hdet.rollback.guard import Guard as PlainGuard
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto
from hdet.search.reporting import Found

try:
    from transformers import TrainerCallback
except ImportError:  # then there is no trainer to attach to, but this file can still be read by tools
    TrainerCallback = object

__all__ = ["AutoLR", "Guard", "Replicas"]

Trainer: TypeAlias = Any
"""A ``transformers.Trainer``."""
_OURS = ("max_lr", "total_steps", "epochs", "steps_per_epoch", "last_epoch", "model")
"""Arguments of a scheduler that :class:`AutoLR` fills in."""


class _Joined(TrainerCallback):  # type: ignore[misc]  # an optional package
    """Puts functions in front of a Trainer's methods, and sums the loss of every optimizer step."""

    def __init__(self) -> None:
        self._trainer: Trainer = None
        self._loss: Tensor | float = 0.0
        """Of the micro-batches since the last optimizer step; the Trainer has divided each."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, before its ``train()``; also as a callback, if it is not one yet. Gives the trainer."""
        self._check(trainer)
        self._trainer = trainer
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        trainer.training_step = self._summed(trainer.training_step)
        trainer._save_optimizer_and_scheduler = self._followed(trainer._save_optimizer_and_scheduler, self._save)
        trainer._load_optimizer_and_scheduler = self._followed(trainer._load_optimizer_and_scheduler, self._load)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is loaded by now, and no step is made yet."""
        if self._trainer is None:
            name = type(self).__name__
            raise ArgumentError(
                f"{name} is a callback of this Trainer, but was not attached to it, so it hears of no loss; write "
                f"{name}(...).attach(trainer) before trainer.train()"
            )
        self._loss = 0.0

    def _check(self, trainer: Trainer) -> None:
        """Raise for a trainer that cannot be joined: a guard can be there beside AutoLR, but nothing twice."""
        name, kind = type(self).__name__, Guard if isinstance(self, Guard) else _Attached
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
        """``training_step`` gives a micro-batch's share of the step's loss: their sum is the loss undivided."""

        def summed(*args: Any, **kwargs: Any) -> Tensor:
            loss = training_step(*args, **kwargs)
            self._loss = self._loss + loss.detach()
            if self._trainer.accelerator.sync_gradients:
                total, self._loss = self._loss, 0.0
                self._observe(total)
            return loss

        return summed

    def _followed(self, method: Callable[..., None], then: Callable[[str], None]) -> Callable[..., None]:
        """Optimizer and scheduler are written to a folder, or read from it, and then what is ours."""

        def followed(folder: str | None) -> None:
            give = "resume with max_steps={steps}, or the num_train_epochs that make as many"
            with lengths_in("max_steps and num_train_epochs of the TrainingArguments", give, "AutoLR(finish=...)"):
                method(folder)
            if folder is not None:
                then(folder)

        return followed

    # What to do with the loss of a step that the optimizer is about to make, and with the folder of a checkpoint:

    def _observe(self, loss: Tensor | float) -> None: ...
    def _save(self, folder: str) -> None: ...
    def _load(self, folder: str) -> None: ...


class _Attached(_Joined):
    """The Trainer's scheduler is given the loss, and what is evaluated and saved is the ranks' one model."""

    def __init__(self) -> None:
        super().__init__()
        self.ending: Ending | None = None
        self._shown = False
        """Whether the weights are the replicas' mean at the moment."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, before its ``train()``; also as a callback, if it is not one yet. Gives the trainer."""
        super().attach(trainer)
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, self._with_mean(getattr(trainer, name)))
        trainer.log = self._logged(trainer.log)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a schedule that is too short for the run."""
        super().on_train_begin(args, state, control, **kwargs)
        scheduler = self._scheduler
        if self.ending is not None:
            self.ending.check(scheduler)
        falls = self.ending is not None and self.ending.is_under_way(scheduler)
        if isinstance(scheduler, OneCycleLR) and not falls:  # past its end torch has no rate
            check_length(state.max_steps, scheduler, "max_steps and num_train_epochs")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One model for what comes after training, where training stopped inside a round. Collective."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):  # that one is everybody's
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

    def _news(self) -> dict[str, Any]:
        """What is added to the logs."""
        return {}

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

    def _logged(self, log: Callable[..., None]) -> Callable[..., None]:
        def logged(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "learning_rate" in logs:  # what the Trainer says of training, not of an evaluation
                logs.update(self._news())
            log(logs, *args, **kwargs)

        return logged


class Replicas(_Attached):
    """Replicas that train apart in a Trainer: for an ``hdet.OneCycleLR`` that was given by ``optimizers=``.

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
        """Step and base rate of the last optimizer step: the Trainer logs when the scheduler has gone on."""

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

    def _news(self) -> dict[str, Any]:
        step, base = self._last_step[0], float(self._last_step[1])
        rows = enumerate(self._scheduler.replica_multipliers(step))
        return {"learning_rate": base, "hdet/rate": base, **{f"hdet/rate/{r}": base * row[0] for r, row in rows}}


class AutoLR(_Attached):
    """Finds the learning rate in a Trainer: ``max_lr="auto"`` in place of the Trainer's own schedule.

    .. code-block:: python

        trainer = Trainer(model, args, train_dataset=data)
        AutoLR().attach(trainer)
        trainer.train()

    ``args.learning_rate`` is a guess, and ``lr_scheduler_type`` and warm-up are not used. ``trainer.lr_scheduler`` is
    made by :func:`hdet.auto`, and saved and loaded with the trainer's checkpoints. It gets the trainer's model and the
    loss of every optimizer step, not divided by the accumulation steps. The logs get ``hdet/found``, the
    peak rate that was found so far (``learning_rate`` is that of the step), ``hdet/status``, whether it has settled,
    and, if something happened, ``hdet/event``.

    The rate is found on ``schedule=``, or on a scheduler of torch or transformers in ``optimizers=``. If
    ``optimizers=`` has a search, an ``hdet.OneCycleLR`` or a result of ``hdet.auto``, AutoLR gives that one the loss;
    then AutoLR takes no arguments but ``finish``.

    With ``finish`` the rate is held, and falls before training stops: when ``EarlyStoppingCallback``, or any code that
    sets ``control.should_training_stop``, asks for a stop, or before ``max_steps``.

    Args:
        finish: steps over which the rate falls at the end.
        options: further arguments of ``hdet.auto``: ``journal``, ``rollback``, ``schedule``, a function from an
            optimizer to its scheduler; without ``schedule`` also those of ``hdet.OneCycleLR``. Momentum is not cycled.
    """

    def __init__(self, *, finish: int | None = None, **options: Any) -> None:
        super().__init__()
        self.ending = None if finish is None else Ending(finish)
        if taken := [name for name in _OURS if name in options]:
            raise ArgumentError(
                f"AutoLR fills in {', '.join(taken)} by itself; leave that out, or build the hdet.OneCycleLR yourself "
                "and give it by optimizers="
            )
        self.options = options
        self._made: OneCycleLR | ScheduledSearch | None = None
        self._events = _Events()
        self._ended_at = -1
        """The step after which the rate had fallen."""

    def attach(self, trainer: Trainer) -> Trainer:
        """Join ``trainer``, before its ``train()``; also as a callback, if it is not one yet. Gives the trainer."""
        super().attach(trainer)
        if self.ending is not None:
            trainer._maybe_log_save_evaluate = self._ended(trainer._maybe_log_save_evaluate, self.ending)
        if not isinstance(trainer.lr_scheduler, (OneCycleLR, ScheduledSearch, type(None))):
            self.options["schedule"], trainer.lr_scheduler = trainer.lr_scheduler, None
        if trainer.lr_scheduler is None:
            trainer.create_scheduler = self._create_scheduler
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also tell of a run that is shorter than its checkpoint's: the Trainer lets no warning of loading through."""
        super().on_train_begin(args, state, control, **kwargs)
        self._ended_at = -1
        scheduler = self._scheduler
        if not isinstance(scheduler, OneCycleLR) or scheduler.last_epoch == 0:
            return
        if state.max_steps < scheduler.total_steps < math.inf:
            warnings.warn(
                f"the checkpoint is of a run of {scheduler.total_steps} steps, but the trainer is to make "
                f"{state.max_steps}: the schedule of {scheduler.total_steps} goes on, and is left before its end; "
                "resume with the max_steps that the run began with",
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
        """In place of the Trainer's: called when model and optimizer are ready, before a checkpoint is loaded."""
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
        journals = self.options.get("journal")
        known = journals if isinstance(journals, (list, tuple)) else [journals]
        options = {**self.options, "model": trainer.model, "journal": [*known, self._events]}
        steps = num_training_steps if self.ending is None or "schedule" in options else None
        self._made = trainer.lr_scheduler = auto(optimizer, total_steps=steps, **options)
        return self._made

    def _ended(self, method: Callable[..., None], ending: Ending) -> Callable[..., None]:
        """The last of a step, where all callbacks have spoken; where the rate has fallen it evaluates and saves."""

        def ended(*args: Any, **kwargs: Any) -> None:
            trainer, state, scheduler = self._trainer, self._trainer.state, self._trainer.lr_scheduler
            if ending.is_over(scheduler) and state.global_step > self._ended_at:  # the epoch ends here too
                self._ended_at = state.global_step
                trainer.control.should_evaluate |= trainer.args.eval_strategy == "steps"
                trainer.control.should_save |= trainer.args.save_strategy == "steps"
            method(*args, **kwargs)
            asked, left = trainer.control.should_training_stop, state.max_steps - state.global_step
            trainer.control.should_training_stop = ending.stops(scheduler, asked=asked, left=left)

        return ended

    def _news(self) -> dict[str, Any]:
        event, found = self._events.taken(), self._scheduler.found
        told = _told(found) if found is not None else {}
        return {**told, **({"hdet/event": event} if event else {})}


class Guard(_Joined):
    """:class:`hdet.Guard` in a Trainer: it rolls training back if it is ruined, at the Trainer's own schedule.

    .. code-block:: python

        trainer = Trainer(model, args, train_dataset=data)
        Guard(check_every=50).attach(trainer)
        trainer.train()

    It judges the loss of every optimizer step, not divided by the accumulation steps. The trainer's checkpoints have it
    as ``hdet_guard.pt``, each rank's own part if weights are sharded.

    Args:
        options: ``every``, ``factor``, ``recover`` and ``most`` of :class:`hdet.Guard`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.guard: PlainGuard | None = None
        """There once ``train()`` has begun."""
        self._of_step: Tensor | float | None = None
        """The loss of the step that is being made."""
        self._folder: str | None = None
        """Of the checkpoint that training goes on from."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the guard, and go on with that of a checkpoint: the optimizer is there, and no step is made yet."""
        super().on_train_begin(args, state, control, **kwargs)
        folder, self._folder, self._of_step = self._folder, None, None
        self.guard = PlainGuard(self._trainer.optimizer, self._trainer.model, **self.options)
        if folder is not None:
            read_guard(folder, self.guard, unwrapped(self._trainer.optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped, and the scheduler too. If a round ends, this is a collective."""
        loss, self._of_step = self._of_step, None
        if self.guard is not None:
            self.guard.step(loss)

    def _observe(self, loss: Tensor | float) -> None:
        self._of_step = loss

    def _save(self, folder: str) -> None:
        if self.guard is not None:
            write_guard(folder, self.guard, unwrapped(self._trainer.optimizer))

    def _load(self, folder: str) -> None:
        self._folder = folder


def _check_sharding(trainer: Trainer, optimizer: Any) -> None:
    """Raise where the Trainer shards weights in a way that cannot be searched."""
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


def _told(found: Found) -> dict[str, Any]:
    """The peak rate that was found so far, and the search's status; if groups differ, also all their rates."""
    if math.isnan(found.rate):
        return {}
    differ = len(set(found.rates)) > 1
    rates = {f"hdet/found/{g}": rate for g, rate in enumerate(found.rates) if differ}
    return {"hdet/found": found.rate, "hdet/status": found.status, **rates}


class _Events:
    """A journal that keeps what happened until it is logged."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def write(self, record: Mapping[str, Any]) -> None:
        happened = event_of(record)
        if happened:
            self._kept.append(happened)

    def taken(self) -> str:
        kept, self._kept = self._kept, []
        return "; ".join(kept)
