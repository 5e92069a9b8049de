"""What an earlier run has learned, for another one: its schedule, or where to begin."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.checks import is_finite, is_int, is_one_of, must_be, shown
from hdet.distributed.group import find_seat
from hdet.distributed.shards import refuse_sharded
from hdet.errors import ArgumentError, JournalError
from hdet.journal import JournalData, read_journal
from hdet.journal.lines import check_needed
from hdet.parameters import check_model, check_optimizer, put_rate, unwrapped

Found = tuple[list[int], list[float]]
"""Steps in ascending order, and the base value from each of them on."""


def found_schedules(journal: str | os.PathLike[str] | JournalData) -> dict[str, Found]:
    """The base value of every knob over the steps of a run: at the beginning of each round, and at its end."""
    data = journal if isinstance(journal, JournalData) else read_journal(journal)
    if not data.rounds:
        raise ArgumentError("the journal has no round yet; give one of a run that has ended at least one")
    names = [str(name) for name in data.header.get("knobs") or ()]
    if not names:
        raise JournalError("the journal's header names no knobs; give a file written by journal=")
    for record in data.rounds:
        try:
            check_needed(record, ("base_before", "base"), len(names))
        except ValueError as error:
            raise JournalError(
                f"round {record.get('round')} of the journal is damaged: {error}; remove its line, or give another file"
            ) from error
    return {name: _points(data, g) for g, name in enumerate(names)}


def schedule_from(journal: str | os.PathLike[str] | JournalData, optimizer: Optimizer) -> LambdaLR:
    """The found schedule as a LambdaLR, to train again without the ensemble.

    Each parameter group takes the rate of its knob; with one rate in the journal, all groups take it. Between the steps
    that the journal knows its square root is interpolated linearly, as the foot of a cosine goes. Of a search,
    the first step, whose length nobody knew, and what was gone back from are not repeated.

    Args:
        journal: a file written by ``journal=``, or its data.
        optimizer: its rates are replaced.
    """
    optimizer = unwrapped(optimizer)
    check_optimizer(optimizer)
    rates = [found for name, found in found_schedules(journal).items() if name.startswith("lr")]
    groups = optimizer.param_groups
    if len(rates) not in (1, len(groups)):
        raise ArgumentError(
            f"the journal has {len(rates)} learning rates, but the optimizer has {len(groups)} parameter groups; build "
            "the optimizer with the groups of that run"
        )
    found = rates if len(rates) == len(groups) else rates * len(groups)
    for group in groups:
        put_rate(group, 1.0)  # LambdaLR multiplies the rate that it finds
        group.pop("initial_lr", None)
    return LambdaLR(optimizer, [partial(value_at, steps=steps, values=values) for steps, values in found])


def _points(data: JournalData, g: int) -> Found:
    start = _search_began(data)
    steps: list[int] = []
    values: list[float] = []
    total = {**(data.header.get("arguments") or {}), **data.rounds[-1]}.get("total_steps")  # it may have changed
    total = total if isinstance(total, int) else None
    for before, record in zip([None, *data.rounds[:-1]], data.rounds, strict=True):
        began = int(before["step"]) if before is not None else 0
        ended = int(record["step"]) - 1  # base_before is the value at the round's last step
        for step, value in (
            (began, before["base"][g] if before is not None else None),
            (ended, record["base_before"][g]),
        ):
            is_new = not steps or step > steps[-1]
            if value is not None and step >= start and is_new and not (total and step >= total):
                steps.append(step)
                values.append(float(value))
        undone = record.get("went_back_to")
        while undone is not None and steps and steps[-1] >= undone:  # step N began from the weights of step N
            steps.pop()
            values.pop()
    if not steps:
        return [0], [float(data.rounds[-1]["base"][g])]
    if start > 0:
        steps.insert(0, 0)
        values.insert(0, values[0])
    return steps, values


def _search_began(data: JournalData) -> int:
    """The step from which on the length of steps was known; 0 where nothing was searched."""
    return max((int(r["step"]) for r in data.rounds if _is_first_step(r)), default=0)


def _is_first_step(record: Mapping[str, object]) -> bool:
    return str(record.get("event") or "").startswith(("first step", "restarted"))


def value_at(t: int, steps: Sequence[int], values: Sequence[float]) -> float:
    """The value at a step: between two known ones its square root is interpolated linearly; outside the nearest.

    >>> [value_at(t, [1, 3], [1.0, 9.0]) for t in (0, 2, 9)]
    [1.0, 4.0, 9.0]
    """
    i = bisect.bisect_right(steps, t)
    if i in (0, len(steps)):
        return values[max(i - 1, 0)]
    done = (t - steps[i - 1]) / (steps[i] - steps[i - 1])
    before, after = values[i - 1], values[i]
    if done == 0:
        return before
    if before < 0 or after < 0:
        return before + (after - before) * done
    return float((before**0.5 * (1 - done) + after**0.5 * done) ** 2)


@torch.no_grad()
def perturb_(
    model: nn.Module,
    nu: float = 0.01,
    seed: int = 0,
    replica: int | None = None,
    scope: Literal["model", "tensor"] = "model",
) -> None:
    r"""Add this replica's noise to the trainable parameters, in place.

    .. math:: \theta_r = \theta_0 + \epsilon_r, \qquad \epsilon_r \sim N(0,\; \nu^2 \|\theta_0\|^2 / d)

    Call it after the DDP wrap: wrapping sends rank 0's parameters to everybody and would overwrite the noise. The noise
    depends on ``seed`` and the replica alone; the global RNG is neither read nor seeded.

    Args:
        model: the model, wrapped or not.
        nu: relative size of the noise; 0 leaves the weights as they are.
        seed: together with ``replica`` it determines the noise.
        replica: which replica this is. None: this process's rank, 0 without torch.distributed. With ``hdet.arms`` give
            ``arms.index``, so that the ranks of an arm stay equal.
        scope: "model": one noise level, from the norm and the number d of all trainable parameters, as published;
            "tensor": each tensor by its own norm and size, so that small tensors are not drowned.
    """
    check_model(model, needed=True)
    must_be("a finite number, at least 0", is_finite(nu) and nu >= 0, "the published value is 0.01", nu=nu)
    for name, value in (("seed", seed), ("replica", 0 if replica is None else replica)):
        if not is_int(value):
            raise ArgumentError(f"{name} must be an integer, but got {name}={shown(value)}; leave it out")
    must_be('"model" or "tensor"', is_one_of(scope, ("model", "tensor")), 'leave it out for "model"', scope=scope)
    parameters = [p for p in model.parameters() if p.requires_grad and (p.is_floating_point() or p.is_complex())]
    refuse_sharded(parameters, "perturb_()")
    number = find_seat(None).replica if replica is None else replica
    generator = torch.Generator().manual_seed(_seed_of(seed, number))
    tensors = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    for tensor, level in zip(tensors, _levels(tensors, nu, scope), strict=True):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.copy_(tensor + level * noise.to(tensor.device, _wide(tensor)))


def _levels(tensors: list[Tensor], nu: float, scope: str) -> Iterator[float]:
    """Standard deviation of the noise for each tensor."""
    squares = [torch.linalg.vector_norm(t, dtype=_wide(t)).item() ** 2 for t in tensors]
    sizes = [t.numel() for t in tensors]
    if scope == "model":
        squares, sizes = [math.fsum(squares)] * len(tensors), [sum(sizes)] * len(tensors)
    for square, size in zip(squares, sizes, strict=True):
        yield nu * math.sqrt(square / size) if size else 0.0


def _wide(tensor: Tensor) -> torch.dtype:
    """At least fp32: norm and noise of half precision are computed in it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _seed_of(seed: int, replica: int) -> int:
    """One 63-bit seed for a pair of numbers; neighbours are unrelated."""
    return int.from_bytes(sha256(f"perturb:{seed}:{replica}".encode()).digest()[:8], "big") >> 1
