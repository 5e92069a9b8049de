"""Pieces: many tensors as a few long vectors, so that a sum over all weights takes a few launches.

A *place* is which part of a sharded tensor a rank holds; a whole tensor has one place. x_0 is where a path of the
weights began, as in :mod:`hdet.rule.estimate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.copies import wide
from hdet.optimizer import leading_part
from hdet.ranks.shards import is_distributed, local, local_gradient, place
from hdet.ranks.weights import fingerprint_of_words, real_of

__all__ = ["Pieces", "Vectors"]

PIECE = 1 << 23
"""Numbers in a piece, at most. A launch costs more than reading memory: pieces of half the length took 1.6 times as
long (86 M weights, H200). A tensor that cannot be cut may be longer."""
_SHARE = 16
"""A piece has at most this part of all numbers, if that is not short: scratch memory is two pieces."""
_SHORT = 1 << 20
Vectors: TypeAlias = list[Tensor]
"""One vector for each piece."""
Value = TypeVar("Value")


class _Part(NamedTuple):
    """A tensor, or some of its numbers in their order, at its place in a vector."""

    tensor: int
    numbers: slice | None
    """None: all of them, in the tensor's shape."""
    shape: tuple[int, ...]
    offset: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """What a tensor has there, as real numbers."""
        real = real_of(tensor)
        return real if self.numbers is None else real.reshape(-1)[self.numbers]


class _Piece(NamedTuple):
    """Parts on one device."""

    parts: list[_Part]
    device: torch.device
    dtype: torch.dtype
    place: str
    """Which part of its tensors this rank holds, by a name that all ranks use."""
    is_plain: bool
    """Whether it is made of whole tensors of real numbers: they are copied as they are, which saves time."""

    @property
    def length(self) -> int:
        return self.parts[-1].offset + self.parts[-1].length

    def sources(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What goes to each part's place."""
        found = [tensors[part.tensor] for part in self.parts]
        if self.is_plain:
            return found
        return [t if t is None else part.of(t) for t, part in zip(found, self.parts, strict=True)]

    def views(self, vector: Tensor) -> list[Tensor]:
        """Each part's place in a vector, in the part's shape."""
        return [vector[part.offset : part.offset + part.length].view(part.shape) for part in self.parts]


class Pieces:
    """Some weights where a path began (x_0), their layout, and scratch vectors to gather them in.

    Of a sharded tensor, the part that this rank holds is laid out. Sums over pieces are then this rank's, and are kept
    apart by place, so that what several ranks hold can be counted once.

    Numbers are at least fp32, since bf16 would destroy a small displacement; complex ones count as two. Scratch memory,
    for each device and type: twice 32 MB in fp32 at most, or more for a long tensor that is not contiguous.

    Args:
        tensors: what is laid out; all further ones have their shapes, devices and kinds.
        values: where the path began, if not where they are now.
    """

    def __init__(self, tensors: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> None:
        places: dict[tuple[torch.device, torch.dtype, str], list[_Part]] = {}
        longest = min(max(sum(local(tensor).numel() for tensor in tensors) // _SHARE, _SHORT), PIECE)
        for i, tensor in enumerate(tensors):
            real = real_of(tensor)
            dtype = torch.promote_types(real.dtype, torch.float32)
            places.setdefault((real.device, dtype, place(tensor)), []).extend(_cut(i, real, longest))
        plain = [not (tensor.is_complex() or is_distributed(tensor)) for tensor in tensors]
        self._pieces = [
            _Piece(parts, *where, is_plain=all(part.numbers is None and plain[part.tensor] for part in parts))
            for where, whole in places.items()
            for parts in _packed(whole, longest)
        ]
        self.sizes = [tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors]
        """How many numbers each tensor has, on all ranks together."""
        self.rounding = max((torch.finfo(tensor.dtype).eps / 2 for tensor in tensors), default=0.0)
        """How much rounding may change a number, as a part of it, in the coarsest of the tensors."""
        self.places = list(dict.fromkeys(piece.place for piece in self._pieces))
        """Which parts of tensors this rank holds; all ranks list them in one order."""
        self.fingerprints = [fingerprint_of_words([where]) for where in self.places]
        """A number for each of them, by which ranks with the same part know each other."""
        self.scratch = [self._shared_scratch(), self._shared_scratch()]
        """Twice a vector for each piece. They share their memory, so one of each may be in use at a time."""
        self._views = [[p.views(v) for p, v in zip(self._pieces, vs, strict=True)] for vs in self.scratch]
        self.ids = [id(tensor) for tensor in tensors]
        self.origin = self.copied(tensors if values is None else values)
        """x_0."""
        self.norms = [torch.linalg.vector_norm(vector) for vector in self.origin]

    def zeros(self) -> Vectors:
        """A new vector for each piece."""
        return [torch.zeros(piece.length, device=piece.device, dtype=piece.dtype) for piece in self._pieces]

    @torch.no_grad()
    def copied(self, tensors: Sequence[Tensor]) -> Vectors:
        """The tensors in vectors of their own."""
        vectors = self.zeros()
        for piece, vector in zip(self._pieces, vectors, strict=True):
            _gather_(piece.views(vector), piece.sources(tensors))
        return vectors

    def displacement(self, weights: Sequence[Tensor]) -> Iterator[Tensor]:
        """x_0 - x, piece by piece; each valid until the next one."""
        for origin, now, out in zip(self.origin, self.gathered(weights, 0), self.scratch[0], strict=True):
            yield torch.sub(origin, now, out=out)

    def gradients(self, optimizer: Optimizer, holding: Sequence[Tensor | None]) -> Iterator[Tensor]:
        """Those that parameters hold, as the optimizer will read them, piece by piece; each valid until the next one.

        Their sign is that in which it uses them. A GradScaler's scale is taken out: torch hands it to fused optimizers,
        which divide by it themselves. They are zero if the optimizer will find some that are not finite, and make no
        step. Does not synchronise.
        """
        ascending = (group["params"] for group in optimizer.param_groups if group.get("maximize", False))
        turned = {id(p) for parameters in ascending for p in parameters}
        scaled = leading_part(optimizer)
        scale, found_inf = getattr(scaled, "grad_scale", None), getattr(scaled, "found_inf", None)
        for gradient in self.gathered([None if p is None else _gradient(p, turned) for p in holding], 1):
            if scale is not None:
                gradient = gradient / scale.to(gradient.device)
            if found_inf is not None:
                gradient = torch.where(found_inf.to(gradient.device) > 0, 0.0, gradient)
            yield gradient

    def norms_of_tensors(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The norm of each tensor at x_0 and how far it has moved, for each of :attr:`places` in turn."""
        both = self._norms_by_place(self.origin), self._norms_by_place(self.displacement(weights))
        return [norm for norms in both for of_all in zip(*norms, strict=True) for norm in of_all]

    def _norms_by_place(self, vectors: Iterable[Tensor]) -> list[list[Tensor]]:
        """For each of :attr:`places` the norm of what each tensor has there; on one device."""
        found: dict[tuple[str, int], list[Tensor]] = {}
        zero = None
        for piece, vector in zip(self._pieces, vectors, strict=True):
            norms = torch._foreach_norm(piece.views(vector))
            zero = torch.zeros_like(norms[0]) if zero is None else zero
            for part, norm in zip(piece.parts, norms, strict=True):
                found.setdefault((piece.place, part.tensor), []).append(norm.to(zero))
        return [
            [_length(found[where, i]) if (where, i) in found else zero for i in range(len(self.sizes))]
            for where in self.places
            if zero is not None
        ]

    def by_place(self, values: Iterable[Value]) -> list[list[Value]]:
        """One value for each piece, as a list for each of :attr:`places`."""
        pairs = list(zip(self._pieces, values, strict=True))
        return [[value for piece, value in pairs if piece.place == where] for where in self.places]

    def folded(self, values: Sequence[Tensor], fold: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """One scalar for each piece, folded for each of :attr:`places`, on the device of its first piece."""
        return [_folded(own, fold) for own in self.by_place(values)]

    def as_tensors(self, vectors: Vectors, like: Sequence[Tensor]) -> list[Tensor]:
        """Vectors as new tensors, in the shapes of ``like`` and at least fp32."""
        found = [wide(tensor).contiguous() for tensor in like]  # zeros, at least fp32
        for piece, vector in zip(self._pieces, vectors, strict=True):
            for part, values in zip(piece.parts, piece.views(vector), strict=True):
                part.of(found[part.tensor]).copy_(values)
        return found

    def gathered(self, tensors: Sequence[Tensor | None], scratch: int) -> Iterator[Tensor]:
        """A vector for each piece in turn, valid until the next one; zero if there is no tensor.

        Args:
            tensors: as they were laid out.
            scratch: 0 or 1: which scratch memory is used for those that are not one vector already.
        """
        for piece, vector, views in zip(self._pieces, self.scratch[scratch], self._views[scratch], strict=True):
            sources = piece.sources(tensors)
            first = sources[0]
            if len(sources) == 1 and first is not None and first.dtype == piece.dtype and first.is_contiguous():
                yield first.detach().view(-1)
                continue
            if any(source is None for source in sources):
                vector.zero_()
            _gather_(views, sources)
            yield vector

    def _shared_scratch(self) -> Vectors:
        """One memory for all pieces of a device and type, of the length of the longest."""
        longest: dict[tuple[torch.device, torch.dtype], int] = {}
        for piece in self._pieces:
            kind = (piece.device, piece.dtype)
            longest[kind] = max(longest.get(kind, 0), piece.length)
        memory = {kind: torch.zeros(n, device=kind[0], dtype=kind[1]) for kind, n in longest.items()}
        return [memory[piece.device, piece.dtype][: piece.length] for piece in self._pieces]


def _gradient(p: Tensor, turned: Set[int]) -> Tensor | None:
    """The gradient that a parameter holds, negated if its id is in ``turned``: ``maximize=True``."""
    gradient = local_gradient(p)
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return -dense if id(p) in turned else dense


def _folded(values: Sequence[Tensor], fold: Callable[[Tensor], Tensor]) -> Tensor:
    """Scalars as one, on the first one's device. One alone is not touched: each launch counts."""
    return values[0] if len(values) == 1 else fold(torch.stack([value.to(values[0].device) for value in values]))


def _length(norms: Sequence[Tensor]) -> Tensor:
    """The norm of a vector that is made of parts with these norms."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)))


def _cut(i: int, numbers: Tensor, longest: int) -> Iterator[_Part]:
    """A tensor in parts of a piece's length at most; offsets are set later."""
    total = numbers.numel()
    if total <= longest or not numbers.is_contiguous():
        yield _Part(i, None, tuple(numbers.shape), 0, total)
        return
    for begin in range(0, total, longest):
        length = min(longest, total - begin)
        yield _Part(i, slice(begin, begin + length), (length,), 0, length)


def _packed(parts: list[_Part], longest: int) -> Iterator[list[_Part]]:
    """Parts one after the other, until a piece is full."""
    full: list[_Part] = []
    offset = 0
    for part in parts:
        if full and offset + part.length > longest:
            yield full
            full, offset = [], 0
        full.append(part._replace(offset=offset))
        offset += part.length
    if full:
        yield full


@torch.no_grad()
def _gather_(views: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    """Copy tensors to their places in a few launches; a missing one is left out."""
    there = [(view, source) for view, source in zip(views, sources, strict=True) if source is not None]
    if there:
        torch._foreach_copy_([view for view, _ in there], [source for _, source in there])
