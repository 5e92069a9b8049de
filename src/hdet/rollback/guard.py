"""``hdet.Guard``: training that diverges is rolled back, whatever sets the learning rate.

A guard does three things. Around each step of the optimizer it notes the gradient's norm, lowers the rate if that was
decided, and makes the first snapshot (:meth:`Guard._before_step`, :meth:`Guard._screen`). :meth:`Guard.step` notes the
loss. Every fourth step is a *look* (:meth:`Guard._look`): the ranks show each other these numbers, the policy decides
(:mod:`hdet.rollback.policy`: when to roll back, to which snapshot, at which rate), and the decision is carried out on
:class:`hdet.rollback.snapshots.Snapshots`. While a rollback is on trial (it is undone if the losses are as bad after
it), every second step is a look. One process looks as soon as it sees a bad step. On a GPU numbers are read
:data:`DELAY` steps late, so that it always has work to do (:mod:`hdet.rollback.losses`).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import is_finite, must_be, must_count, reading, shown, users_level
from hdet.errors import ArgumentError, DivergedError, RollbackWarning
from hdet.parameters import (
    check_model,
    check_optimizer,
    direction,
    hook_steps,
    is_capturing,
    once_gradients_are_there,
    refuse_without_hooks,
    stands_still,
    trained_parameters,
    unwrapped,
)
from hdet.ranks.agreement import Occasion, Shown
from hdet.ranks.group import ReplicaGroup, Solo, arriving, gather_named
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import refuse_partitions
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights
from hdet.rollback.guarded_step import Loans, gradient_norm, largest, memory_of, not_finite, screened
from hdet.rollback.judge import BLOCKS
from hdet.rollback.losses import Readings
from hdet.rollback.policy import (
    GROWN,
    OLD,
    PATIENCE,
    SPACING,
    Action,
    Cause,
    GuardDecision,
    GuardPolicy,
    GuardState,
    Slowed,
    Snapshot,
    Step,
    is_due,
)
from hdet.rollback.saving import fields_of, from_fields, rows_of
from hdet.rollback.snapshots import Snapshots

__all__ = ["Guard"]

_log = logging.getLogger("hdet")
_VERSION = 3
_PATIENCE = 64
"""Calls without a step of the optimizer after which a guard raises an error. A GradScaler leaves out fewer in a row."""
_CAPTURE = (
    "a step that is replayed from a CUDA graph calls no hook, so its rate could not be lowered. Capture forward and "
    "backward only, and call optimizer.step() outside the graph"
)
_WORDS = "the checkpoint's state of a hdet.Guard"
_NAMES = ("loss", "norm")
DELAY = 2
"""Steps after which numbers are read off a device: it has work to do meanwhile."""
_SHOWN = 4
_NOT_FINITE = ": NaN or infinite"
_CAUSES = {
    Cause.LOSSES: "the losses have risen too far",
    Cause.STEP: "a loss or a gradient was NaN, infinite or out of all proportion",
    Cause.WEIGHTS: "weights, buffers or optimizer state are NaN, infinite or out of all proportion",
}


class Guard:
    """Watches a run, and rolls back to earlier weights if training diverges.

    .. code-block:: python

        guard = hdet.Guard(optimizer, model)
        for batch in loader:
            ...
            optimizer.step()
            scheduler.step()  # any one, or none
            guard.step(loss)

    Training has diverged if a loss, gradient or weight is NaN, infinite or out of all proportion, if losses leap and
    stay there for some steps, or if the losses of a whole round have lost too much of what was gained. Weights, buffers
    and optimizer state are then rolled back to an earlier snapshot. The data are not rewound, so the batches of a spike
    are not used again. If the losses are as bad after the rollback, the data were harder, and the rollback is undone.
    In one process on a CPU a bad gradient is kept from the optimizer, so that nothing needs to be rolled back; on a GPU
    this is done between a rollback and the next snapshot.

    The first rollback leaves the rate as it is. One that follows soon multiplies it by ``factor``, which applies only
    during ``optimizer.step()``: neither a schedule nor its log sees it. Each rollback is a
    :class:`hdet.RollbackWarning`; one more than ``max_rollbacks`` raises :class:`hdet.DivergedError`.

    Memory: two snapshots of weights, buffers and optimizer state on the device, eight steps apart, and one in pinned
    host memory. If the device has no room for them, two are kept in host memory, ``check_every`` steps apart. On a GPU
    :meth:`step` waits for numbers that are two steps old: in one process at every step, in several at every look; from
    a rollback to the next snapshot one process waits for those of the step itself. Every rank has a guard, and all make
    the same decision.

    Args:
        optimizer: its steps are guarded. Steps inside a CUDA graph are refused.
        model: its buffers are rolled back with the weights, and FSDP2 gathers its weights again.
        check_every: steps of a round, at least 8. A hundredth of the run is a good choice.
        factor: what the rate is multiplied by at a rollback that soon follows another one.
        recover: rounds in which the rate grows back. If training recovers, but diverges again within twice that time at
            a rate that was lowered before, it stays low. None: it always stays low.
        max_rollbacks: the most rollbacks of the run.
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
    ) -> None:
        optimizer = unwrapped(optimizer)
        check_optimizer(optimizer)
        check_model(model, needed=True)
        self._policy = _checked(check_every=check_every, factor=factor, recover=recover, max_rollbacks=max_rollbacks)
        refuse_without_hooks(optimizer)
        # partitions: DeepSpeed's tensors in place of the model's parameters
        refuse_partitions(optimizer, "what is written into them does not reach the model. Use ZeRO stage 0")
        self._optimizer, self._model = optimizer, model
        self._replica_tensors = ReplicaTensors(model)
        self._replica_tensors.remember(optimizer)
        self._replica_tensors.set_aside()
        self._state, self._snapshots = GuardState(), Snapshots(host=OLD)
        self._t = self._looked = 0
        """Calls of :meth:`step` so far, and how many of these steps were looked at."""
        self._size = math.inf
        """The largest weight of the last snapshot."""
        self._snapshots.watch(optimizer)
        self._readings = Readings()
        """Of the steps since the last look."""
        self._withheld: set[int] = set()
        """Those of these steps whose gradients were kept from the optimizer."""
        self._screened, self._spacing = screened(optimizer), SPACING
        self._of_all: list[Any] | None = None
        self._calls = 0
        """Of :meth:`step`, since it was built or loaded, until a step of the optimizer was heard of."""
        self._stepping = -1
        """The step that is being made; -1: none is."""
        self._loans = Loans()
        self._rank_group = RankGroup(None, {name: repr(value) for name, value in asdict(self._policy).items()})
        hook_steps(optimizer, self, Guard._step_begins, Guard._step_is_over)

    @property
    def factor(self) -> float:
        """What the rate of the next step is multiplied by."""
        return self._policy.factor_at(self._state.slowed, self._t)

    @property
    def rollbacks(self) -> int:
        """Number of rollbacks, without those that were undone because the data were harder."""
        return self._state.slowed.rollbacks

    # -- the optimizer's step -----------------------------------------------------------------------------------------

    def _step_begins(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return once_gradients_are_there(args, kwargs, self._screen) if self._before_step() else None

    def _step_is_over(self, *_: Any) -> None:
        self._loans.give_back()
        self._stepping = -1

    def _before_step(self) -> bool:
        """Whether a step begins. One that calls its base class's calls the hooks once more."""
        if is_capturing(self._optimizer):
            raise ArgumentError(f"optimizer.step() was captured under a hdet.Guard, but {_CAPTURE}")
        self._snapshots.wait()
        self._calls = -1
        if stands_still(self._optimizer) or self._loans.are_open or self._stepping == self._t:
            return False
        self._stepping = self._t
        if not self._state.kept:
            self._keep(0)
            self._state = self._state._replace(kept=(Snapshot(self._t, 0),))
        if self.factor != 1:
            self._loans.lower_rates(self._optimizer, self.factor)
        return True

    def _screen(self) -> None:
        """Note how large the gradients are. If they can be judged at once, and are bad, the optimizer gets none."""
        norm = gradient_norm(self._screened)
        if norm is None:
            return
        if self._delay == 0 and self._is_alone and self._state.is_bad(Step(norm=float(norm))):
            self._withheld.add(self._t)
            self._loans.hide_gradients(self._optimizer)
        self._readings.add(self._t, norm=norm)

    @property
    def _is_alone(self) -> bool:
        return self._rank_group.replica_index.size == 1

    @property
    def _delay(self) -> int:
        """How many steps late numbers are read: a device that must show its last ones at once runs out of work.

        After a rollback one process reads them at once all the same, to keep bad gradients from the optimizer.
        """
        on_host = all(p.is_cpu for group in self._optimizer.param_groups for p in group["params"][:1])
        return 0 if on_host or (self._state.since_well > 0 and self._is_alone) else DELAY

    def _keep(self, slot: int) -> None:
        self._snapshots.keep(slot, self._optimizer, self._model)

    # -- a step of training -------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Count a step: call it once after every ``optimizer.step()``, on all ranks.

        Every fourth call is a collective, every second one right after a rollback. On a GPU it reads the numbers of two
        steps ago, so as not to wait long.

        Args:
            loss: of that step. None on ranks without a loss, such as some ranks of a pipeline.
        """
        t, looked, state = self._t, self._looked, self._state
        self._readings.add(t, loss=loss)
        self._loans.give_back()  # a step that has raised did not
        self._snapshots.watch(self._optimizer)
        self._rank_group.check_step(t)
        self._connect()
        self._t = t + 1
        self._calls += self._calls >= 0
        if self._calls >= _PATIENCE:
            raise ArgumentError(
                f"guard.step() was called {self._calls} times, but the optimizer that it was given has made no step: "
                f"{_CAPTURE}; or give the optimizer that is stepped"
            )
        length, delay = self._policy.until_next_look(state), self._delay
        known = t + 1 - delay
        is_bad = looked < known and self._was_bad(known - 1)
        may_keep = t + 1 - looked == length and is_due(state.recent, t + 1 + delay, self._spacing)
        if may_keep or (is_bad and known > t):
            self._measure(t)
        if is_bad or known - looked >= length:
            self._look(known)

    def _was_bad(self, t: int) -> bool:
        """Whether a step was bad, if one process can judge it by itself."""
        if not self._is_alone:
            return False
        return t in self._withheld or self._state.is_bad(self._step_of([self._readings.at(t)], t))

    def _measure(self, t: int) -> None:
        """Note how large the weights are after step ``t``, and all that belongs to them."""
        rest = largest([*self._replica_tensors.buffers(), *memory_of(self._optimizer)])
        self._readings.add(t, size=largest(trained_parameters(self._optimizer)), rest=rest)
        self._screened = screened(self._optimizer)  # layers may have been added, frozen or thawed

    def _connect(self) -> None:
        """Once torch.distributed is initialised: check that the ranks agree. Collective the first time."""
        if not self._rank_group.is_due:
            return
        group: ReplicaGroup = Solo()
        if not self._is_alone:
            self._replica_tensors.first_weights(self._optimizer, needs_model=True)  # raises for what cannot be held so
            with arriving("the first step, where the ranks meet"):
                group, _ = self._rank_group.first(self._t, self._trained, {}, keeps_journal=False)
        self._rank_group.begin(group)

    @property
    def _trained(self) -> Weights:
        return NO_WEIGHTS._replace(parameters=trained_parameters(self._optimizer))

    # -- a look -------------------------------------------------------------------------------------------------------

    def _look(self, known: int) -> None:
        """Gather, decide, act and report, about the first ``known`` steps. Two small gathers."""
        t, steps = self._t, range(self._looked, known)
        with arriving(f"a look of hdet.Guard, at step {t}"):
            seen, is_finite, size, on_device = self._gather(steps)
        is_sound = None if size < 0 else is_finite and size <= GROWN * max(self._size, 1.0)
        state = self._state.remembering(self._snapshots.present(self._optimizer))
        self._spacing = SPACING if on_device else self._policy.check_every
        decision = self._policy.after_look(state, t, seen, is_sound, spacing=self._spacing, known=known)
        self._act(decision, is_finite=is_finite)
        has_jumped = decision.action in (Action.ROLL_BACK, Action.TAKE_BACK)  # later readings are of other weights
        if decision.action is Action.KEEP:
            self._size = size
        self._state, self._looked = decision.state, t if has_jumped else known
        self._readings.forget(self._looked)
        self._snapshots.keep_only(decision.state.slots)
        self._tell(decision, seen, steps)
        self._withheld -= set(range(known))

    def _gather(self, steps: range) -> tuple[list[Step], bool, float, bool]:
        """What all ranks have seen in some steps. Collective.

        Returns:
            the steps; whether weights, buffers and optimizer state are finite; the largest weight, or -1 if it was not
            measured; whether snapshots are on the device, where they are quickly made.
        """
        own = [self._readings.at(step) for step in steps]
        sizes = [one[name] for one in own for name in ("size", "rest") if name in one]
        finite = all(map(math.isfinite, sizes))
        row = {
            "finite": [float(finite)],
            "size": [max((one["size"] for one in own if "size" in one), default=-1.0)],
            "on_device": [float(self._snapshots.fit_on_device(self._optimizer))],
            "steps": [number for one in own for name in _NAMES for number in (name in one, one.get(name, math.nan))],
        }
        trained = self._trained
        if not self._is_alone:
            values = [finite, 0, 0]
            self._rank_group.agree(Occasion.ROUND_END, self._t, trained, Shown(), expect_equal=False, values=values)
        rows = gather_named(self._rank_group.group, row, trained.device)
        shown = [[_by_name(found["steps"][4 * k :]) for found in rows] for k in range(len(steps))]
        return (
            [self._step_of(found, step) for found, step in zip(shown, steps, strict=True)],
            all(one["finite"][0] for one in rows),
            max(one["size"][0] for one in rows),
            all(one["on_device"][0] for one in rows),
        )

    def _step_of(self, shown: Sequence[Mapping[str, float]], step: int) -> Step:
        """A step, from what all ranks have shown of it."""
        losses, norms = ([one[name] for one in shown if name in one] for name in _NAMES)
        finite = [loss for loss in losses if math.isfinite(loss)]
        sign, loss = direction(self._optimizer.param_groups), fmean(finite) if finite else math.nan
        worst = max(norms, key=lambda norm: norm if math.isfinite(norm) else math.inf, default=None)
        return Step(sign * loss if losses and sign else None, worst, step in self._withheld)

    def _act(self, decision: GuardDecision, *, is_finite: bool) -> None:
        action = decision.action
        if action is Action.KEEP:
            self._keep(decision.slot)
            if decision.retired is not None:
                self._snapshots.retire(decision.retired, OLD)
        elif action in (Action.ROLL_BACK, Action.TAKE_BACK):
            if decision.aside is not None:
                self._keep(decision.aside)
            self._snapshots.roll_back_(decision.slot, self._optimizer, self._model)
            if decision.cause is not Cause.LOSSES:
                _refuse_what_is_left(self._model, self._rank_group.group, self._t)
        elif action is Action.GIVE_UP and decision.state.withheld >= PATIENCE:
            raise DivergedError(
                f"the gradients of the last {decision.state.withheld} steps were NaN or infinite, and were not used "
                f"(step {self._t}). Look at the data and at the loss"
            )
        elif action is Action.GIVE_UP:
            raise DivergedError(
                f"training diverged at step {self._t}, after the {self.rollbacks} rollbacks that are allowed "
                f"(max_rollbacks={self._policy.max_rollbacks}). Load an earlier checkpoint; lower the rate, or look at "
                "the data"
            )
        elif action is Action.GO_ON and not is_finite:
            names = _names(self._model, self._rank_group.group) or f"the optimizer state{_NOT_FINITE}"
            raise DivergedError(
                f"{names} at step {self._t}, and there is no snapshot to roll back to; load an earlier checkpoint"
            )

    def _tell(self, decision: GuardDecision, seen: Sequence[Step], steps: range) -> None:
        """People, at once, on one rank."""
        text = _words_of(decision, self._t, self._policy) or _withheld_words(seen, steps)
        if text and self._rank_group.replica_index.replica == 0:
            _log.info("%s", text)
            if decision.action is not Action.TAKE_BACK:
                warnings.warn(text, RollbackWarning, stacklevel=users_level())

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, group: ReplicaGroup) -> Iterator[None]:
        """Inside, :meth:`state_dict` has the readings of all ranks. Collective; ``hdet.save`` does it."""
        self._of_all = group.gather_objects(self._readings.saved())
        try:
            yield
        finally:
            self._of_all = None

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and the snapshots' tensors themselves: a run that is resumed with it is bit-equal.

        ``hdet.save`` takes a guard as a part. If weights are sharded, each rank saves its own.
        """
        return {
            "version": _VERSION,
            "step": self._t,
            "looked": self._looked,
            "size": self._size,
            **fields_of(self._state),
            "readings": self._of_all or [self._readings.saved()],
            "snapshots": self._snapshots.saved(self._optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The arguments stay this guard's own. Raises before anything is changed."""
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ArgumentError(
                f"{_WORDS} must be a dict of version {_VERSION}, but got {shown(state)}; give what state_dict() gave"
            )
        with reading(_WORDS, "build model and optimizer as they were when it was saved"):
            readings = Readings.loaded(rows_of(state["readings"], self._rank_group.replica_index))
            snapshots = Snapshots.loaded(state["snapshots"], self._optimizer, host=OLD)
            found = from_fields(GuardState, state).remembering(snapshots.present(self._optimizer))
            t, looked, size = int(state["step"]), int(state["looked"]), float(state["size"])
        self._t, self._looked, self._size, self._state = t, looked, size, found
        self._readings, self._snapshots = readings, snapshots
        self._snapshots.watch(self._optimizer)
        self._loans.give_back()
        self._withheld, self._calls, self._stepping = set(), 0, -1

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy sets hooks of its own, since that of an optimizer has none."""
        return {"made": (self._optimizer, self._model), "policy": asdict(self._policy), "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["made"], **state["policy"])  # type: ignore[misc]
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


def _names(model: nn.Module, group: ReplicaGroup) -> str:
    """Which tensors of a model are not finite on any rank, in words. Collective."""
    found = group.gather_objects(not_finite(model))
    names = list(dict.fromkeys(name for own in found for name in own))
    return f"{', '.join(names[:_SHOWN])}{' and more' if len(names) > _SHOWN else ''}{_NOT_FINITE}" if names else ""


def _refuse_what_is_left(model: nn.Module, group: ReplicaGroup, t: int) -> None:
    """Raise if something is NaN or infinite that no snapshot has: to roll back again would not help. Collective."""
    names = _names(model, group)
    if names:
        raise DivergedError(
            f"training diverged at step {t}: {names}, and was not rolled back, since this optimizer does not train it "
            "and no snapshot has it. Load it from an earlier checkpoint, and find out what has written to it"
        )


def _by_name(numbers: Sequence[float]) -> dict[str, float]:
    """Of pairs that say whether a number is known, and which it is."""
    return {name: numbers[2 * i + 1] for i, name in enumerate(_NAMES) if numbers[2 * i]}


def _withheld_words(seen: Sequence[Step], steps: range) -> str:
    bad = [f"{t} (norm {one.norm:.3g})" for t, one in zip(steps, seen, strict=True) if one.withheld]
    return f"gradients out of all proportion were not used, and training goes on: step {', '.join(bad)}" if bad else ""


def _words_of(decision: GuardDecision, t: int, policy: GuardPolicy) -> str:
    """What has happened to the weights, for people; nothing if nothing has."""
    slowed, before = decision.state.slowed, decision.state.before
    if decision.action is Action.TAKE_BACK:
        return (
            f"the losses after the rollback are as high at step {t}: the data are harder, and the weights of step "
            f"{decision.step} are restored"
        )
    if decision.action not in (Action.ROLL_BACK, Action.GO_ON):
        return ""
    what = f"rolled back to step {decision.step}"
    if decision.action is Action.GO_ON:
        what = "no snapshot fits the parameters that train now, so they stay"
    is_lowered = slowed.low < policy.factor_at(before or Slowed(), t)
    rate = f"the rate is multiplied by {slowed.low:.3g}" if is_lowered else "the rate stays as it is"
    why = _CAUSES[decision.cause]
    often = f"rollback {slowed.rollbacks} of at most {policy.max_rollbacks}"
    return f"training diverged at step {t}: {what}, and {rate} ({why}; {often})"
