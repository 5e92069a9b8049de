"""What the ranks of a guarded run measure and gather: they check that they agree, and show what each has seen.

After each of these all ranks know the same, so that all make the same decision. A guard on one rank runs the same code.
:mod:`hdet.ranks` serves replica ensembles too, so to its code each rank is a *replica*. :func:`arriving` adds to the
error of a failed collective which ranks are missing. Tensors are measured in few launches and without synchronising
host and device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.optimizer import direction, trained_parameters
from hdet.ranks.agreement import Occasion, RankGroup, RankReport
from hdet.ranks.group import ReplicaGroup, ReplicaIndex, Solo, arriving
from hdet.ranks.shards import Partitioned, is_distributed, local
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights, norm_of
from hdet.rollback.guard_state import Step, merged_step


class GuardRanks:
    """The ranks that train a model under guards. They hold equal weights, or each a part of them.

    Args:
        optimizer: the guarded one.
        model: its buffers are measured as well. Those that are not finite now, such as masks, are not.
        alike: arguments that must be equal on all ranks, as texts.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, alike: Mapping[str, str]) -> None:
        self._optimizer, self._model = optimizer, model
        self._rank_group = RankGroup(None, alike)
        self._replica_tensors = ReplicaTensors(model)
        self._replica_tensors.remember(optimizer)
        self._replica_tensors.set_aside()

    @property
    def replica_index(self) -> ReplicaIndex:
        """This rank's number and how many there are, as known now: torch.distributed may be initialised later."""
        return self._rank_group.replica_index

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank."""
        return self.replica_index.size == 1

    @property
    def _trained(self) -> Weights:
        return NO_WEIGHTS._replace(parameters=trained_parameters(self._optimizer))

    def connect(self, t: int) -> None:
        """Once torch.distributed is initialised: check that the ranks agree. Collective the first time."""
        if not self._rank_group.is_due:
            return
        group: ReplicaGroup = Solo()
        if not self.is_alone:
            self._replica_tensors.first_weights(self._optimizer, needs_model=True)  # raises for what cannot be held so
            with arriving("the first step, where the ranks meet"):
                group, _ = self._rank_group.first(t, self._trained, {}, keeps_journal=False)
        self._rank_group.begin(group)

    @torch.no_grad()
    def gradient_norm(self, t: int) -> Tensor | None:
        """The 2-norm of the gradients, the same on all ranks; None if there are none.

        Collective if each rank has a part of them: ranks with shards add the squares of their norms. Gradients that DDP
        has summed are equal. On a device, where each tensor takes time, only matrices are measured: if a gradient is
        NaN, infinite or far too large, it is so in most layers. A scale that a fused step will divide by is taken out.
        """
        optimizer = self._optimizer
        if isinstance(optimizer, Partitioned) and (known := optimizer.gradient_norm()) is not None:
            return known
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        measured = [gradient for gradient in held if gradient.is_cpu or gradient.dim() > 1] or held
        scale = getattr(optimizer, "grad_scale", None)
        # a scaler grows its scale while gradients are finite, and their squares would overflow in fp32 long before
        is_wide = scale is not None and scale.device.type != "mps"  # which has no float64
        least = torch.float64 if is_wide else torch.float32
        own = [one if type(one) is Tensor and not one.is_sparse else _held(one) for one in measured]
        norm = norm_of(own, 2.0, least)
        if norm is not None and scale is not None:
            norm = (norm / scale.to(norm.device)).float()
        trained = [] if self.is_alone else trained_parameters(optimizer)
        if not any(map(is_distributed, trained)):
            return norm
        self.connect(t)
        square = torch.zeros((), device=trained[0].device) if norm is None else norm.float().square()
        with arriving(f"a step under a hdet.Guard, {t}"):
            self._rank_group.group.start_sum(square)()
        return square.sqrt()

    def sizes(self) -> dict[str, Tensor | None]:
        """The largest weight of this rank, and the largest number of what belongs to the weights."""
        trained = trained_parameters(self._optimizer)
        states = [v for p in trained for v in self._optimizer.state.get(p, {}).values()]
        memory = [v for v in states if isinstance(v, Tensor) and v.dim() and _is_float(v)]  # without counters
        return {"size": _largest(trained), "rest": _largest([*self._replica_tensors.buffers(), *memory])}

    def merged(self, ranks: Sequence[Step]) -> Step:
        """One step as all ranks have seen it, its loss with the sign with which lower is better."""
        return merged_step(ranks, direction(self._optimizer.param_groups))

    def gather(self, t: int, steps: Sequence[Step], sizes: Mapping[str, float]) -> tuple[list[Step], bool, float]:
        """What all ranks have seen until step ``t``. Collective: two small gathers.

        Args:
            t: steps made.
            steps: what this rank has seen of those that were not gathered yet.
            sizes: those of the last snapshot on this rank; empty if there are none to be judged.

        Returns:
            the steps; whether all sizes are finite; the largest weight.
        """
        weights, is_finite = self._trained, all(map(math.isfinite, sizes.values()))
        if not self.is_alone:
            known = [is_finite, 0, 0]
            self._rank_group.agree(Occasion.ROUND_END, t, weights, RankReport(), expect_equal=False, values=known)
        row = [is_finite, sizes.get("size", 0.0), *(number for one in steps for number in _row_of(one))]
        rows = self._rank_group.group.gather(row, weights.device)
        seen = [self.merged([_step_of(found[k : k + 5]) for found in rows]) for k in range(2, len(row), 5)]
        return seen, all(found[0] for found in rows), max(found[1] for found in rows)

    def are_finite(self) -> bool:
        """Whether what training changes is finite on all ranks. Synchronises host and device. Collective."""
        own = all(math.isfinite(float(size)) for size in self.sizes().values() if size is not None)
        return all(row[0] for row in self._rank_group.group.gather([float(own)], self._trained.device))

    def not_finite(self) -> list[str]:
        """The parameters with NaN or infinities on any rank, and the buffers with NaN, by name. Collective."""
        names = [name for name, p in self._model.named_parameters() if _is_float(p) and not local(p).isfinite().all()]
        names += [name for name, b in self._model.named_buffers() if _is_float(b) and local(b).isnan().any()]
        rows = self._rank_group.group.gather_objects(names)
        return list(dict.fromkeys(name for own in rows for name in own))


def _row_of(step: Step) -> list[float]:
    """A step as five numbers: for loss and norm, whether it is known, and which it is; then whether it was left out."""
    pairs = [(value is not None, math.nan if value is None else value) for value in (step.loss, step.norm)]
    return [*map(float, (*pairs[0], *pairs[1], step.left_out))]


def _step_of(row: Sequence[float]) -> Step:
    """The step of :func:`_row_of`."""
    has_loss, loss, has_norm, norm, left_out = row
    return Step(loss if has_loss else None, norm if has_norm else None, bool(left_out))


@torch.no_grad()
def _largest(tensors: Iterable[Tensor]) -> Tensor | None:
    """The largest absolute value of what this rank holds of some tensors; NaN if there is one, None if there are none.

    >>> _largest([torch.tensor([1.0, -3.0]), torch.tensor([2.0])])
    tensor(3.)
    """
    return norm_of([local(tensor) for tensor in tensors], math.inf)


def _held(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local(gradient)


def _is_float(tensor: Tensor) -> bool:
    """Whether its numbers can be NaN."""
    return tensor.is_floating_point() or tensor.is_complex()
