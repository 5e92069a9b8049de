"""``hdet.OneCycleLR``: torch's OneCycleLR that finds the learning rate, or whose replicas explore it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from hdet.checks import STATE_WORDS, is_equal, is_int, is_real, must_be, must_count, reading, shown
from hdet.ensemble.controller import Controller
from hdet.errors import ArgumentError
from hdet.journal import Journals
from hdet.parameters import added_groups, as_type_of, copy_rate, group_counts, put_rate, unwrapped, with_added
from hdet.ranks.group import Group, ReplicaIndex
from hdet.schedulers.arguments import SCHEDULE, CommonArguments, rate_names
from hdet.schedulers.loading import NEEDED, refuse_foreign, refuse_mangled, refuse_other_groups, tell_another_length
from hdet.schedulers.onecycle_ensemble import replicas_of
from hdet.schedulers.plan import ANNEALINGS, Plan, annealing_in, levels_of, phase_at, take_in
from hdet.schedulers.run import Run
from hdet.schedulers.search_arguments import WithSearch, searched

_NOT_SAVED = {"_run", "search", "_counted", "_plan", "_counts"}
"""Attributes that are not in a state: what a run saves of itself has its own key."""
_torch = lr_scheduler.OneCycleLR
"""Called by name: ``super()`` is slow before Python 3.12."""


class OneCycleLR(WithSearch, lr_scheduler.OneCycleLR):
    r"""torch's OneCycleLR that finds the learning rate in the run, or whose replicas explore it while they train.

    With ``max_lr="auto"`` the rate is found, on one device or on several. The optimizer's own rate is a guess.
    Training begins far below it, and the rate is raised as long as the gradients of all steps so far, together, give a
    higher estimated rate. If the loss shows that training has diverged, it is rolled back to earlier weights.

    .. code-block:: python

        scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=10_000)
        for batch in loader:
            loss = train_step(batch)
            optimizer.step()
            scheduler.step(loss)

    With a number as ``max_lr`` it is the ensemble of HDET: replica r trains at :math:`\rho_r` times the schedule. At
    the end of every round the weights are averaged over the replicas, and from S_warm on their losses move the base
    rate. With one replica and the default ``decay`` it is torch's scheduler, number for number. Inside a round the
    replicas hold different weights: evaluate and save inside ``with scheduler.consensus():``, or right after the end of
    a round.

    A parameter group that is added during the run has its own ``max_lr``. With "auto" and without it, its rate is its
    guess.

    Args:
        optimizer, total_steps, epochs, steps_per_epoch, pct_start, base_momentum, max_momentum,
            div_factor, final_div_factor, three_phase, last_epoch: as in torch.
            With "auto" and without a length the rate is held until :meth:`finish` is called; ``total_steps`` is
            infinite until then. With "auto" an optimizer without momentum, such as Adagrad, has none cycled.
        anneal_strategy: as in torch; with "auto" also "trapezoid", the schedule of :func:`hdet.auto`.
        cycle_momentum: as in torch, unless a rate is searched: then momentum stays as it is, which makes no difference.
        max_lr: as in torch, or "auto": the optimizer's own rate is a guess that may be far off.
        spread: alpha in [0, 1], the relative distance of the outermost replicas from the base rate; 0: no fan-out.
            None: 1/9.
        sync_every: T, steps per round. None: ``max(1, min(1000, total_steps // 50))``.
        auto_lr: True for :class:`hdet.Corrected` as published, False for none, or a controller object, for instance
            ``hdet.Corrected(sigma=0.3)``. With "auto": False uses the guess.
        auto_lr_start: S_warm, rounded up to a round. None: the end of the warm-up phase (never, if past the end).
        decay: "schedule": base = m * OneCycle(t), the controller moves m. "exponential": OneCycle until
            S_warm, then constant within a round and multiplied by (1 - gamma)(1 + lambda v) after each.
        seed: for the reassignment of multipliers after every round.
        group: the process group whose ranks are the replicas, ``hdet.arms(n)`` or ``hdet.torchft(manager)``. None: the
            default group, or a single replica if torch.distributed is not initialised. Looked up when it is first
            needed.
        model: averages its float buffers (BatchNorm) too; without it, only the optimizer's parameters. With "auto", the
            buffers are also rolled back with the weights.
        journal: a path, an object with ``write(record)``, a SummaryWriter or another tracker, or a list of these; one
            record per round.
        rollback: with "auto", whether snapshots of weights and optimizer state are kept for rollbacks, one on the
            device and one on the host. False saves their memory; weights that are NaN or infinite then raise a
            :class:`hdet.DivergedError`.
        highest: with "auto", a rate that is never exceeded; or a list with one for each parameter group, in which None
            is no bound. All groups share one factor: it rises until the first group is at its bound.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float] | Literal["auto"],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear", "trapezoid"] = "cos",
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
        rollback: bool = True,
        highest: float | Sequence[float | None] | None = None,
    ) -> None:
        given = dict(locals())
        self._counted = 0
        """torch's count of steps, without those that Accelerate adds to it between the steps of an accumulation."""
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, Optimizer):
            _torch.__init__(self, optimizer, 1.0)  # raises
        schedule = {name: given[name] for name in SCHEDULE}
        common = CommonArguments(group, model, journal)
        if isinstance(max_lr, str):
            words, cure = 'a number, a list of numbers or "auto"', 'with "auto" the optimizer\'s lr is the guess'
            must_be(words, max_lr == "auto", cure, max_lr=max_lr)
            self.search = searched(optimizer, schedule, common, given)
            self._run: Run = self.search
        else:
            self._run = replicas_of(optimizer, schedule, common, given)
        _torch.__init__(self, optimizer, **schedule)  # steps once, which writes the first rates
        plan = Plan.of(self)
        plan = plan.trapezoid() if is_equal(anneal_strategy, "trapezoid") else plan
        self._plan = plan.without_end() if self._run.total_steps is None else plan
        """The plan of the constructor's arguments; :meth:`finish` changes that of the schedule."""
        self._plan.put(self)
        self._counts = group_counts(optimizer)
        """How many groups of each optimizer are known."""
        self._run.begin(optimizer)
        if self.search is not None:
            self.search.written.begin(self)
            self.search.levels = levels_of(optimizer.param_groups)
            self._write(self._rates())  # torch's are of its own plan

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]  # torch's first parameter is the epoch; here a loss may stand there
        self, value: float | Tensor | None = None, /, epoch: int | None = None, *, loss: float | Tensor | None = None
    ) -> None:
        """Observe a loss if one is given, end the round if one ends here, and go to the next step of the schedule.

        Called as ``step(loss)``, ``step(loss=loss)``, ``step()`` or, as in torch, ``step(epoch=3)``. A loss is a float
        or a tensor of one element. A positional int is an epoch as in torch; with "auto", or if losses were given
        before, it is refused, since a loss may have been meant. A round's end is a collective.
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
            self._run.step(self.optimizer, self.last_epoch, t, loss, self._rates_at, self._peak)
        if is_inside and self._step_count > 1 and epoch is None:
            self._step_count += 1
            self.last_epoch += 1  # not t: a replica of torchft that fell behind is with the others now
            self._write(self._rates())
        else:
            if self.search is not None and self._step_count == 0 < self._counted:
                self.search.written.is_shared = True  # SequentialLR begins with this scheduler
            _torch.step(self, epoch)
            if self.search is not None:
                self.search.written.note(self.optimizer.param_groups)
        self._counted = self._step_count

    def _join(self) -> None:
        """For :func:`hdet.torchft`: meet the others, and go on where they are."""
        steps = self._run.join(self, self._rates_at, self.last_epoch)  # type: ignore[attr-defined]  # torchft's run
        self.last_epoch += steps
        self._step_count += steps
        self._counted = self._step_count
        self._write(self._rates())

    def finish(self, steps: int) -> None:
        """End the run after ``steps`` more steps: the rate falls from here on as at the end of the schedule.

        For ``max_lr="auto"``, at any step, whether the run has an end or none. A rate that falls already falls on from
        there, faster or slower. A collective: all ranks call it at the same step. A checkpoint that was saved before
        the call resumes as if there had been no call.

        Args:
            steps: steps that training still makes; ``total_steps`` is known from now on.
        """
        plan = Plan.of(self)
        now = max(self.last_epoch, 0)  # SequentialLR leaves -1 in one that waits for its turn
        if self.search is None or now >= plan.phases[-1]["end_step"]:
            state = "has a number as max_lr" if self.search is None else f"is at step {now} of {plan.length}"
            raise ArgumentError(
                f'finish() is for max_lr="auto", before the run ends, but this scheduler {state}; give total_steps to '
                "the constructor, or go on from a checkpoint of an earlier step"
            )
        steps = must_count(1, "give the steps that training is still to make", steps=steps)
        self._take_in_new_groups()
        peaks = sum(float(group["max_lr"]) for group in self.optimizer.param_groups)
        share = 1.0 if plan.has_fallen(now) else sum(self._rates_at(now)) / peaks
        self.search.finish(self.optimizer, now, steps, share)
        plan.finished(now, steps).put(self)
        if self._owns_rates():  # inside SequentialLR they may be another scheduler's
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
        return self._run.base(self._values(self.last_epoch), self.last_epoch)

    @property
    def multipliers(self) -> list[float]:
        """rho of this replica for each parameter group in the current round; 1 in a search."""
        return self._run.multipliers(self.last_epoch, self._run.replica_index)

    def replica_multipliers(self, step: int | None = None) -> list[list[float]]:
        """rho of all replicas, a row for each, at a step (None: now). The same on every rank, and no collective."""
        t, size = self.last_epoch if step is None else step, self._run.replica_index.size
        return [self._run.multipliers(t, ReplicaIndex(replica, size)) for replica in range(size)]

    # -- the schedule -----------------------------------------------------------------------------------------------

    def _peak(self) -> float:
        """The step at which the rise ends."""
        return float(self._schedule_phases[0]["end_step"])

    def _rates_at(self, t: int) -> list[float]:
        return [float(value) for value in self._values(t)]

    def _values(self, t: float, *, momenta: bool = False) -> list[float | Tensor]:
        """The plain schedule at step ``t``, of which the run makes its rates. A search climbs by itself: until the
        schedule's peak it is given the peak. ``momenta``: whether to write momenta into the optimizer."""
        if self.search is not None and self.search.holds_rise:
            t = max(t, self._peak())
        phase, part = phase_at(self._schedule_phases, t)
        anneal, start, end, rates = ANNEALINGS[self._anneal_func_type], phase["start_lr"], phase["end_lr"], []
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
        if self.search is not None:
            self.search.written.note(self.optimizer.param_groups)

    def _write_again(self) -> None:
        self._write(self.get_last_lr())
        if self.search is not None:
            self.search.levels = levels_of(self.optimizer.param_groups)

    def _own_again(self, *, is_loaded: bool) -> None:
        """Also the levels of the schedule, which the state of another run's optimizer has too."""
        if self.search is not None and not is_loaded:
            for group, levels in zip(self.optimizer.param_groups, self.search.levels, strict=True):
                group.update(levels)
        self._write_again()

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
            pairs = zip(self.get_last_lr(), self._run.base(self._values(t), t), strict=True)
            state["_last_lr"] = [as_type_of(own, value) for own, value in pairs]
        state["hdet"] = {**self._run.state(), "owns_rates": self._owns_rates(), "planned": self._plan.length}
        return state

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise an :class:`hdet.ArgumentError` unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        self._take_in_new_groups()  # as at the next step: the checkpoint may have them
        expected = "a state of hdet.OneCycleLR, or of torch's OneCycleLR,"
        refuse_foreign(state_dict, NEEDED, "hdet.OneCycleLR", expected)
        own = super().state_dict()
        refuse_mangled(state_dict, {key: own[key] for key in own.keys() - _NOT_SAVED})
        refuse_other_groups(len(state_dict["_last_lr"]), self.optimizer)
        if "hdet" not in state_dict:
            return
        with reading(STATE_WORDS):
            ours, saved, t = state_dict["hdet"], Plan.saved_in(state_dict), state_dict["last_epoch"]
            self._run.check(ours)
            planned, _ = ours["planned"], ours["owns_rates"]
            if self.search is not None and planned != self._plan.length:
                self._plan.check_goes_on(saved, planned, t, self.search.found_in(ours).max_lr)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint of any rank, at any number of replicas; its values replace the constructor's.

        One exception: the length of a search is this scheduler's. Another length needs a rate that does not fall yet.
        Writes this replica's rates at once, and again if the optimizer is loaded afterwards. Also takes a checkpoint of
        torch's own OneCycleLR: then the constructor's hdet arguments count, and replicas differ from the next step on.
        """
        self.check_state_dict(state_dict)
        known = {*super().state_dict(), "_anneal_func_type", "use_beta1"} - _NOT_SAVED
        torch_state = {**annealing_in(state_dict), **{key: v for key, v in state_dict.items() if key in known}}
        if not all("base_momentum" in group for group in self.optimizer.param_groups):
            torch_state["cycle_momentum"] = False  # there is nothing to cycle between
        total_steps, t = torch_state["total_steps"], torch_state["last_epoch"]
        ours, search = state_dict.get("hdet"), self.search
        if ours is None or search is None:
            tell_another_length(self._plan.length, total_steps, self._run.replica_index)
        if ours is None:
            self._run.adopt(total_steps, t)
        else:
            self._run.load(ours, Plan.saved_in(state_dict).length, t)
        super().load_state_dict(torch_state)
        self._counted = self._step_count
        if ours is None or search is None:
            self._plan = Plan.of(self)
        elif ours["planned"] != self._plan.length:
            self._plan.going_on(Plan.saved_in(state_dict), t).put(self)
            search.replan(self._plan.length, self._peak())
            self._last_lr = self._rates()
        if ours is None:
            return
        if search is not None:
            self._last_lr = search.held(self._last_lr)
        rho = self._run.multipliers(t, self._run.replica_index)
        rates = [value if own == 1.0 else value * own for value, own in zip(self._last_lr, rho, strict=True)]
        self._last_lr = rates
        if ours["owns_rates"]:
            self._write_again()
            self._watch_loading()
        elif search is not None:  # inside SequentialLR the rates in the optimizer may be another scheduler's
            search.written.forget()

    # -- torch's ways -----------------------------------------------------------------------------------------------

    def _loss_and_epoch(
        self, value: Any, epoch: int | None, loss: float | Tensor | None
    ) -> tuple[float | Tensor | None, int | None]:
        """Sort out what ``step`` was given. Never TypeError: DeepSpeed takes one for a request to step by batch size.

        An integer by position is an epoch, but may be a loss in a search, or if losses were given before. An exception
        is the 0 by which SequentialLR of torch 2.6 begins the turn of a scheduler.
        """
        must_be("an integer", epoch is None or is_real(epoch), "call step() or step(loss) instead", epoch=epoch)
        if value is None:
            return loss, epoch
        if loss is not None:
            raise ArgumentError(f"step() got two losses, {shown(value)} and loss={shown(loss)}; give one of them")
        if not is_int(value) or epoch is not None:
            return value, epoch
        if (self.search is not None or self._run.losses.ever) and not (value == 0 and self.last_epoch < 0):
            raise ArgumentError(
                f"a loss must be a float or a tensor, but step() got the integer {value}; give step(float(loss)), or "
                f"step(epoch={value}) to set the epoch"
            )
        return None, value

    def _update_lr(self, epoch: int | None = None) -> None:
        """torch writes rates. From SequentialLR, with 0: this scheduler's turn begins, earlier steps were another's."""
        if epoch == 0:
            self._take_in_new_groups()
            if self.search is not None:
                self.search.take_over()
                self.search.written.is_shared = True
        _torch._update_lr(self, epoch)

    def _take_in_new_groups(self) -> None:
        """Groups that were added to the optimizer follow the schedule from the next step on."""
        new = added_groups(self.optimizer, self._counts)
        if not new:
            return
        groups, names = self.optimizer.param_groups, rate_names(self.optimizer)
        take_in(groups, new, by_lr=self.search is not None, momenta=self.cycle_momentum)
        self._counts = group_counts(self.optimizer)
        self._last_lr = with_added(self._last_lr, {g: copy_rate(groups[g]["lr"]) for g in new})
        self._run.journal_writer.add([names[g] for g in new], max(self.last_epoch, 0))
        self._run.grow(new, names)
        if self.search is not None:
            self.search.levels = levels_of(groups)
