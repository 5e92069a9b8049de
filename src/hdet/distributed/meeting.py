"""The meeting: who the replicas are, when they first see each other, what they show, and how many steps each made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.distributed.arms import Arms
from hdet.distributed.group import Group, ReplicaGroup, Seat, Solo, connect, find_seat
from hdet.distributed.presence import presence
from hdet.distributed.rollcall import Occasion, RollCall, Shown, call, check_arguments, in_words
from hdet.distributed.weights import NO_WEIGHTS, Weights, to_host
from hdet.errors import ArgumentError

_PATIENCE = 8
"""So many steps in a row are looked at if the optimizer makes none. After that nobody will tell us of any: a CUDA graph
is replayed, or a compiler has taken the hook away."""

_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is. Looked up once, because every step calls it."""


class Tally:
    """Steps of the optimizer and of the scheduler since the last round ended.

    A step that a GradScaler leaves out, because gradients are not finite, counts as made: each arm has a scale of its
    own. The gradients are only looked at where a step is missing, and no more once all ranks leave out steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._scheduler_steps = 0
        self._left_out: list[Tensor] = []
        """Whether each missing step had gradients that are not finite; on their device until somebody asks."""
        self._unheard = 1
        """Steps of the scheduler since the last of the optimizer; before the first, one that is made with it is due."""
        self._looks = True
        self._watches = False

    def watch(self, optimizer: Optimizer) -> None:
        """Count its steps from now on. The hook holds the tally weakly, and goes when the tally does."""
        if self._watches:
            return
        self._watches = True
        held = ref(self)

        def heard(*_: Any) -> None:
            mine = held()
            if mine is not None:
                mine._steps += 1
                mine._unheard = 0

        try:
            handle = optimizer.register_step_pre_hook(heard)
        except AttributeError:  # a framework's wrapper
            return
        finalize(self, handle.remove)

    def step(self) -> bool:
        """The scheduler makes a step. Whether the optimizer has made none before it."""
        self._scheduler_steps += 1
        self._unheard += 1
        return self._unheard > 1

    def ask_why(self, optimizer: Optimizer) -> None:
        """The optimizer has made no step: count it all the same if there was a reason, or nobody can know."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._looks and gradients and self._unheard <= _PATIENCE:
            self._left_out.append(~_all_finite(gradients))
        else:
            self._steps += 1

    def counts(self) -> dict[str, float]:
        """By name; synchronises host and device only where a step was left out."""
        left_out = sum(to_host(self._left_out))
        return {
            "optimizer steps in this round": float(self._steps + left_out),
            "scheduler steps in this round": float(self._scheduler_steps),
        }

    def reset(self) -> None:
        """A new round begins. A loop that leaves out steps for no reason is not looked at any more."""
        self._looks = self._looks and all(to_host(self._left_out))
        self._steps, self._scheduler_steps, self._left_out = 0, 0, []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the optimizer has no hooks."""
        return {**vars(self), "_watches": False}


def _all_finite(gradients: list[Tensor]) -> Tensor:
    dense = [grad._values() if grad.is_sparse else grad for grad in gradients]
    return NO_WEIGHTS._replace(parameters=dense).all_finite()


class Meeting:
    """The replicas of a run, seen from one of them. They must make as many steps each, in the same order.

    Args:
        group: the user's process group or arms; None: the default group, once there is one.
        alike: arguments that must be equal on all ranks, in words.
    """

    def __init__(self, group: Group, alike: Mapping[str, str]) -> None:
        self._user_group = group
        self._alike = alike
        """Nothing once a checkpoint has replaced them."""
        self._group: ReplicaGroup | None = None
        self._tally = Tally()
        self.in_consensus = False
        """Whether this replica holds the replicas' mean."""

    @property
    def group(self) -> ReplicaGroup:
        """The replicas that have met; alone before that."""
        return self._group or Solo()

    @property
    def seat(self) -> Seat:
        """This replica's place; may be asked at any time, no collective."""
        if self._group is not None:
            return self._group.seat
        return find_seat(self._user_group) if _initialised() else Solo.seat

    @property
    def is_due(self) -> bool:
        """Whether the replicas could meet and have not."""
        return self._group is None and _initialised()

    # -- steps, of which all ranks make as many -------------------------------------------------------------------

    def count_steps(self, optimizer: Optimizer) -> None:
        """Have the optimizer's steps counted, where there is somebody to compare with."""
        if self.seat.size > 1:
            self._tally.watch(optimizer)

    def step(self, optimizer: Optimizer, t: int) -> None:
        """The scheduler makes a step, at ``t``."""
        if self.in_consensus:
            raise ArgumentError(
                f"step() was called inside consensus(), at step {t}: the weights are put back afterwards, so "
                "training inside is lost; leave the `with` block first"
            )
        if self._tally.step() and self.seat.size > 1:
            self._tally.ask_why(optimizer)
        self.count_steps(optimizer)  # a copy has no hook yet

    def begin_round(self) -> None:
        """A round has ended, and all ranks have made as many steps in it."""
        self._tally.reset()

    def resume(self) -> None:
        """A checkpoint was loaded, whose values replace the arguments."""
        self._alike = {}
        self._tally.reset()

    # -- seeing each other ----------------------------------------------------------------------------------------

    def first(
        self, t: int, terms: Mapping[str, float], weights: Weights, *, keeps_journal: bool
    ) -> tuple[ReplicaGroup, RollCall]:
        """Our own group over the replicas, whose roll was called; :meth:`begin` goes on with it. Collective.

        A group of our own, so that our collectives cannot pair with others'.
        """
        presence().arrive(f"the first step, {t}")
        group, shown = connect(self._user_group), Shown(journal=keeps_journal)
        roll = self.roll_call(Occasion.FIRST_STEP, t, terms, weights, shown, expect_equal=False, within=group)
        check_arguments(group, self._alike, weights.device)
        return group, roll

    def begin(self, group: ReplicaGroup) -> None:
        """The replicas have met and agree."""
        self._group = group

    def roll_call(
        self,
        occasion: Occasion,
        t: int,
        terms: Mapping[str, float],
        weights: Weights,
        shown: Shown,
        *,
        expect_equal: bool,
        values: Sequence[float] | None = None,
        within: ReplicaGroup | None = None,
    ) -> RollCall:
        """Show and see, raise on disagreement, conclude. Collective. ``within``: other replicas than :attr:`group`."""
        group = within or self.group
        alone = group.seat.size == 1
        if not alone:
            presence().arrive(f"{in_words(occasion)}, step {t}")
        agreed = {} if alone else {"step": float(t), **self._tally.counts(), **terms}
        known = NO_WEIGHTS if alone else weights  # nobody to compare with: do not read them
        return call(group, occasion, agreed, known, shown, expect_equal=expect_equal, values=values)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, this replica holds the replicas' mean, and may make no step. Not to be entered twice."""
        if self.in_consensus:
            raise ArgumentError("consensus() is entered already; leave the outer `with ...consensus():` first")
        self.in_consensus = True
        try:
            yield
        finally:
            self.in_consensus = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a process group cannot be copied, so the copy looks for the default group."""
        group = self._user_group if isinstance(self._user_group, Arms) else None
        return {**vars(self), "_user_group": group, "_group": None}
