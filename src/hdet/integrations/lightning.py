"""hdet in Lightning: the callbacks ``AutoLR``, which finds the learning rate, and ``Guard``, which rolls back.

``lightning`` and ``pytorch_lightning`` are two packages with the same content, and each accepts only its own callbacks:
those here are of both, if both are in use.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdet.checks import must_be
from hdet.errors import ArgumentError
from hdet.frameworks import not_by_steps
from hdet.integrations.auto_lr import Finish, check_length, length_from, mean_of, options_of_auto
from hdet.integrations.checkpoints import SEARCH, AccumulatingGuard, has_parts, read_search, search_state, write_search
from hdet.journal import Journals, open_journal
from hdet.journal.sinks import EventSink
from hdet.rule.found import listed
from hdet.schedulers.auto_scheduler import AutoScheduler, auto
from hdet.schedulers.onecycle import OneCycleLR

__all__ = ["AutoLR", "Guard"]

_NAMES = ["lightning.pytorch", "pytorch_lightning"]
_IMPORTED = [name for name in _NAMES if name in sys.modules]
_INSTALLED = [name for name in _NAMES if find_spec(name.partition(".")[0]) is not None]
_PACKAGES: list[Any] = [import_module(name) for name in _IMPORTED or _INSTALLED or _NAMES]
_Callback: Any = type("_Callback", tuple(package.Callback for package in _PACKAGES), {})


class AutoLR(_Callback):  # type: ignore[misc]  # the type of an optional package
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
        options: further arguments of :func:`hdet.auto`. The default of ``total_steps`` is the trainer's
            ``estimated_stepping_batches``.
    """

    state_key = "hdet.integrations.lightning.AutoLR (without it the learning rate stays as it was saved)"
    """How Lightning names this callback in its warning if a checkpoint is resumed without it."""

    def __init__(self, journal: Journals = None, *, finish: int | None = None, **options: Any) -> None:
        super().__init__()
        open_journal(journal)  # raises for what cannot be one
        self.options = {"journal": journal, **options}
        self.finish = None if finish is None else Finish(finish)
        self.scheduler: Any = None
        """The scheduler, once ``fit`` has begun."""
        self.summary: str | None = None
        """What the search has found, once ``fit`` has ended; None if the scheduler is the user's own."""
        self._is_ours = False
        """Whether AutoLR has made the scheduler."""
        self._consensus = ExitStack()
        """While the module holds the mean of the replicas: what restores each one's own weights."""
        self._fit = ExitStack()
        """While ``fit`` goes on: what leaves the trainer as it was."""
        self._min_steps: int | None = None
        """The trainer's own."""
        self._restored: Mapping[str, Any] = {}
        """The scheduler's state and the search in a checkpoint, until Lightning has loaded the rest of it."""

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Not empty, since Lightning warns of a missing callback only if it had a state."""
        return {"scheduler": type(self.scheduler).__name__}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Also save the tensors of the search. Collective, except after an exception."""
        if self.scheduler is not None and not has_parts(self.scheduler.optimizer):
            search = search_state(self.scheduler, alone="save_checkpoint" not in vars(trainer))
            checkpoint.update({SEARCH: search} if search else {})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a checkpoint without a scheduler, since Lightning would then not restore ours."""
        if trainer.state.fn != "fit":
            return
        if not checkpoint.get("lr_schedulers"):
            raise ArgumentError(
                "the checkpoint has no scheduler, but AutoLR adds one: it was saved without AutoLR, or with weights "
                "only; load its weights into the module before fit(), or leave AutoLR out"
            )
        self._restored = {name: checkpoint.get(name, {}) for name in ("lr_schedulers", SEARCH)}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make a scheduler, or find the user's: the optimizers exist, and nothing is restored yet."""
        _check(trainer, pl_module)
        configs, self.summary = trainer.strategy.lr_scheduler_configs, None
        cure = "return only the optimizer, or with it one scheduler of torch or of hdet"
        options = options_of_auto([config.scheduler for config in configs], self.options, cure)
        self._is_ours = options is not None
        if options is None:
            self.scheduler = configs[0].scheduler
            if (words := not_by_steps(configs[0])) is not None:
                raise ArgumentError(words)
        else:
            config = configs[0] if configs else _PACKAGES[0].utilities.types.LRSchedulerConfig(None)
            if configs:
                every = options.get("schedule_every")
                cure = "leave it out: the scheduler's interval and frequency say it"
                must_be("None beside a scheduler of torch", every is None, cure, schedule_every=every)
                options["schedule_every"] = config.frequency * _steps_of_an_interval(trainer, config.interval)
            self.scheduler = self._new_scheduler(trainer, pl_module, options)
            config.scheduler, config.interval, config.frequency = self.scheduler, "step", 1
            trainer.strategy.lr_scheduler_configs = [config]
        if self.finish is not None:
            self.finish.check(self.scheduler)
            loop = trainer.fit_loop.epoch_loop
            self._min_steps = loop.min_steps
            self._fit.callback(setattr, loop, "min_steps", loop.min_steps)
        if self._restored and self._is_ours:
            with length_from("max_steps and max_epochs of the trainer", self.options):
                self.scheduler.check_state_dict(self._restored["lr_schedulers"][0])
        trainer.save_checkpoint = partial(self._save, trainer)
        self._fit.callback(vars(trainer).pop, "save_checkpoint", None)

    def _new_scheduler(self, trainer: Any, pl_module: Any, options: dict[str, Any]) -> AutoScheduler:
        if options.get("total_steps") is None and ("schedule" in options or self.finish is None):
            options["total_steps"] = _total_steps(trainer, may_be_endless="schedule" not in options)
        options["journal"] = [options["journal"], *trainer.loggers, EventSink(_tell)]
        return auto(_only_optimizer(trainer), **{"model": pl_module, **options})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume a search that was restored. Refuse a trainer that makes more steps than its schedule has."""
        restored, self._restored = self._restored.get(SEARCH, {}), {}
        if has_parts(self.scheduler.optimizer):
            if trainer.ckpt_path:
                read_search(trainer.ckpt_path, self.scheduler)
        elif isinstance(self.scheduler, AutoScheduler):
            self.scheduler.load_search_state_dict(restored)
        if self.finish is None and self._is_ours and self.options.get("total_steps") is None:
            check_length(self.scheduler, _total_steps(trainer) or math.inf, "max_epochs and max_steps")

    # -- the loop -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Log the rate of the next step."""
        self._let_fall(trainer)
        pl_module.log("hdet/lr", _rate(self.scheduler), prog_bar=True, on_step=True, on_epoch=False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop if the rate has fallen because of ``finish``."""
        self._let_fall(trainer)

    def _let_fall(self, trainer: Any) -> None:
        """With ``finish``, let the rate fall before the trainer stops.

        Until it has fallen, the trainer's ``min_steps`` is so high that Lightning does not stop. Called twice a step,
        since the module, or a callback after this one, may have requested a stop meanwhile.
        """
        if self.finish is None:
            return
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current.processed
        loop.min_steps = self._min_steps
        can_stop = epochs >= (trainer.min_epochs or 0) and trainer.global_step >= (self._min_steps or 0)
        requested = trainer.should_stop and can_stop
        left = (_total_steps(trainer) or math.inf) - trainer.global_step
        stops = self.finish.stops(self.scheduler, requested=requested, left=left)
        loop.min_steps = self._min_steps if stops else sys.maxsize
        if stops or requested:
            trainer.should_stop = stops

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Give the scheduler the loss. Later hooks come after the scheduler's step."""
        self.scheduler.observe(_returned(trainer, loss))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the mean of the replicas."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._consensus.enter_context(mean_of(self.scheduler))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore each replica's own weights."""
        self._consensus.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave one model behind, even if training has stopped inside a round."""
        self.scheduler.converge()
        if self._is_ours:
            self.summary = f"{self.scheduler.found}; the guess was {listed(self.scheduler.guesses)}"
            _say(self.summary)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for no other rank from here on: the others may have seen no exception."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the trainer as it was."""
        self._consensus.close()
        self._fit.close()
        self._restored = {}

    def _save(self, trainer: Any, filepath: Any, weights_only: Any = None, storage_options: Any = None) -> None:
        """In place of ``trainer.save_checkpoint``, which all callbacks use: save the mean of the replicas.

        ``on_save_checkpoint`` would not do, since Lightning does not call it if only weights are saved.
        """
        with mean_of(self.scheduler):
            type(trainer).save_checkpoint(trainer, filepath, weights_only, storage_options)
        if not weights_only and has_parts(self.scheduler.optimizer):
            folder = trainer.strategy.broadcast(str(filepath) if Path(filepath).is_dir() else None)
            if folder is not None:
                write_search(folder, self.scheduler)


class Guard(_Callback):  # type: ignore[misc]  # the type of an optional package
    """:class:`hdet.Guard` in a trainer of Lightning: it rolls back if training has diverged, with any schedule.

    .. code-block:: python

        trainer = Trainer(max_epochs=10, callbacks=[Guard(check_every=50)])

    It judges the mean loss of the batches of every optimizer step. It is saved in Lightning's checkpoints, and
    ``fit(ckpt_path=...)`` resumes it; but if weights are sharded it is not saved, and starts again.

    Args:
        options: ``check_every``, ``factor``, ``recover`` and ``max_rollbacks`` of :class:`hdet.Guard`.
    """

    state_key = "hdet.integrations.lightning.Guard"
    """How Lightning names this callback in its warning if a checkpoint is resumed without it."""
    guard: AccumulatingGuard
    """The guard, once ``fit`` has begun."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self._restored: Mapping[str, Any] = {}
        self._steps = 0
        """The trainer's ``global_step`` at the last optimizer step."""
        self._is_saved = False
        """Whether ``fit`` has begun, and no rank holds a part of the weights."""
        self._is_alone = False
        """Whether other ranks may have stopped, since this one has seen an exception."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers and snapshots. Collective, except after an exception."""
        if not self._is_saved:
            return {"guard": None}
        return {"guard": self.guard.state_dict() if self._is_alone else self.guard.state_of_all()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts, since the optimizers are not restored yet."""
        self._restored = state_dict

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the guard, now that the optimizers exist."""
        optimizer = _only_optimizer(trainer)
        self.guard = AccumulatingGuard(optimizer, pl_module, **self.options)
        self._is_saved, self._is_alone = not has_parts(optimizer), False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume a guard that was restored."""
        restored, self._restored, self._steps = self._restored, {}, trainer.global_step
        if trainer.ckpt_path:
            self.guard.resume(restored.get("guard"), trainer.ckpt_path)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Count the loss that ``training_step`` returned."""
        self.guard.observe(_returned(trainer, loss))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step, if the optimizer has made one. If a round ends here, this is a collective."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.guard.end_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for no other rank from here on: the others may have seen no exception."""
        self._is_alone = True


def _tell(record: Mapping[str, Any], event: str) -> None:
    _say(f"step {record['step']}: {event}; the rate is {listed(record['base'])}")


def _say(words: str) -> None:
    _PACKAGES[0].utilities.rank_zero_info(f"hdet: {words}")


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
    strategy, has_engine = type(trainer.strategy).__name__, hasattr(trainer.strategy, "deepspeed_engine")
    cure = "give ModelParallelStrategy with fully_shard, or use hdet.integrations.deepspeed in a loop of your own"
    must_be("one without an engine", not has_engine, cure, strategy=strategy)
    is_automatic = module.automatic_optimization
    cure = "leave AutoLR out, and call scheduler.step(loss) of hdet.OneCycleLR after optimizer.step()"
    must_be("True, since AutoLR does not see manual steps", is_automatic, cure, automatic_optimization=is_automatic)


def _only_optimizer(trainer: Any) -> Any:
    """What configure_optimizers returned."""
    made, cure = trainer.optimizers, "return one optimizer, for instance torch.optim.AdamW(self.parameters())"
    must_be("one optimizer with parameters", len(made) == 1 and made[0].param_groups, cure, configure_optimizers=made)
    return made[0]


def _steps_of_an_interval(trainer: Any, interval: str) -> int:
    if interval == "step":
        return 1
    trainer.estimated_stepping_batches  # sets up the loader  # noqa: B018
    return math.ceil(int(trainer.num_training_batches) / int(trainer.accumulate_grad_batches))


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


def _rate(scheduler: Any) -> float | Tensor:
    """The rate of the first parameter group, of replicas without their multipliers; of a search, the first searched."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.base_lrs_now[0]
    lead = scheduler.search.memory.lead if isinstance(scheduler, AutoScheduler) else 0
    rate: float | Tensor = scheduler.optimizer.param_groups[lead]["lr"]
    return rate
