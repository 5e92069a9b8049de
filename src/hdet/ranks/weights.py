"""Which tensors are averaged, and numbers about them: fingerprints, norms, and whether they are finite.

A replica sends the numbers instead of the tensors. They are computed on the device, which may not have float64, and
read on the host in few transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from hashlib import sha256
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ShardedParametersError
from hdet.frameworks import partitioner
from hdet.ranks.shards import PLAIN, is_distributed, local, refuse_flat, reshard

_LAST = "build the scheduler after them, with the optimizer that is stepped"

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHT = -7046029254386353131  # odd, as a signed 64-bit number: the golden ratio times 2**64
_MIX = 6364136223846793005
_CHUNK = 1 << 20
_LOWEST = 11
"""Bits of a fingerprint that are dropped, so that a float64 holds the rest exactly."""


def to_host(tensors: Sequence[Tensor]) -> list[float]:
    """All numbers of some tensors, one after the other. Synchronises once per device and dtype.

    >>> to_host([torch.tensor(0.5), torch.tensor(True), torch.tensor([2**40, 1])])
    [0.5, True, 1099511627776, 1]
    """
    kinds = _by_kind(tensor.detach().reshape(-1) for tensor in tensors)
    values = {kind: iter(torch.cat(own).tolist()) for kind, own in kinds.items()}
    return [number for t in tensors for number in islice(values[t.device, t.dtype], t.numel())]


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The tensors of each device and dtype, which one launch can take together."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    device = dtype = None
    own: list[Tensor] = []
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.device != device:  # to hash them for each tensor would take longer
            device, dtype = tensor.device, tensor.dtype
            own = found.setdefault((device, dtype), [])
        own.append(tensor)
    return found


def read(named: Mapping[str, Sequence[Tensor]]) -> dict[str, list[float]]:
    """The numbers of tensors, by name. Synchronises as :func:`to_host` does.

    >>> read({"loss": [torch.tensor([0.5, 0.25])], "sound": [torch.tensor(True)], "none": []})
    {'loss': [0.5, 0.25], 'sound': [True], 'none': []}
    """
    values = iter(to_host([tensor for tensors in named.values() for tensor in tensors]))
    return {name: list(islice(values, sum(t.numel() for t in tensors))) for name, tensors in named.items()}


def fingerprint_of_words(parts: Iterable[str]) -> float:
    """48 bits over some texts: exact as a float64."""
    return float(int.from_bytes(sha256(";".join(parts).encode()).digest()[:6], "big"))


def real_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, as real numbers: a complex one is two. A conjugate view is copied."""
    own = (tensor if type(tensor) in PLAIN else local(tensor)).detach()
    return torch.view_as_real(own.resolve_conj()) if own.is_complex() else own


def fingerprint(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """53 bits over every bit that this rank holds of the tensors, and its position: an int64 scalar on ``device``.

    Does not synchronise. Extra memory is a few times a chunk of a million elements.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        for chunk in real_of(tensor).reshape(-1).split(_CHUNK):
            total = total * _MIX + _weighted_sum(chunk).to(device)
    return total >> _LOWEST


def _weighted_sum(chunk: Tensor) -> Tensor:
    """Sum of bits_i * w_i modulo 2**64, with odd weights that depend on the position."""
    integers = chunk.view(_INTEGER_OF_SIZE[chunk.element_size()]).long()
    weights = torch.arange(1, chunk.numel() + 1, device=chunk.device).mul_(_WEIGHT).bitwise_or_(1)
    return (integers * weights).sum()


class Weights(NamedTuple):
    """The tensors of one replica that converge averages, each once."""

    parameters: list[Tensor]
    """Trained parameters."""
    buffers: list[Tensor]
    """Float buffers."""
    still: list[Tensor]
    """Frozen parameters and buffers set aside: expected to be equal, averaged only if they are not."""
    state: list[Tensor]
    """Optimizer state, if that is averaged too."""

    @property
    def moving(self) -> list[Tensor]:
        """What training changes."""
        return self.parameters + self.buffers + self.state

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return self.moving + self.still

    @property
    def outline(self) -> list[str]:
        """Role, shape, dtype and sharding of each tensor, as text that must be equal on all replicas."""
        roles = ("parameter", "buffer", "still", "optimizer state")
        return [
            f"{role} {tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', '')}".rstrip()
            for role, tensors in zip(roles, self, strict=True)
            for tensor in tensors
        ]

    @property
    def device(self) -> torch.device:
        """The device on which numbers about the weights are computed."""
        tensors = self.tensors
        return tensors[0].device if tensors else torch.device("cpu")

    def all_finite(self) -> Tensor:
        """Whether this rank's part of :attr:`moving` is finite: a scalar on :attr:`device`. Does not synchronise."""
        largest = norm_of([real for real in map(real_of, self.moving) if _may_be_infinite(real)], math.inf)
        return (torch.tensor(True) if largest is None else largest.isfinite()).to(self.device)


NO_WEIGHTS = Weights([], [], [], [])


class ReplicaTensors:
    """Finds the tensors of one replica, and remembers which buffers are set aside.

    Args:
        model: its buffers and further parameters are averaged too, or None.
        with_state: whether the optimizer's state (moments) is averaged too.
    """

    def __init__(self, model: nn.Module | None, *, with_state: bool = False) -> None:
        self.model = model
        self.with_state = with_state
        self._set_aside: frozenset[str] = frozenset()
        self._known: list[int] = []
        """Ids of the optimizer's parameters when it was first seen; empty: not known."""

    def remember(self, optimizer: Optimizer) -> None:
        """Note the optimizer's parameters, before a sharded optimizer replaces them by partitions."""
        self._known = [id(p) for group in optimizer.param_groups for p in group["params"]]

    def first_weights(self, optimizer: Optimizer, *, needs_model: bool) -> Weights:
        """The weights when the replicas first meet. Raises for shards that cannot be handled.

        ``needs_model``: whether shards must be those of a known model.
        """
        self._refuse_replaced(optimizer)
        found = self.weights(optimizer).tensors
        refuse_flat(found)
        if needs_model and self.model is None and any(map(is_distributed, found)):
            raise ShardedParametersError(
                "the weights are sharded (DTensor), and FSDP2's modules must be told when their weights are changed; "
                "give the model: model=model"
            )
        self.set_aside()
        return self.weights(optimizer)

    def _refuse_replaced(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer's parameters were replaced since :meth:`remember`.

        Partitions that a framework puts in their place have equal shapes and different content on each rank. FSDP2's
        DTensors say what they are.
        """
        found = [p for group in optimizer.param_groups for p in group["params"]]
        replaced = set(self._known) - set(map(id, found))
        if replaced and not (found and all(map(is_distributed, found))):  # ZeRO 3 leaves nothing there between steps
            framework = partitioner()
            cases, cure = (f", {framework.cases}", framework.cures["replaced"]) if framework else ("", _LAST)
            raise ShardedParametersError(
                f"{len(replaced)} of the optimizer's {len(self._known)} parameters were replaced after the scheduler "
                f"was built{cases}: partitions, of which each rank has its own, must not be averaged; {cure}"
            )

    def set_aside(self) -> None:
        """Expect buffers that are not finite now, such as masks, to stay equal: they say nothing about divergence."""
        for name, buffer in self.model.named_buffers() if self.model is not None else ():
            if _is_averaged(buffer) and not buffer.is_meta and not bool(local(buffer).isfinite().all()):
                self._set_aside |= {name}

    def weights(self, optimizer: Optimizer) -> Weights:
        """The optimizer's parameters and, with a model, its parameters and buffers too. Integers are left out.

        A model that FSDP2 has gathered for a forward pass would show other parameters than the optimizer has.
        """
        reshard(self.model)
        parameters: dict[int, Tensor] = {}
        still: dict[int, Tensor] = {}
        own = (p for group in optimizer.param_groups for p in group["params"])
        for tensor in chain(own, self.model.parameters() if self.model is not None else ()):
            if _is_averaged(tensor):
                (parameters if tensor.requires_grad else still).setdefault(id(tensor), tensor)
        still |= {id(tensor): tensor for tensor in self.buffers(set_aside=True)}
        state = _state_of(optimizer, parameters.values()) if self.with_state else []
        return Weights(list(parameters.values()), self.buffers(), list(still.values()), state)

    def buffers(self, *, set_aside: bool = False) -> list[Tensor]:
        """The model's float buffers that belong to a checkpoint, each once; or those of them that are set aside.

        Other buffers are caches: each rank's forward pass makes them again, as long as its batch needs.
        """
        if self.model is None:
            return []
        caches = {id(getattr(m, name, None)) for m in self.model.modules() for name in m._non_persistent_buffers_set}
        return [
            tensor
            for name, tensor in self.model.named_buffers()
            if _is_averaged(tensor) and id(tensor) not in caches and (name in self._set_aside) == set_aside
        ]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other tensors, so their ids are not copied."""
        return {**vars(self), "_set_aside": frozenset(), "_known": []}


def _state_of(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Moments and momentum buffers: float state of a parameter's own shape, in a fixed order."""
    return [
        value
        for p in parameters
        for name, value in sorted(optimizer.state.get(p, {}).items())
        if name != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape
    ]


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def norm_of(tensors: Iterable[Tensor], order: float, least: torch.dtype = torch.float32) -> Tensor | None:
    """The norm of all tensors together, in few launches: a scalar on the first one's device; None if all are empty.

    At least in fp32, since a sum of squares overflows in half precision; ``least``: or in this wider type. NaN is not
    hidden. Does not synchronise.

    >>> norm_of([torch.tensor([1.0, -3.0]), torch.tensor([2.0])], math.inf)
    tensor(3.)
    """
    found: list[Tensor] = []
    for (_, dtype), own in _by_kind([tensor for tensor in tensors if tensor.numel()]).items():
        wide = None if dtype.is_complex else torch.promote_types(dtype, least)
        found.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own, order, wide)), order))
    if len(found) < 2:
        return found[0] if found else None
    wide, device = reduce(torch.promote_types, (one.dtype for one in found)), found[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device, wide) for one in found]), order)
    return total


def _may_be_infinite(real: Tensor) -> bool:
    """False if it is on the host and its sum is finite, which is quick to see. On a device that would synchronise."""
    return bool(real.numel()) and not (real.is_cpu and math.isfinite(real.sum().item()))
