"""The list of knobs that an ensemble explores: what is refused, and which knobs share a place."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hdet.checks import items_of, must_be, shown
from hdet.ensemble.knobs import Knob
from hdet.ensemble.signals import ProbeLoss, Signal, TrainLoss
from hdet.errors import ArgumentError
from hdet.optimizer.rates import shared_rates
from hdet.ranks.arms import Arms
from hdet.ranks.torchft import Torchft


def flat_knobs(knobs: Any) -> list[Knob]:
    """The knobs of a list that may contain lists. Raises for anything else."""
    rows = items_of(knobs)
    flat = [knob for item in rows or () for knob in (item if isinstance(item, (list, tuple)) else [item])]
    fits = rows is not None and all(isinstance(knob, Knob) for knob in flat)
    cure = "for instance knobs=[hdet.knobs.lr(optimizer)]"
    must_be("a list of knobs made by hdet.knobs.*", fits, cure, knobs=knobs)
    return flat


def columns_of(knobs: list[Knob], optimizer: Optimizer) -> list[int]:
    """The column of the design for each knob: its own, but one for rates that are the same tensor."""
    first_group = shared_rates(optimizer)
    owner = {knob.group: i for i, knob in reversed(list(enumerate(knobs))) if knob.group is not None}
    return [i if knob.group is None else owner.get(first_group[knob.group], i) for i, knob in enumerate(knobs)]


def check_knobs(knobs: list[Knob], signal: Signal, schedule: object) -> None:
    """Raise unless the knobs have different names, are not written by the schedule, and fit the signal."""
    cure = "for a function or a ProbeBatch give signal=hdet.ProbeLoss(fn)"
    must_be("TrainLoss(), ProbeLoss(fn) or None", isinstance(signal, (TrainLoss, ProbeLoss)), cure, signal=signal)
    names = [knob.spec.name for knob in knobs]
    if not knobs or len(set(names)) < len(names):
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
    """Raise for knobs of the loss under shared gradients. They need arms; a single process may use arms(1)."""
    loss_knobs = [knob.spec.name for knob in knobs if knob.acts == "loss"]
    isolated = isinstance(group, Arms) and (len(group.members) > 1 or len(group.members[0]) == 1)
    isolated |= isinstance(group, Torchft)
    if loss_knobs and not isolated:
        raise ArgumentError(
            f"the knobs {loss_knobs} act in the loss, but the replicas share gradients: all of them get the same "
            "update and keep the same weights, so their losses only show the knob itself and not where it should "
            "go. Isolate the gradients: arms = hdet.arms(n), DistributedDataParallel(model, "
            "process_group=arms.gradients), group=arms; or allow_uninformative=True"
        )
