"""All arguments of the two faces: checked, and defaults filled in. What comes out is a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch import Tensor, optim
from torch.optim import Optimizer

from hdet.algorithm.auto import constants as auto
from hdet.algorithm.auto.pilot import Pilot
from hdet.algorithm.controller import Controller
from hdet.algorithm.design import Balanced, Permuted
from hdet.algorithm.knob import KnobSpec
from hdet.algorithm.linesearch import LineSearch
from hdet.algorithm.normalised import Normalised
from hdet.algorithm.published import Published
from hdet.algorithm.rounds import Rounds, default_length
from hdet.algorithm.scales import scale_named
from hdet.comm.arms import Arms
from hdet.comm.group import check_group
from hdet.engine.probed.way import ProbedWay
from hdet.engine.rates import shared_rates
from hdet.engine.run import Run
from hdet.engine.trained.fanout import FanOut
from hdet.engine.trained.inner import Inner
from hdet.engine.trained.settings import DECAYS, Settings
from hdet.engine.trained.signals import ProbeLoss, Signal, TrainLoss
from hdet.engine.trained.way import TrainedWay
from hdet.engine.weights import Body, check_model
from hdet.errors import ArgumentError, ProbeWarning
from hdet.faces import torch_onecycle as torch_private
from hdet.faces.knobs import Knob
from hdet.journal import open_journal

__all__ = ["Ours", "ensemble_run", "flat_knobs", "onecycle_run", "rate_knobs"]

PUBLISHED_SPREAD = 1 / 9
ENSEMBLE_ROUND = 200
"""T of an ensemble whose length nobody may know."""
NOT_PROBED: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along its own line, by closures",
    optim.Rprop: "its step sizes grow and shrink by themselves: lr is only where they begin",
}
"""Optimizers whose steps a factor on the learning rate does not lengthen, and why."""


class Ours(NamedTuple):
    """What both faces take beside a schedule, as the user has given it."""

    group: Any
    model: Any
    journal: Any
    seed: Any
    sync_every: Any
    start: Any
    fanout: Any
    probe: Any
    points: Any


# -- OneCycleLR -------------------------------------------------------------------------------------------------------


def onecycle_run(
    optimizer: Optimizer,
    schedule: dict[str, Any],
    ours: Ours,
    *,
    spread: Any,
    auto_lr: Any,
    decay: Any,
    published: tuple[Any, Any, Any],
) -> Run | None:
    """The run behind an ``hdet.OneCycleLR``; None where torch will refuse the schedule.

    ``schedule`` has torch's arguments; ``max_lr="auto"`` in it becomes the optimizer's own rates. ``published``: sigma,
    meta_momentum, meta_lr.
    """
    ours = ours._replace(fanout=_fanout(ours.fanout, schedule["max_lr"], decay))
    _check_common(ours)
    probed = ours.fanout == "probed"
    if isinstance(schedule["max_lr"], str):
        schedule["max_lr"] = _guesses(optimizer)
    if probed:
        _refuse_impossible(schedule["max_lr"])
    _refuse_nan(schedule)
    if decay not in DECAYS:
        raise ArgumentError(f"decay must be one of {DECAYS}, but got decay={decay!r}; leave it out for 'schedule'")
    if decay == "exponential" and schedule["final_div_factor"] == math.inf:
        raise ArgumentError('decay="exponential" needs a floor above 0, but got final_div_factor=inf; use 1e4')
    spread = _checked_spread(spread, auto.SPREAD if probed else PUBLISHED_SPREAD)
    controller = _onecycle_controller(auto_lr, published, probed)
    sink = open_journal(ours.journal)
    steps, pct_start = torch_private.total_steps_of(schedule), schedule["pct_start"]
    if steps is None or not isinstance(pct_start, float) or not isinstance(optimizer, Optimizer):
        return None
    ours = ours._replace(sync_every=_checked_length(ours.sync_every, probed, default_length(steps)))
    specs, columns = rate_knobs(0, len(optimizer.param_groups), spread), shared_rates(optimizer)
    way: TrainedWay | ProbedWay
    if probed:
        start = _checked_start(ours.start, steps) if ours.start is not None else 0
        way = _probed_way(optimizer, ours._replace(start=start), controller, specs, columns, steps)
        settled = {name: value for name, value in way.state().items() if name in ("sync_every", "seed", "points")}
        settled["auto_lr_start"], settled["decay"] = start, decay
    else:
        rounds = Rounds(ours.sync_every or default_length(steps), steps)
        warm_up_end = torch_private.warm_up_end(steps, pct_start)
        settings = Settings(rounds, int(ours.seed), decay, _resolved_start(ours.start, rounds, steps, warm_up_end))
        isolated = isinstance(ours.group, Arms) and len(ours.group.members) > 1
        body = Body(ours.model, with_state=isolated)  # moments differ between arms, and only there
        fan_out = FanOut(specs, Permuted(), settings.seed, columns)
        way = TrainedWay(settings, fan_out, controller, [spec.start(0.0) for spec in specs], body)
        settled = settings.state()
    told = {**schedule, "total_steps": steps, "fanout": ours.fanout, "spread": spread, **settled}
    told = {name: value for name, value in told.items() if name not in ("epochs", "steps_per_epoch")}
    return Run(way, ours.group, sink, _plain({**told, "auto_lr": repr(controller)}))


def rate_knobs(first: int, end: int, spread: float) -> list[KnobSpec]:
    """One knob per parameter group: the published fan-out of its learning rate."""
    return [KnobSpec(f"lr[{g}]", scale_named("relative"), float(spread), scheduled=True) for g in range(first, end)]


def _fanout(fanout: object, max_lr: object, decay: object) -> object:
    """Which fan-out is meant."""
    if isinstance(max_lr, str) and max_lr != "auto":
        raise ArgumentError(
            f'max_lr must be a number, a list of numbers or "auto", but got max_lr={max_lr!r}; with "auto" the '
            "optimizer's lr is the guess"
        )
    if fanout is None:
        fanout = "probed" if max_lr == "auto" else "trained"
    if fanout == "trained" and max_lr == "auto":
        raise ArgumentError('max_lr="auto" needs a probed fan-out; leave fanout="trained" out, or give a rate')
    if fanout == "probed" and decay != "schedule":
        raise ArgumentError(
            f'a probed fan-out keeps the schedule: decay must be "schedule", but got decay={decay!r}; leave it out'
        )
    return fanout


def _guesses(optimizer: object) -> list[float]:
    """The optimizer's own rates."""
    if not isinstance(optimizer, Optimizer):
        return []  # torch raises for it
    return [float(group["lr"]) for group in optimizer.param_groups]


def _refuse_impossible(max_lr: object) -> None:
    """A probed fan-out multiplies the rate that it is given: it must be a number above 0."""
    guesses = list(max_lr) if isinstance(max_lr, (list, tuple)) else [max_lr]
    if not all(isinstance(guess, (int, float)) and 0 < guess < math.inf for guess in guesses):
        raise ArgumentError(
            f'a probed fan-out begins from max_lr, or the optimizer\'s lr with "auto", which must be a finite number '
            f"above 0, but got {guesses}; any guess will do, for instance 1e-3"
        )


def _refuse_nan(schedule: Mapping[str, object]) -> None:
    """Raise for an argument that is or contains NaN: every rate computed from it would be NaN."""
    for name, value in schedule.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (Real, Tensor)) and bool(item != item) for item in items):
            raise ArgumentError(
                f"{name} must not be NaN, but got {name}={value!r}; every learning rate would become NaN"
            )


def _checked_spread(spread: Any, default: float) -> float:
    spread = default if spread is None else spread
    if not (_is_real(spread) and 0 <= spread <= 1):
        raise ArgumentError(
            f"spread must be at least 0 and at most 1, but got spread={spread!r}; it is the relative distance of "
            "the outermost replicas from the base rate, published as 1/9, and 0 means no fan-out"
        )
    return float(spread)


def _onecycle_controller(auto_lr: object, published: tuple[Any, Any, Any], probed: bool) -> Controller | None:
    rule = Published(*published)  # also checks the numbers where they are not used
    if isinstance(auto_lr, bool):
        return (LineSearch() if probed else rule) if auto_lr else None
    if isinstance(auto_lr, Controller):
        return auto_lr
    raise ArgumentError(
        f"auto_lr must be True, False or a controller with init() and update(), but got auto_lr={auto_lr!r}; "
        "True is the published controller"
    )


def _resolved_start(start: Any, rounds: Rounds, total_steps: int, warm_up_end: float) -> int | None:
    """S_warm: a round end. By default the end of the warm-up rounded up to a round; never if that is past the end."""
    if start is None:
        end = max(1, math.ceil(warm_up_end / rounds.length)) * rounds.length
        return end if end <= total_steps else None
    return rounds.next_end(_checked_start(start, total_steps))


def _checked_start(start: Any, total_steps: int) -> int:
    if not (_is_int(start) and 0 <= start <= total_steps):
        raise ArgumentError(
            f"auto_lr_start must be an integer from 0 to total_steps = {total_steps}, but got "
            f"auto_lr_start={start!r}; leave it out for the end of the warm-up, or use auto_lr=False for never"
        )
    return int(start)


# -- Ensemble ---------------------------------------------------------------------------------------------------------


def ensemble_run(
    optimizer: Optimizer,
    schedule: Any,
    knobs: list[Knob],
    ours: Ours,
    *,
    total_steps: Any,
    signal: Any,
    controller: Any,
    outer: Any,
    inner: Any,
    optimizer_state: Any,
    allow_uninformative: bool,
) -> Run:
    """The run behind an ``hdet.Ensemble``."""
    probed = ours.fanout == "probed"
    _check_schedule(optimizer, schedule)
    _check_common(ours)
    if probed:
        _refuse_trained_parts(signal=signal, outer=outer, inner=inner, optimizer_state=optimizer_state)
        _refuse_other_knobs(knobs)
    signal = TrainLoss() if signal is None else signal
    _check_parts(signal, outer, inner, ours.group, optimizer_state)
    _check_knobs(knobs, signal, schedule)
    if not (allow_uninformative or probed):
        _refuse_uninformative(knobs, ours.group)
    length = _checked_length(ours.sync_every, probed, ENSEMBLE_ROUND)
    _check_lengths(ours.start, ours.seed, total_steps)
    rule = _ensemble_controller(controller, signal, probed)
    specs, columns = [knob.spec for knob in knobs], _columns(knobs, optimizer)
    learned = [knob.spec.start(knob.read()) for knob in knobs]
    sink = open_journal(ours.journal)
    way: TrainedWay | ProbedWay
    if probed:
        groups = {knob.group: i for i, knob in enumerate(knobs) if knob.group is not None}
        way = _probed_way(optimizer, ours._replace(sync_every=length), rule, specs, columns, total_steps, groups)
    else:
        settings = Settings(Rounds(length or ENSEMBLE_ROUND, total_steps), ours.seed, "schedule", ours.start)
        state = optimizer_state or ("average" if isinstance(ours.group, Arms) else "keep")
        body = Body(ours.model, with_state=state == "average")
        fan_out = FanOut(specs, Balanced(), ours.seed, columns)
        way = TrainedWay(settings, fan_out, rule, learned, body, signal, outer, inner, state == "reset")
    told = {
        "fanout": ours.fanout,
        **{name: way.state()[name] for name in ("sync_every", "seed", "auto_lr_start")},
        "total_steps": total_steps,
        "schedule": type(schedule).__name__ if schedule is not None else None,
        "knobs": {
            s.name: {"scale": s.scale.name, "spread": s.spread, "base": b} for s, b in zip(specs, learned, strict=True)
        },
        "signal": repr(signal),
        "controller": repr(rule),
        "optimizer_state": optimizer_state,
    }
    return Run(way, ours.group, sink, told)


def flat_knobs(knobs: object) -> list[Knob]:
    """The knobs of a list that may hold lists; anything else is refused."""
    if isinstance(knobs, Knob):
        raise ArgumentError(f"knobs must be a list, but got the knob {knobs.spec.name!r} itself; give knobs=[knob]")
    if not isinstance(knobs, Iterable):
        raise ArgumentError(
            f"knobs must be a list of knobs, but got knobs={knobs!r}; for instance knobs=[hdet.knobs.lr(optimizer)]"
        )
    flat: list[Any] = []
    for item in knobs:
        flat += [item] if isinstance(item, Knob) or not isinstance(item, Iterable) else list(item)
    strangers = [item for item in flat if not isinstance(item, Knob)]
    if strangers:
        raise ArgumentError(
            f"knobs must be made by hdet.knobs.*, but got {strangers!r}; for instance hdet.knobs.lr(optimizer)"
        )
    return flat


def _check_schedule(optimizer: object, schedule: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer must be a torch optimizer, but got {optimizer!r}; for instance torch.optim.Adam"
        )
    if schedule is None:
        return
    if not callable(getattr(schedule, "step", None)):
        raise ArgumentError(
            f"schedule must have step(), as torch's schedulers do, or be None, but got {schedule!r}; give the scheduler"
        )
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ArgumentError("schedule belongs to another optimizer; build it on the optimizer of the ensemble")
    if isinstance(getattr(schedule, "_run", None), Run):
        raise ArgumentError(
            "schedule is an hdet.OneCycleLR, which spreads the rates already; give torch's OneCycleLR as the schedule"
        )


def _check_parts(signal: object, outer: object, inner: object, group: object, optimizer_state: object) -> None:
    if not isinstance(signal, (TrainLoss, ProbeLoss)):
        raise ArgumentError(
            f"signal must be TrainLoss(), ProbeLoss(fn) or None, but got signal={signal!r}; for a function or a "
            "ProbeBatch give signal=hdet.ProbeLoss(fn)"
        )
    if outer is not None and not callable(getattr(outer, "merge", None)):
        raise ArgumentError(
            f"outer must be hdet.experimental.Outer(...), Elastic(...) or None, but got outer={outer!r}; leave it out "
            "for the mean"
        )
    if inner is not None and not isinstance(inner, Inner):
        raise ArgumentError(
            f"inner must be hdet.experimental.Inner(every=..., ranks=...) or None, but got inner={inner!r}; leave it "
            "out for rounds without nodes"
        )
    if isinstance(inner, Inner) and isinstance(group, Arms):
        _refuse_cut_arms(group, inner.ranks)
    if optimizer_state not in (None, "average", "keep", "reset"):
        raise ArgumentError(
            f'optimizer_state must be "average", "keep" or "reset", but got {optimizer_state!r}; leave it out'
        )


def _refuse_cut_arms(arms: Arms, ranks: int) -> None:
    """Raise if a node of ``ranks`` consecutive ranks holds only part of an arm: its weights would come apart."""
    for arm in arms.members:
        if len({rank // ranks for rank in arm}) > 1:
            raise ArgumentError(
                f"inner averages over nodes of {ranks} ranks, which cuts the arm with ranks {arm}; use nodes that hold "
                "whole arms"
            )


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


def _check_lengths(start: object, seed: object, total_steps: object) -> None:
    if not (_is_int(start) and start >= 0):  # type: ignore[operator]  # an integer
        raise ArgumentError(f"start must be an integer, at least 0, but got start={start!r}; leave it out for 0")
    if total_steps is not None and not (_is_int(total_steps) and total_steps >= 1):  # type: ignore[operator]
        raise ArgumentError(
            f"total_steps must be a positive integer or None, but got total_steps={total_steps!r}; leave it out if "
            "nobody knows"
        )


def _ensemble_controller(controller: object, signal: Signal, probed: bool) -> Controller | None:
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


# -- both -------------------------------------------------------------------------------------------------------------


def _check_common(ours: Ours) -> None:
    """Raise for arguments that are of the wrong kind or do not go together."""
    if ours.fanout not in ("trained", "probed"):
        raise ArgumentError(f'fanout must be "trained" or "probed", but got fanout={ours.fanout!r}; leave it out')
    check_group(ours.group)
    check_model(ours.model)
    if not _is_int(ours.seed):
        raise ArgumentError(f"seed must be an integer, but got seed={ours.seed!r}; leave it out for 0")
    if isinstance(ours.probe, ProbeLoss):
        raise ArgumentError(
            "probe= takes the function itself, but got hdet.ProbeLoss(fn), which is a signal of replicas that train; "
            "give probe=fn, for instance probe=hdet.ProbeBatch(model, loss_fn, probe_loader)"
        )
    if ours.fanout == "trained":
        if ours.probe is not None:
            raise ArgumentError(
                f'probe= is for fanout="probed", but got fanout={ours.fanout!r}; give that, or leave the probe out'
            )
        return
    if not callable(ours.probe):
        raise ArgumentError(
            f"a probed fan-out needs probe=, a loss of the current model, but got probe={ours.probe!r}; for instance "
            "probe=hdet.ProbeBatch(model, loss_fn, probe_loader)"
        )
    if not (_is_int(ours.points) and ours.points >= 3):
        raise ArgumentError(
            f"points must be an integer, at least 3, but got points={ours.points!r}; leave it out for {auto.POINTS}"
        )
    if isinstance(ours.group, Arms):
        raise ArgumentError(
            "a probed fan-out needs shared gradients, but group= is hdet.arms(n), whose weights come apart; "
            "leave it out"
        )


def _checked_length(sync_every: Any, probed: bool, default: int) -> int | None:
    """T, or None for the default: rounds that grow if probed."""
    if sync_every is None or (probed and sync_every == "auto"):
        return None
    if not (_is_int(sync_every) and sync_every >= 1):
        growing = ', or "auto" for rounds that grow' if probed else ' ("auto" is for fanout="probed")'
        raise ArgumentError(
            f"sync_every must be an integer, at least 1, but got sync_every={sync_every!r}; leave it out for "
            f"{'growing rounds' if probed else default}{growing}"
        )
    return int(sync_every)


def _probed_way(
    optimizer: Optimizer,
    ours: Ours,
    controller: Controller | None,
    specs: Sequence[KnobSpec],
    columns: Sequence[int],
    total_steps: int | None,
    knob_of_group: Mapping[int, int] | None = None,
) -> ProbedWay:
    for kind, why in NOT_PROBED.items():
        if isinstance(optimizer, kind):
            raise ArgumentError(
                f"a probed fan-out cannot find the rate of {kind.__name__}: {why}. Use another optimizer, or torch's "
                "own scheduler"
            )
    pilot = Pilot(
        controller,
        len(specs),
        total_steps,
        length=ours.sync_every,
        points=ours.points,
        spread=max((spec.spread for spec in specs), default=0.0),
        seed=int(ours.seed),
        start=ours.start,
        columns=tuple(columns),
    )
    if controller is not None and not pilot.long_enough:
        warnings.warn(
            f"a run of {total_steps} steps is too short to find its rate, which takes at least {auto.SHORTEST}: the "
            "guess is kept to; give the rate, or count optimizer steps rather than epochs",
            ProbeWarning,
            stacklevel=5,  # _probed_way, ..._run, __init__, the user
        )
    groups = knob_of_group if knob_of_group is not None else {g: g for g in range(len(specs))}
    return ProbedWay(pilot, specs, groups, ours.probe, ours.model)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Arguments as JSON can hold them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, Tensor) else value
