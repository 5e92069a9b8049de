"""hdet in Lightning: the callbacks ``AutoLR``, which finds the learning rate, and ``Guard``, which rolls back.

``lightning`` and ``pytorch_lightning`` are two packages with the same content, and each accepts only its own callbacks:
those here are of both, if both are in use.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.integrations import checkpoints
from hdet.integrations.guards import AccumulatingGuard, warn_without_guard
from hdet.integrations.lengths import Finish, check_length, length_from
from hdet.integrations.rules import not_by_steps
from hdet.journal import Journals, open_journal
from hdet.journal.sinks import EventSink
from hdet.rule.found import listed
from hdet.schedulers.auto import auto
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.ensemble import Ensemble
from hdet.schedulers.onecycle import OneCycleLR

__all__ = ["AutoLR", "Guard"]

Scheduler: TypeAlias = AutoScheduler | OneCycleLR | Ensemble


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of each package that is imported or, if none is, of each that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    used = [name for name in names if name in sys.modules]
    found = used or [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    return tuple(importlib.import_module(name).Callback for name in found)


_CALLBACKS = _callback_classes()
_Base: Any = type("_Base", _CALLBACKS, {}) if _CALLBACKS else object


class _Callback(_Base):  # type: ignore[misc]  # the type of an optional package
    def __init__(self) -> None:
        if not _CALLBACKS:
            name = type(self).__name__
            raise ModuleNotFoundError(f"{name} needs Lightning, which is not installed: pip install lightning")
        super().__init__()


class AutoLR(_Callback):
    """Finds the learning rate while a LightningModule trains.

    .. code-block:: python

        trainer = Trainer(max_epochs=10, callbacks=[AutoLR()])

    ``configure_optimizers`` returns only an optimizer, whose rate is a guess that may be far off. AutoLR adds
    the scheduler of :func:`hdet.auto`, stepped at every optimizer step, before a checkpoint is restored:
    ``fit(ckpt_path=...)`` resumes the search. The scheduler gets the loss that ``training_step`` returns, and the
    module.

    If ``configure_optimizers`` returns a scheduler of torch too, stepped by steps or by epochs, the rate is found on
    that schedule.

    If ``configure_optimizers`` returns a scheduler of hdet, AutoLR uses that one. It gives it the training loss, logs
    its rate, and validates and saves the mean of the replicas. Then give ``journal`` and other arguments to that
    scheduler, not to AutoLR.

    The loggers get each round's numbers. Events and the rate that was found are messages of Lightning's log.
    ``hdet/lr`` is also in the progress bar.

    In a trainer of unknown length (``max_epochs=-1``) the rate is constant once it is found. With ``finish`` it is
    constant in any trainer, and falls before training stops: when ``EarlyStopping``, or any code that sets
    ``trainer.should_stop``, requests a stop, or before the trainer's own end.

    Args:
        journal: as in :class:`hdet.OneCycleLR`.
        finish: number of steps over which the rate falls at the end. None: the schedule falls by itself.
        onecycle: further arguments of :func:`hdet.auto`. The default of ``total_steps`` is the trainer's
            ``estimated_stepping_batches``.
    """

    def __init__(self, journal: Journals = None, *, finish: int | None = None, **onecycle: Any) -> None:
        super().__init__()
        open_journal(journal)  # raises for what cannot be one
        self.journal = journal
        self.onecycle = onecycle
        self.finish = None if finish is None else Finish(finish)
        self.scheduler: Scheduler | None = None
        """The scheduler, once ``fit`` has begun."""
        self.summary: str | None = None
        """What the search has found, once ``fit`` has ended; None if the scheduler is the user's own."""
        self._is_ours = False
        """Whether AutoLR has made the scheduler."""
        self._stopping: _Stopping | None = None
        """With ``finish``, while ``fit`` goes on."""
        self._consensus: ExitStack | None = None
        """While the module holds the mean of the replicas: what restores each one's own weights."""
        self._restored: Mapping[str, Any] = {}
        """The scheduler's state and the search in a checkpoint, until Lightning has loaded the rest of it."""

    # -- the scheduler ------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """How Lightning names this callback in its warning if a checkpoint is resumed without it."""
        return "hdet.integrations.lightning.AutoLR (without it the learning rate stays as it was saved)"

    def state_dict(self) -> dict[str, Any]:
        """Not empty, since Lightning warns of a missing callback only if it had a state."""
        return {"scheduler": type(self.scheduler).__name__}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Also save the tensors of the search. Collective, except after an exception."""
        if self.scheduler is not None and not checkpoints.holds_parts(self.scheduler.optimizer):
            search = checkpoints.search_state(self.scheduler, alone="save_checkpoint" not in vars(trainer))
            checkpoint.update({checkpoints.SEARCH: search} if search else {})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a checkpoint without a scheduler, since Lightning would then not restore ours."""
        if trainer.state.fn != "fit":
            return
        if not checkpoint.get("lr_schedulers"):
            raise ArgumentError(
                "the checkpoint has no scheduler, but AutoLR adds one: it was saved without AutoLR, or with weights "
                "only; load its weights into the module before fit(), or leave AutoLR out"
            )
        self._restored = {name: checkpoint.get(name, {}) for name in ("lr_schedulers", checkpoints.SEARCH)}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make a scheduler, or find the user's: the optimizers exist, and nothing is restored yet."""
        _check(trainer, pl_module)
        configs, self.summary = trainer.strategy.lr_scheduler_configs, None
        self._is_ours = not configs or _is_schedule(configs)
        if self._is_ours:
            config = configs[0] if configs else _part_of_lightning(trainer, "utilities.types").LRSchedulerConfig(None)
            schedule: dict[str, Any] = {}
            if configs:
                self._check_nothing_given("schedule", "schedule_every")
                every = config.frequency * (1 if config.interval == "step" else _steps_of_an_epoch(trainer))
                schedule = {"schedule": config.scheduler, "schedule_every": every}
            scheduler = self._new_scheduler(trainer, pl_module, **schedule)
            config.scheduler, config.interval, config.frequency = scheduler, "step", 1
            trainer.strategy.lr_scheduler_configs = [config]
        else:
            self._check_nothing_given("journal", *self.onecycle)
            scheduler = _hdet_scheduler(configs)
        self.scheduler = scheduler
        if self.finish is not None:
            self.finish.check(scheduler)
            self._stopping = _Stopping(self.finish, trainer, scheduler)
        if self._restored and self._is_ours:
            trainers = self.onecycle.get("total_steps") is None
            with length_from("max_steps and max_epochs of the trainer" if trainers else "total_steps of AutoLR"):
                scheduler.check_state_dict(self._restored["lr_schedulers"][0])
        self._save_consensus(trainer, scheduler)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume a search that was restored. Refuse a trainer that makes more steps than its schedule has."""
        restored, self._restored = self._restored.get(checkpoints.SEARCH, {}), {}
        if isinstance(self.scheduler, AutoScheduler) and trainer.ckpt_path:
            if checkpoints.holds_parts(self.scheduler.optimizer):
                checkpoints.read_search(trainer.ckpt_path, self.scheduler)
            else:
                self.scheduler.load_search_state_dict(restored)
        if self.finish is None and self._is_ours and self.onecycle.get("total_steps") is None:
            check_length(self.scheduler, _total_steps(trainer) or math.inf, "max_epochs and max_steps")

    def _new_scheduler(self, trainer: Any, pl_module: Any, **schedule: Any) -> Scheduler:
        arguments = {"total_steps": None, **self.onecycle, **schedule}
        if arguments["total_steps"] is None and ("schedule" in arguments or self.finish is None):
            arguments["total_steps"] = _total_steps(trainer, may_be_endless="schedule" not in arguments)
        journals = [self.journal, *trainer.loggers, EventSink(partial(_say_event, trainer))]
        known = {"model": pl_module, **arguments, "journal": journals}
        return auto(_only_optimizer(trainer), **known)

    def _check_nothing_given(self, *unused: str) -> None:
        given = {"journal": self.journal, **self.onecycle}
        names = [name for name in unused if given.get(name) is not None]
        cure = "give them to that scheduler, or return only the optimizer"
        must_be("empty, because configure_optimizers returned a scheduler", not names, cure, arguments=names)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Log the rate of the next step."""
        assert self.scheduler is not None
        if self._stopping is not None:
            self._stopping.look()
        pl_module.log("hdet/lr", _rate(self.scheduler), prog_bar=True, on_step=True, on_epoch=False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop if the rate has fallen because of ``finish``."""
        if self._stopping is not None:
            self._stopping.look()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Give the scheduler the loss. Later hooks come after the scheduler's step."""
        if self.scheduler is not None:
            self.scheduler.observe(_returned(trainer, loss))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the mean of the replicas."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.scheduler is not None:
            self._consensus = ExitStack()
            self._consensus.enter_context(self.scheduler.consensus())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore each replica's own weights."""
        self._leave_consensus()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave one model behind, even if training has stopped inside a round."""
        if self.scheduler is not None:
            self.scheduler.converge()
        if self._is_ours and isinstance(self.scheduler, AutoScheduler):
            self.summary = f"{self.scheduler.found}; the guess was {listed(self.scheduler.guesses)}"
            _say(trainer, self.summary)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for no other rank from here on: the others may have seen no exception."""
        self._leave(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the trainer as it was."""
        self._leave(trainer)

    def _save_consensus(self, trainer: Any, scheduler: Scheduler) -> None:
        """Let ``trainer.save_checkpoint``, which all callbacks use, save the mean of the replicas.

        ``on_save_checkpoint`` would not do, since Lightning does not call it if only weights are saved.
        """
        save = type(trainer).save_checkpoint

        def save_checkpoint(filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> None:
            with scheduler.consensus() if self._consensus is None else nullcontext():
                save(trainer, filepath, weights_only, *args, **kwargs)
            if not weights_only and checkpoints.holds_parts(scheduler.optimizer):
                folder = trainer.strategy.broadcast(str(filepath) if Path(filepath).is_dir() else None)
                if folder is not None:
                    checkpoints.write_search(folder, scheduler)

        trainer.save_checkpoint = save_checkpoint

    def _leave(self, trainer: Any) -> None:
        self._leave_consensus()
        self._restored = {}
        vars(trainer).pop("save_checkpoint", None)
        if self._stopping is not None:
            self._stopping.leave()
            self._stopping = None

    def _leave_consensus(self) -> None:
        entered, self._consensus = self._consensus, None
        if entered is not None:
            entered.close()


class _Stopping:
    """Lets the rate fall before the trainer stops.

    Until it has fallen, the trainer's ``min_steps`` is so high that Lightning does not stop.
    """

    def __init__(self, finish: Finish, trainer: Any, scheduler: Any) -> None:
        self._finish, self._trainer, self._scheduler = finish, trainer, scheduler
        self._min_steps = trainer.fit_loop.epoch_loop.min_steps
        """The trainer's own."""

    def look(self) -> None:
        """Called twice a step, since the module, or a callback after this one, may have requested a stop meanwhile."""
        trainer = self._trainer
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current.processed
        loop.min_steps = self._min_steps
        can_stop = epochs >= (trainer.min_epochs or 0) and trainer.global_step >= (self._min_steps or 0)
        requested = trainer.should_stop and can_stop
        left = (_total_steps(trainer) or math.inf) - trainer.global_step
        stops = self._finish.stops(self._scheduler, requested=requested, left=left)
        loop.min_steps = self._min_steps if stops else sys.maxsize
        if stops or requested:
            trainer.should_stop = stops

    def leave(self) -> None:
        """Give the trainer its own ``min_steps``."""
        self._trainer.fit_loop.epoch_loop.min_steps = self._min_steps


class Guard(_Callback):
    """:class:`hdet.Guard` in a trainer of Lightning: it rolls back if training has diverged, with any schedule.

    .. code-block:: python

        trainer = Trainer(max_epochs=10, callbacks=[Guard(check_every=50)])

    It judges the mean loss of the batches of every optimizer step. It is saved in Lightning's checkpoints, and
    ``fit(ckpt_path=...)`` resumes it; but if weights are sharded it is not saved, and starts again.

    Args:
        options: ``check_every``, ``factor``, ``recover`` and ``max_rollbacks`` of :class:`hdet.Guard`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.guard: AccumulatingGuard | None = None
        """The guard, once ``fit`` has begun."""
        self._is_sharded = False
        self._restored: Mapping[str, Any] = {}
        self._steps = 0
        """The trainer's ``global_step`` at the last optimizer step."""
        self._is_alone = False
        """Whether other ranks may have stopped, since this one has seen an exception."""

    @property
    def state_key(self) -> str:
        """How Lightning names this callback in its warning if a checkpoint is resumed without it."""
        return "hdet.integrations.lightning.Guard"

    def state_dict(self) -> dict[str, Any]:
        """Numbers and snapshots. Collective, except after an exception."""
        if self.guard is None or self._is_sharded:
            return {"guard": None}
        return {"guard": self.guard.state_dict() if self._is_alone else self.guard.state_of_all()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts, since the optimizers are not restored yet."""
        self._restored = state_dict

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the guard, now that the optimizers exist."""
        optimizer = _only_optimizer(trainer)
        self.guard = AccumulatingGuard(optimizer, pl_module, **self.options)
        self._is_sharded, self._is_alone = checkpoints.holds_parts(optimizer), False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume a guard that was restored."""
        restored, self._restored, self._steps = self._restored, {}, trainer.global_step
        if self.guard is not None and restored.get("guard") is not None:
            self.guard.load_state_dict(restored["guard"])
        elif trainer.ckpt_path:
            warn_without_guard(trainer.ckpt_path)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Count the loss that ``training_step`` returned."""
        if self.guard is not None:
            self.guard.observe(_returned(trainer, loss))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step, if the optimizer has made one. If a round ends here, this is a collective."""
        if trainer.global_step > self._steps and self.guard is not None:
            self._steps = trainer.global_step
            self.guard.end_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for no other rank from here on: the others may have seen no exception."""
        self._is_alone = True


def _say_event(trainer: Any, record: Mapping[str, Any], event: str) -> None:
    _say(trainer, f"step {record['step']}: {event}; the rate is {listed(record['base'])}")


def _say(trainer: Any, words: str) -> None:
    _part_of_lightning(trainer, "utilities.rank_zero").rank_zero_info(f"hdet: {words}")


def _part_of_lightning(trainer: Any, path: str) -> Any:
    """A module of the package that the trainer is from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    root, _, _ = type(trainer.fit_loop).__module__.partition(".loops.")
    return importlib.import_module(f"{root}.{path}")


def _returned(trainer: Any, loss: Tensor) -> Tensor:
    """The loss that ``training_step`` returned.

    Lightning has divided it by the number of accumulated batches, and a GradScaler has multiplied it.
    """
    value: Tensor = loss.detach() * trainer.accumulate_grad_batches
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        value = value / scaler.scale(torch.ones_like(value))
    return value


def _check(trainer: Any, module: Any) -> None:
    """Raise for a trainer whose steps AutoLR cannot see."""
    cure = (
        "give DDPStrategy, or ModelParallelStrategy with fully_shard, or call hdet.integrations.deepspeed.auto(engine, "
        "...) in a loop of your own"
    )
    strategy = type(trainer.strategy).__name__
    must_be("one without an engine", not hasattr(trainer.strategy, "deepspeed_engine"), cure, strategy=strategy)
    is_automatic = module.automatic_optimization
    cure = "leave AutoLR out, and call scheduler.step(loss) of hdet.OneCycleLR after optimizer.step()"
    must_be("True, since AutoLR does not see manual steps", is_automatic, cure, automatic_optimization=is_automatic)


def _only_optimizer(trainer: Any) -> Any:
    """What configure_optimizers returned."""
    made, cure = trainer.optimizers, "return one optimizer, for instance torch.optim.AdamW(self.parameters())"
    must_be("one optimizer with parameters", len(made) == 1 and made[0].param_groups, cure, configure_optimizers=made)
    return made[0]


def _is_schedule(configs: list[Any]) -> bool:
    """Whether there is one scheduler, of torch, whose rates are known in advance."""
    one = configs[0].scheduler if len(configs) == 1 else None
    return isinstance(one, LRScheduler) and not isinstance(one, (AutoScheduler, OneCycleLR, ReduceLROnPlateau))


def _steps_of_an_epoch(trainer: Any) -> int:
    trainer.estimated_stepping_batches  # sets up the loader  # noqa: B018
    steps: int = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    return steps


def _hdet_scheduler(configs: list[Any]) -> Scheduler:
    """The user's own scheduler."""
    if len(configs) != 1 or not isinstance(configs[0].scheduler, (AutoScheduler, OneCycleLR, Ensemble)):
        names = ", ".join(type(config.scheduler).__name__ for config in configs)
        raise ArgumentError(
            f"AutoLR needs one schedule whose rates are known in advance, but configure_optimizers returned {names}; "
            "return only the optimizer, or with it one scheduler of torch or of hdet"
        )
    if (words := not_by_steps(configs[0])) is not None:
        raise ArgumentError(words)
    found: Scheduler = configs[0].scheduler
    return found


def _total_steps(trainer: Any, *, may_be_endless: bool = True) -> int | None:
    """Optimizer steps that the trainer will make; None if its length is unknown."""
    steps = trainer.estimated_stepping_batches
    if may_be_endless and trainer.max_epochs == trainer.max_steps == -1:
        return None
    if not (math.isfinite(steps) and steps >= 1):
        raise ArgumentError(
            f"the schedule needs the run's length, but the trainer's estimated_stepping_batches is {steps}; give "
            "Trainer(max_steps=...) or max_epochs=, or AutoLR(total_steps=...)"
        )
    return int(steps)


def _rate(scheduler: Scheduler) -> float | Tensor:
    """The base rate of the first parameter group; of a search, that of the first group that is searched."""
    if isinstance(scheduler, Ensemble):
        rate: float | Tensor = scheduler.optimizer.param_groups[0]["lr"]
        return rate
    if isinstance(scheduler, AutoScheduler):
        return scheduler.get_last_lr()[scheduler.search.memory.lead]
    return scheduler.base_lrs_now[0]
