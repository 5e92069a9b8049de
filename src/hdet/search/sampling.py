"""Sampling: a hook notices the optimizer's steps; they are counted, and the gradients of some are measured.

Steps in a CUDA graph call no hook when they are replayed: the scheduler's step counts and samples them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypeVar
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from hdet.parameters import copies_of, hook_steps, is_capturing, once_gradients_are_there
from hdet.ranks.shards import is_continued
from hdet.search.constants import Constants
from hdet.search.measure import Measure
from hdet.search.rule import is_sampled, next_end

Owner = TypeVar("Owner")
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


class StepHook:
    """Calls its owner before every step of an optimizer, and knows when that does not work.

    Hooks are not copied with an optimizer, and do not run when a captured CUDA graph is replayed.
    """

    def __init__(self) -> None:
        self.captured = False
        """Whether a step was captured into a CUDA graph: replays make steps for which no hook is called."""
        self._begun = False
        self.inside = False
        """Whether a step is being made. A step that calls its base class's step calls hooks twice, and is one step. One
        that raises an error has not called its last hook: the owner clears this between steps."""

    def _step_is_over(self, *_: Any) -> None:
        self.inside = False

    def begin(self, optimizer: Optimizer, owner: Owner, before_step: Callable[[Owner, Optimizer], None]) -> None:
        """Set the hook, if that has not been done. It holds the owner weakly, and goes when the owner does."""
        if self._begun:
            return
        self._begun = True
        self._owner, self._before_step = ref(owner), before_step
        hook_steps(optimizer, self, StepHook._step_begins, StepHook._step_is_over)

    def _step_begins(self, optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> Any:
        if self.inside:
            return None
        self.inside = True
        return once_gradients_are_there(args, kwargs, lambda: self._tell(optimizer))

    def _tell(self, optimizer: Optimizer) -> None:
        owner = self._owner()
        if is_capturing(optimizer):  # nothing of ours may get into the graph
            self.captured = True
        elif owner is not None:
            self._before_step(owner, optimizer)


class Sampling(Enum):
    """Which gradients are measured now."""

    NONE = 0
    FIRST = 1
    """Those of the first step: its length is unknown."""
    SOME = 2
    """Some of each round."""


class Sampler:
    """Counts steps, in all and since this round began, and owns what is measured of gradients.

    Args:
        groups: numbers of the parameter groups whose rate is searched.
        constants: of the rule; they say which steps are sampled.
    """

    def __init__(self, groups: Sequence[int], constants: Constants) -> None:
        self._constants = constants
        self.measure = Measure(groups)
        self.made = 0
        """Steps that the optimizer has made ..."""
        self.begun = 0
        """... and had made when this round began."""
        self.is_heard = False
        """Whether a step came by the hook since the scheduler was stepped last; one that is replayed does not."""
        self._sampled_last = False
        """Whether the step that came last was sampled."""
        self._awaits_replay = False
        self._weights_before: list[Tensor] = []
        """The weights before a step that is replayed from a graph and sampled afterwards."""

    def forget(self) -> None:
        """Forget what was measured: it belongs to another run or another scheduler."""
        self.measure = Measure(self.measure.groups)
        self.made = self.begun = 0
        self._awaits_replay = False

    def before_step(self, optimizer: Optimizer, sampling: Sampling) -> None:
        """A step is about to be made, or a further part of one that the optimizer makes in parts, as ZeRO does."""
        if not is_continued(optimizer):
            if sampling is not Sampling.NONE:
                self._sample(optimizer, sampling)
            self.made += 1
            self.is_heard = True
        elif self._sampled_last and sampling is Sampling.FIRST:
            self.measure.sample_sizes(optimizer, continued=True)
        elif self._sampled_last and sampling is Sampling.SOME:
            self.measure.sample(optimizer, continued=True)

    def set_out(self, optimizer: Optimizer) -> None:
        """Before a step: begin a path, if there is none. Layers may have been frozen or thawed since."""
        if self.measure.begins_here(optimizer):
            self.measure.begin_path()
        self.measure.set_origin(optimizer)

    def _sample(self, optimizer: Optimizer, sampling: Sampling, weights: Sequence[Tensor] = ()) -> None:
        """Measure the gradients of a step. ``weights``: those at which they were taken, if not those of now."""
        self._sampled_last = sampling is Sampling.FIRST or self._is_due
        if not self._sampled_last:
            self.measure.pass_by(optimizer)
            return
        self.set_out(optimizer)
        if sampling is Sampling.FIRST:
            self.measure.sample_sizes(optimizer)
        else:
            self.measure.sample(optimizer, weights)

    @property
    def _is_due(self) -> bool:
        """Whether the gradient of the step to come is sampled."""
        length = next_end(self.begun, self._constants) - self.begun
        return is_sampled(self.made - self.begun, length, self._constants)

    # -- steps that are replayed from a CUDA graph, for which no hook is called ------------------------------------

    def after_replay(self, optimizer: Optimizer, sampling: Sampling) -> None:
        """A step was replayed: its gradients are still there."""
        if sampling is not Sampling.NONE and self._awaits_replay:
            self._sample(optimizer, sampling, self._weights_before)
        self.made += 1

    def await_replay(self, optimizer: Optimizer, sampling: Sampling) -> None:
        """Remember the weights that the next step begins from."""
        self._awaits_replay, self._weights_before = sampling is not Sampling.NONE, []
        if self._awaits_replay:
            self.set_out(optimizer)
            if sampling is Sampling.SOME and self._is_due:
                self._weights_before = copies_of(self.measure.searched(optimizer))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a copy has other tensors, so what was measured of them is left out."""
        own = {"measure": Measure(self.measure.groups), "_weights_before": [], "_awaits_replay": False}
        return {**vars(self), **own}
