"""The arguments of ``hdet.Ensemble``: checked, and defaults filled in. What comes out is a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.auto.search import Search
from hdet.checks import is_int, is_one_of, must_be
from hdet.distributed.arms import Arms
from hdet.distributed.meeting import Meeting
from hdet.distributed.weights import Body
from hdet.ensemble.bases import Settings
from hdet.ensemble.design import Balanced, Rounds
from hdet.ensemble.knobs import Knob
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.published import Controller, Published
from hdet.ensemble.replicas import Replicas
from hdet.ensemble.signals import ProbeLoss, Signal, TrainLoss
from hdet.ensemble.steering import FanOut, Steering
from hdet.errors import ArgumentError
from hdet.journal import open_journal
from hdet.journal.chronicle import Chronicle
from hdet.parameters import check_optimizer, shared_rates, unwrapped
from hdet.schedulers.arguments import Ours, check_common, check_length, checked_length

ENSEMBLE_ROUND = 200
"""T of an ensemble whose length nobody may know."""


def ensemble_run(
    optimizer: Optimizer,
    schedule: Any,
    knobs: list[Knob],
    ours: Ours,
    *,
    sync_every: Any,
    start: Any,
    seed: Any,
    total_steps: Any,
    signal: Any,
    controller: Any,
    optimizer_state: Any,
    allow_uninformative: bool,
) -> Replicas:
    """The run behind an ``hdet.Ensemble``."""
    check_optimizer(optimizer)
    check_schedule_of(optimizer, schedule)
    check_common(ours, optimizer)
    signal = TrainLoss() if signal is None else signal
    _check_parts(signal, optimizer_state)
    _check_knobs(knobs, signal, schedule)
    fits = isinstance(allow_uninformative, bool)
    must_be("True or False", fits, "leave it out for False", allow_uninformative=allow_uninformative)
    if not allow_uninformative:
        _refuse_uninformative(knobs, ours.group)
    length = checked_length(sync_every, ENSEMBLE_ROUND)
    _check_counts(start, seed)
    check_length(total_steps)
    rule = _ensemble_controller(controller, signal)
    specs = [knob.spec for knob in knobs]
    learned = [knob.spec.start(knob.read()) for knob in knobs]
    sink = open_journal(ours.journal)
    settings = Settings(Rounds(length, total_steps), seed, "schedule", start)
    state = optimizer_state or ("average" if isinstance(ours.group, Arms) else "keep")
    body = Body(ours.model, with_state=state == "average")
    fan_out = FanOut(specs, Balanced(), seed, _columns(knobs, optimizer))
    steering = Steering(settings, fan_out, rule, learned)
    told = {
        "sync_every": length,
        "seed": seed,
        "auto_lr_start": start,
        "total_steps": total_steps,
        "schedule": type(schedule).__name__ if schedule is not None else None,
        "knobs": {
            s.name: {"scale": s.scale.name, "spread": s.spread, "base": b} for s, b in zip(specs, learned, strict=True)
        },
        "signal": repr(signal),
        "controller": repr(rule),
        "optimizer_state": optimizer_state,
    }
    bases = {spec.name: repr(base) for spec, base in zip(specs, learned, strict=True) if not spec.scheduled}
    rates = {"lr": repr([float(group["lr"]) for group in optimizer.param_groups])}
    meeting, chronicle = Meeting(ours.group, {**rates, **bases}), Chronicle(sink, told)
    resets = state == "reset"
    return Replicas(steering, body, meeting, chronicle, signal=signal, reset_state=resets)


def flat_knobs(knobs: Any) -> list[Knob]:
    """The knobs of a list that may hold lists; anything else is refused."""
    if isinstance(knobs, Knob):
        raise ArgumentError(f"knobs must be a list, but got the knob {knobs.spec.name!r} itself; give knobs=[knob]")
    fits = isinstance(knobs, Iterable) and not isinstance(knobs, (str, Tensor))
    must_be("a list of knobs", fits, "for instance knobs=[hdet.knobs.lr(optimizer)]", knobs=knobs)
    flat: list[Any] = []
    for item in knobs:
        flat += [item] if isinstance(item, Knob) or not isinstance(item, Iterable) else list(item)
    strangers = [item for item in flat if not isinstance(item, Knob)]
    if strangers:
        raise ArgumentError(
            f"knobs must be made by hdet.knobs.*, but got {strangers!r}; for instance hdet.knobs.lr(optimizer)"
        )
    return flat


def check_schedule_of(optimizer: Optimizer, schedule: object) -> None:
    """Raise for what cannot be the schedule of an optimizer's rates; None: they stay."""
    if schedule is None:
        return
    if not callable(getattr(schedule, "step", None)):
        raise ArgumentError(
            f"schedule must have step(), as torch's schedulers do, or be None, but got {schedule!r}; give the scheduler"
        )
    if unwrapped(getattr(schedule, "optimizer", optimizer)) is not optimizer:
        raise ArgumentError("schedule belongs to another optimizer; build it on the optimizer of the ensemble")
    if isinstance(getattr(schedule, "_run", None), (Replicas, Search)):
        raise ArgumentError(
            "schedule is an hdet.OneCycleLR, which spreads the rates already; give torch's OneCycleLR as the schedule"
        )


def _check_parts(signal: object, optimizer_state: object) -> None:
    cure = "for a function or a ProbeBatch give signal=hdet.ProbeLoss(fn)"
    must_be("TrainLoss(), ProbeLoss(fn) or None", isinstance(signal, (TrainLoss, ProbeLoss)), cure, signal=signal)
    fits = is_one_of(optimizer_state, (None, "average", "keep", "reset"))
    must_be('"average", "keep" or "reset"', fits, "leave it out", optimizer_state=optimizer_state)


def _columns(knobs: list[Knob], optimizer: Optimizer) -> list[int]:
    """The column of the design for each knob: its own, but one for rates that are the same tensor."""
    first_group = shared_rates(optimizer)
    owner = {knob.group: i for i, knob in reversed(list(enumerate(knobs))) if knob.group is not None}
    return [i if knob.group is None else owner.get(first_group[knob.group], i) for i, knob in enumerate(knobs)]


def _check_knobs(knobs: list[Knob], signal: Signal, schedule: object) -> None:
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
            "always go to zero. Compare by a loss without the regulariser: signal=hdet.ProbeLoss(hdet.ProbeBatch("
            'model, loss_fn, loader), at="round_mean")'
        )


def _refuse_uninformative(knobs: list[Knob], group: object) -> None:
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


def _check_counts(start: Any, seed: Any) -> None:
    must_be("an integer, at least 0", is_int(start) and start >= 0, "leave it out for 0", start=start)
    must_be("an integer", is_int(seed), "leave it out for 0", seed=seed)


def _ensemble_controller(controller: object, signal: Signal) -> Controller | None:
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
