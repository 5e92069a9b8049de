"""The arguments of ``hdet.OneCycleLR``: checked, and defaults filled in. What comes out is a run."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from hdet.algorithm.controller import Controller
from hdet.algorithm.design import Permuted
from hdet.algorithm.knob import KnobSpec
from hdet.algorithm.published import Published
from hdet.algorithm.rounds import Rounds, default_length
from hdet.algorithm.scales import scale_named
from hdet.checks import is_int, is_one_of, is_real, shown
from hdet.distributed.arms import Arms
from hdet.distributed.weights import Body
from hdet.engine.probed.way import ProbedWay
from hdet.engine.run import Run
from hdet.engine.trained.fanout import FanOut
from hdet.engine.trained.settings import DECAYS, Settings
from hdet.engine.trained.way import TrainedWay
from hdet.errors import ArgumentError
from hdet.faces import torch_onecycle as torch_private
from hdet.faces.arguments import PUBLISHED_SPREAD, Ours, check_common, check_guesses, checked_length, probed_way
from hdet.faces.torch_arguments import check_levels, check_steps, number_of
from hdet.journal import open_journal
from hdet.rates import shared_rates

__all__ = ["onecycle_run", "rate_knobs"]


def onecycle_run(
    optimizer: Optimizer,
    schedule: dict[str, Any],
    last_epoch: Any,
    ours: Ours,
    *,
    spread: Any,
    auto_lr: Any,
    decay: Any,
    published: tuple[Any, Any, Any],
) -> Run | None:
    """The run behind an ``hdet.OneCycleLR``; None where torch will refuse the schedule.

    ``schedule`` has torch's other arguments; ``max_lr="auto"`` in it becomes the optimizer's own rates. ``published``:
    sigma, meta_momentum, meta_lr.
    """
    check_steps(schedule, last_epoch)
    if not is_one_of(decay, DECAYS):
        raise ArgumentError(f"decay must be one of {DECAYS}, but got decay={shown(decay)}; leave it out for 'schedule'")
    ours = ours._replace(fanout=_fanout(ours.fanout, schedule["max_lr"], decay))
    check_common(ours, optimizer)
    probed = ours.fanout == "probed"
    is_auto = isinstance(schedule["max_lr"], str)
    if is_auto:
        schedule["max_lr"] = _guesses(optimizer)
    if probed:
        check_guesses(_per_group(schedule["max_lr"]))
    check_levels(schedule, last_epoch)
    if decay == "exponential" and schedule["final_div_factor"] == math.inf:
        raise ArgumentError('decay="exponential" needs a floor above 0, but got final_div_factor=inf; use 1e4')
    spread = _checked_spread(spread, probed)
    controller = _onecycle_controller(auto_lr, published, probed)
    sink = open_journal(ours.journal)
    steps, pct_start = torch_private.total_steps_of(schedule), schedule["pct_start"]
    fraction = isinstance(pct_start, float) and 0 <= pct_start <= 1
    if steps is None or not fraction or not isinstance(optimizer, Optimizer):
        return None
    specs = rate_knobs(0, len(optimizer.param_groups), spread)
    way: TrainedWay | ProbedWay
    if probed:
        guesses = _per_group(schedule["max_lr"], len(specs))
        way = probed_way(optimizer, ours, bool(auto_lr), specs, steps, dict(enumerate(guesses)))
        settled: dict[str, Any] = {"sync_every": "auto", "seed": int(ours.seed), "decay": decay}
    else:
        rounds = Rounds(checked_length(ours.sync_every, default_length(steps)), steps)
        warm_up_end = torch_private.warm_up_end(steps, pct_start)
        settings = Settings(rounds, int(ours.seed), decay, _resolved_start(ours.start, rounds, steps, warm_up_end))
        isolated = isinstance(ours.group, Arms) and len(ours.group.members) > 1
        body = Body(ours.model, with_state=isolated)  # moments differ between arms, and only there
        fan_out = FanOut(specs, Permuted(), settings.seed, shared_rates(optimizer))
        way = TrainedWay(settings, fan_out, controller, [spec.start(0.0) for spec in specs], body)
        settled = settings.state()
    told = {**schedule, "total_steps": steps, "fanout": ours.fanout, "spread": spread, **settled}
    told = {name: value for name, value in told.items() if name not in ("epochs", "steps_per_epoch")}
    told = _plain({**told, "auto_lr": auto_lr if probed else repr(controller)})
    return Run(way, ours.group, sink, told, _in_words(schedule, is_auto))


def rate_knobs(first: int, end: int, spread: float) -> list[KnobSpec]:
    """One knob per parameter group: the published fan-out of its learning rate."""
    return [KnobSpec(f"lr[{g}]", scale_named("relative"), float(spread), scheduled=True) for g in range(first, end)]


def _fanout(fanout: object, max_lr: object, decay: object) -> object:
    """Which fan-out is meant."""
    auto = is_one_of(max_lr, ("auto",))
    if isinstance(max_lr, str) and not auto:
        raise ArgumentError(
            f'max_lr must be a number, a list of numbers or "auto", but got max_lr={shown(max_lr)}; with "auto" the '
            "optimizer's lr is the guess"
        )
    if fanout is None:
        fanout = "probed" if auto else "trained"
    if is_one_of(fanout, ("trained",)) and auto:
        raise ArgumentError('max_lr="auto" needs a probed fan-out; leave fanout="trained" out, or give a rate')
    if is_one_of(fanout, ("probed",)) and decay != "schedule":
        raise ArgumentError(
            f'a probed fan-out keeps the schedule: decay must be "schedule", but got decay={decay!r}; leave it out'
        )
    return fanout


def _guesses(optimizer: object) -> list[float]:
    """The optimizer's own rates."""
    if not isinstance(optimizer, Optimizer):
        return []  # torch raises for it
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(max_lr: Any, groups: int = 1) -> list[Any]:
    """One rate per parameter group, as torch takes them."""
    return list(max_lr) if isinstance(max_lr, (list, tuple)) else [max_lr] * groups


def _checked_spread(spread: Any, probed: bool) -> float:
    if probed:
        if spread is not None:
            raise ArgumentError(
                f"a probed fan-out has one model and no spread, but got spread={spread!r}; leave it out, or use "
                'fanout="trained" with a number as max_lr'
            )
        return 0.0
    spread = PUBLISHED_SPREAD if spread is None else spread
    if not (is_real(spread) and 0 <= spread <= 1):
        raise ArgumentError(
            f"spread must be at least 0 and at most 1, but got spread={spread!r}; it is the relative distance of "
            "the outermost replicas from the base rate, published as 1/9, and 0 means no fan-out"
        )
    return float(spread)


def _onecycle_controller(auto_lr: object, published: tuple[Any, Any, Any], probed: bool) -> Controller | None:
    rule = Published(*published)  # also checks the numbers where they are not used
    if isinstance(auto_lr, bool):
        return rule if auto_lr and not probed else None
    if isinstance(auto_lr, Controller) and not probed:
        return auto_lr
    cure = (
        "a probed fan-out searches by a rule of its own: True, or False to keep to the guess"
        if probed
        else "True is the published controller"
    )
    kinds = "True or False" if probed else "True, False or a controller with init() and update()"
    raise ArgumentError(f"auto_lr must be {kinds}, but got auto_lr={shown(auto_lr)}; {cure}")


def _resolved_start(start: Any, rounds: Rounds, total_steps: int, warm_up_end: float) -> int | None:
    """S_warm: a round end. By default the end of the warm-up rounded up to a round; never if that is past the end."""
    if start is None:
        end = max(1, math.ceil(warm_up_end / rounds.length)) * rounds.length
        return end if end <= total_steps else None
    return rounds.next_end(_checked_start(start, total_steps))


def _checked_start(start: Any, total_steps: int) -> int:
    if not (is_int(start) and 0 <= start <= total_steps):
        raise ArgumentError(
            f"auto_lr_start must be an integer from 0 to total_steps = {total_steps}, but got "
            f"auto_lr_start={start!r}; leave it out for the end of the warm-up, or use auto_lr=False for never"
        )
    return int(start)


def _in_words(schedule: dict[str, Any], is_auto: bool) -> dict[str, str]:
    """Those of torch's arguments that no way knows, so that ranks can compare them."""
    left_out = {"total_steps", "epochs", "steps_per_epoch"}
    if not schedule["cycle_momentum"]:
        left_out |= {"base_momentum", "max_momentum"}
    names = {"max_lr": "max_lr (the optimizer's lr)"} if is_auto else {}
    return {names.get(name, name): _word(value) for name, value in schedule.items() if name not in left_out}


def _word(value: Any) -> str:
    """25 and 25.0 are equal."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_word, value))}]"
    number = None if isinstance(value, bool) else number_of(value)
    return shown(value) if number is None else repr(number)


def _plain(value: Any) -> Any:
    """Arguments as JSON can hold them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    number = number_of(value)
    return shown(value) if number is None else number
