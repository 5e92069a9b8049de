"""The arguments of ``hdet.OneCycleLR``: checked, and defaults filled in. What comes out is a run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.auto.constants import DEFAULT
from hdet.auto.search import Search
from hdet.checks import is_int, is_one_of, is_real, must_be, shown
from hdet.distributed.arms import Arms
from hdet.distributed.meeting import Meeting
from hdet.distributed.weights import Body
from hdet.ensemble.bases import DECAYS, Settings
from hdet.ensemble.design import Permuted, Rounds, default_length
from hdet.ensemble.published import Controller, Published
from hdet.ensemble.replicas import Replicas
from hdet.ensemble.steering import FanOut, Steering
from hdet.errors import ArgumentError
from hdet.journal import open_journal
from hdet.journal.chronicle import Chronicle
from hdet.journal.file import mapped
from hdet.parameters import shared_rates
from hdet.schedulers import torch_onecycle as torch_private
from hdet.schedulers.arguments import (
    LONGEST,
    PUBLISHED_SPREAD,
    Ours,
    bounds_of,
    check_common,
    check_guesses,
    checked_length,
    rate_knobs,
    rate_names,
    search_of,
)
from hdet.schedulers.torch_onecycle import check_levels, check_steps, number_of

_LENGTHS = ("total_steps", "epochs", "steps_per_epoch")
_PARTS = {"pct_start": 0.3, "three_phase": False}
"""What is said in parts of a length, and what it is where nobody says it."""


class Fanout(NamedTuple):
    """The arguments for replicas that train apart, as the user has given them."""

    spread: Any
    sync_every: Any
    auto_lr: Any
    start: Any
    decay: Any
    published: tuple[Any, Any, Any]
    """sigma, meta_momentum, meta_lr."""
    seed: Any


def onecycle_run(
    optimizer: Optimizer,
    schedule: dict[str, Any],
    last_epoch: Any,
    ours: Ours,
    fanout: Fanout,
    go_back: Any,
    highest: Any,
) -> Search | Replicas | None:
    """The run behind an ``hdet.OneCycleLR``; None where torch will refuse the schedule.

    ``schedule`` has torch's other arguments; ``max_lr="auto"`` in it becomes the optimizer's own rates.
    """
    check_steps(schedule, last_epoch)
    is_auto = _is_auto(schedule["max_lr"])
    has_end = not is_auto or any(schedule[name] is not None for name in _LENGTHS)
    if not has_end:
        _refuse_parts(schedule)
        peak = DEFAULT.shortest + 1
        schedule.update(total_steps=LONGEST, pct_start=peak / LONGEST)  # torch's; what falls is taken away afterwards
    check_common(ours, optimizer)
    if is_auto:
        _refuse_fanout(fanout)
        schedule["max_lr"] = _guesses(optimizer)
        searches = fanout.auto_lr is True and (torch_private.total_steps_of(schedule) or 0) >= DEFAULT.shortest
        if searches or not {"momentum", "betas"} & set(getattr(optimizer, "defaults", ("momentum",))):
            schedule["cycle_momentum"] = False  # no gain in a search; torch refuses Adagrad and Adafactor
        if schedule["max_lr"]:
            check_guesses(schedule["max_lr"])  # torch would speak of a max_lr that nobody gave
            bounds_of(highest, schedule["max_lr"])
    else:
        _check_fanout(fanout, go_back, highest)
    check_levels(schedule, last_epoch)
    if fanout.decay == "exponential" and schedule["final_div_factor"] == math.inf:
        raise ArgumentError('decay="exponential" needs a floor above 0, but got final_div_factor=inf; use 1e4')
    ours = ours._replace(journal=open_journal(ours.journal))
    steps, pct_start = torch_private.total_steps_of(schedule), schedule["pct_start"]
    fraction = isinstance(pct_start, float) and 0 <= pct_start <= 1
    if steps is None or not fraction or not isinstance(optimizer, Optimizer):
        return None
    known = {name: value for name, value in schedule.items() if name not in _LENGTHS}
    if not has_end:
        steps, known = None, {name: value for name, value in known.items() if name not in _PARTS}
    told, alike = {**known, "total_steps": steps}, _in_words(schedule, is_auto)
    if not is_auto:
        return _replicas(optimizer, ours, fanout, pct_start, told, alike)
    searches = fanout.auto_lr
    told = {**told, "max_lr": "auto", "guess": schedule["max_lr"], "go_back": go_back, "auto_lr": searches}
    told, alike = {**told, "highest": highest}, {**alike, "highest": _word(highest)}
    guesses, more = schedule["max_lr"], {"searches": searches, "go_back": go_back, "highest": highest}
    return search_of(optimizer, ours, guesses, steps, mapped(told, _plain), alike, **more)


def _replicas(
    optimizer: Optimizer, ours: Ours, fanout: Fanout, pct_start: float, told: dict[str, Any], alike: dict[str, str]
) -> Replicas:
    """The published ensemble."""
    steps = told["total_steps"]
    spread = PUBLISHED_SPREAD if fanout.spread is None else float(fanout.spread)
    controller = _controller(fanout)
    rounds = Rounds(checked_length(fanout.sync_every, default_length(steps)), steps)
    start = _resolved_start(fanout.start, rounds, steps, torch_private.warm_up_end(steps, pct_start))
    settings = Settings(rounds, int(fanout.seed), fanout.decay, start)
    isolated = isinstance(ours.group, Arms) and len(ours.group.members) > 1
    body = Body(ours.model, with_state=isolated)  # moments differ between arms, and only there
    specs = rate_knobs(rate_names(optimizer), spread)
    fan_out = FanOut(specs, Permuted(), settings.seed, shared_rates(optimizer))
    settled = {"spread": spread, **settings.state(), "auto_lr": repr(controller)}
    steering = Steering(settings, fan_out, controller, [spec.start(0.0) for spec in specs])
    return Replicas(
        steering, body, Meeting(ours.group, alike), Chronicle(ours.journal, mapped({**told, **settled}, _plain))
    )


def _is_auto(max_lr: object) -> bool:
    if isinstance(max_lr, str) and max_lr != "auto":
        raise ArgumentError(
            f'max_lr must be a number, a list of numbers or "auto", but got max_lr={shown(max_lr)}; with "auto" the '
            "optimizer's lr is the guess"
        )
    return isinstance(max_lr, str)


def _refuse_fanout(fanout: Fanout) -> None:
    """Raise for arguments of replicas that train apart: a search is for one model."""
    given = {
        "spread": (fanout.spread, fanout.spread is None),
        "sync_every": (fanout.sync_every, fanout.sync_every is None),
        "auto_lr_start": (fanout.start, fanout.start is None),
        "decay": (fanout.decay, is_one_of(fanout.decay, ("schedule",))),
        "seed": (fanout.seed, is_int(fanout.seed) and fanout.seed == 0),
    }
    for name, (value, left_out) in given.items():
        if not left_out:
            raise ArgumentError(
                f'max_lr="auto" searches the rate of one model, in rounds of its own: {name} is for replicas that '
                f"train at different rates, but got {name}={shown(value)}; leave it out, or give a number as max_lr"
            )
    if not isinstance(fanout.auto_lr, bool):
        raise ArgumentError(
            f'auto_lr must be True or False with max_lr="auto", but got auto_lr={shown(fanout.auto_lr)}; a search '
            "goes by a rule of its own: True, or False to keep to the guess"
        )


def _refuse_parts(schedule: dict[str, Any]) -> None:
    """Raise for parts of a length that nobody knows."""
    for name, usual in _PARTS.items():
        if schedule[name] != usual:
            raise ArgumentError(
                f"{name} must be left out of a run without an end, which it cannot divide, but got "
                f"{name}={shown(schedule[name])}; give total_steps with it, or leave it out"
            )


def _check_fanout(fanout: Fanout, go_back: object, highest: object) -> None:
    """Raise for what cannot be meant; what depends on the run's length is checked later."""
    must_be(f"one of {DECAYS}", is_one_of(fanout.decay, DECAYS), "leave it out for 'schedule'", decay=fanout.decay)
    must_be("an integer", is_int(fanout.seed), "leave it out for 0", seed=fanout.seed)
    if go_back is not True:
        raise ArgumentError(
            f'go_back is for max_lr="auto", whose search may roll back, but got go_back={shown(go_back)}; leave it out'
        )
    if highest is not None:
        raise ArgumentError(
            f'highest is for max_lr="auto", which finds the rate, but got highest={shown(highest)}; leave it out: a '
            "number as max_lr is the highest rate already"
        )
    spread = fanout.spread
    if spread is not None and not (is_real(spread) and 0 <= spread <= 1):
        raise ArgumentError(
            f"spread must be at least 0 and at most 1, but got spread={shown(spread)}; it is the relative distance of "
            "the outermost replicas from the base rate, published as 1/9, and 0 means no fan-out"
        )
    _controller(fanout)


def _controller(fanout: Fanout) -> Controller | None:
    rule = Published(*fanout.published)  # also checks the numbers where they are not used
    if isinstance(fanout.auto_lr, bool):
        return rule if fanout.auto_lr else None
    if isinstance(fanout.auto_lr, Controller):
        return fanout.auto_lr
    raise ArgumentError(
        "auto_lr must be True, False or a controller with init() and update(), but got "
        f"auto_lr={shown(fanout.auto_lr)}; True is the published controller"
    )


def _guesses(optimizer: object) -> list[float]:
    """The optimizer's own rates."""
    if not isinstance(optimizer, Optimizer):
        return []  # torch raises for it
    return [float(group["lr"]) for group in optimizer.param_groups]


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
            f"auto_lr_start={shown(start)}; leave it out for the end of the warm-up, or use auto_lr=False for never"
        )
    return int(start)


def _in_words(schedule: dict[str, Any], is_auto: bool) -> dict[str, str]:
    """Those of torch's arguments that no way knows, so that ranks can compare them."""
    left_out = set(_LENGTHS)
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
    """An argument as JSON can hold it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    number = number_of(value)
    return shown(value) if number is None else number
