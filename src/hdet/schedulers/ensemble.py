"""``hdet.Ensemble``: any scalar hyperparameter, on any schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.checks import is_int, is_one_of, must_be, must_count
from hdet.ensemble import knobs as knob_factories
from hdet.ensemble.bases import Settings
from hdet.ensemble.controller import AsPrinted, Controller, Corrected
from hdet.ensemble.design import Balanced, Rounds
from hdet.ensemble.knobs import Knob, check_knobs, columns_of, flat_knobs, refuse_uninformative
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.signals import Signal, TrainLoss
from hdet.ensemble.steering import Steering
from hdet.errors import ArgumentError
from hdet.journal import Journals, open_journal
from hdet.journal.writer import JournalWriter
from hdet.optimizer import (
    added_groups,
    check_optimizer,
    check_training,
    copy_rate,
    group_counts,
    put_rate,
    put_rates,
    unwrapped,
)
from hdet.ranks.agreement import RankGroup
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group
from hdet.ranks.torchft import Torchft
from hdet.ranks.weights import ReplicaTensors
from hdet.schedulers.replica_scheduler import PUBLISHED_SPREAD, ReplicaScheduler, replicas_of
from hdet.schedulers.schedules import PlainRates, Schedule, check_schedule_of
from hdet.state import refuse_foreign, refuse_other_groups

_ROUND = 200
"""T by default: the run's length may be unknown."""


class Ensemble(ReplicaScheduler):
    """Replicas that explore any scalar hyperparameter while they train, and are merged every ``sync_every`` steps.

    .. code-block:: python

        ensemble = hdet.Ensemble(
            optimizer,
            schedule=CosineAnnealingLR(optimizer, T_max=10_000),
            knobs=[hdet.knobs.lr(optimizer), hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)],
            sync_every=200,
        )
        for batch in loader:
            loss = train_step(batch)
            optimizer.step()
            ensemble.step(loss)

    Args:
        optimizer: the optimizer that trains.
        schedule: any torch scheduler of that optimizer; the base of a learning rate is its value times a learned
            factor. ReduceLROnPlateau is stepped by ``step(loss, metrics=...)``, with metrics that are equal on all
            replicas. None holds the optimizer's values.
        knobs: what is explored: results of ``hdet.knobs.*``, in one list. None: the learning rate of every group.
        sync_every: T, steps per round; None: 200.
        total_steps: the run's length, if it is known: then weights are averaged at its end.
        signal: what replicas are compared by: ``TrainLoss()`` (default), ``ProbeLoss(fn)``, or
            ``ProbeLoss(fn, at="round_mean")``.
        controller: moves the base values. None: ``Corrected()`` with the train loss, ``Normalised()`` with a probe.
            False: nothing moves.
        start: the step from which the controller may move.
        group: the process group, ``hdet.arms(n)`` or ``hdet.torchft(manager)``; None: the default group, once there is
            one.
        model: averages its float buffers too.
        seed: for the design of every round.
        journal: a path or an object with ``write(record)``.
        optimizer_state: "average", "keep" or "reset" at the end of a round. None: "average" in arms, whose moments
            differ, and "keep" under shared gradients, whose moments are equal.
        allow_uninformative: explore knobs of the loss under shared gradients, though that shows nothing.
    """

    _written: tuple[list[float], list[float]] | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule | None = None,
        knobs: Iterable[Knob | Sequence[Knob]] | None = None,
        *,
        sync_every: int | None = None,
        total_steps: int | None = None,
        signal: Signal | None = None,
        controller: Controller | Literal[False] | None = None,
        start: int = 0,
        group: Group = None,
        model: nn.Module | None = None,
        seed: int = 0,
        journal: Journals = None,
        optimizer_state: Literal["average", "keep", "reset"] | None = None,
        allow_uninformative: bool = False,
    ) -> None:
        optimizer = unwrapped(optimizer)
        check_optimizer(optimizer)
        self._explores_all_rates = knobs is None
        self._knobs = flat_knobs(knob_factories.lr(optimizer, spread=PUBLISHED_SPREAD) if knobs is None else knobs)
        if schedule is not None:
            check_schedule_of(optimizer, schedule)
        check_training(optimizer, group, model)
        signal = TrainLoss() if signal is None else signal
        fits = is_one_of(optimizer_state, (None, "average", "keep", "reset"))
        must_be('"average", "keep" or "reset"', fits, "leave it out", optimizer_state=optimizer_state)
        check_knobs(self._knobs, signal, schedule)
        cure = "leave it out for False"
        must_be("True or False", isinstance(allow_uninformative, bool), cure, allow_uninformative=allow_uninformative)
        if not allow_uninformative:
            refuse_uninformative(self._knobs, group)
        settings = _settings_of(sync_every, total_steps, seed, start)
        rule = _controller_of(controller, signal)
        specs = [knob.spec for knob in self._knobs]
        bases = [knob.spec.start(float(knob.read())) for knob in self._knobs]
        header = {
            **settings.state(),
            "total_steps": settings.rounds.total_steps,
            "schedule": type(schedule).__name__ if schedule is not None else None,
            "knobs": {
                spec.name: {"scale": spec.scale, "spread": spec.spread, "base": base}
                for spec, base in zip(specs, bases, strict=True)
            },
            "signal": repr(signal),
            "controller": repr(rule),
            "optimizer_state": optimizer_state,
        }
        alike = {
            "lr": repr([float(row["lr"]) for row in optimizer.param_groups]),
            **{spec.name: repr(base) for spec, base in zip(specs, bases, strict=True) if not spec.scheduled},
            "signal": signal.kind,
            "bounds": repr([spec.bounds for spec in specs]),
        }
        state = optimizer_state or ("average" if isinstance(group, (Arms, Torchft)) else "keep")
        self._run = replicas_of(group)(
            RankGroup(group, alike),
            Steering(settings, specs, Balanced(), columns_of(self._knobs, optimizer), rule, bases),
            ReplicaTensors(model, with_state=state == "average"),
            JournalWriter(open_journal(journal), header),
            signal=signal,
            resets_state=state == "reset",
        )
        self.optimizer = optimizer
        self.schedule = schedule
        self._plain = PlainRates(optimizer, schedule)
        self.last_epoch = 0
        self._begin(group)
        self._write_again()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None, *, metrics: float | Tensor | None = None) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule.

        Args:
            loss: this replica's training loss.
            metrics: for ReduceLROnPlateau, which is stepped only if they are given. They must be equal on all replicas:
                an error lists those of every rank otherwise.
        """
        self._take_in_new_groups()
        if metrics is not None:
            fits, cure = isinstance(self.schedule, ReduceLROnPlateau), f"it is a {type(self.schedule).__name__}"
            must_be("left out unless the schedule is a ReduceLROnPlateau", fits, cure, metrics=metrics)
            self._run.compare(self.optimizer, float(metrics), self.last_epoch)
            self._plain.ahead(float(metrics))
        before, after = self.last_epoch, self.last_epoch + 1
        if self._run.step(self.optimizer, before, after, loss):
            self._run.end_round(self.optimizer, before, after, self._schedule)
        self._plain.step()
        self.last_epoch += 1  # of a replica of torchft that fell behind, the run has moved it
        self._write_values()

    def _join(self) -> None:
        if self._run.join(self, self._schedule, self.last_epoch):
            self._plain.step()
            self.last_epoch += 1
        self._write_again()

    def __getitem__(self, name: str) -> float:
        """This replica's value of a knob, for your own code to use."""
        return float({knob.spec.name: knob for knob in self._knobs}[name].read())

    @property
    def base_values(self) -> dict[str, float]:
        """The shared base value of each knob, around which the replicas spread."""
        base = self._run.steering.base(self._schedule(self.last_epoch), self.last_epoch)
        rows = zip(self._knobs, self._run.steering.bases.learned, base, strict=True)
        return {knob.spec.name: float(value) if knob.spec.scheduled else m for knob, m, value in rows}

    # -- values -----------------------------------------------------------------------------------------------------

    def _take_in_new_groups(self) -> None:
        """Groups added to the optimizer follow the schedule; if all rates are explored, theirs are too."""
        new = added_groups(self.optimizer, self._counts)
        if not new:
            return
        self._counts = group_counts(self.optimizer)
        self._plain.grow({g: copy_rate(self.optimizer.param_groups[g]["lr"]) for g in new})
        if self._explores_all_rates:
            spread = max(knob.spec.spread for knob in self._knobs)
            more = knob_factories.lr(self.optimizer, spread=spread, groups=new)
            self._knobs += more
            self._run.steering.grow([knob.spec for knob in more])
            self._run.journal_writer.add([knob.spec.name for knob in more], self.last_epoch)

    def _write_values(self) -> None:
        """Write this replica's values: rates at every step, others at the beginning of a round.

        Groups whose rate is no knob have the schedule's plain rate.
        """
        t = self.last_epoch
        if self.schedule is not None:  # otherwise rates that are no knobs are left to others
            put_rates(self.optimizer, self._plain.now)
        values, learned = self._run.steering.values(t, self._run.replica_index), list(self._run.steering.bases.learned)
        fresh = self._written != (values, learned)
        self._written = (values, learned)
        plain = [self._plain.now[knob.group] if knob.group is not None else 1.0 for knob in self._knobs]
        for knob, rate, value in zip(self._knobs, self._run.rates(plain, t), values, strict=True):
            if knob.group is not None:
                put_rate(self.optimizer.param_groups[knob.group], rate)
            elif fresh:
                knob.write(value)

    def _schedule(self, t: int) -> list[float]:
        """The plain schedule of each knob at this step or at the next one; 1 for knobs without one."""
        plain = self._plain.now if t == self.last_epoch else self._plain.ahead()
        return [float(plain[knob.group]) if knob.group is not None else 1.0 for knob in self._knobs]

    def _write_again(self) -> None:
        self._written = None
        self._write_values()

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        self._take_in_new_groups()
        steps = {"step": self.last_epoch, "total_steps": self._run.total_steps}
        return {**steps, **self._plain.saved(), "hdet": self._run.state()}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        refuse_foreign(state_dict, set(self.state_dict()), "hdet.Ensemble", "a state of hdet.Ensemble")
        refuse_other_groups(len(state_dict["plain_lrs"]), len(self.optimizer.param_groups))
        self._plain.check(state_dict["schedule"])
        self._run.check(state_dict["hdet"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of replicas; its values replace the constructor's."""
        self.check_state_dict(state_dict)
        self._plain.load(state_dict)  # first: the user's own schedule may raise
        self.last_epoch = int(state_dict["step"])
        self._tell_another_length(state_dict["total_steps"])
        self._run.load(state_dict["hdet"], state_dict["total_steps"], self.last_epoch)
        self._write_again()
        self._watch_loading()


def _settings_of(sync_every: int | None, total_steps: int | None, seed: int, start: int) -> Settings:
    """The rounds, the seed and the controller's first step, checked."""
    sync_every = _ROUND if sync_every is None else must_count(1, f"leave it out for {_ROUND}", sync_every=sync_every)
    start = must_count(0, "leave it out for 0", start=start)
    must_be("an integer", is_int(seed), "leave it out for 0", seed=seed)
    if total_steps is not None:
        total_steps = must_count(1, "leave it out if it is unknown", total_steps=total_steps)
    return Settings(Rounds(sync_every, total_steps), int(seed), "schedule", start)


def _controller_of(controller: object, signal: Signal) -> Controller | None:
    """The controller that ``controller=`` stands for; None: the base values do not move."""
    if controller is None:
        return Corrected() if isinstance(signal, TrainLoss) else Normalised()
    if controller is False:
        return None
    if isinstance(controller, AsPrinted):
        raise ArgumentError(
            "controller must not be AsPrinted, whose decay is that of a OneCycle, in an Ensemble; give "
            "hdet.Corrected(), or use hdet.OneCycleLR(..., auto_lr=hdet.AsPrinted())"
        )
    rule = "an object with init() and update(), False or None"
    must_be(rule, isinstance(controller, Controller), "for instance hdet.Normalised()", controller=controller)
    return controller  # type: ignore[return-value]  # checked
