"""``hdet.Guard``: training that is ruined goes back and slows down, at any schedule and at a fixed rate."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import Rule, check_state, count, in_pairs, is_finite, maybe, must_be, pairs, shown, users_level
from hdet.distributed.group import ReplicaGroup, Solo, arriving, gather_named
from hdet.distributed.meeting import Meeting
from hdet.distributed.rollcall import Occasion, Shown, terms_of
from hdet.distributed.shards import refuse_partitions
from hdet.distributed.weights import NO_WEIGHTS, Body, Weights, infinite_buffers, nan_buffers, read
from hdet.errors import ArgumentError, DivergedError, RollbackWarning
from hdet.parameters import (
    Rate,
    check_model,
    check_optimizer,
    copy_rate,
    direction,
    is_capturing,
    refuse_without_hooks,
    shared_rates,
    stands_still,
    trained_parameters,
    unwrapped,
)
from hdet.rollback.losses import Losses, merged
from hdet.rollback.retreat import Action, Decision, Policy, Retreat, Slowed
from hdet.rollback.ruin import BLOCKS, Block
from hdet.rollback.saving import check_course, loaded_course, losses_of, saved_course
from hdet.rollback.snapshots import Snapshots

__all__ = ["Guard"]

_log = logging.getLogger("hdet")
_VERSION = 1
_PATIENCE = 64
"""So many calls without a step of the optimizer: nobody will tell us of any. A GradScaler leaves out fewer in a row."""
_CAPTURE = (
    "a step that is replayed from a CUDA graph calls no hook, so its rate could not be lowered. Capture forward and "
    "backward only, and call optimizer.step() outside the graph"
)
_FACTOR = Rule("a number above 0, at most 1", lambda value: is_finite(value) and 0 < value <= 1)
_ARGUMENTS = {
    "every": (count(BLOCKS), "a hundredth of the run is a good choice"),
    "factor": (_FACTOR, "1/3 is the default"),
    "recover": (maybe(count(1)), "None keeps the rate low"),
    "most": (count(0), "0 raises at once"),
}
_WORDS = "the checkpoint's state of a hdet.Guard"
_LISTS = Rule("a list", lambda value: isinstance(value, (list, tuple)))
_SLOWED = {"times": count(0), "since": count(0), "low": _FACTOR, "ceiling": _FACTOR}
_STATE = {"step": count(0), "begun": count(0), "course": pairs, "slowed": pairs, "before": maybe(pairs)}


class _Held(NamedTuple):
    """What a guard holds, beside its arguments."""

    t: int
    """Calls of :meth:`Guard.step` so far ..."""
    begun: int
    """... and when this round began."""
    state: Retreat
    losses: Losses
    snapshots: Snapshots


class Guard:
    """Watches the losses of a run, and rolls back to earlier weights if training is ruined.

    .. code-block:: python

        guard = hdet.Guard(optimizer, model)
        for batch in loader:
            ...
            optimizer.step()
            scheduler.step()  # any one, or none
            guard.step(loss)

    Losses are judged at the end of every round, as with ``max_lr="auto"``. Weights, buffers and moments that are not
    finite are ruin too. Then weights, buffers and optimizer state are rolled back to one of the last two snapshots, and
    the rate is multiplied by a factor. The factor applies only during ``optimizer.step()``: neither a schedule nor its
    log sees it. The data are not rewound, so the batches of a spike are not used again. Each roll back is a
    :class:`hdet.RollbackWarning`; one more than ``most`` raises :class:`hdet.DivergedError`.

    Memory: two snapshots, of weights, buffers and optimizer state each: one on the device if it takes at most half of
    the free memory, one in pinned host memory. Host and device are synchronised once a round. Every rank has a guard,
    and all make the same decision.

    Args:
        optimizer: its steps are guarded. Steps inside a CUDA graph are refused.
        model: its buffers are rolled back with the weights, and FSDP2 gathers its weights again.
        every: steps of a round, at least 8. A hundredth of the run is a good choice.
        factor: what the rate is multiplied by at each roll back.
        recover: rounds in which the rate grows back. If training is ruined again within twice that time, it stays low.
            None: it always stays low.
        most: the most roll backs of the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        every: int = 50,
        factor: float = 1 / 3,
        recover: int | None = 5,
        most: int = 10,
    ) -> None:
        optimizer = unwrapped(optimizer)
        check_optimizer(optimizer)
        check_model(model, needed=True)
        self._policy = _checked(every=every, factor=factor, recover=recover, most=most)
        refuse_without_hooks(optimizer)
        refuse_partitions(optimizer, "what is written into them does not reach the model. Use ZeRO stage 0")
        self._optimizer, self._model = optimizer, model
        self._body = Body(model, with_state=True)
        self._body.remember(optimizer)
        self._body.set_aside(nan_buffers(model) | infinite_buffers(model))
        self._held = _Held(0, 0, Retreat(), Losses(), Snapshots())
        self._losses_of_all: list[Any] | None = None
        self._heard = 0
        """Steps of the optimizer since it was built or loaded."""
        self._lent: list[tuple[dict[str, Any], Rate]] = []
        """Parameter groups and their own rates, while the factor is on them."""
        self._terms = terms_of("guard", [], [], total_steps=None, sync_every=self._policy.every)
        self._meeting = Meeting(None, {name: repr(value) for name, value in asdict(self._policy).items()})
        self._meeting.count_steps(optimizer)
        self._set_hooks()

    @property
    def factor(self) -> float:
        """What the rate of the next step is multiplied by."""
        return self._policy.factor_at(self._held.state.slowed, self._held.t)

    @property
    def times(self) -> int:
        """Number of roll backs, without those that did not help because the data were harder."""
        return self._held.state.slowed.times

    # -- the optimizer's step -----------------------------------------------------------------------------------------

    def _set_hooks(self) -> None:
        """They hold the guard weakly, and go when it does."""
        held = ref(self)

        def before(*_: Any) -> None:
            guard = held()
            if guard is not None:
                guard._before_step()

        def after(*_: Any) -> None:
            guard = held()
            if guard is not None:
                guard._take_back()

        set_before, set_after = self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook
        for handle in (set_before(torch.compiler.disable(before)), set_after(torch.compiler.disable(after))):
            finalize(self, handle.remove)

    def _before_step(self) -> None:
        if is_capturing(self._optimizer):
            raise ArgumentError(f"optimizer.step() was captured under a hdet.Guard, but {_CAPTURE}")
        t, _, state, _, snapshots = self._held
        snapshots.wait()
        if stands_still(self._optimizer):
            return
        self._heard += 1
        if not state.kept:
            snapshots.keep(0, self._optimizer, self._model)
            self._held = self._held._replace(state=state._replace(kept=((t, 0),)))
        if self.factor != 1 and not self._lent:  # a step that calls its base class's calls hooks twice
            self._lend(self.factor)

    @torch.no_grad()
    def _lend(self, factor: float) -> None:
        """Put the factor on the rates. Groups may share one tensor."""
        groups, first = self._optimizer.param_groups, shared_rates(self._optimizer)
        self._lent = [(group, copy_rate(group["lr"])) for g, group in enumerate(groups) if first[g] == g]
        for group, _ in self._lent:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor

    @torch.no_grad()
    def _take_back(self) -> None:
        """The rates are as they were, bit by bit."""
        for group, rate in self._lent:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._lent = []

    # -- a step of training -------------------------------------------------------------------------------------------

    def step(self, loss: float | Tensor | None = None) -> None:
        """Count a step: call it once after every ``optimizer.step()``, on all ranks.

        The call at the end of a round is a collective. Other calls do not wait.

        Args:
            loss: of that step. None on ranks without a loss, such as some ranks of a pipeline.
        """
        if loss is not None:
            self._held.losses.add(loss, self._held.t - self._held.begun)
        self._take_back()  # a step that has raised did not
        self._meeting.step(self._optimizer, self._held.t)
        self._meet()
        self._held = self._held._replace(t=self._held.t + 1)
        if self._held.t - self._held.begun >= self._policy.every:
            self._end_round()

    def _meet(self) -> None:
        """Once torch.distributed is initialised: check that the ranks agree. Collective the first time."""
        if not self._meeting.is_due:
            return
        group: ReplicaGroup = Solo()
        if self._meeting.seat.size > 1:
            self._body.first_weights(self._optimizer, needs_model=True)  # raises for what cannot be held so
            with arriving("the first step, where the ranks meet"):
                group, _ = self._meeting.first(self._held.t, self._terms, self._trained, keeps_journal=False)
        self._meeting.begin(group)

    @property
    def _trained(self) -> Weights:
        return NO_WEIGHTS._replace(parameters=trained_parameters(self._optimizer))

    def _end_round(self) -> None:
        """Show and see, decide, act, tell. One synchronisation of host and device, two small gathers."""
        if self._heard == 0 and self._held.t >= _PATIENCE:
            raise ArgumentError(
                f"guard.step() was called {self._held.t} times, but the optimizer that it was given has made no step: "
                f"{_CAPTURE}; or give the optimizer that is stepped"
            )
        with arriving(f"the end of a guarded round, at step {self._held.t}"):
            is_sound, blocks = self._gather()
        t, _, state, losses, snapshots = self._held
        state = state.remembering(snapshots.present(self._optimizer))
        decision = self._policy.after_round(state, t, blocks, is_sound=is_sound)
        self._act(decision, is_sound=is_sound)
        losses.reset()
        self._meeting.begin_round()
        snapshots.keep_only({slot for _, slot in decision.state.kept})
        self._held = self._held._replace(begun=t, state=decision.state)
        if decision.action in (Action.ROLL_BACK, Action.GO_ON):
            self._tell(decision)

    def _gather(self) -> tuple[bool, tuple[Block, ...]]:
        """Whether everything is finite, and the losses, of all ranks; lower is better. Collective."""
        losses, every = self._held.losses, self._policy.every
        finite = self._body.weights(self._optimizer).all_finite()
        own = read({"sound": [finite.float()], "losses": losses.on_device()})
        losses.take(own["losses"])
        trained, values = self._trained, [*own["sound"], 0.0, 0.0]
        roll = self._meeting.roll_call(
            Occasion.ROUND_END, self._held.t, self._terms, trained, Shown(), expect_equal=False, values=values
        )
        rows = gather_named(self._meeting.group, {"table": losses.table(every)}, trained.device)
        sign = direction(self._optimizer.param_groups)
        blocks = merged([row["table"] for row in rows], every) if sign else ()
        return all(roll.finite), tuple(Block(sign * mean, steps) for mean, steps in blocks)

    def _act(self, decision: Decision, *, is_sound: bool) -> None:
        t, _, _, _, snapshots = self._held
        if decision.action is Action.KEEP:
            snapshots.keep(decision.slot, self._optimizer, self._model)
        elif decision.action is Action.ROLL_BACK:
            snapshots.restore_(decision.slot, self._optimizer, self._model)
        elif decision.action is Action.GIVE_UP:
            raise DivergedError(
                f"training was ruined at step {t}, and has gone back {self.times} times already, the most that is "
                f"allowed (most={self._policy.most}). Load an earlier checkpoint; lower the rate, or look at the data"
            )
        elif decision.action is Action.GO_ON and not is_sound:
            raise DivergedError(
                f"the weights are not finite at step {t}, and none are kept to go back to; load an earlier checkpoint"
            )

    def _tell(self, decision: Decision) -> None:
        """People, at once, on one rank."""
        slowed = decision.state.slowed
        what = f"the weights of step {decision.back_to} are put back"
        if decision.action is Action.GO_ON:
            what = "no snapshot fits the parameters that train now, so they stay"
        text = (
            f"training was ruined at step {slowed.since}: {what}, and the rate is multiplied by {slowed.low:.3g} from "
            f"here on; time {slowed.times} of at most {self._policy.most}"
        )
        if self._meeting.seat.replica == 0:
            _log.info("%s", text)
            warnings.warn(text, RollbackWarning, stacklevel=users_level())

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, group: ReplicaGroup) -> Iterator[None]:
        """Inside, :meth:`state_dict` has the losses of all ranks. Collective; ``hdet.save`` does it."""
        self._losses_of_all = group.gather_objects(self._held.losses.saved())
        try:
            yield
        finally:
            self._losses_of_all = None

    def state_dict(self) -> dict[str, Any]:
        """Numbers, and the snapshots' tensors themselves: a run that is resumed with it is bit-equal.

        ``hdet.save`` takes a guard as a part. Where weights are sharded, each rank saves its own.
        """
        t, begun, state, losses, snapshots = self._held
        return {
            "version": _VERSION,
            "step": t,
            "begun": begun,
            "course": saved_course(state.course),
            "slowed": _saved(state.slowed),
            "before": None if state.before is None else _saved(state.before),
            "kept": [list(one) for one in state.kept],
            "losses": self._losses_of_all or [losses.saved()],
            "snapshots": snapshots.saved(self._optimizer),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load_state_dict` can go on from it. Changes nothing."""
        self._read(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`. The arguments stay this guard's own. Raises before anything is changed."""
        self._held = self._read(state)
        self._take_back()
        self._heard = 0
        self._meeting.resume()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy sets hooks of its own, since that of an optimizer has none."""
        return {"made": (self._optimizer, self._model), "policy": asdict(self._policy), "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["made"], **state["policy"])  # type: ignore[misc]
        self.load_state_dict(state["state"])

    def _read(self, state: Mapping[str, Any]) -> _Held:
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ArgumentError(
                f"{_WORDS} must be a dict of version {_VERSION}, but got {shown(state)}; give what state_dict() gave"
            )
        check_state(state, {**_STATE, **dict.fromkeys(("kept", "losses", "snapshots"), _LISTS)}, _WORDS)
        check_course(state["course"], _WORDS)
        for row in (state["slowed"], state["before"] or state["slowed"]):
            check_state(dict(row), _SLOWED, _WORDS)
        try:
            losses = losses_of(state["losses"], self._meeting.seat)
            snapshots = Snapshots.loaded(state["snapshots"], self._optimizer)
            kept = tuple((int(step), int(slot)) for step, slot in state["kept"])
            slowed = Slowed(**dict(state["slowed"]))
            before = None if state["before"] is None else Slowed(**dict(state["before"]))
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"{_WORDS} does not fit this optimizer ({type(error).__name__}: {error}); build model and optimizer as "
                "they were when it was saved"
            ) from error
        found = Retreat(loaded_course(state["course"]), kept, slowed, before)
        found = found.remembering(snapshots.present(self._optimizer))
        return _Held(int(state["step"]), int(state["begun"]), found, losses, snapshots)


def _checked(**given: Any) -> Policy:
    for name, (rule, cure) in _ARGUMENTS.items():
        must_be(rule.words, rule.fits(given[name]), cure, **{name: given[name]})
    recover = None if given["recover"] is None else int(given["recover"])
    return Policy(int(given["every"]), float(given["factor"]), recover, int(given["most"]))


def _saved(slowed: Slowed) -> list[list[Any]]:
    return in_pairs(slowed._asdict())
