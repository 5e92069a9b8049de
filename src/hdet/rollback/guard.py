"""``hdet.Guard``: faults are left out or rolled back, whatever sets the learning rate.

A guard has two lines of defence. Around each step of the optimizer it measures the gradient and, if that is NaN,
infinite or out of all proportion, keeps it from the optimizer (:meth:`Guard._screen`): on a device by a tensor that the
optimizer's fused kernels read, so that nothing waits. :meth:`Guard.step` notes the loss. Every fourth step is a *look*
(:meth:`Guard._look`): the ranks show each other these numbers, the policy decides (:mod:`hdet.rollback.guard_policy`:
when to hold still, when to roll back, to which snapshot, at which rate), and the guard acts on its
:class:`hdet.rollback.snapshots.Snapshots`. One process looks as soon as it sees a strange step. On a GPU numbers are
read :data:`DELAY` steps late, so that it always has work to do (:class:`hdet.rollback.guarded_step.Readings`).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import is_finite, items_of, must_be, must_count, shown, users_level
from hdet.errors import ArgumentError, DivergedError, RollbackWarning
from hdet.optimizer import (
    check_model,
    check_optimizer,
    claim_rates,
    end_step,
    hook_saving,
    hook_steps,
    once_gradients_are_there,
    parts_of,
    refuse_beside,
    refuse_without_hooks,
    unwrapped,
)
from hdet.ranks.group import arriving, connect
from hdet.ranks.shards import Partitioned, refuse_partitions
from hdet.rollback.gathering import GuardRanks
from hdet.rollback.guard_policy import SPACING, GuardPolicy
from hdet.rollback.guard_state import ASIDE, RECENT, Cause, GuardDecision, GuardState, Hold, Outcome, Step
from hdet.rollback.guarded_step import NO_CAPTURE, GuardedStep, Readings
from hdet.rollback.reporting import in_words, why_given_up, why_not_rolled_back
from hdet.rollback.snapshots import Snapshots
from hdet.rule.constants import BLOCKS
from hdet.rule.enums import Action
from hdet.rule.judge import Snapshot
from hdet.state import check_version, fields_of, from_fields, reading, written

_log = logging.getLogger("hdet")
_VERSION = 6
_WORDS = "the checkpoint's state of a hdet.Guard"
_UNHEARD = 64
"""Calls without a step of the optimizer after which a guard raises an error. A GradScaler leaves out fewer in a row."""
DELAY = 2
"""Steps after which numbers are read off a device: it has work to do meanwhile."""
_ON_HOST = (1, 2, 3, ASIDE)
"""Slots of snapshots in host memory."""
_GROWN = 1e3
"""Weights have diverged if the largest is above 1000 times that in the last snapshot, and above 1000: a bit was
flipped."""


class Guard:
    """Watches a run: leaves out steps that would do harm, and rolls back to earlier weights if training diverges.

    .. code-block:: python

        guard = hdet.Guard(optimizer, model)
        for batch in loader:
            ...
            optimizer.step()
            scheduler.step()  # any one, or none
            guard.step(loss)

    A gradient that is NaN, infinite or out of all proportion is kept from the optimizer, whose state and step count do
    not change either. On a GPU that takes an optimizer of torch with ``fused=True``; with others the step is undone a
    few steps later. If losses or gradients stay strange at unchanged weights, weights, buffers and optimizer state are
    rolled back to an earlier snapshot, and the guard holds still: it leaves steps out until the losses have shown what
    was at fault. If they are as usual at once, training had diverged. If they are so after a while, the data were bad,
    and only these batches are lost. If they are not within a fiftieth of the steps made, and within ``check_every``
    batches, the data are harder: the rollback is undone. The data are not rewound.

    The first rollback leaves the rate as it is. One that follows soon multiplies it by ``factor``, which applies only
    during ``optimizer.step()``: neither a schedule nor its log sees it. Each rollback is a
    :class:`hdet.RollbackWarning`; more than ``max_rollbacks`` that each follow soon after another raise
    :class:`hdet.DivergedError`. Call :meth:`forgive` after a change that was meant, such as a new head.

    Memory: a snapshot of weights, buffers and optimizer state on the device, and up to three in pinned host memory.
    Every rank has a guard, and all make the same decision.

    Args:
        optimizer: its steps are guarded. Steps inside a CUDA graph are refused.
        model: its buffers are rolled back with the weights, and FSDP2 gathers its weights again.
        check_every: steps of a round, at least 8. A hundredth of the run is a good choice.
        factor: what the rate is multiplied by at a rollback that soon follows another one.
        recover: rounds in which the rate grows back. If training recovers, but diverges again within twice that time at
            a rate that was lowered before, it stays low. None: it always stays low.
        max_rollbacks: the most rollbacks that each follow within twice the time to recover after another.
        also: averages of the weights, such as ``torch.optim.swa_utils.AveragedModel``, which are rolled back too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        check_every: int = 50,
        factor: float = 1 / 3,
        recover: int | None = 5,
        max_rollbacks: int = 10,
        also: Collection[nn.Module] = (),
    ) -> None:
        optimizer = unwrapped(optimizer)
        check_optimizer(optimizer)
        check_model(model, needed=True)
        self._policy = _checked(check_every=check_every, factor=factor, recover=recover, max_rollbacks=max_rollbacks)
        averages = None if isinstance(also, nn.Module) else items_of(also)  # one with layers is a list, too
        fits = averages is not None and all(isinstance(one, nn.Module) for one in averages)
        cure = "give averages of the weights, such as [torch.optim.swa_utils.AveragedModel(model)]"
        must_be("a list of nn.Modules", fits, cure, also=also)
        self._also = tuple(averages or ())
        refuse_without_hooks(optimizer)
        refuse_beside(optimizer, "hdet.auto")
        refuse_partitions(optimizer, "guard", "what is written into them does not reach the model")
        self._optimizer, self._model = optimizer, model
        self._ranks = GuardRanks(optimizer, model, {name: repr(value) for name, value in asdict(self._policy).items()})
        self._step, self._readings = GuardedStep(optimizer), Readings()
        self._state, self._snapshots = GuardState(), Snapshots(_ON_HOST, also=self._also)
        self._snapshots.watch(optimizer)
        self._t = self._looked = 0
        """Calls of :meth:`step` so far, and how many of these steps were looked at."""
        self._size = math.inf
        """The largest weight of the last snapshot that was sound."""
        self._unheard = 0
        """Calls of :meth:`step` since the guard was built or loaded; -1: a step of the optimizer was heard of."""
        claim_rates(optimizer, self, "hdet.Guard")
        hook_steps(optimizer, self, Guard._step_begins, Guard._step_ends)
        # An optimizer is saved between steps. If the last one has raised, rates and gradients are still changed.
        hook_saving(optimizer, self, lambda guard, _: guard._step.ends())

    @property
    def factor(self) -> float:
        """What the rate of the next step is multiplied by."""
        return self._policy.factor_at(self._state.slowed, self._t)

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks, without those that were undone because the data were harder."""
        return self._state.slowed.rollbacks

    @property
    def held(self) -> int:
        """Number of batches that were left out."""
        return self._state.held + self._state.left_out

    def forgive(self) -> None:
        """Say that a change was meant: a new head, new data, another loss. To be called on all ranks.

        What losses and gradients were like no longer counts, and earlier snapshots are given up. If the change has been
        rolled back already, it is restored.
        """
        state = self._state
        if state.hold is not None and state.hold.replaced is not None:
            self._snapshots.roll_back_(ASIDE, self._optimizer, self._model)
        self._state = GuardState(
            begun=self._t,
            slowed=state.slowed,
            held=state.held,
            left_out=state.left_out,
            look_limits=state.look_limits,
            round_limits=state.round_limits,
        )
        self._snapshots.keep_only(())
        self._readings.forget(self._t)
        self._looked, self._size = self._t, math.inf

    # -- the optimizer's step -----------------------------------------------------------------------------------------

    def _step_begins(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_measured = self._step.begins(self._t, self.factor)
        self._unheard = -1
        self._snapshots.wait()
        if not is_measured:
            return None
        if not self._state.kept and self._state.unproven is None:
            self._keep()
            self._state = self._state._replace(unproven=Snapshot(self._t, RECENT))
        return once_gradients_are_there(args, kwargs, self._screen, self._step.ends)

    def _step_ends(self, *_: Any) -> None:
        if len(parts_of(self._optimizer)) == 1:  # else others are to be stepped yet: :meth:`step` does it
            self._step.ends()

    def _screen(self) -> None:
        """Measure the gradients. If they are strange, or the guard holds still, the optimizer does not use them."""
        norm = self._ranks.gradient_norm(self._t)
        if norm is None:
            return
        limit = self._state.usual.norm_limit
        reads_at_once = self._delay == 0 or isinstance(self._optimizer, Partitioned)  # ZeRO has read it as well
        self._readings.add(self._t, norm=norm, scaler=self._step.skipped_by_scaler)
        if self._state.hold is not None or (reads_at_once and not (self._readings.step(self._t).norm or 0.0) <= limit):
            self._step.withhold(self._t)
            self._readings.add(self._t, left_out=1.0)
        elif not reads_at_once and self._step.can_be_skipped:
            self._step.skip_above(norm, limit)
            self._readings.add(self._t, limit=limit)

    @property
    def _delay(self) -> int:
        """How many steps late numbers are read: a device that must show its last ones at once runs out of work.

        After a strange step they are read at once all the same.
        """
        return 0 if self._is_on_host or self._state.strange or self._state.hold is not None else DELAY

    @property
    def _is_on_host(self) -> bool:
        return all(p.is_cpu for group in self._optimizer.param_groups for p in group["params"][:1])

    def _keep(self) -> None:
        """Make a snapshot of what is there now, and note how large it is."""
        self._snapshots.keep(RECENT, self._optimizer, self._model)
        self._readings.add(self._t, **self._ranks.sizes())

    # -- a step of training -------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Count a step: call it once after every ``optimizer.step()``, on all ranks.

        Every fourth call is a collective, every one right after a strange step. On a GPU it reads the numbers of two
        steps ago, so as not to wait long.

        Args:
            loss: of that step. None on ranks without a loss, such as some ranks of a pipeline.
        """
        t = self._t
        self._readings.add(t, loss=loss)
        self._step.ends()  # a step that has raised did not
        end_step(self._optimizer)
        self._snapshots.watch(self._optimizer)
        self._ranks.connect(t)
        self._t = t + 1
        self._unheard += self._unheard >= 0
        if self._unheard >= _UNHEARD:
            raise ArgumentError(
                f"guard.step() was called {self._unheard} times, but the optimizer that it was given has made no step: "
                f"{NO_CAPTURE}; or give the optimizer that is stepped"
            )
        length, delay = self._policy.until_next_look(self._state), self._delay
        if delay and t + 1 - self._looked == length:
            self._readings.send()  # they are read at the look that is due when they will have arrived
        if t + 1 - delay - self._looked >= length or (delay == 0 and self._was_strange(t)):
            self._look(t + 1 - delay)

    def _was_strange(self, t: int) -> bool:
        """Whether a step was strange, if one process can judge it by itself."""
        return self._ranks.is_alone and self._state.is_strange(self._ranks.merged([self._readings.step(t)]))

    def _look(self, known: int) -> None:
        """Gather, decide, act and report, about the first ``known`` steps. Collective."""
        t, steps, unproven = self._t, range(self._looked, known), self._state.unproven
        spacing = SPACING if self._is_on_host else max(SPACING, self._policy.check_every)  # a device takes longer
        with arriving(f"a look of hdet.Guard, at step {t}"):
            numbers = self._readings.at(unproven.step) if unproven is not None else {}
            sizes = {name: number for name, number in numbers.items() if name in ("size", "rest")}
            own = [self._readings.step(step) for step in steps]
            seen, is_finite, size = self._ranks.gather(t, own, sizes)
            is_sound = is_finite and size <= _GROWN * max(self._size, 1.0)
            state = self._state.remembering(self._snapshots.present(self._optimizer))
            decision = self._policy.after_look(state, t, seen, is_sound=is_sound, spacing=spacing, delay=t - known)
            if decision.action is Action.ROLL_BACK and decision.state.hold is not None:
                decision = self._setting_aside(decision, decision.state.hold)
        if state.unproven is not None and is_sound:
            self._size = size
        self._act(decision, is_finite=is_finite)
        self._tell(decision, dict(zip(steps, seen, strict=True)))
        has_jumped = decision.action in (Action.ROLL_BACK, Action.TAKE_BACK)  # later readings are of other weights
        self._state, self._looked = decision.state, t if has_jumped else known
        self._readings.forget(self._looked)
        self._snapshots.keep_only(decision.state.slots)

    def _setting_aside(self, decision: GuardDecision, hold: Hold) -> GuardDecision:
        """Copy the weights that will be replaced, unless they are NaN or infinite on any rank. Collective."""
        if self._ranks.are_finite():
            self._snapshots.keep(ASIDE, self._optimizer, self._model)
            return decision
        return decision._replace(state=decision.state._replace(hold=hold._replace(replaced=None)))

    def _act(self, decision: GuardDecision, *, is_finite: bool) -> None:
        action, t = decision.action, self._t
        if decision.proven is not None:
            self._snapshots.retire(RECENT, decision.proven)
        if action is Action.KEEP:
            self._keep()
        elif action in (Action.ROLL_BACK, Action.TAKE_BACK):
            self._snapshots.roll_back_(decision.slot, self._optimizer, self._model)
            names = self._ranks.not_finite() if decision.cause is not Cause.LOSSES else []
            if names:  # no snapshot has these: to roll back again would not help
                raise DivergedError(why_not_rolled_back(names, t, has_snapshot=True))
        elif action is Action.GIVE_UP:
            raise DivergedError(why_given_up(decision, t, self._policy))
        elif action is Action.CANNOT_ROLL_BACK and not is_finite:
            raise DivergedError(why_not_rolled_back(self._ranks.not_finite(), t, has_snapshot=False))

    def _tell(self, decision: GuardDecision, seen: Mapping[int, Step]) -> None:
        """Tell people at once, on one rank."""
        text = in_words(decision, self._t, self._policy, self._state.slowed, seen)
        if not text or self._ranks.replica_index.replica != 0:
            return
        _log.info("%s", text)
        if decision.state.hold is None and decision.outcome is not Outcome.HARDER_DATA:
            warnings.warn(text, RollbackWarning, stacklevel=users_level())

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_of_all(self) -> dict[str, Any]:
        """:meth:`state_dict` with the readings of all ranks, for a checkpoint of all. Collective."""
        return {**self.state_dict(), "readings": connect(None).gather_objects(self._readings.saved())}

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and the snapshots' tensors themselves: a run that is resumed with it is bit-equal.

        ``hdet.save`` takes a guard as a part. If weights are sharded, each rank saves its own.
        """
        return {
            **written(_VERSION),
            "step": self._t,
            "looked": self._looked,
            "size": self._size,
            **fields_of(self._state),
            "readings": [self._readings.saved()],
            "snapshots": self._snapshots.saved(self._optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The arguments stay this guard's own. Raises before anything is changed."""
        if not isinstance(state, Mapping):
            raise ArgumentError(f"{_WORDS} must be a dict, but got {shown(state)}; give what state_dict() gave")
        check_version(_WORDS, state, _VERSION)
        with reading(_WORDS, "build model and optimizer as they were when it was saved"):
            readings = Readings.loaded(self._ranks.replica_index.own(state["readings"]))
            snapshots = Snapshots.loaded(state["snapshots"], self._optimizer, _ON_HOST, self._also)
            found = from_fields(GuardState, state).remembering(snapshots.present(self._optimizer))
            t, looked, size = int(state["step"]), int(state["looked"]), float(state["size"])
        self._t, self._looked, self._size, self._state = t, looked, size, found
        self._readings, self._snapshots, self._unheard = readings, snapshots, 0
        self._snapshots.watch(self._optimizer)
        self._step.ends()
        self._step = GuardedStep(self._optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy sets hooks of its own, since that of an optimizer has none."""
        arguments = {**asdict(self._policy), "also": self._also}
        return {"made": (self._optimizer, self._model), "arguments": arguments, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Guard.__init__(self, *state["made"], **state["arguments"])
        self.load_state_dict(state["state"])


def _checked(check_every: Any, factor: Any, recover: Any, max_rollbacks: Any) -> GuardPolicy:
    """The policy of these arguments. Raises if they are not what they must be."""
    check_every = must_count(BLOCKS, "a hundredth of the run is a good choice", check_every=check_every)
    fits = is_finite(factor) and 0 < factor <= 1
    must_be("a number above 0, at most 1", fits, "1/3 is the default", factor=factor)
    if recover is not None:
        recover = must_count(1, "None keeps the rate low", recover=recover)
    max_rollbacks = must_count(0, "0 raises at once", max_rollbacks=max_rollbacks)
    return GuardPolicy(check_every, float(factor), recover, max_rollbacks)
