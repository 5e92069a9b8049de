"""The mean over replicas, in place.

Tensors travel in flat buckets, several at a time, so that the additional memory is bounded.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdet.ranks.group import ReplicaGroup
from hdet.ranks.shards import local
from hdet.ranks.weights import to_host

EXTRA_BYTES = 64 * 2**20
"""Bound on the additional memory of one call, in bytes."""
_UNDER_WAY = 4
"""Number of buckets that travel at the same time: meanwhile the next is packed and the last unpacked."""
_HOST_BUCKET = 4 * 2**20
"""Largest bucket in host memory, in bytes. There the first touch of a new page costs more than summing it, so a few
small buckets are used over and over. On a device few large buckets are better, since each is a launch."""


class _Transfer(NamedTuple):
    """A bucket that travels: pieces of tensors, and the views of them in one buffer."""

    wait: Callable[[], object]
    buffer: Tensor
    views: list[Tensor]
    pieces: list[Tensor]


@torch.no_grad()
def average_(
    tensors: Sequence[Tensor],
    group: ReplicaGroup,
    live: Sequence[bool],
    *,
    extra_bytes: int = EXTRA_BYTES,
    measure: bool = False,
) -> tuple[float, float]:
    """Replace every tensor by its mean over the live replicas, in place, also on those that are not live.

    A replica that is not live adds zeros, so its NaN reaches no other. Half precision is summed in fp32. A replica of
    several ranks (an arm) counts once. Of a sharded tensor, this rank's part is replaced.

    Phases, per bucket: pack (one read, one write), sum over replicas, divide into the tensors (one read, one write).
    ``measure`` adds three more passes over the weights, and synchronises host and device.

    Args:
        tensors: floating tensors of equal shapes on all replicas; they may be strided and on several devices.
        group: the replicas.
        live: ``live[r]``: whether replica r counts. At least one must.
        extra_bytes: bound on additional memory.
        measure: whether to measure this replica's distance from the mean.

    Returns:
        ||theta - mean|| and ||mean||; 0 if they were not measured.
    """
    replica, n = group.replica_index.replica, float(sum(live))
    share = 1.0 / len(group.members[replica])
    if all(len(ranks) == len(group.members[0]) for ranks in group.members):
        n, share = n * len(group.members[0]), 1.0  # arms of one size: no need to scale what they add
    under_way: deque[_Transfer] = deque()
    norms: tuple[list[Tensor], list[Tensor]] = [], []
    for pieces in _buckets(tensors, extra_bytes // _UNDER_WAY):
        buffer = _receive(under_way.popleft(), n, norms, measure) if len(under_way) == _UNDER_WAY else None
        dtype, device = _sum_dtype(pieces[0].dtype), pieces[0].device
        room = _room(dtype, device, extra_bytes // _UNDER_WAY)
        if buffer is None or (buffer.numel(), buffer.dtype, buffer.device) != (room, dtype, device):
            del buffer  # before the new one is made: the bound on memory holds
            buffer = torch.empty(room, dtype=dtype, device=device)
        under_way.append(_send(pieces, buffer, group, share if live[replica] else 0.0))
    for transfer in under_way:
        _receive(transfer, n, norms, measure)
    to_mean, of_mean = (math.hypot(*to_host(own)) for own in norms)
    return to_mean, of_mean


def _send(pieces: list[Tensor], buffer: Tensor, group: ReplicaGroup, share: float) -> _Transfer:
    """Pack a bucket and send it. ``share``: the factor on this rank's weights; with 0 they may be NaN."""
    sizes = [piece.numel() for piece in pieces]
    flat = buffer[: sum(sizes)]
    views = [part.view(piece.shape) for part, piece in zip(flat.split(sizes), pieces, strict=True)]
    if share == 0.0:
        flat.zero_()
    else:
        torch._foreach_copy_(views, pieces)
    if share not in (0.0, 1.0):
        flat.mul_(share)
    return _Transfer(group.start_sum(flat), buffer, views, pieces)


def _receive(transfer: _Transfer, n: float, norms: tuple[list[Tensor], list[Tensor]], measure: bool) -> Tensor:
    """Wait for a bucket and write the means to the tensors. Returns its buffer, for the next.

    ``norms``: if they are measured, those of each piece's distance from the mean and of the mean are added.
    """
    transfer.wait()
    for piece, view in zip(transfer.pieces, transfer.views, strict=True):
        if not measure:
            torch.div(view, n, out=piece)
            continue
        mean = view.div_(n)
        piece.sub_(mean)  # the piece is about to be overwritten: it can hold the difference meanwhile
        norms[0].append(torch.linalg.vector_norm(piece, dtype=mean.dtype))
        norms[1].append(torch.linalg.vector_norm(mean))
        piece.copy_(mean)
    return transfer.buffer


def _buckets(tensors: Iterable[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """Pieces of the tensors in their order, packed per dtype of the sum and device, none above the limit."""
    buckets: defaultdict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        kind = _sum_dtype(tensor.dtype), tensor.device
        own, room = local(tensor).detach(), _room(*kind, limit_bytes)
        real = torch.view_as_real(own) if own.is_complex() else own  # a view, never a copy: it is written to
        for piece in _pieces(real, room):
            if filled[kind] + piece.numel() > room:
                yield buckets[kind]
                buckets[kind], filled[kind] = [], 0
            buckets[kind].append(piece)
            filled[kind] += piece.numel()
    yield from buckets.values()


def _room(dtype: torch.dtype, device: torch.device, limit_bytes: int) -> int:
    """How many elements fit into a bucket."""
    bound = min(limit_bytes, _HOST_BUCKET) if device.type == "cpu" else limit_bytes
    return max(1, bound // dtype.itemsize)


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views of at most ``limit`` elements that together are the tensor, in its logical order whatever its strides."""
    if tensor.numel() <= limit:
        if tensor.numel():
            yield tensor
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(limit)
    else:
        rows = max(1, limit * tensor.shape[0] // tensor.numel())
        for part in tensor.split(rows) if tensor.shape[0] > 1 else tensor.unbind():
            yield from _pieces(part, limit)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half precision and below; real numbers for complex ones."""
    real = dtype.to_real()
    return torch.float32 if real.itemsize < 4 else real
