"""``hdet.OneCycleLR`` with a number as ``max_lr``, the ensemble of HDET: its arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hdet.checks import is_int, is_one_of, is_real, must_be
from hdet.ensemble.bases import DECAYS, Decay, Settings
from hdet.ensemble.controller import AsPrinted, Controller, Corrected
from hdet.ensemble.design import Permuted, Rounds, default_length
from hdet.ensemble.knob import rate_knobs
from hdet.ensemble.replicas import Replicas
from hdet.ensemble.steering import Steering
from hdet.errors import ArgumentError
from hdet.journal import open_journal
from hdet.journal.writer import JournalWriter
from hdet.parameters import shared_rates
from hdet.ranks.arms import Arms
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.weights import ReplicaTensors
from hdet.schedulers.arguments import (
    PUBLISHED_SPREAD,
    CommonArguments,
    alike_of,
    check_common,
    checked_length,
    rate_names,
    refuse_given,
    rehearsed,
    told_of,
)

_OF_A_SEARCH = {"rollback": True, "highest": None}
"""Arguments of a search, with the values that they have if they are left out."""


def replicas_of(
    optimizer: Optimizer,
    schedule: dict[str, Any],
    common: CommonArguments,
    auto_lr: Any,
    numbers: tuple[Any, Any, Any],
    for_search: Mapping[str, Any],
    *,
    spread: Any,
    sync_every: Any,
    auto_lr_start: Any,
    decay: Any,
    seed: Any,
) -> Replicas:
    """The ensemble behind an ``hdet.OneCycleLR``. Raises before anything is changed.

    Args:
        optimizer, common, auto_lr, spread, sync_every, auto_lr_start, decay, seed: as the user has given them.
        schedule: torch's own arguments.
        numbers: sigma, meta_momentum and meta_lr.
        for_search: arguments that an ensemble refuses.
    """
    refuse_given(for_search, _OF_A_SEARCH, 'max_lr="auto", which finds the rate', 'give max_lr="auto"')
    must_be("an integer", is_int(seed), "leave it out for 0", seed=seed)
    cure = "it is the relative distance of the outermost replicas from the base rate; leave it out for 1/9"
    fits = spread is None or (is_real(spread) and 0 <= spread <= 1)
    must_be("at least 0 and at most 1", fits, cure, spread=spread)
    controller = _controller(auto_lr, numbers)
    decay = _decay(decay, controller, schedule["final_div_factor"])
    check_common(common, optimizer)
    made = rehearsed(optimizer, schedule)
    journal, steps = open_journal(common.journal), made.total_steps
    spread = PUBLISHED_SPREAD if spread is None else float(spread)
    rounds = Rounds(checked_length(sync_every, default_length(steps)), steps)
    start = _resolved_start(auto_lr_start, rounds, steps, made._schedule_phases[0]["end_step"])
    settings = Settings(rounds, int(seed), decay, start)
    specs = rate_knobs(rate_names(optimizer), spread)
    learned, columns = [spec.start(0.0) for spec in specs], shared_rates(optimizer)
    settled = {"spread": spread, **settings.state(), "auto_lr": repr(controller)}
    told = {**told_of(schedule), "total_steps": steps, **told_of(settled)}
    isolated = isinstance(common.group, Arms) and len(common.group.members) > 1
    return Replicas(
        Steering(settings, specs, Permuted(), columns, controller, learned),
        ReplicaTensors(common.model, with_state=isolated),  # moments differ between arms, and only there
        RankGroup(common.group, alike_of(schedule)),
        JournalWriter(journal, told),
    )


def _controller(auto_lr: Any, numbers: tuple[Any, Any, Any]) -> Controller | None:
    rule = Corrected(*numbers)  # checks the numbers, also if they are not used
    if isinstance(auto_lr, bool):
        return rule if auto_lr else None
    words, cure = "True, False or a controller with init() and update()", "True is hdet.Corrected()"
    must_be(words, isinstance(auto_lr, Controller), cure, auto_lr=auto_lr)
    return auto_lr  # type: ignore[no-any-return]  # checked


def _decay(decay: Any, controller: Controller | None, final_div_factor: Any) -> Decay:
    """The decay that is meant: a controller as printed has its own."""
    must_be(f"one of {DECAYS}", is_one_of(decay, DECAYS), "leave it out for 'schedule'", decay=decay)
    printed = isinstance(controller, AsPrinted)
    if printed and decay != "schedule":
        raise ArgumentError(
            f"decay must be left out with auto_lr=hdet.AsPrinted(), which has a decay of its own, but got {decay=}; "
            "hdet.Corrected() takes it"
        )
    if final_div_factor == math.inf and (printed or decay == "exponential"):
        what = "auto_lr=hdet.AsPrinted()" if printed else 'decay="exponential"'
        raise ArgumentError(f"{what} needs a floor above 0, but got final_div_factor=inf; use 1e4")
    return "printed" if printed else decay


def _resolved_start(start: Any, rounds: Rounds, total_steps: int, warm_up_end: float) -> int | None:
    """S_warm: a round end. By default the end of the warm-up rounded up to a round; never if that is past the end."""
    if start is None:
        end = max(1, math.ceil(warm_up_end / rounds.length)) * rounds.length
        return end if end <= total_steps else None
    cure = "leave it out for the end of the warm-up, or use auto_lr=False for never"
    fits = is_int(start) and 0 <= start <= total_steps
    must_be(f"an integer from 0 to total_steps = {total_steps}", fits, cure, auto_lr_start=start)
    return rounds.next_end(int(start))
