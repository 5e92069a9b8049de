"""Lightning: ``AutoLR``, a callback that finds the learning rate, or serves a scheduler of hdet."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.checks import not_by_steps
from hdet.errors import ArgumentError, ResumeWarning
from hdet.integrations.lengths import Ending, check_length, lengths_in
from hdet.integrations.lightning_story import Story, part_of_lightning
from hdet.integrations.searches import (
    NAME,
    guard_state,
    holds_parts,
    read_search,
    search_of,
    warn_of_no_guard,
    write_search,
)
from hdet.journal import Journals, open_journal
from hdet.rollback.guard import Guard as PlainGuard
from hdet.schedulers.ensemble import Ensemble
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.scheduled import ScheduledSearch
from hdet.schedulers.several import auto

__all__ = ["AutoLR", "Guard"]

Scheduler: TypeAlias = OneCycleLR | ScheduledSearch | Ensemble


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of ``lightning`` and of ``pytorch_lightning``: of those in use, else of those installed.

    Each package accepts only its own.
    """
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

    ``configure_optimizers`` returns only an optimizer, whose rate is a guess that may be far off. AutoLR
    adds :class:`hdet.OneCycleLR` with ``max_lr="auto"``, stepped at every optimizer step, before a checkpoint is
    restored: ``fit(ckpt_path=...)`` resumes the search. The scheduler gets the loss that ``training_step`` returns, and
    the module.

    If ``configure_optimizers`` returns a scheduler of torch too, stepped by steps or by epochs, the rate is found on
    that schedule (:func:`hdet.auto`).

    If ``configure_optimizers`` returns a scheduler of hdet, AutoLR serves that one. It gives it the training loss, logs
    its rate, and validates and saves the mean of replicas that train apart. Then give ``journal`` and other arguments
    to that scheduler, not to AutoLR.

    The loggers get each round's numbers. Events and the rate that was found are messages of Lightning's log.
    ``hdet/lr`` is also in the progress bar.

    A trainer without an end (``max_epochs=-1``) has a run without an end: the rate is held. With ``finish`` it is held
    in any trainer, and falls before training stops: when ``EarlyStopping``, or any code that sets
    ``trainer.should_stop``, asks for a stop, or before the trainer's own end.

    Args:
        journal: as in :class:`hdet.OneCycleLR`.
        finish: steps over which the rate falls at the end.
        onecycle: further arguments of :class:`hdet.OneCycleLR`; or ``schedule``, a function from an optimizer to its
            scheduler, and further arguments of :func:`hdet.auto`. The default of ``total_steps`` is the trainer's
            ``estimated_stepping_batches``.
    """

    def __init__(self, journal: Journals = None, *, finish: int | None = None, **onecycle: Any) -> None:
        super().__init__()
        open_journal(journal)
        self.journal = journal
        self.onecycle = onecycle
        self.ending = None if finish is None else Ending(finish)
        self._min_steps: int | None = None
        """Of the trainer. While the rate has not fallen it is set so high that Lightning obeys no stop."""
        self.scheduler: Scheduler | None = None
        """What steps the rate; there once ``fit`` has begun."""
        self.story: Story | None = None
        """What happened in the search; None where the scheduler is the user's own."""
        self._together: ExitStack | None = None
        """While the module holds the mean of the replicas: what puts each one's own weights back."""
        self._restored: Mapping[str, Any] = {}
        """The search of a checkpoint, until all else of it is loaded."""
        self._state: dict[str, Any] | None = None
        """The state of its scheduler, until Lightning loads it."""

    # -- the scheduler ------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """What Lightning asks for in a warning if a checkpoint of ours is resumed without this callback."""
        return "hdet.integrations.lightning.AutoLR (without it the learning rate stays as it was saved)"

    def state_dict(self) -> dict[str, Any]:
        """What of it stands in a checkpoint: not empty, or Lightning would not miss it."""
        return {"scheduler": type(self.scheduler).__name__}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Also save what the search holds in tensors. Collective, but after an exception."""
        if self.scheduler is not None and not holds_parts(self.scheduler.optimizer):
            search = search_of(self.scheduler, alone="save_checkpoint" not in vars(trainer))
            checkpoint.update({NAME: search} if search else {})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a checkpoint without a scheduler: nobody would restore ours."""
        if trainer.state.fn != "fit":
            return
        if not checkpoint.get("lr_schedulers"):
            raise ArgumentError(
                "the checkpoint has no scheduler, but AutoLR adds one: it was saved without AutoLR, or with weights "
                "only; load its weights into the module before fit(), or leave AutoLR out"
            )
        self._restored = checkpoint.get(NAME, {})
        self._state = checkpoint["lr_schedulers"][0]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Add a scheduler, or find the user's: optimizers are there, and nothing is restored yet."""
        _check_optimizers(trainer, pl_module)
        configs = trainer.strategy.lr_scheduler_configs
        if configs and not _is_schedule(configs):
            self._check_nothing_given("journal", *self.onecycle)
            self.scheduler, self.story = _hdet_scheduler(configs), None
        else:
            config = configs[0] if configs else part_of_lightning(trainer, "utilities.types").LRSchedulerConfig(None)
            schedule: dict[str, Any] = {}
            if configs:
                self._check_nothing_given("schedule", "schedule_every")
                every = config.frequency * (1 if config.interval == "step" else _steps_of_an_epoch(trainer))
                schedule = {"schedule": config.scheduler, "schedule_every": every}
            self.story = Story(trainer)
            self.scheduler = self._new_scheduler(trainer, pl_module, self.story, **schedule)
            config.scheduler, config.interval, config.frequency = self.scheduler, "step", 1
            trainer.strategy.lr_scheduler_configs = [config]
        if self.ending is not None:
            self.ending.check(self.scheduler)
            self._min_steps = trainer.fit_loop.epoch_loop.min_steps
        state, self._state = self._state, None
        if state is not None and self.story is not None:
            given = self.onecycle.get("total_steps") is not None
            source = "total_steps of AutoLR" if given else "max_steps and max_epochs of the trainer"
            trainers = "resume with Trainer(max_steps={steps}), or the max_epochs that make as many"
            cure = "resume with AutoLR(total_steps={steps})" if given else trainers
            with lengths_in(source, cure, "AutoLR(finish=...)"):
                self.scheduler.check_state_dict(state)
        self._save_together(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with a search that was restored. Refuse a trainer that makes more steps than its schedule has."""
        restored, self._restored = self._restored, {}
        if isinstance(self.scheduler, (OneCycleLR, ScheduledSearch)) and trainer.ckpt_path:
            if holds_parts(self.scheduler.optimizer):
                _read_parts(trainer.ckpt_path, self.scheduler)
            else:
                self.scheduler.load_search_state_dict(restored)
        if self.story is None or not isinstance(self.scheduler, OneCycleLR):
            return
        falls = self.ending is not None and self.ending.is_under_way(self.scheduler)
        if self.onecycle.get("total_steps") is None and not falls:
            check_length(_total_steps(trainer) or math.inf, self.scheduler, "max_epochs and max_steps")

    def _new_scheduler(self, trainer: Any, pl_module: Any, story: Story, **schedule: Any) -> Scheduler:
        arguments = {"total_steps": None, **self.onecycle, **schedule}
        if arguments["total_steps"] is None and ("schedule" in arguments or self.ending is None):
            arguments["total_steps"] = _total_steps(trainer, may_be_endless="schedule" not in arguments)
        given = self.journal if isinstance(self.journal, (list, tuple)) else [self.journal]
        known = {"model": pl_module, **arguments, "journal": [*given, story]}
        optimizer = trainer.optimizers[0]
        return auto(optimizer, **known) if "schedule" in known else OneCycleLR(optimizer, "auto", **known)

    def _check_nothing_given(self, *unused: str) -> None:
        given = {"journal": self.journal, **self.onecycle}
        names = [name for name in unused if given.get(name) is not None]
        if names:
            raise ArgumentError(
                f"configure_optimizers returned a scheduler, so {', '.join(names)} of AutoLR would not be used; give "
                "them to that scheduler, or return only the optimizer"
            )

    # -- the loop -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Log the rate of the step to come."""
        self._come_to_an_end(trainer)
        pl_module.log("hdet/lr", _rate(self.scheduler), prog_bar=True, on_step=True, on_epoch=False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop where the rate has fallen."""
        self._come_to_an_end(trainer)

    def _come_to_an_end(self, trainer: Any) -> None:
        """Somebody may have asked for a stop since: other callbacks, after this one, or the module."""
        if self.ending is None or not isinstance(self.scheduler, OneCycleLR):
            return
        loop = trainer.fit_loop.epoch_loop
        loop.min_steps = self._min_steps
        asked = trainer.should_stop and trainer.fit_loop._can_stop_early
        left = (_total_steps(trainer) or math.inf) - trainer.global_step
        if self.ending.stops(self.scheduler, asked=asked, left=left):
            trainer.should_stop = True
            return
        loop.min_steps = sys.maxsize
        if asked:
            trainer.should_stop = False

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Give the scheduler the loss that ``training_step`` returned: later hooks come after the scheduler's step."""
        if self.scheduler is not None:
            self.scheduler.observe(_returned(trainer, loss))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Replicas that train apart are validated as one model."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.scheduler is not None:
            self._together = ExitStack()
            self._together.enter_context(self.scheduler.consensus())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Each replica goes on with its own weights."""
        self._apart()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave one model behind, also where training stopped inside a round."""
        if self.scheduler is not None:
            self.scheduler.converge()
        if self.story is not None:
            name = "max_lr" if isinstance(self.scheduler, OneCycleLR) else "initial_lr"
            self.story.conclude([float(group.get(name, group["lr"])) for group in trainer.optimizers[0].param_groups])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Other ranks may have seen no exception: from here on nothing waits for them."""
        self._leave(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the trainer as it was."""
        self._leave(trainer)

    def _save_together(self, trainer: Any) -> None:
        """Let ``trainer.save_checkpoint``, which all callbacks use, save the mean of the replicas.

        ``on_save_checkpoint`` would not do: it is left out where only weights are saved.
        """
        scheduler, save = self.scheduler, type(trainer).save_checkpoint

        def save_checkpoint(filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> None:
            with ExitStack() as stack:
                if scheduler is not None and self._together is None:
                    stack.enter_context(scheduler.consensus())
                save(trainer, filepath, weights_only, *args, **kwargs)
            if scheduler is not None and not weights_only and holds_parts(scheduler.optimizer):
                folder = trainer.strategy.broadcast(str(filepath) if Path(filepath).is_dir() else None)
                if folder is not None:
                    write_search(folder, scheduler)

        trainer.save_checkpoint = save_checkpoint

    def _leave(self, trainer: Any) -> None:
        self._apart()
        self._restored, self._state = {}, None
        vars(trainer).pop("save_checkpoint", None)
        if self.ending is not None:
            trainer.fit_loop.epoch_loop.min_steps = self._min_steps

    def _apart(self) -> None:
        together, self._together = self._together, None
        if together is not None:
            together.close()


class Guard(_Callback):
    """:class:`hdet.Guard` in a trainer of Lightning: it rolls training back if it is ruined, at any schedule.

    .. code-block:: python

        trainer = Trainer(max_epochs=10, callbacks=[Guard(check_every=50)])

    It judges the mean loss of the batches of every optimizer step. Lightning's checkpoints have it, and
    ``fit(ckpt_path=...)`` goes on with it; not if weights are sharded, where it begins anew.

    Args:
        options: ``every``, ``factor``, ``recover`` and ``most`` of :class:`hdet.Guard`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.guard: PlainGuard | None = None
        """There once ``fit`` has begun."""
        self._optimizer: Any = None
        self._restored: Mapping[str, Any] | None = None
        self._losses: list[Tensor] = []
        """Of the batches since the last step of the optimizer ..."""
        self._made = 0
        """... and how many steps it had made then."""
        self._is_alone = False
        """Whether other ranks may not be there any more, since this one has seen an exception."""

    @property
    def state_key(self) -> str:
        """What Lightning asks for in a warning if a checkpoint of ours is resumed without this callback."""
        return "hdet.integrations.lightning.Guard"

    def state_dict(self) -> dict[str, Any]:
        """Numbers and snapshots. Collective, but after an exception."""
        if self.guard is None or holds_parts(self._optimizer):
            return {"guard": None}
        return {"guard": self.guard.state_dict() if self._is_alone else guard_state(self.guard)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Optimizers are not restored yet: it is loaded when training starts."""
        self._restored = state_dict

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the guard: optimizers are there."""
        if len(trainer.optimizers) != 1:
            raise ArgumentError(
                f"Guard watches the steps of one optimizer, but configure_optimizers returned {trainer.optimizers}; "
                "return one, or call hdet.Guard(optimizer, module) of one of them and its step(loss) in training_step"
            )
        self._optimizer = trainer.optimizers[0]
        self.guard = PlainGuard(self._optimizer, pl_module, **self.options)
        self._losses, self._is_alone = [], False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with a guard that was restored."""
        restored, self._restored, self._made = self._restored, None, trainer.global_step
        state = (restored or {}).get("guard")
        if self.guard is not None and state is not None:
            self.guard.load_state_dict(state)
        elif trainer.ckpt_path:
            warn_of_no_guard(trainer.ckpt_path)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Keep the loss that ``training_step`` returned."""
        self._losses.append(_returned(trainer, loss))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step, if the optimizer has made one. Where a round ends, a collective."""
        if trainer.global_step > self._made and self.guard is not None:
            losses, self._losses, self._made = self._losses, [], trainer.global_step
            self.guard.step(sum(losses) / len(losses) if losses else None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Other ranks may have seen no exception: from here on nothing waits for them."""
        self._is_alone = True


def _returned(trainer: Any, loss: Tensor) -> Tensor:
    """The loss that ``training_step`` returned.

    Lightning has divided it by the batches that are accumulated, and a GradScaler has multiplied it.
    """
    value: Tensor = loss.detach() * trainer.accumulate_grad_batches
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        value = value / scaler.scale(torch.ones_like(value))
    return value


def _read_parts(path: str, scheduler: Scheduler) -> None:
    """A search whose parts are with the ranks lies in the folder of a checkpoint of all ranks."""
    if Path(path).is_file():
        warnings.warn(
            f"{path} is one file of all weights, which are sharded here: the search was not saved in it; give "
            "ModelParallelStrategy(save_distributed_checkpoint=True), its default, to keep it",
            ResumeWarning,
            stacklevel=2,
        )
    else:
        read_search(path, scheduler)


def _check_optimizers(trainer: Any, module: Any) -> None:
    if hasattr(trainer.strategy, "deepspeed_engine"):
        raise ArgumentError(
            f"AutoLR needs a strategy of torch, but this trainer has {type(trainer.strategy).__name__}, whose engine "
            "holds the weights in partitions; give DDPStrategy or ModelParallelStrategy with fully_shard, or call "
            "hdet.integrations.deepspeed.auto(engine, ...) in a loop of your own"
        )
    if not module.automatic_optimization:
        raise ArgumentError(
            f"AutoLR needs automatic optimization, but {type(module).__name__} has automatic_optimization=False: it "
            "does not see manual steps; leave AutoLR out, and call scheduler.step(loss) of hdet.OneCycleLR after "
            "optimizer.step()"
        )
    optimizers = trainer.optimizers
    if len(optimizers) != 1 or not optimizers[0].param_groups:
        raise ArgumentError(
            f"AutoLR searches the rate of one optimizer, but configure_optimizers returned {optimizers}; return one "
            "optimizer with an lr, for instance torch.optim.AdamW(self.parameters())"
        )


def _is_schedule(configs: list[Any]) -> bool:
    """Whether there is one scheduler, of torch, whose rates are known in advance."""
    one = configs[0].scheduler if len(configs) == 1 else None
    return isinstance(one, LRScheduler) and not isinstance(one, (OneCycleLR, ReduceLROnPlateau))


def _steps_of_an_epoch(trainer: Any) -> int:
    trainer.estimated_stepping_batches  # sets up the loader  # noqa: B018
    steps: int = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    return steps


def _hdet_scheduler(configs: list[Any]) -> Scheduler:
    """The scheduler of the user's own."""
    if len(configs) != 1 or not isinstance(configs[0].scheduler, (OneCycleLR, ScheduledSearch, Ensemble)):
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
    """None: the trainer has no end."""
    steps = trainer.estimated_stepping_batches
    if may_be_endless and trainer.max_epochs == trainer.max_steps == -1:
        return None
    if not (math.isfinite(steps) and steps >= 1):
        raise ArgumentError(
            f"the schedule needs the run's length, but the trainer's estimated_stepping_batches is {steps}; give "
            "Trainer(max_steps=...) or max_epochs=, or AutoLR(total_steps=...)"
        )
    return int(steps)


def _rate(scheduler: Scheduler | None) -> float | Tensor:
    """The base rate of the first parameter group, of a search that of the first one that is searched."""
    if isinstance(scheduler, (OneCycleLR, ScheduledSearch)):
        return scheduler.base_lrs_now[0 if scheduler.search is None else scheduler.search.lead]
    rate: float | Tensor = scheduler.optimizer.param_groups[0]["lr"] if scheduler is not None else math.nan
    return rate
