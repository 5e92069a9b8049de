"""``hdet.OneCycleLR``: torch's OneCycleLR whose replicas explore the learning rate.

A phase of the schedule is a dict, as in torch: the step at which it ends, and the levels between which it goes, by
their names in a parameter group ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from hdet.checks import is_int, is_one_of, is_real, must_be, must_count, shown
from hdet.ensemble.bases import DECAYS, Settings
from hdet.ensemble.controller import AsPrinted, Controller, Corrected
from hdet.ensemble.design import Permuted, Rounds, default_length
from hdet.ensemble.knob import rate_knobs
from hdet.ensemble.replicas import Replicas
from hdet.ensemble.steering import Steering
from hdet.errors import ArgumentError
from hdet.journal import Journals, open_journal
from hdet.journal.file import mapped
from hdet.journal.writer import JournalWriter
from hdet.optimizer import (
    added_groups,
    as_type_of,
    check_training,
    copy_rate,
    group_counts,
    put_rate,
    rate_names,
    shared_rates,
    unwrapped,
    with_added,
)
from hdet.ranks.agreement import RankGroup
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group
from hdet.ranks.torchft import Torchft
from hdet.ranks.weights import ReplicaTensors
from hdet.schedulers.replica_scheduler import PUBLISHED_SPREAD, ReplicaScheduler, replicas_of
from hdet.schedulers.schedules import emptied
from hdet.state import STATE_WORDS, reading, refuse_foreign, refuse_other_groups

_NEEDED = {"total_steps", "last_epoch", "base_lrs", "_last_lr", "_step_count"}
"""Keys of a state, in every version of torch."""
_NOT_SAVED = {"_run", "_counted", "_counts"}
"""Attributes that are not in a state: what a run saves of itself has its own key."""
_HIGHEST = torch.finfo(torch.float32).max
"""The highest rate that gradients can be multiplied by."""
_torch = lr_scheduler.OneCycleLR
"""Called by name: ``super()`` is slow before Python 3.12."""


class OneCycleLR(ReplicaScheduler, lr_scheduler.OneCycleLR):
    r"""torch's OneCycleLR, for data-parallel replicas that explore the learning rate while they train.

    Replica r trains at :math:`\rho_r` times the schedule. At the end of every round the weights are averaged over the
    replicas, and from S_warm on their losses move the base rate. With one replica and the default ``decay`` it is
    torch's scheduler, number for number.

    .. code-block:: python

        scheduler = hdet.OneCycleLR(optimizer, max_lr=0.1, total_steps=10_000)
        for batch in loader:
            loss = train_step(batch)
            optimizer.step()
            scheduler.step(loss)

    Inside a round the replicas hold different weights: evaluate and save inside ``with scheduler.consensus():``, or
    right after the end of a round. A parameter group that is added during the run has its own ``max_lr``.

    :func:`hdet.auto` finds the learning rate of one model instead.

    Args:
        optimizer, max_lr, total_steps, epochs, steps_per_epoch, pct_start, anneal_strategy, cycle_momentum,
            base_momentum, max_momentum, div_factor, final_div_factor, three_phase, last_epoch: as in torch.
        spread: alpha in [0, 1], the relative distance of the outermost replicas from the base rate; 0: no fan-out.
            None: 1/9.
        sync_every: T, steps per round. None: ``max(1, min(1000, total_steps // 50))``.
        auto_lr: True for :class:`hdet.Corrected` as published, False for none, or a controller object, for instance
            ``hdet.Corrected(sigma=0.3)``.
        auto_lr_start: S_warm, rounded up to a round. None: the end of the warm-up phase (never, if past the end).
        decay: "schedule": base = m * OneCycle(t), the controller moves m. "exponential": OneCycle until
            S_warm, then constant within a round and multiplied by (1 - gamma)(1 + lambda v) after each.
        seed: for the reassignment of multipliers after every round.
        group: the process group whose ranks are the replicas, ``hdet.arms(n)`` or ``hdet.torchft(manager)``. None: the
            default group, or a single replica if torch.distributed is not initialised. Looked up when it is first
            needed.
        model: averages its float buffers (BatchNorm) too; without it, only the optimizer's parameters.
        journal: a path, an object with ``write(record)``, a SummaryWriter or another tracker, or a list of these; one
            record per round.
    """

    _run: Replicas

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        *,
        spread: float | None = None,
        sync_every: int | None = None,
        auto_lr: bool | Controller = True,
        auto_lr_start: int | None = None,
        decay: Literal["schedule", "exponential"] = "schedule",
        seed: int = 0,
        group: Group = None,
        model: nn.Module | None = None,
        journal: Journals = None,
    ) -> None:
        length = {"total_steps": total_steps, "epochs": epochs, "steps_per_epoch": steps_per_epoch}
        shape = {"pct_start": pct_start, "anneal_strategy": anneal_strategy, "three_phase": three_phase}
        levels = {"max_lr": max_lr, "div_factor": div_factor, "final_div_factor": final_div_factor}
        momenta = {"cycle_momentum": cycle_momentum, "base_momentum": base_momentum, "max_momentum": max_momentum}
        schedule: dict[str, Any] = {**shape, **levels, **momenta}
        arguments: dict[str, Any] = {**length, **schedule, "last_epoch": last_epoch}
        self._counted = 0
        """torch's count of steps, without those that a framework adds to it between the steps of an accumulation."""
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, Optimizer):
            _torch.__init__(self, optimizer, 1.0)  # raises
        if isinstance(max_lr, str):
            raise ArgumentError(
                f"max_lr must be a number or a list of numbers, but got max_lr={shown(max_lr)}; to have the rate found "
                "in the run, write scheduler = hdet.auto(optimizer, total_steps=...)"
            )
        cure = "it is the relative distance of the outermost replicas from the base rate; leave it out for 1/9"
        fits = spread is None or (is_real(spread) and 0 <= spread <= 1)
        must_be("at least 0 and at most 1", fits, cure, spread=spread)
        spread = PUBLISHED_SPREAD if spread is None else float(spread)
        words, cure = "True, False or a controller with init() and update()", "True is hdet.Corrected()"
        must_be(words, isinstance(auto_lr, (bool, Controller)), cure, auto_lr=auto_lr)
        controller = (Corrected() if auto_lr else None) if isinstance(auto_lr, bool) else auto_lr
        check_training(optimizer, group, model)
        made = _rehearsed(optimizer, arguments)
        settings = _settings_of(made, controller, decay, sync_every, auto_lr_start, seed)
        specs = rate_knobs(rate_names(optimizer), spread)
        learned, columns = [spec.start(0.0) for spec in specs], shared_rates(optimizer)
        settled = {"spread": spread, **settings.state(), "auto_lr": repr(controller)}
        plain = mapped(schedule, _plain)
        header = {**plain, "total_steps": made.total_steps, **settled}
        unused = () if cycle_momentum else ("base_momentum", "max_momentum")
        isolated = isinstance(group, Torchft) or (isinstance(group, Arms) and len(group.members) > 1)
        self._run = replicas_of(group)(
            RankGroup(group, {name: repr(value) for name, value in plain.items() if name not in unused}),
            Steering(settings, specs, Permuted(), columns, controller, learned),
            ReplicaTensors(model, with_state=isolated),  # gradients differ, so moments do
            JournalWriter(open_journal(journal), header),
        )
        _torch.__init__(self, optimizer, **arguments)  # steps once, which writes the first rates
        self._begin(group)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]  # torch's first parameter is the epoch; here a loss may stand there
        self, value: float | Tensor | None = None, /, epoch: int | None = None, *, loss: float | Tensor | None = None
    ) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule.

        Called as ``step(loss)``, ``step(loss=loss)``, ``step()`` or, as in torch, ``step(epoch=3)``. A loss is a float
        or a tensor of one element. A positional int is an epoch as in torch; if losses were given before, it is
        refused, since a loss may have been meant. A round's end is a collective.
        """
        if epoch is None and loss is None and (value is None or isinstance(value, Tensor)):  # as usual, without delay
            loss = value
        else:
            loss, epoch = self._loss_and_epoch(value, epoch, loss)
        if self._step_count > self._counted:
            self._step_count = self._counted
        t = self.last_epoch + 1 if epoch is None else epoch
        is_inside = t <= self.total_steps  # if not, torch raises
        if is_inside and self._step_count > 0:  # torch's constructor makes a step too
            if len(self.optimizer.param_groups) != len(self._last_lr):
                self._take_in_new_groups()
            if self._run.step(self.optimizer, self.last_epoch, t, loss):
                self._run.end_round(self.optimizer, self.last_epoch, t, self._rates_at)
        if is_inside and self._step_count > 1 and epoch is None:
            self._step_count += 1
            self.last_epoch += 1  # not t: a replica of torchft that fell behind is with the others now
            self._write(self._rates())
        else:
            _torch.step(self, epoch)
        self._counted = self._step_count

    def _join(self) -> None:
        steps = self._run.join(self, self._rates_at, self.last_epoch)
        self.last_epoch += steps
        self._step_count += steps
        self._counted = self._step_count
        self._write(self._rates())

    # -- values -----------------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float | Tensor]:
        """This replica's rates at ``last_epoch``: base times rho. Writes momenta, as torch's does."""
        if self.last_epoch > self.total_steps:
            return _torch.get_lr(self)  # raises
        return self._rates()

    @property
    def base_lrs_now(self) -> list[float | Tensor]:
        """The shared base rate of each parameter group at ``last_epoch``, around which the replicas spread."""
        self._take_in_new_groups()
        return self._run.steering.base(self._values(self.last_epoch), self.last_epoch)

    @property
    def multipliers(self) -> list[float]:
        """rho of this replica for each parameter group in the current round."""
        return self._run.multipliers(self.last_epoch)

    # -- the schedule -----------------------------------------------------------------------------------------------

    def _rates_at(self, t: int) -> list[float]:
        return [float(value) for value in self._values(t)]

    def _values(self, t: float, *, momenta: bool = False) -> list[float | Tensor]:
        """The plain schedule at step ``t``. ``momenta``: whether to write momenta into the optimizer."""
        phase, part = _phase_at(self._schedule_phases, t)
        anneal: Callable[[Any, Any, float], Any] = self._anneal_func
        start, end, rates = phase["start_lr"], phase["end_lr"], []
        for group in self.optimizer.param_groups:
            rates.append(anneal(group[start], group[end], part))
            if momenta:
                momentum = anneal(group[phase["start_momentum"]], group[phase["end_momentum"]], part)
                if self.use_beta1:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum
        return rates

    def _rates(self) -> list[float | Tensor]:
        """This replica's rates at ``last_epoch``. Writes momenta."""
        t = self.last_epoch
        return self._run.rates(self._values(t, momenta=self.cycle_momentum), t)

    def _write(self, rates: list[float | Tensor]) -> None:
        """Put rates into the optimizer, each as the type it was, and remember them as torch's ``step()`` does."""
        self._last_lr = rates
        for g, group in enumerate(self.optimizer.param_groups):
            if isinstance(group["lr"], float):
                group["lr"] = rates[g]
            else:
                put_rate(group, rates[g])
                rates[g] = copy_rate(group["lr"])

    def _write_again(self) -> None:
        self._write(self.get_last_lr())

    def _owns_rates(self) -> bool:
        """Whether the optimizer's rates are those that were written here last: no other scheduler has changed them."""
        rates, last = [group["lr"] for group in self.optimizer.param_groups], self.get_last_lr()
        return len(rates) == len(last) and all(bool(own == rate) for own, rate in zip(rates, last, strict=True))

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's keys plus ``hdet``. The same on every rank (``_last_lr`` is the base rate), and no collective."""
        self._take_in_new_groups()
        state = {key: value for key, value in super().state_dict().items() if key not in _NOT_SAVED}
        if self._run.replica_index.size > 1:
            t = max(self.last_epoch, 0)  # SequentialLR leaves -1 in one that waits for its turn
            pairs = zip(self.get_last_lr(), self._run.steering.base(self._values(t), t), strict=True)
            state["_last_lr"] = [as_type_of(own, value) for own, value in pairs]
        state["hdet"] = {**self._run.state(), "owns_rates": self._owns_rates()}
        return state

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        self._take_in_new_groups()  # as at the next step: the checkpoint may have them
        expected = "a state of hdet.OneCycleLR, or of torch's OneCycleLR,"
        refuse_foreign(state_dict, _NEEDED, "hdet.OneCycleLR", expected)
        with reading(STATE_WORDS):
            refuse_other_groups(len(state_dict["_last_lr"]), len(self.optimizer.param_groups))
            _check_state({**vars(self), **state_dict}, self.optimizer.param_groups)
            if "hdet" in state_dict:
                self._run.check(state_dict["hdet"])
                _ = state_dict["hdet"]["owns_rates"], state_dict["_schedule_phases"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of replicas; its values replace the constructor's.

        Writes this replica's rates at once, and again if the optimizer is loaded afterwards. Also takes a checkpoint of
        torch's own OneCycleLR: then the constructor's hdet arguments count, and replicas differ from the next step on.
        """
        self.check_state_dict(state_dict)
        known = {*super().state_dict(), "use_beta1"} - _NOT_SAVED
        torch_state = {key: value for key, value in state_dict.items() if key in known}
        if not all("base_momentum" in group for group in self.optimizer.param_groups):
            torch_state["cycle_momentum"] = False  # there is nothing to cycle between
        total_steps, t = torch_state["total_steps"], torch_state["last_epoch"]
        ours = state_dict.get("hdet")
        self._tell_another_length(total_steps)
        if ours is None:
            self._run.adopt(total_steps, t)
        else:
            self._run.load(ours, total_steps, t)
        super().load_state_dict(torch_state)
        self._counted = self._step_count
        if ours is None:
            return
        rho = self._run.multipliers(t)
        rates = [value if own == 1.0 else value * own for value, own in zip(self._last_lr, rho, strict=True)]
        self._last_lr = rates
        if ours["owns_rates"]:
            self._write_again()
            self._watch_loading()

    # -- torch's ways -----------------------------------------------------------------------------------------------

    def _loss_and_epoch(
        self, value: Any, epoch: int | None, loss: float | Tensor | None
    ) -> tuple[float | Tensor | None, int | None]:
        """Sort out what ``step`` was given. Never TypeError: a framework takes one for a request to step by batch size.

        An integer by position is an epoch, but may be a loss if losses were given before. An exception is the 0
        by which SequentialLR of torch 2.6 begins the turn of a scheduler.
        """
        must_be("an integer", epoch is None or is_real(epoch), "call step() or step(loss) instead", epoch=epoch)
        if value is None:
            return loss, epoch
        if loss is not None:
            raise ArgumentError(f"step() got two losses, {shown(value)} and loss={shown(loss)}; give one of them")
        if not is_int(value) or epoch is not None:
            return value, epoch
        if self._run.losses.ever and not (value == 0 and self.last_epoch < 0):
            raise ArgumentError(
                f"a loss must be a float or a tensor, but step() got the integer {value}; give step(float(loss)), or "
                f"step(epoch={value}) to set the epoch"
            )
        return None, value

    def _update_lr(self, epoch: int | None = None) -> None:
        """torch writes rates. From SequentialLR, with 0: this scheduler's turn begins, earlier steps were another's."""
        if epoch == 0:
            self._take_in_new_groups()
        _torch._update_lr(self, epoch)

    def _take_in_new_groups(self) -> None:
        """Groups that were added to the optimizer follow the schedule from the next step on."""
        new = added_groups(self.optimizer, self._counts)
        if not new:
            return
        groups, names = self.optimizer.param_groups, rate_names(self.optimizer)
        _take_in(groups, new, momenta=self.cycle_momentum)
        self._counts = group_counts(self.optimizer)
        self._last_lr = with_added(self._last_lr, {g: copy_rate(groups[g]["lr"]) for g in new})
        self._run.journal_writer.add([names[g] for g in new], max(self.last_epoch, 0))
        self._run.grow(new, names)


def _rehearsed(optimizer: Optimizer, arguments: dict[str, Any]) -> lr_scheduler.OneCycleLR:
    """torch's scheduler on an optimizer without weights: what torch refuses, it refuses before anything is changed."""
    made = _torch(emptied(optimizer), **arguments)
    for group in made.optimizer.param_groups:
        _check_peak(group["max_lr"], max_lr=arguments["max_lr"])
    return made


def _check_peak(rate: Any, /, **given: Any) -> None:
    """Raise unless weights can be trained at a rate, the highest of the schedule; ``given``: the argument for it."""
    is_number = is_real(rate) or (isinstance(rate, Tensor) and not rate.is_complex())
    must_be("finite and not below 0", is_number and 0 <= rate <= _HIGHEST, "for instance 0.1", **given)


def _phase_at(phases: Sequence[Mapping[str, Any]], t: float) -> tuple[Mapping[str, Any], float]:
    """The phase that step ``t`` is in, which may be a fraction of a step, and which part of it is over.

    >>> _phase_at([{"end_step": 4, "start_lr": "max_lr", "end_lr": "min_lr"}], 3)[1]
    0.75
    """
    start = end = 0.0
    for phase in phases:
        start, end = end, phase["end_step"]
        if t <= end:
            break
    if start == end and len(phases) > 1 and phase is phases[-1]:
        return phases[-2], 1.0  # pct_start leaves no step to the last phase: torch divides by zero
    return phase, (t - start) / (end - start)


def _check_state(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless a state gives rates to these groups: torch would load it, and fail at a later step.

    Raises:
        KeyError, TypeError, ValueError: it does not.
    """
    phases = state["_schedule_phases"]
    steps = [state[name] for name in ("last_epoch", "_step_count", "total_steps")]
    numbers = [*state["_last_lr"], *state["base_lrs"], *(phase["end_step"] for phase in phases)]
    if not phases or not all(map(is_int, steps)) or not all(math.isfinite(float(number)) for number in numbers):
        raise ValueError("its steps, rates or phases are no numbers")
    _ = [group[phase[level]] for group in groups for phase in phases for level in ("start_lr", "end_lr")]


def _take_in(groups: Sequence[dict[str, Any]], new: Collection[int], *, momenta: bool) -> None:
    """Give groups that were added to the optimizer the levels of the schedule. Raises before it changes any.

    Args:
        groups: of the optimizer.
        new: the numbers of those that were added.
        momenta: whether they are cycled.
    """
    added = [(g, groups[g]) for g in new]
    for g, group in added:
        if "max_lr" not in group:
            raise ArgumentError(
                f"param_groups[{g}], which was added to the optimizer, has no max_lr, which must be its rate at the "
                'schedule\'s peak; give it: optimizer.add_param_group({"params": ..., "max_lr": 0.1})'
            )
        _check_peak(group["max_lr"], **{f"max_lr of param_groups[{g}]": group["max_lr"]})
    known = [group for g, group in enumerate(groups) if g not in new]
    example = next((group for group in known if group["max_lr"] > 0), known[0])
    for _, group in added:
        for name in ("initial_lr", "min_lr"):
            group.setdefault(name, group["max_lr"] * (float(example[name]) / (float(example["max_lr"]) or 1.0)))
        for name in ("base_momentum", "max_momentum") if momenta else ():
            group.setdefault(name, example[name])


def _plain(value: Any) -> Any:
    """An argument as JSON can hold it, for the journal and for other ranks; equal numbers are equal texts."""
    if value is None or isinstance(value, (bool, str)):
        return value
    return float(value) if is_real(value) else shown(value)


def _settings_of(
    made: lr_scheduler.OneCycleLR, controller: Controller | None, decay: Any, sync_every: Any, start: Any, seed: Any
) -> Settings:
    """Rounds, seed, decay and S_warm, checked; ``made``: torch's scheduler with the same arguments."""
    must_be("an integer", is_int(seed), "leave it out for 0", seed=seed)
    must_be(f"one of {DECAYS}", is_one_of(decay, DECAYS), "leave it out for 'schedule'", decay=decay)
    if controller is None and decay == "schedule" and start is not None:
        raise ArgumentError(
            'auto_lr_start is for a controller or decay="exponential", which begin there, but got auto_lr_start='
            f"{shown(start)}; leave it out, or leave auto_lr=False out"
        )
    if isinstance(controller, AsPrinted):
        cure = "it has a decay of its own; hdet.Corrected() takes one"
        must_be("left out with auto_lr=hdet.AsPrinted()", decay == "schedule", cure, decay=decay)
        decay = "printed"
    sync_every = default_length(made.total_steps) if sync_every is None else sync_every
    length = must_count(1, "leave it out for a fiftieth of the run", sync_every=sync_every)
    rounds = Rounds(length, made.total_steps)
    return Settings(rounds, int(seed), decay, _checked_start(start, rounds, made))


def _checked_start(start: Any, rounds: Rounds, made: lr_scheduler.OneCycleLR) -> int | None:
    """S_warm: a round end. By default the end of the warm-up rounded up to a round; never if that is past the end."""
    if start is None:
        end = max(1, math.ceil(made._schedule_phases[0]["end_step"] / rounds.length)) * rounds.length
        return end if end <= made.total_steps else None
    cure = "leave it out for the end of the warm-up, or use auto_lr=False for never"
    return rounds.next_end(must_count(0, cure, high=made.total_steps, auto_lr_start=start))
