"""The optimizer's steps, as a search sees them: a hook before each counts it and measures its gradients.

Before a step the rates are held, a snapshot of the start is kept, and the gradients of some steps are sampled. Steps
in a CUDA graph call no hook when they are replayed: they are counted and sampled afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.copies import copies_of
from hdet.optimizer import (
    Rate,
    claim_rates,
    end_step,
    has_claim,
    hook_steps,
    is_capturing,
    once_gradients_are_there,
    put_rate,
    stands_still,
)
from hdet.ranks.shards import is_continued
from hdet.rollback.snapshots import START, Snapshots
from hdet.rule.constants import Constants
from hdet.rule.decision import is_sampled, next_end
from hdet.rule.found import listed
from hdet.search.measure import Measure
from hdet.search.reporting import warn


class Sampling(Enum):
    """Which gradients are measured now."""

    NONE = 0
    FIRST = 1
    """Those of the first step: its length is unknown."""
    SOME = 2
    """Some of each round."""


class Steps:
    """Counts steps, in all and since this round began, and owns what is measured and kept of them.

    Args:
        groups: numbers of the parameter groups whose rate is searched.
        constants: of the rule; they say which steps are sampled.
        model: its buffers are in snapshots.
    """

    def __init__(self, groups: Sequence[int], constants: Constants, model: nn.Module | None) -> None:
        self._constants = constants
        self._model = model
        self.measure = Measure(groups)
        self.snapshots = Snapshots()
        self.written = Written()
        self.sampling = Sampling.FIRST
        """The search sets it at every step of the scheduler and at a round's end."""
        self.is_loaded = False
        """Between loading a checkpoint and the next step of the scheduler."""
        self.made = 0
        """Steps that the optimizer has made."""
        self.in_round = 0
        """Those that it has made in this round."""
        self.is_heard = False
        """Whether a step came by the hook since the scheduler was stepped last; one that is replayed does not."""
        self.captured = False
        """Whether a step was captured into a CUDA graph: replays make steps for which no hook is called."""
        self._inside = False
        """Whether a step is being made. A step that calls its base class's step calls hooks twice, and is one step. One
        that raises an error has not called its last hook: this is cleared between steps."""
        self._sampled_last = False
        """Whether the step that came last was sampled."""
        self._weights_before: list[Tensor] | None = None
        """The weights before a step that is replayed from a graph, if it is sampled afterwards; None: no step is to be
        measured."""
        self._optimizer: Optimizer | None = None
        """The one that trains, once it is known."""

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known. Its hooks hold this object weakly."""
        self._optimizer = optimizer
        claim_rates(optimizer, self, "hdet.auto")
        hook_steps(optimizer, self, Steps._step_begins, Steps._step_is_over)
        self.snapshots.watch(optimizer)

    def restart(self, made: int, in_round: int, constants: Constants) -> None:
        """Forget what was measured and kept, as it is of another run, and count on from there."""
        self._constants = constants
        self.measure = Measure(self.measure.groups)
        self.snapshots = Snapshots()
        self.made, self.in_round, self._weights_before = made, in_round, None

    # -- the hook -----------------------------------------------------------------------------------------------------

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or not has_claim(optimizer, self):
            return None
        self._inside = True
        return once_gradients_are_there(args, kwargs, lambda: self._before_step(optimizer))

    def _step_is_over(self, *_: Any) -> None:
        self._inside = False

    def _before_step(self, optimizer: Optimizer) -> None:
        """A step is about to be made, or a further part of one that the optimizer makes in parts, as ZeRO does."""
        if is_capturing(optimizer):  # nothing of ours may get into the graph
            self.captured = True
            return
        self.snapshots.wait()
        if stands_still(optimizer):  # a step at the rate 0, as torch.distributed.checkpoint makes, does not count
            return
        if not self.is_heard:  # of several steps between two of the scheduler, the first
            self.written.hold(optimizer.param_groups, is_loaded=self.is_loaded)
        self._keep_start(optimizer)
        is_further = is_continued(optimizer)
        if self.sampling is not Sampling.NONE and (self._sampled_last or not is_further):
            self._sample(optimizer, continued=is_further)
        if not is_further:
            self._count()
            self.is_heard = True

    def _count(self) -> None:
        self.made, self.in_round = self.made + 1, self.in_round + 1

    def _keep_start(self, optimizer: Optimizer) -> None:
        if self.sampling is Sampling.FIRST and START not in self.snapshots.present(optimizer):
            self.snapshots.keep(START, optimizer, self._model)

    def _sample(self, optimizer: Optimizer, weights: Sequence[Tensor] = (), *, continued: bool = False) -> None:
        """Measure the gradients of a step, if it is one of those that are sampled.

        Args:
            optimizer: its parameters hold the gradients.
            weights: those at which the gradients were taken, if not those of now.
            continued: whether they are of a further part of the step that was sampled last.
        """
        if not continued:
            self._sampled_last = self.sampling is Sampling.FIRST or self._is_due
            if not self._sampled_last:
                self.measure.pass_by(optimizer)
                return
            self.measure.set_origin(optimizer)
        if self.sampling is Sampling.FIRST:
            self.measure.sample_sizes(optimizer, continued=continued)
        else:
            self.measure.sample(optimizer, weights, continued=continued)

    @property
    def _is_due(self) -> bool:
        """Whether the gradient of the step to come is sampled."""
        begun = self.made - self.in_round
        return is_sampled(self.in_round, next_end(begun, self._constants) - begun, self._constants)

    # -- between steps ------------------------------------------------------------------------------------------------

    def end_step(self, optimizer: Optimizer) -> None:
        """The scheduler was stepped: the next step begins."""
        self._inside = False
        self.snapshots.watch(optimizer)
        end_step(optimizer)  # tells several optimizers that hdet.auto sees as one, its parts
        if self.captured:
            if not self.is_heard:
                self._count_replay(optimizer)
            self._await_replay(optimizer)
        elif self.made == 0 and self.sampling is not Sampling.NONE:
            self._keep_start(optimizer)
            self.measure.set_origin(optimizer)  # weights that move from here on without a step are moved by a graph
        self.is_heard = False

    def begin_round(self, optimizer: Optimizer, *, resets_path: bool) -> None:
        """A round begins with the next step; and a new path, if the old one counts no more."""
        self.in_round = 0
        self.measure.begin_round()
        if resets_path or self.sampling is Sampling.NONE:
            self.measure.begin_path()
        if self.captured:
            self._await_replay(optimizer)

    def notice_graph(self) -> None:
        """Weights have moved without a step: a graph was captured before the hook was set."""
        self.captured = True
        self.measure.begin_path()

    def _count_replay(self, optimizer: Optimizer) -> None:
        """A step was replayed: its gradients are still there."""
        if self.sampling is not Sampling.NONE and self._weights_before is not None:
            self._sample(optimizer, self._weights_before)
        self._count()

    def _await_replay(self, optimizer: Optimizer) -> None:
        """Remember the weights that the next step begins from: no hook is called before it."""
        self.snapshots.wait()
        self._keep_start(optimizer)
        self._weights_before = None
        if self.sampling is not Sampling.NONE:
            self.measure.set_origin(optimizer)
            is_copied = self.sampling is Sampling.SOME and self._is_due
            self._weights_before = copies_of(self.measure.searched(optimizer)) if is_copied else []

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy has other tensors, so what is kept of them goes by their parameters' places.

        The copy of the optimizer has no hooks.
        """
        own: dict[str, Any] = {"_weights_before": None, "captured": False, "_inside": False}
        optimizer = self._optimizer
        if optimizer is not None:
            own |= {"snapshots": self.snapshots.saved(optimizer), "measure": self.measure.saved(optimizer)}
        return {**vars(self), **own, "_groups": self.measure.groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state.pop("_groups")
        vars(self).update(state)
        if (optimizer := self._optimizer) is not None:
            self.measure = Measure.loaded(state["measure"], groups, optimizer)
            self.snapshots = Snapshots.loaded(state["snapshots"], optimizer)
            self.begin(optimizer)


class Written:
    """The rates as they were left in the optimizer. Nothing is read from a device unless they changed.

    If somebody else writes one, the search would measure steps of another length than it thinks, and find a wrong rate.

    A rate is known by itself, and a tensor by how often it was changed in place, too.
    """

    def __init__(self) -> None:
        self._rates: Sequence[Rate] = ()
        self._marks: list[tuple[Rate, int]] = []
        self._t = 0
        self._is_told = False
        """Whether this change was reported. It is reset once the rates are left alone."""

    def note(self, groups: Sequence[dict[str, Any]], rates: Sequence[Rate], t: int) -> None:
        """These rates of step ``t`` have just been written into these groups."""
        self._rates, self._t = rates, t
        self._marks = [_mark(group["lr"]) for group in groups]

    def forget(self) -> None:
        """Rates are not held any more."""
        self._marks = []

    def hold(self, groups: Sequence[dict[str, Any]], *, is_loaded: bool) -> None:
        """Before a step: write the rates again, if others are there, and say so.

        ``is_loaded``: whether a checkpoint was loaded since the last step. It may have brought the rates of its run.
        """
        if not self._marks:
            return
        if all(map(_is_there, groups, self._marks)):
            self._is_told = False
            return
        found = [float(group["lr"]) for group in groups]
        for group, mark, rate in zip(groups, self._marks, self._rates, strict=True):
            group["lr"] = mark[0]  # a tensor itself
            put_rate(group, rate)
        self.note(groups, self._rates, self._t)
        own = [float(group["lr"]) for group in groups]
        if found != own and not is_loaded and not self._is_told:
            self._is_told = True
            warn(
                f"the optimizer's lr was {listed(found)} at step {self._t}, but the search had written "
                f"{listed(own)}, and has written that again. An lr is a guess, to be given before the scheduler is "
                "built. To limit it, use highest=; to shape it, schedule=. If a checkpoint brought it, load its "
                "scheduler too"
            )


def _mark(rate: Rate) -> tuple[Rate, int]:
    """A rate and the version of its tensor, which is known without reading it."""
    return rate, rate._version if isinstance(rate, Tensor) else 0


def _is_there(group: dict[str, Any], mark: tuple[Rate, int]) -> bool:
    rate, version = _mark(group["lr"])
    return rate is mark[0] and version == mark[1]
