"""The arguments that both faces take beside a schedule: checked, and defaults filled in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import optim
from torch.optim import Optimizer

from hdet.algorithm.auto import constants as auto
from hdet.algorithm.auto.pilot import Pilot
from hdet.algorithm.knob import KnobSpec
from hdet.checks import is_int, is_one_of, is_real, shown, takes
from hdet.distributed.arms import Arms
from hdet.distributed.group import check_group
from hdet.distributed.sharding import refuse_flat
from hdet.distributed.shards import is_distributed
from hdet.engine.probed.evaluated import parts_of
from hdet.engine.probed.watch import refuse_unheard
from hdet.engine.probed.way import ProbedWay
from hdet.engine.trained.signals import ProbeLoss
from hdet.errors import ArgumentError, ProbeWarning
from hdet.parameters import check_model, trained_parameters

__all__ = ["LONGEST", "PUBLISHED_SPREAD", "Ours", "check_common", "check_guesses", "checked_length", "probed_way"]

PUBLISHED_SPREAD = 1 / 9
LONGEST = 2**53
"""Steps that a run may have: integers above are no floats, and the schedule computes with those."""
_NO_RATES = frozenset(("initial_lr", "lr_decay", "max_lr", "min_lr"))
"""Options that are named like rates, and are what schedules write or a decay."""
_GUESSES = (1e-14, 1e14)
"""Bounds of a guess: the factor on it that is learned stays between 1e-15 and 1e15."""
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
    copies_on_device: Any


def check_common(ours: Ours, optimizer: Optimizer) -> None:
    """Raise for arguments that are of the wrong kind or do not go together."""
    if not is_one_of(ours.fanout, ("trained", "probed")):
        raise ArgumentError(f'fanout must be "trained" or "probed", but got fanout={shown(ours.fanout)}; leave it out')
    check_group(ours.group)
    check_model(ours.model)
    refuse_flat(p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])  # torch checks its kind
    if not is_int(ours.seed):
        raise ArgumentError(f"seed must be an integer, but got seed={shown(ours.seed)}; leave it out for 0")
    if isinstance(ours.probe, ProbeLoss):
        raise ArgumentError(
            "probe= takes the function itself, but got hdet.ProbeLoss(fn), which is a signal of replicas that train; "
            "give probe=fn, for instance probe=hdet.ProbeBatch(model, loss_fn, probe_loader)"
        )
    if ours.fanout == "trained":
        for name, value in (("probe", ours.probe), ("copies_on_device", ours.copies_on_device)):
            if value is not None:
                raise ArgumentError(
                    f'{name}= is for fanout="probed", as max_lr="auto" has it, but got fanout={ours.fanout!r}; give '
                    f"that, or leave {name} out"
                )
        return
    if ours.copies_on_device is not None and not (is_int(ours.copies_on_device) and ours.copies_on_device >= 0):
        raise ArgumentError(
            "copies_on_device must be a number of bytes, 0 or more, but got "
            f"copies_on_device={shown(ours.copies_on_device)}; leave it out for half of the free memory"
        )
    if not takes(ours.probe):
        raise ArgumentError(
            'a probed fan-out (max_lr="auto") needs probe=, a function that gives a loss of the current model, but got '
            f"probe={shown(ours.probe)}; for instance probe=hdet.ProbeBatch(model, loss_fn, probe_loader)"
        )
    for name, value in (("sync_every", ours.sync_every), ("auto_lr_start", ours.start)):
        if value is not None and not (is_int(value) and value == 0):
            raise ArgumentError(
                f"a probed fan-out has rounds of its own, and searches from the first step on: {name} is for "
                f'fanout="trained", but got {name}={shown(value)}; leave it out'
            )
    if isinstance(ours.group, Arms) and not any(map(is_distributed, trained_parameters(optimizer))):
        raise ArgumentError(
            "a probed fan-out needs shared gradients, but group= is hdet.arms(n), whose weights come apart; "
            "leave it out (arms along a mesh go with a model that is sharded over it)"
        )


def check_guesses(guesses: Sequence[Any]) -> None:
    """Raise for rates from which nothing can be found: what is learned is a factor on them, and has bounds."""
    low, high = _GUESSES
    within = [is_real(guess) and (guess == 0 or low <= guess <= high) for guess in guesses]
    if guesses and not (all(within) and any(guesses)):
        raise ArgumentError(
            f'a search begins from max_lr, or the optimizer\'s lr with "auto": each rate must be a number from {low:g} '
            f"to {high:g}, or 0 where a group is to be left alone, and one must be above 0, but got {guesses}; any "
            "guess will do, for instance 1e-3"
        )


def checked_length(sync_every: Any, default: int) -> int:
    """T of replicas that train."""
    if sync_every is None:
        return default
    if not (is_int(sync_every) and 1 <= sync_every <= LONGEST):
        raise ArgumentError(
            f"sync_every must be an integer, at least 1 and at most {LONGEST}, but got sync_every={shown(sync_every)}; "
            f"leave it out for {default}"
        )
    return int(sync_every)


def probed_way(
    optimizer: Optimizer,
    ours: Ours,
    searches: bool,
    specs: Sequence[KnobSpec],
    total_steps: int | None,
    guesses: Mapping[int, float],
) -> ProbedWay:
    """``guesses``: of the parameter groups whose rates are the knobs, in their order. Groups at 0 are left alone."""
    for kind, why in NOT_PROBED.items():
        if any(isinstance(part, kind) for part in parts_of(optimizer)):
            raise ArgumentError(
                f"a probed fan-out cannot find the rate of {kind.__name__}: {why}. Use another optimizer, or torch's "
                "own scheduler"
            )
    refuse_unheard(optimizer)
    pilot, others = Pilot(total_steps, searches), _other_rates(optimizer)
    if searches and others:
        warnings.warn(
            f"the optimizer has rates beside lr, {others}: a search finds one factor on lr, and knows nothing of the "
            "others; give all of them in the right ratio",
            ProbeWarning,
            stacklevel=4,  # probed_way, ..._run, __init__, the user
        )
    if searches and not pilot.long_enough:
        warnings.warn(
            f"a run of {total_steps} steps is too short to find its rate, which takes at least {auto.SHORTEST}: the "
            "guess is kept to; give the rate, or count optimizer steps rather than epochs",
            ProbeWarning,
            stacklevel=4,  # probed_way, ..._run, __init__, the user
        )
    groups = {g: knob for knob, (g, guess) in enumerate(guesses.items()) if guess > 0}
    return ProbedWay(pilot, specs, groups, ours.probe, ours.model, ours.copies_on_device)


def _other_rates(optimizer: Optimizer) -> dict[str, float]:
    """Options of an optimizer that are rates too, by their names: ``lr_1d`` of MARS is built into a ratio to ``lr``."""
    return {
        name: value
        for part in parts_of(optimizer)
        for name, value in part.defaults.items()
        if (name.startswith("lr_") or name.endswith("_lr")) and name not in _NO_RATES and is_real(value) and value > 0
    }
