"""The mean over replicas, in place.

Tensors travel in flat buckets, several at a time, so that the additional memory is bounded.
"""

from __future__ import annotations

import math
from collections import deque
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


class _Bucket(NamedTuple):
    pieces: list[Tensor]
    room: int
    """Elements that fit into a bucket of this kind."""
    dtype: torch.dtype
    device: torch.device


class _Transfer(NamedTuple):
    """A bucket that travels."""

    wait: Callable[[], object]
    buffer: Tensor
    views: list[Tensor]
    pieces: list[Tensor]


class _Norms(NamedTuple):
    """How far this replica was from the mean, and the mean itself: norms of all pieces, scalars on their devices."""

    to_mean: list[Tensor]
    of_mean: list[Tensor]


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
    spare: list[Tensor] = []  # the buffer of the bucket that came last: never more than one
    norms = _Norms([], [])
    for bucket in _buckets(tensors, extra_bytes // _UNDER_WAY):
        if len(under_way) == _UNDER_WAY:
            spare.append(_receive(under_way.popleft(), n, norms, measure))
        under_way.append(_send(bucket, _buffer(bucket, spare), group, share if live[replica] else 0.0))
    for transfer in under_way:
        _receive(transfer, n, norms, measure)
    to_mean, of_mean = (math.hypot(*to_host(own)) for own in norms)
    return to_mean, of_mean


def _buffer(bucket: _Bucket, spare: list[Tensor]) -> Tensor:
    """A buffer for a bucket: the spare one if its size, dtype and device fit, otherwise a new one."""
    if spare:
        buffer = spare.pop()
        if (buffer.numel(), buffer.dtype, buffer.device) == (bucket.room, bucket.dtype, bucket.device):
            return buffer
        del buffer  # before the new one is made: the bound on memory holds
    return torch.empty(bucket.room, dtype=bucket.dtype, device=bucket.device)


def _send(bucket: _Bucket, buffer: Tensor, group: ReplicaGroup, share: float) -> _Transfer:
    """Pack a bucket and send it. ``share``: the factor on this rank's weights; with 0 they may be NaN."""
    sizes = [piece.numel() for piece in bucket.pieces]
    flat = buffer[: sum(sizes)]
    views = [part.view(piece.shape) for part, piece in zip(flat.split(sizes), bucket.pieces, strict=True)]
    if share == 0.0:
        flat.zero_()
    else:
        torch._foreach_copy_(views, bucket.pieces)
    if share not in (0.0, 1.0):
        flat.mul_(share)
    return _Transfer(group.start_sum(flat), buffer, views, bucket.pieces)


def _receive(transfer: _Transfer, n: float, norms: _Norms, measure: bool) -> Tensor:
    """Wait for a bucket and write the means to the tensors. Returns its buffer, for the next."""
    transfer.wait()
    for piece, view in zip(transfer.pieces, transfer.views, strict=True):
        if not measure:
            torch.div(view, n, out=piece)
            continue
        mean = view.div_(n)
        norms.of_mean.append(torch.linalg.vector_norm(mean))
        piece.sub_(mean)  # the piece is about to be overwritten: it can hold the difference meanwhile
        norms.to_mean.append(torch.linalg.vector_norm(piece, dtype=mean.dtype))
        piece.copy_(mean)
    return transfer.buffer


def _buckets(tensors: Iterable[Tensor], limit_bytes: int) -> Iterator[_Bucket]:
    """Pieces of the tensors in their order, packed per dtype of the sum and device, none above the limit."""
    filling: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
    for tensor in tensors:
        key = _sum_dtype(tensor.dtype), tensor.device
        bound = min(limit_bytes, _HOST_BUCKET) if tensor.device.type == "cpu" else limit_bytes
        limit = max(1, bound // key[0].itemsize)
        own = local(tensor).detach()
        real = torch.view_as_real(own) if own.is_complex() else own  # a view, never a copy: it is written to
        for piece in _pieces(real, limit):
            bucket, filled = filling.get(key, (_Bucket([], limit, *key), 0))
            if filled + piece.numel() > limit:
                yield bucket
                bucket, filled = _Bucket([], limit, *key), 0
            bucket.pieces.append(piece)
            filling[key] = bucket, filled + piece.numel()
    yield from (bucket for bucket, filled in filling.values() if filled)


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
