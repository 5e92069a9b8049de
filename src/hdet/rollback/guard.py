"""``hdet.Guard``: faults are left out or rolled back, whatever sets the learning rate.

A guard has two lines of defence. Around each step of the optimizer it measures the gradient and, if it is NaN, infinite
or out of all proportion, keeps it from the optimizer (:meth:`Guard._screen`): on a device by a tensor that the
optimizer's fused kernels read, so that nothing waits. :meth:`Guard.step` notes the loss. Every fourth step is a *look*
(:meth:`Guard._look`): the ranks show each other these numbers, the policy decides (:mod:`hdet.rollback.guard_policy`:
when to hold still, when to roll back, to which snapshot, at which rate), and the decision is carried out on
:class:`hdet.rollback.snapshots.Snapshots`. One process looks as soon as it sees a strange step. On a GPU numbers are
read :data:`DELAY` steps late, so that it always has work to do (:mod:`hdet.rollback.losses`).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import is_finite, items_of, must_be, must_count, reading, shown, users_level
from hdet.errors import ArgumentError, DivergedError, RollbackWarning
from hdet.parameters import (
    check_model,
    check_optimizer,
    direction,
    end_step,
    hook_steps,
    is_capturing,
    once_gradients_are_there,
    parts_of,
    refuse_without_hooks,
    stands_still,
    trained_parameters,
    unwrapped,
)
from hdet.ranks.agreement import Occasion, Shown
from hdet.ranks.group import ReplicaGroup, Solo, arriving, gather_named
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import Partitioned, is_continued, is_distributed, local, refuse_partitions
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights
from hdet.rollback.guard_policy import (
    ASIDE,
    GROWN,
    PATIENCE,
    RECENT,
    SPACING,
    Cause,
    GuardDecision,
    GuardPolicy,
    GuardState,
    Outcome,
    Slowed,
    Step,
)
from hdet.rollback.guarded_step import (
    StepChanges,
    gradient_norm,
    largest,
    memory_of,
    not_finite,
    skipped_by_scaler,
    skips_on_device,
)
from hdet.rollback.judge import BLOCKS
from hdet.rollback.losses import Readings
from hdet.rollback.policy import Action, Snapshot
from hdet.rollback.saving import fields_of, from_fields, rows_of
from hdet.rollback.snapshots import Snapshots

__all__ = ["Guard"]

_log = logging.getLogger("hdet")
_VERSION = 4
_PATIENCE = 64
"""Calls without a step of the optimizer after which a guard raises an error. A GradScaler leaves out fewer in a row."""
_CAPTURE = (
    "a step that is replayed from a CUDA graph calls no hook, so its rate could not be lowered. Capture forward and "
    "backward only, and call optimizer.step() outside the graph"
)
_WORDS = "the checkpoint's state of a hdet.Guard"
_NAMES = ("loss", "norm", "left_out")
DELAY = 2
"""Steps after which numbers are read off a device: it has work to do meanwhile."""
_ON_HOST = (1, 2, 3, ASIDE)
"""Slots of snapshots in host memory."""
_SHOWN = 4
_NOT_FINITE = ": NaN or infinite"
_CAUSES = {
    Cause.LOSSES: "the losses have risen too far",
    Cause.STEP: "losses or gradients were NaN, infinite or out of all proportion",
    Cause.WEIGHTS: "weights, buffers or optimizer state are NaN, infinite or out of all proportion",
}


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
        self._also = _checked_averages(also, model, optimizer)
        refuse_without_hooks(optimizer)
        # partitions: DeepSpeed's tensors in place of the model's parameters
        refuse_partitions(optimizer, "give hdet.integrations.deepspeed.Guard the engine")
        self._optimizer, self._model = optimizer, model
        self._replica_tensors = ReplicaTensors(model)
        self._replica_tensors.remember(optimizer)
        self._replica_tensors.set_aside()
        self._state, self._snapshots = GuardState(), Snapshots(_ON_HOST, also=self._also)
        self._t = self._looked = 0
        """Calls of :meth:`step` so far, and how many of these steps were looked at."""
        self._size = math.inf
        """The largest weight of the last snapshot that was sound."""
        self._snapshots.watch(optimizer)
        self._readings, self._proof = Readings(), Readings()
        """Of the steps since the last look, and of the snapshot that is not known to be sound yet."""
        self._of_all: list[Any] | None = None
        self._calls = 0
        """Of :meth:`step`, since it was built or loaded, until a step of the optimizer was heard of."""
        self._stepping = -1
        """The step that is being made; -1: none is."""
        self._withheld = -1
        """The last step whose gradients were kept from the optimizer."""
        self._changes = StepChanges()
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
        self._state = GuardState(begun=self._t, slowed=state.slowed, held=state.held, left_out=state.left_out)
        self._snapshots.keep_only(())
        self._readings.forget(self._t)
        self._looked, self._size = self._t, math.inf

    # -- the optimizer's step -----------------------------------------------------------------------------------------

    def _step_begins(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return once_gradients_are_there(args, kwargs, self._screen) if self._before_step() else None

    def _step_is_over(self, *_: Any) -> None:
        if len(parts_of(self._optimizer)) == 1:  # else others are to be stepped yet: :meth:`step` does it
            self._changes.undo()
            self._stepping = -1

    def _before_step(self) -> bool:
        """Whether a step begins. One that calls its base class's calls the hooks once more, one in parts for each."""
        if is_capturing(self._optimizer):
            raise ArgumentError(f"optimizer.step() was captured under a hdet.Guard, but {_CAPTURE}")
        self._snapshots.wait()
        self._calls = -1
        if stands_still(self._optimizer) or self._changes.are_there or self._stepping == self._t:
            return False
        if self.factor != 1:
            self._changes.lower_rates(self._optimizer, self.factor)
        if is_continued(self._optimizer):  # its first part was measured for all of them
            if self._withheld == self._t:
                self._changes.hide_gradients(self._optimizer)
            return False
        self._stepping = self._t
        if not self._state.kept and self._state.unproven is None:
            self._keep(self._t)
            self._state = self._state._replace(unproven=Snapshot(self._t, RECENT))
        return True

    def _screen(self) -> None:
        """Measure the gradients. If they are strange, or the guard holds still, the optimizer does not use them."""
        norm = self._gradient_norm()
        if norm is None:
            return
        limit = self._state.usual.norm_limit
        reads_at_once = self._delay == 0 or isinstance(self._optimizer, Partitioned)  # ZeRO has read it as well
        self._readings.add(self._t, norm=norm, scaler=skipped_by_scaler(self._optimizer))
        if self._state.hold is not None or (reads_at_once and not self._reading(self._t).get("norm", 0.0) <= limit):
            self._changes.hide_gradients(self._optimizer)
            self._withheld = self._t
            self._readings.add(self._t, left_out=1.0)
        elif not reads_at_once and skips_on_device(self._optimizer):
            self._changes.skip_above(self._optimizer, norm, limit)
            self._readings.add(self._t, limit=limit)

    def _gradient_norm(self) -> Tensor | None:
        """The same on all ranks: gradients that DDP has summed are equal, and ranks with shards add up theirs."""
        norm = gradient_norm(self._optimizer)
        if self._is_alone or not any(map(is_distributed, trained_parameters(self._optimizer))):
            return norm
        self._connect()
        square = torch.zeros((), device=self._device) if norm is None else norm.float().square()
        with arriving(f"a step under a hdet.Guard, {self._t}"):
            self._rank_group.group.start_sum(square)()
        return square.sqrt()

    @property
    def _is_alone(self) -> bool:
        return self._rank_group.replica_index.size == 1

    @property
    def _delay(self) -> int:
        """How many steps late numbers are read: a device that must show its last ones at once runs out of work.

        After a strange step they are read at once all the same.
        """
        return 0 if self._is_on_host or self._state.strange or self._state.hold is not None else DELAY

    @property
    def _is_on_host(self) -> bool:
        return all(p.is_cpu for group in self._optimizer.param_groups for p in group["params"][:1])

    @property
    def _spacing(self) -> int:
        """Steps between snapshots: those of a device go to the host, which takes longer."""
        return SPACING if self._is_on_host else max(SPACING, self._policy.check_every)

    def _keep(self, t: int) -> None:
        """A snapshot of what is there now, and how large it is."""
        self._snapshots.keep(RECENT, self._optimizer, self._model)
        self._proof = Readings()
        self._proof.add(t, **self._sizes())
        self._proof.send()

    def _sizes(self) -> dict[str, Tensor | None]:
        """The largest weight, and the largest number of what belongs to the weights."""
        rest = largest([*self._replica_tensors.buffers(), *memory_of(self._optimizer)])
        return {"size": largest(trained_parameters(self._optimizer)), "rest": rest}

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
        self._changes.undo()  # a step that has raised did not
        end_step(self._optimizer)
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
        length, delay = self._policy.until_next_look(self._state), self._delay
        if delay and t + 1 - self._looked == length:
            self._readings.send()  # they are read at the look that is due when they will have arrived
        if t + 1 - delay - self._looked >= length or (delay == 0 and self._was_strange(t)):
            self._look(t + 1 - delay)

    def _was_strange(self, t: int) -> bool:
        """Whether a step was strange, if one process can judge it by itself."""
        return self._is_alone and self._state.is_strange(self._step_of([self._reading(t)]))

    def _reading(self, t: int) -> dict[str, float]:
        """What this rank knows of a step."""
        found = self._readings.at(t)
        if found.get("scaler", 0.0) > 0:  # a GradScaler has left the step out: its gradients say nothing
            return {name: value for name, value in found.items() if name == "loss"}
        if "limit" in found and not found["norm"] <= found["limit"]:
            found["left_out"] = 1.0  # the device has left it out by itself
        return found

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
    def _device(self) -> torch.device:
        """That of the weights."""
        return next(
            (p.device for group in self._optimizer.param_groups for p in group["params"][:1]), torch.device("cpu")
        )

    @property
    def _trained(self) -> Weights:
        return NO_WEIGHTS._replace(parameters=trained_parameters(self._optimizer))

    # -- a look -------------------------------------------------------------------------------------------------------

    def _look(self, known: int) -> None:
        """Gather, decide, act and report, about the first ``known`` steps. Two small gathers."""
        t, steps = self._t, range(self._looked, known)
        with arriving(f"a look of hdet.Guard, at step {t}"):
            seen, is_finite, size = self._gather(steps)
            is_sound = is_finite and size <= GROWN * max(self._size, 1.0)
            state = self._state.remembering(self._snapshots.present(self._optimizer))
            decision = self._policy.after_look(state, t, seen, is_sound, spacing=self._spacing, known=known)
            if decision.action is Action.ROLL_BACK and decision.state.hold is not None:
                decision = self._setting_aside(decision)
        if state.unproven is not None and is_sound:
            self._size = size
        self._act(decision, is_finite=is_finite)
        has_jumped = decision.action in (Action.ROLL_BACK, Action.TAKE_BACK)  # later readings are of other weights
        self._tell(decision, seen, steps)
        self._state, self._looked = decision.state, t if has_jumped else known
        self._readings.forget(self._looked)
        self._snapshots.keep_only(decision.state.slots)

    def _gather(self, steps: range) -> tuple[list[Step], bool, float]:
        """What all ranks have seen in some steps. Collective.

        Returns:
            the steps; whether the snapshot that is not proven yet is finite; its largest weight.
        """
        unproven = self._state.unproven
        sizes = self._proof.at(unproven.step) if unproven is not None else {}
        finite = all(map(math.isfinite, sizes.values()))
        own = [self._reading(step) for step in steps]
        row = {
            "finite": [float(finite)],
            "size": [sizes.get("size", 0.0)],
            "steps": [number for one in own for name in _NAMES for number in (name in one, one.get(name, math.nan))],
        }
        if not self._is_alone:
            values = [finite, 0, 0]
            self._rank_group.agree(
                Occasion.ROUND_END, self._t, self._trained, Shown(), expect_equal=False, values=values
            )
        rows = gather_named(self._rank_group.group, row, self._device)
        width = 2 * len(_NAMES)
        shown = [[_by_name(found["steps"][width * k :]) for found in rows] for k in range(len(steps))]
        seen = [self._step_of(found) for found in shown]
        return seen, all(one["finite"][0] for one in rows), max(one["size"][0] for one in rows)

    def _step_of(self, shown: Sequence[Mapping[str, float]]) -> Step:
        """A step, from what all ranks have shown of it."""
        losses, norms, left_out = ([one[name] for one in shown if name in one] for name in _NAMES)
        finite = [loss for loss in losses if math.isfinite(loss)]
        sign, loss = direction(self._optimizer.param_groups), fmean(finite) if finite else math.nan
        worst = max(norms, key=lambda norm: norm if math.isfinite(norm) else math.inf, default=None)
        return Step(sign * loss if losses and sign else None, worst, bool(left_out))

    def _setting_aside(self, decision: GuardDecision) -> GuardDecision:
        """Copy the weights that will be replaced, unless they are NaN or infinite on any rank. Collective."""
        sizes = [float(size) for size in self._sizes().values() if size is not None]
        rows = self._rank_group.group.gather([float(all(map(math.isfinite, sizes)))], self._device)
        if all(row[0] for row in rows):
            self._snapshots.keep(ASIDE, self._optimizer, self._model)
            return decision
        hold = decision.state.hold
        assert hold is not None  # the caller has seen it
        return decision._replace(state=decision.state._replace(hold=hold._replace(replaced=None)))

    def _act(self, decision: GuardDecision, *, is_finite: bool) -> None:
        action = decision.action
        if decision.proven is not None:
            self._snapshots.retire(RECENT, decision.proven)
        if action is Action.KEEP:
            self._keep(self._t)
        elif action in (Action.ROLL_BACK, Action.TAKE_BACK):
            self._snapshots.roll_back_(decision.slot, self._optimizer, self._model)
            if decision.cause is not Cause.LOSSES:
                _refuse_what_is_left(self._model, self._rank_group.group, self._t)
        elif action is Action.GIVE_UP and decision.state.nonfinite >= PATIENCE:
            raise DivergedError(
                f"the losses or gradients of the last {decision.state.nonfinite} steps were NaN or infinite, and were "
                f"not used (step {self._t}). Look at the data and at the loss"
            )
        elif action is Action.GIVE_UP:
            raise DivergedError(
                f"training diverged at step {self._t}, after {self._policy.max_rollbacks} rollbacks that each followed "
                f"soon after another (max_rollbacks={self._policy.max_rollbacks}). Load an earlier checkpoint; lower "
                "the rate, or look at the data"
            )
        elif action is Action.GO_ON and not is_finite:
            names = _names(self._model, self._rank_group.group) or f"the optimizer state{_NOT_FINITE}"
            raise DivergedError(
                f"{names} at step {self._t}, and there is no snapshot to roll back to; load an earlier checkpoint"
            )

    def _tell(self, decision: GuardDecision, seen: Sequence[Step], steps: range) -> None:
        """People, at once, on one rank."""
        if self._rank_group.replica_index.replica != 0:
            return
        text = _words_of(decision, self._t, self._policy, self._state.slowed)
        if not text and self._state.hold is None:
            text = _left_out_words(seen, steps)
        if text:
            _log.info("%s", text)
        if text and decision.state.hold is None and decision.outcome is not Outcome.HARDER_DATA:
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
            "proof": self._proof.saved(),
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
            proof = Readings.loaded(state["proof"])
            snapshots = Snapshots.loaded(state["snapshots"], self._optimizer, _ON_HOST, self._also)
            found = from_fields(GuardState, state).remembering(snapshots.present(self._optimizer))
            t, looked, size = int(state["step"]), int(state["looked"]), float(state["size"])
        self._t, self._looked, self._size, self._state = t, looked, size, found
        self._readings, self._proof, self._snapshots = readings, proof, snapshots
        self._snapshots.watch(self._optimizer)
        self._changes.undo()
        self._calls, self._stepping, self._withheld = 0, -1, -1

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy sets hooks of its own, since that of an optimizer has none."""
        arguments = {**asdict(self._policy), "also": self._also}
        return {"made": (self._optimizer, self._model), "arguments": arguments, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["made"], **state["arguments"])  # type: ignore[misc]
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


def _checked_averages(also: Any, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, ...]:
    """Averages of the weights. Raises for what is no module, or shares weights with the model."""
    cure = "give a list of averages, such as torch.optim.swa_utils.AveragedModel(model)"
    found = None if isinstance(also, nn.Module) else items_of(also)
    fits = found is not None and all(isinstance(one, nn.Module) for one in found)
    must_be("a list of nn.Modules", fits, cure, also=also)
    averages: list[nn.Module] = found or []
    own = {_memory_of(p) for p in (*model.parameters(), *trained_parameters(optimizer)) if p.numel()}
    shared = [name for one in averages for name, p in one.named_parameters() if p.numel() and _memory_of(p) in own]
    if shared:
        raise ArgumentError(
            f"also must have weights of its own, but {', '.join(shared[:_SHOWN])} belongs to the model as well; {cure}"
        )
    return tuple(averages)


def _memory_of(p: Tensor) -> tuple[torch.device, int]:
    """Where a tensor lies; tensors without memory are told apart by themselves."""
    return p.device, local(p).untyped_storage().data_ptr() or id(p)


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


def _left_out_words(seen: Sequence[Step], steps: range) -> str:
    bad = [f"{t} (norm {one.norm:.3g})" for t, one in zip(steps, seen, strict=True) if one.left_out and one.norm]
    return f"gradients out of all proportion were not used, and training goes on: step {', '.join(bad)}" if bad else ""


def _words_of(decision: GuardDecision, t: int, policy: GuardPolicy, before: Slowed) -> str:
    """What has happened to the weights, for people; nothing if nothing has. ``before``: as it was until now."""
    ended, hold, slowed = decision.ended, decision.state.hold, decision.state.slowed
    if ended is not None and decision.outcome is Outcome.HARDER_DATA:
        return (
            f"the losses stayed as they were after the rollback of step {ended.begun}: the data are harder, and the "
            f"weights are as before it; {ended.batches} batches were left out"
        )
    if ended is not None and decision.outcome is Outcome.BAD_DATA:
        return (
            f"the data were bad around step {ended.begun}, and are as usual again at step {t}: rolled back to step "
            f"{ended.back}, and {ended.batches} batches were left out"
        )
    if hold is not None:
        if decision.action is not Action.ROLL_BACK:
            return ""
        why = f"{_CAUSES[hold.cause]}: rolled back to step {hold.back} at step {t}"
        return f"{why}, and up to {hold.allowed} batches are left out, to see whether weights or data are at fault"
    if ended is None and decision.action not in (Action.ROLL_BACK, Action.GO_ON):
        return ""
    at, cause = (t, decision.cause) if ended is None else (ended.begun, ended.cause)
    what = f"rolled back to step {decision.step if ended is None else ended.back}"
    if decision.action is Action.GO_ON:
        what = "no snapshot fits the parameters that train now, so they stay"
    is_lowered = slowed.low < policy.factor_at(before, t)
    rate = f"the rate is multiplied by {slowed.low:.3g}" if is_lowered else "the rate stays as it is"
    often = f"rollback {slowed.rollbacks}, {slowed.in_a_row} of at most {policy.max_rollbacks} in a row"
    return f"training diverged at step {at}: {what}, and {rate} ({_CAUSES[cause]}; {often})"
