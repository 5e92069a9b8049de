"""``hdet.Ensemble``: any scalar hyperparameter, on any schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hdet.algorithm.controllers import Controller, Published
from hdet.algorithm.design import Balanced
from hdet.algorithm.linesearch import LineSearch
from hdet.algorithm.normalised import Normalised
from hdet.algorithm.rounds import Growing, Rounds
from hdet.comm.arms import Arms
from hdet.comm.group import Group, ReplicaGroup, arriving, check_group, connect_within
from hdet.engine import knobs as knob_factories
from hdet.engine.engine import Engine, RoundEnd
from hdet.engine.knobs import Knob
from hdet.engine.onecycle import OneCycleLR
from hdet.engine.outer import OuterStep
from hdet.engine.probed import ProbeFn, check_fanout, probed_engine
from hdet.engine.probes import ProbeBatch
from hdet.engine.rates import copy_rate, put_rate, shared_rates
from hdet.engine.rollcall import Occasion
from hdet.engine.settings import Settings
from hdet.engine.signals import Probe, Signal, TrainLoss
from hdet.engine.snapshots import RoundMean, kept, write_
from hdet.engine.weights import Body, check_model
from hdet.errors import ArgumentError
from hdet.journal import Journals, open_journal

__all__ = ["Ensemble", "Inner", "Schedule"]


class Schedule(Protocol):
    """Anything that writes learning rates into the optimizer: every torch scheduler, HF's, timm's by its adapter."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Inner:
    """Hierarchical rounds: replicas of one node are averaged every ``every`` steps, all of them at the end of a round.

    Args:
        every: T1, steps between averages inside a node; the round's T2 is ``sync_every``.
        ranks: how many consecutive ranks make a node.
    """

    every: int
    ranks: int

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("ranks", self.ranks)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name} must be an integer, at least 1, but got {name}={value!r}")


class Ensemble:
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
            factor. None holds the optimizer's values.
        knobs: what is explored: results of ``hdet.knobs.*``, in one list. None: the learning rate of every group.
        sync_every: T, steps per round; None: 200. "auto" (probed only, and the default there): rounds that grow.
        total_steps: the run's length, if known: then there is a converge at its end.
        signal: what replicas are compared by: ``TrainLoss()`` (default), ``Probe(fn)``, ``Probe(fn, at="round_mean")``.
        controller: moves the base values. None: the published rule with the train loss, ``Normalised()`` with a probe.
            False: nothing moves.
        start: the step from which the controller may move.
        group: the process group or ``hdet.arms(n)``; None: the default group, once there is one.
        model: averages its float buffers too.
        seed: for the design of every round.
        journal: a path or an object with ``write(record)``.
        outer: what converge makes of the parameters: None (the mean), ``Outer(...)``, ``Elastic(...)``.
        optimizer_state: "average", "keep" or "reset" at converge. None: "average" in arms, where moments differ, "keep"
            under shared gradients, where they do not.
        inner: averages inside nodes between rounds.
        allow_uninformative: explore loss knobs under shared gradients all the same.
        fanout: "trained": replicas train at their own values. "probed": everybody trains at the base value, and
            replicas are points on the line of a round's displacement; for learning rates, which act through it. The
            rate is found from any guess: give a schedule without a warm-up of its own.
        probe: for ``fanout="probed"``: a loss of the current model, ``hdet.ProbeBatch(model, loss_fn, loader)``.
        points: how many points are probed at the end of a round.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule | None = None,
        knobs: Iterable[Knob | Sequence[Knob]] | None = None,
        *,
        sync_every: int | Literal["auto"] | None = None,
        total_steps: int | None = None,
        signal: Signal | None = None,
        controller: Controller | Literal[False] | None = None,
        start: int = 0,
        group: Group = None,
        model: nn.Module | None = None,
        seed: int = 0,
        journal: Journals = None,
        outer: OuterStep | None = None,
        optimizer_state: Literal["average", "keep", "reset"] | None = None,
        inner: Inner | None = None,
        allow_uninformative: bool = False,
        fanout: Literal["trained", "probed"] = "trained",
        probe: ProbeFn | None = None,
        points: int = 8,
    ) -> None:
        check_fanout(fanout, probe, points, group)
        probed = fanout == "probed"
        if probed:
            _refuse_trained_parts(signal=signal, outer=outer, inner=inner, optimizer_state=optimizer_state)
        self.optimizer = optimizer
        self.schedule = schedule
        self.signal: Signal = signal if signal is not None else TrainLoss()
        _check(optimizer, schedule, self.signal, group, model, outer, inner)
        default = knob_factories.lr(optimizer, spread=0.3 if probed else 1 / 9)
        self._knobs = _flat(knobs if knobs is not None else [default])
        _check_knobs(self._knobs, self.signal, schedule)
        if not allow_uninformative:
            _refuse_uninformative(self._knobs, group)
        if probed:
            _refuse_other_knobs(self._knobs)
        settings = _settings(sync_every, total_steps, start, seed, probed)
        self.optimizer_state = optimizer_state or ("average" if isinstance(group, Arms) else "keep")
        if self.optimizer_state not in ("average", "keep", "reset"):
            raise ArgumentError(
                f'optimizer_state must be "average", "keep" or "reset", but got {optimizer_state!r}; leave it out'
            )
        rule = _controller(controller, self.signal, probed)
        specs = [knob.spec for knob in self._knobs]
        learned = [knob.spec.start(knob.read()) for knob in self._knobs]
        body = Body(model, with_state=self.optimizer_state == "average")
        body.remember(optimizer)
        arguments = {
            "fanout": fanout,
            **settings.state(),
            "total_steps": total_steps,
            "schedule": type(schedule).__name__ if schedule is not None else None,
            "knobs": {
                s.name: {"scale": s.scale.name, "spread": s.spread, "base": b}
                for s, b in zip(specs, learned, strict=True)
            },
            "signal": repr(self.signal),
            "controller": repr(rule),
            "optimizer_state": self.optimizer_state,
        }
        sink = open_journal(journal)
        parts = [_signal_in_words(self.signal), repr(inner), self.optimizer_state]
        columns = _columns(self._knobs, optimizer)
        if probed and probe is not None:
            self._engine: Engine = probed_engine(
                settings,
                rule,
                specs,
                columns,
                points,
                probe,
                model,
                group,
                sink,
                arguments,
                peak=0.3 * (total_steps or 0),  # where OneCycle's rising phase would end
            )
            self._engine.knob_of_group = {k.group: i for i, k in enumerate(self._knobs) if k.group is not None}
            self._engine.begin(optimizer)
        else:
            self._engine = Engine(
                settings, rule, specs, learned, Balanced(), group, sink, arguments, body, outer, parts
            )
        self._engine.columns = columns
        self._inner = inner
        self._node: ReplicaGroup | None = None
        self._mean = RoundMean()
        self._written: tuple[list[float], list[float]] | None = None
        self._step = 0
        self._plain = [copy_rate(row["lr"]) for row in optimizer.param_groups]
        """The schedule's own rates: what the optimizer would hold without the ensemble."""
        self._engine.outer.begin(body.weights(optimizer).parameters)
        self._write_values()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None, *, metrics: float | None = None) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule.

        Args:
            loss: this replica's training loss.
            metrics: for ReduceLROnPlateau, which is only stepped where they are given; equal on all replicas.
        """
        engine, t = self._engine, self._step + 1
        engine.refuse_inside_consensus(self._step)
        if loss is not None:
            engine.meter.add(loss)
        engine.just_loaded = False
        engine.connect(self.optimizer, self._step)
        if metrics is not None:
            self._check_metrics(metrics)
        engine.after_step(self.optimizer, t)
        self._take_snapshot(t)
        if engine.settings.rounds.ends_at(t):
            self._end_round(t)
        elif self._inner is not None and t % self._inner.every == 0:
            self._average_within(self._inner)
        self._step_schedule(metrics)
        self._step = t
        self._write_values()

    def observe(self, loss: float | Tensor) -> None:
        """Count a loss of this replica towards the round; ``step(loss)`` is observe and step."""
        self._engine.meter.add(loss)

    def converge(self) -> None:
        """Average the weights over the replicas now, and nothing else: the round, its values and losses go on."""
        self._engine.converge_now(Occasion.CONVERGE, self.optimizer, self._step)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Averaged weights inside, each replica's own back afterwards, also after an exception. A collective."""
        with self._engine.consensus(self.optimizer, self._step):
            yield

    def __getitem__(self, name: str) -> float:
        """This replica's value of a knob, for your own code to use."""
        for knob in self._knobs:
            if knob.spec.name == name:
                return knob.read()
        raise KeyError(f"there is no knob {name!r}; there are {[knob.spec.name for knob in self._knobs]}")

    @property
    def base_values(self) -> dict[str, float]:
        """The shared base value of each knob, around which the replicas spread."""
        base = self._engine.base(self._schedule(self._step), self._step)
        rows = zip(self._knobs, self._engine.learned, base, strict=True)
        return {knob.spec.name: float(value) if knob.spec.scheduled else m for knob, m, value in rows}

    # -- the end of a round -----------------------------------------------------------------------------------------

    def _take_snapshot(self, t: int) -> None:
        if not (isinstance(self.signal, Probe) and self.signal.at == "round_mean"):
            return
        start, end = self._engine.settings.rounds.span(t)
        if self._mean.is_due(t - start, end - start):
            self._mean.add(self._engine.body.weights(self.optimizer).parameters)

    def _end_round(self, t: int) -> None:
        signal = self._probe if isinstance(self.signal, Probe) else None
        end = RoundEnd(self._step, t, self.optimizer, self._schedule, self._floors, signal)
        was_live = self._engine.end_round(end)
        self._mean.reset()
        if self.optimizer_state == "reset" or not (was_live or self._has_finite_state()):
            self.optimizer.state.clear()

    def _has_finite_state(self) -> bool:
        """A replica that was left out may keep its moments only if they are finite."""
        values = (v for state in self.optimizer.state.values() for v in state.values())
        return all(bool(v.isfinite().all()) for v in values if isinstance(v, Tensor))

    def _probe(self) -> Tensor:
        """The probe's loss at the replica's own weights, or at their mean over the round."""
        assert isinstance(self.signal, Probe)  # only then it is given to the engine
        if isinstance(self.signal.fn, ProbeBatch):
            k = self._engine.settings.rounds.index(self._step)
            with arriving(f"sharing the probe batch of round {k}"):
                self.signal.fn.prepare(k, self._engine.group)
        mean = self._mean.weights
        if mean is None:
            return self.signal.value()
        parameters = self._engine.body.weights(self.optimizer).parameters
        with kept(parameters):
            write_(parameters, mean)
            return self.signal.value()

    def _average_within(self, inner: Inner) -> None:
        if self._engine.seat.size == 1:
            return
        if self._node is None:
            with arriving("making the nodes' groups"):
                self._node = connect_within(inner.ranks)
        self._engine.converge_now(Occasion.INNER, self.optimizer, self._step, self._node)

    # -- values -----------------------------------------------------------------------------------------------------

    def _step_schedule(self, metrics: float | None) -> None:
        """Step the schedule on its own rates: many torch schedules go on from what the optimizer holds."""
        if self.schedule is None or (isinstance(self.schedule, ReduceLROnPlateau) and metrics is None):
            return
        for row, plain in zip(self.optimizer.param_groups, self._plain, strict=True):
            put_rate(row, plain)
        if isinstance(self.schedule, ReduceLROnPlateau) and metrics is not None:
            self.schedule.step(metrics)
        else:
            self.schedule.step()
        self._plain = [copy_rate(row["lr"]) for row in self.optimizer.param_groups]

    def _check_metrics(self, metrics: float) -> None:
        if not isinstance(self.schedule, ReduceLROnPlateau):
            raise ArgumentError(
                f"metrics are for ReduceLROnPlateau, but the schedule is {self.schedule!r}; leave them out"
            )
        self._engine.compare(float(metrics), self._step)

    def _write_values(self) -> None:
        """Put this replica's values where they act: rates at every step, others where a round begins."""
        engine, t = self._engine, self._step
        places = engine.my_places(t)
        fresh = self._written != (places, engine.learned)
        self._written = (places, engine.learned)
        plain = [self._plain[knob.group] if knob.group is not None else 1.0 for knob in self._knobs]
        rows = zip(self._knobs, engine.learned, engine.rates(plain, t), places, strict=True)
        for knob, learned, rate, x in rows:
            if knob.group is not None:
                put_rate(self.optimizer.param_groups[knob.group], rate)
            elif fresh:
                knob.write(knob.spec.value(learned, x))

    def _schedule(self, _: int) -> list[float]:
        return [float(self._plain[knob.group]) if knob.group is not None else 1.0 for knob in self._knobs]

    def _floors(self) -> list[float]:
        return [0.0] * len(self._knobs)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and no collective. Save the optimizer and the model as usual."""
        return {
            "step": self._step,
            "total_steps": self._engine.settings.rounds.total_steps,
            "plain_lrs": [copy_rate(lr) for lr in self._plain],
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "outer": self._engine.outer.state(),
            "hdet": self._engine.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of replicas; its values replace the constructor's."""
        has_schedule = state_dict["schedule"] is not None
        if has_schedule != (self.schedule is not None) or len(state_dict["plain_lrs"]) != len(self._plain):
            raise ArgumentError(
                f"the checkpoint has {'a' if has_schedule else 'no'} schedule and {len(state_dict['plain_lrs'])} "
                f"parameter groups, but here the schedule is {self.schedule!r} and there are {len(self._plain)}; "
                "build the ensemble as it was when it was saved"
            )
        saved, here = state_dict["outer"], self._engine.outer.state()
        if [[t.shape for t in part] for part in saved] != [[t.shape for t in part] for part in here]:
            raise ArgumentError(
                f"the checkpoint's outer state does not fit outer={self._engine.outer!r}; build the ensemble with the "
                "outer step and the parameters it was saved with"
            )
        t = int(state_dict["step"])
        self._engine.load(state_dict["hdet"], state_dict["total_steps"], t)
        self._engine.outer.load(state_dict["outer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state_dict["schedule"])
        self._plain = [copy_rate(lr) for lr in state_dict["plain_lrs"]]
        self._step = t
        self._mean.reset()
        self._write_again()
        self._engine.watch(self.optimizer, self, Ensemble._write_again)

    def _write_again(self) -> None:
        self._written = None
        self._write_values()


def _flat(knobs: Iterable[Knob | Sequence[Knob]]) -> list[Knob]:
    flat: list[Knob] = []
    for item in knobs:
        flat += [item] if isinstance(item, Knob) or not isinstance(item, Iterable) else list(item)
    strangers = [item for item in flat if not isinstance(item, Knob)]
    if strangers:
        raise ArgumentError(
            f"knobs must be made by hdet.knobs.*, but got {strangers!r}; for instance hdet.knobs.lr(optimizer)"
        )
    return flat


def _check(
    optimizer: object, schedule: object, signal: object, group: object, model: object, outer: object, inner: object
) -> None:
    """Refuse what is of the wrong kind, with what would be right."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be a torch optimizer, but got {optimizer!r}")
    if schedule is not None and not callable(getattr(schedule, "step", None)):
        raise ArgumentError(f"schedule must have step(), as torch's schedulers do, or be None, but got {schedule!r}")
    if schedule is not None and getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ArgumentError("schedule belongs to another optimizer; build it on the optimizer of the ensemble")
    if isinstance(schedule, OneCycleLR):
        raise ArgumentError(
            "schedule is an hdet.OneCycleLR, which spreads the rates already; give torch's OneCycleLR as the schedule"
        )
    if not isinstance(signal, (TrainLoss, Probe)):
        raise ArgumentError(f"signal must be TrainLoss(), Probe(fn) or None, but got signal={signal!r}")
    check_group(group)
    check_model(model)
    if outer is not None and not callable(getattr(outer, "merge", None)):
        raise ArgumentError(f"outer must be hdet.Outer(...), hdet.Elastic(...) or None, but got outer={outer!r}")
    if inner is not None and not isinstance(inner, Inner):
        raise ArgumentError(f"inner must be hdet.Inner(every=..., ranks=...) or None, but got inner={inner!r}")
    if isinstance(inner, Inner) and isinstance(group, Arms):
        _refuse_cut_arms(group, inner.ranks)


def _refuse_cut_arms(arms: Arms, ranks: int) -> None:
    """Raise if a node of ``ranks`` consecutive ranks holds only part of an arm: its weights would come apart."""
    for arm in arms.members:
        if len({rank // ranks for rank in arm}) > 1:
            raise ArgumentError(
                f"inner averages over nodes of {ranks} ranks, which cuts the arm with ranks {arm}; use nodes that hold "
                "whole arms"
            )


def _signal_in_words(signal: Signal) -> str:
    return f"Probe at {signal.at}" if isinstance(signal, Probe) else "TrainLoss"


def _columns(knobs: list[Knob], optimizer: Optimizer) -> list[int]:
    """The column of the design for each knob: its own, but one for rates that are the same tensor."""
    first_group = shared_rates(optimizer)
    owner = {knob.group: i for i, knob in reversed(list(enumerate(knobs))) if knob.group is not None}
    return [i if knob.group is None else owner.get(first_group[knob.group], i) for i, knob in enumerate(knobs)]


def _check_knobs(knobs: list[Knob], signal: Signal, schedule: Schedule | None) -> None:
    names = [knob.spec.name for knob in knobs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if not knobs or doubled:
        raise ArgumentError(
            f"knobs must be at least one, each with a name of its own, but got {names}; "
            "give each its own name, or None for the learning rates"
        )
    cycled = [name for name in names if name.startswith(("momentum", "betas.0"))]
    if cycled and getattr(schedule, "cycle_momentum", False):
        raise ArgumentError(
            f"the knobs {cycled} are written by the schedule at every step; give the schedule cycle_momentum=False"
        )
    regularisers = [knob.spec.name for knob in knobs if knob.regularises]
    if regularisers and isinstance(signal, TrainLoss):
        raise ArgumentError(
            f"the knobs {regularisers} regularise: they make the training loss worse on purpose, so judged by it they "
            "always go to zero. Compare by a loss without the regulariser: signal=hdet.Probe(hdet.ProbeBatch(model, "
            'loss_fn, loader), at="round_mean")'
        )


def _refuse_uninformative(knobs: list[Knob], group: Group) -> None:
    """Loss knobs need isolated gradients: arms, or arms(1) in a single process, where nothing is explored."""
    loss_knobs = [knob.spec.name for knob in knobs if knob.acts == "loss"]
    isolated = isinstance(group, Arms) and (len(group.members) > 1 or len(group.members[0]) == 1)
    if loss_knobs and not isolated:
        raise ArgumentError(
            f"the knobs {loss_knobs} act in the loss, but the replicas share gradients: all of them get the same "
            "update and keep the same weights, so their losses only show the knob itself and not where it should "
            "go. Isolate the gradients: arms = hdet.arms(n), DistributedDataParallel(model, "
            "process_group=arms.gradients), group=arms; or allow_uninformative=True"
        )


def _refuse_trained_parts(**parts: object) -> None:
    given = {name: value for name, value in parts.items() if value is not None}
    if given:
        raise ArgumentError(
            f"a probed fan-out averages nothing and compares by its probe, but got {given}; leave these out, or use "
            'fanout="trained"'
        )


def _refuse_other_knobs(knobs: list[Knob]) -> None:
    others = [knob.spec.name for knob in knobs if knob.group is None]
    if others:
        raise ArgumentError(
            f"the knobs {others} do not act as a factor on the displacement of a round, so points on its line cannot "
            'judge them; probe learning rates only, or use fanout="trained"'
        )


def _settings(sync_every: int | str | None, total_steps: int | None, start: int, seed: int, probed: bool) -> Settings:
    if sync_every is None:
        sync_every = "auto" if probed else 200
    length = None if probed and sync_every == "auto" else sync_every
    for name, value, least in (
        ("sync_every", 1 if length is None else length, 1),
        ("start", start, 0),
        ("seed", seed, -math.inf),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(f"{name} must be an integer, at least {least}, but got {name}={value!r}")
    if total_steps is not None and (not isinstance(total_steps, int) or total_steps < 1):
        raise ArgumentError(f"total_steps must be a positive integer or None, but got total_steps={total_steps!r}")
    if probed:
        growing = Growing.for_run(total_steps, None if length is None else int(length))
        return Settings(growing if start == 0 else replace(growing, landed=0), seed, "schedule", start)
    return Settings(Rounds(int(sync_every), total_steps), seed, "schedule", start)


def _controller(controller: object, signal: Signal, probed: bool) -> Controller | None:
    if controller is None and probed:
        return LineSearch()
    if controller is None:
        return Published() if isinstance(signal, TrainLoss) else Normalised()
    if controller is False:
        return None
    if isinstance(controller, Controller):
        return controller
    raise ArgumentError(
        f"controller must have init() and update(), or be False or None, but got controller={controller!r}; "
        "for instance hdet.Normalised()"
    )
