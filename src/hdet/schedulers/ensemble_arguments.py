"""The arguments of ``hdet.Ensemble``: checks of knobs, schedule and controller, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import must_be, shown
from hdet.ensemble.knobs import Knob
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.published import Controller, Published
from hdet.ensemble.signals import ProbeLoss, Signal, TrainLoss
from hdet.errors import ArgumentError
from hdet.parameters import shared_rates, unwrapped
from hdet.ranks.arms import Arms
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.plain_rates import OnSchedule


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
            f"knobs must be made by hdet.knobs.*, but got {shown(strangers)}; for instance hdet.knobs.lr(optimizer)"
        )
    return flat


def check_schedule_of(optimizer: Optimizer, schedule: object) -> None:
    """Raise for what cannot be the schedule of an optimizer's rates; None: they stay."""
    if schedule is None:
        return
    if not callable(getattr(schedule, "step", None)):
        raise ArgumentError(
            f"schedule must have step(), as torch's schedulers do, or be None, but got {shown(schedule)}; give the "
            "scheduler"
        )
    if unwrapped(getattr(schedule, "optimizer", optimizer)) is not optimizer:
        raise ArgumentError("schedule belongs to another optimizer; build it on the optimizer of the ensemble")
    if isinstance(schedule, (OneCycleLR, OnSchedule)):
        raise ArgumentError(
            "schedule is an hdet.OneCycleLR, which spreads the rates already; give torch's OneCycleLR as the schedule"
        )


def columns_of(knobs: list[Knob], optimizer: Optimizer) -> list[int]:
    """The column of the design for each knob: its own, but one for rates that are the same tensor."""
    first_group = shared_rates(optimizer)
    owner = {knob.group: i for i, knob in reversed(list(enumerate(knobs))) if knob.group is not None}
    return [i if knob.group is None else owner.get(first_group[knob.group], i) for i, knob in enumerate(knobs)]


def check_knobs(knobs: list[Knob], signal: Signal, schedule: object) -> None:
    """Raise for a signal that is none, and knobs that share a name, that the schedule writes or it cannot judge."""
    cure = "for a function or a ProbeBatch give signal=hdet.ProbeLoss(fn)"
    must_be("TrainLoss(), ProbeLoss(fn) or None", isinstance(signal, (TrainLoss, ProbeLoss)), cure, signal=signal)
    names = [knob.spec.name for knob in knobs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if not knobs or doubled:
        raise ArgumentError(
            f"knobs must be at least one, each with a name of its own, but got {shown(names)}; "
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


def refuse_uninformative(knobs: list[Knob], group: object) -> None:
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


def controller_of(controller: object, signal: Signal) -> Controller | None:
    """What ``controller=`` means; None: nothing moves the base values."""
    if controller is None:
        return Published() if isinstance(signal, TrainLoss) else Normalised()
    if controller is False:
        return None
    if isinstance(controller, Controller):
        return controller
    raise ArgumentError(
        f"controller must have init() and update(), or be False or None, but got controller={shown(controller)}; "
        "for instance hdet.Normalised()"
    )
