"""``hdet.OneCycleLR`` with a number as ``max_lr``, the ensemble of HDET: its arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hdet.checks import is_int, is_one_of, is_real, must_be, must_count
from hdet.ensemble.bases import DECAYS, Decay, Settings
from hdet.ensemble.controller import AsPrinted, Controller, Corrected
from hdet.ensemble.design import Permuted, Rounds, default_length
from hdet.ensemble.elastic import replicas_in
from hdet.ensemble.knob import rate_knobs
from hdet.ensemble.replicas import Replicas
from hdet.ensemble.steering import Steering
from hdet.errors import ArgumentError
from hdet.journal import open_journal
from hdet.journal.writer import JournalWriter
from hdet.parameters import shared_rates
from hdet.ranks.arms import Arms
from hdet.ranks.torchft import Torchft
from hdet.ranks.weights import ReplicaTensors
from hdet.schedulers.arguments import (
    PUBLISHED_SPREAD,
    CommonArguments,
    alike_of,
    check_common,
    rate_names,
    refuse_given,
    rehearsed,
    told_of,
)

_OF_A_SEARCH = {"rollback": True, "highest": None}
"""Arguments of a search, with the values that they have if they are left out."""


def replicas_of(
    optimizer: Optimizer, schedule: dict[str, Any], common: CommonArguments, given: Mapping[str, Any]
) -> Replicas:
    """The ensemble behind an ``hdet.OneCycleLR``. Raises before anything is changed.

    Args:
        optimizer: the optimizer that trains.
        schedule: torch's own arguments.
        common: the arguments that all schedulers take.
        given: all arguments, as the user has given them.
    """
    refuse_given(given, _OF_A_SEARCH, 'max_lr="auto", which finds the rate', 'give max_lr="auto"')
    seed, spread, sync_every = (given[name] for name in ("seed", "spread", "sync_every"))
    must_be("an integer", is_int(seed), "leave it out for 0", seed=seed)
    cure = "it is the relative distance of the outermost replicas from the base rate; leave it out for 1/9"
    fits = spread is None or (is_real(spread) and 0 <= spread <= 1)
    must_be("at least 0 and at most 1", fits, cure, spread=spread)
    controller = _controller(given)
    check_common(common, optimizer)
    made = rehearsed(optimizer, schedule)
    decay = _decay(given["decay"], controller)
    if controller is None and decay == "schedule":
        whose = 'a controller or decay="exponential", which begin there'
        refuse_given(given, {"auto_lr_start": None}, whose, "leave auto_lr=False out")
    journal, steps = open_journal(common.journal), made.total_steps
    spread = PUBLISHED_SPREAD if spread is None else float(spread)
    sync_every = default_length(steps) if sync_every is None else sync_every
    rounds = Rounds(must_count(1, "leave it out for a fiftieth of the run", sync_every=sync_every), steps)
    start = _resolved_start(given["auto_lr_start"], rounds, steps, made._schedule_phases[0]["end_step"])
    settings = Settings(rounds, int(seed), decay, start)
    specs = rate_knobs(rate_names(optimizer), spread)
    learned, columns = [spec.start(0.0) for spec in specs], shared_rates(optimizer)
    settled = {"spread": spread, **settings.state(), "auto_lr": repr(controller)}
    told = {**told_of(schedule), "total_steps": steps, **told_of(settled)}
    arms = isinstance(common.group, Arms) and len(common.group.members) > 1
    isolated = arms or isinstance(common.group, Torchft)
    return replicas_in(
        common.group,
        Steering(settings, specs, Permuted(), columns, controller, learned),
        ReplicaTensors(common.model, with_state=isolated),  # gradients differ, so moments do
        alike_of(schedule),
        JournalWriter(journal, told),
    )


def _controller(given: Mapping[str, Any]) -> Controller | None:
    auto_lr = given["auto_lr"]
    if isinstance(auto_lr, bool):
        return Corrected() if auto_lr else None
    words, cure = "True, False or a controller with init() and update()", "True is hdet.Corrected()"
    must_be(words, isinstance(auto_lr, Controller), cure, auto_lr=auto_lr)
    return auto_lr  # type: ignore[no-any-return]  # checked


def _decay(decay: Any, controller: Controller | None) -> Decay:
    """The decay that is meant: a controller as printed has its own."""
    must_be(f"one of {DECAYS}", is_one_of(decay, DECAYS), "leave it out for 'schedule'", decay=decay)
    printed = isinstance(controller, AsPrinted)
    if printed and decay != "schedule":
        raise ArgumentError(
            f"decay must be left out with auto_lr=hdet.AsPrinted(), which has a decay of its own, but got {decay=}; "
            "hdet.Corrected() takes it"
        )
    return "printed" if printed else decay


def _resolved_start(start: Any, rounds: Rounds, total_steps: int, warm_up_end: float) -> int | None:
    """S_warm: a round end. By default the end of the warm-up rounded up to a round; never if that is past the end."""
    if start is None:
        end = max(1, math.ceil(warm_up_end / rounds.length)) * rounds.length
        return end if end <= total_steps else None
    cure = "leave it out for the end of the warm-up, or use auto_lr=False for never"
    return rounds.next_end(must_count(0, cure, high=total_steps, auto_lr_start=start))
