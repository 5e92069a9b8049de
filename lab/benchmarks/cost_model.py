"""What ``auto`` and replicas that train apart add to a run, as formulas.

    n  GPUs, g of them in a node        P  parameters; p = P where every GPU has the whole model, P / n where they are
    S  steps                               sharded
    B  tokens per GPU and step          w, v  bytes per parameter of weights and of moments; all the rest is fp32
    F  FLOP/s times utilisation         c  bytes/s of the link: inside a node, or between nodes where n > g; of the bus
                                           to pinned host memory: e

A pass over x bytes per parameter takes l + x p / m: l for its launches, m bytes/s of memory. lab/benchmarks/cost_fit.py
fits both to what was measured, for each kind of pass by itself.

    step    = 6 P B / F
    look    = pass over 2 w + 12 bytes: gradient, weights and origin are read, the sum of gradients read and written
    keep    = half the rounds: pass over 2 (w + v), weights and moments are copied on the device; the other half: l and
              (w + v) p / e, to the host. What of it goes on beside training is not taken off
    measure = pass over 2 w + 12: the way gone, and its inner product with the sum; reads of single numbers are in l
    check   = (2 w + 80) p / m on two ranks or more: are weights finite, and equal on all ranks? m as of a look
    talk    = 2 h ceil(log2 n): two gathers of a few numbers; h is a message's latency
    end     = keep + measure + check + talk

With R rounds, whose number follows from S, and H looks (at most 8 in a round, none once the schedule falls):

    auto    = H look + R end        steps that are repeated after going back are not in it
    memory  = 8 p while it searches: origin and sum of gradients; a snapshot of (w + v) p on the device, and one on the
              host

Replicas that train apart are averaged once in T steps, r of them: all n GPUs with whole models, or the n / g nodes,
where each shards one replica. One replica averages nothing.

    apart   = ceil(S / T) (2 (r - 1) / r * w p / c + h ceil(log2 r) + 5 w p / m)        p = P, or P / g

Their ordinary steps cost microseconds of the host; lab/benchmarks/trained_gpu.py measures them. Left out is what
training itself sends over the links: it hides behind computing, or makes steps longer alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hdet.auto.constants import DEFAULT
from hdet.auto.rule import next_end
from hdet.distributed.average import EXTRA_BYTES

__all__ = ["Cost", "Machine", "Pass", "Passes", "added", "bytes_per_parameter", "fan_out", "looks", "rounds"]

PCT_START = 0.3
"""Of OneCycle, as in torch."""
FP32 = 4
FINGERPRINT = 80
"""Bytes per parameter, beside the weights, that hdet.distributed.weights reads and writes: it makes int64 numbers
of them and of their places. They are made in chunks that a GPU's cache may hold: rather too high."""
MERGED = 5
"""Reads and writes of a converge: finiteness, pack, divide into the weights."""


class Pass(NamedTuple):
    """A pass over memory.

    >>> Pass(launch=1.0, bandwidth=2.0).seconds(6.0)
    4.0
    """

    launch: float
    """Seconds, whatever the size."""
    bandwidth: float
    """Bytes per second."""

    def seconds(self, size: float) -> float:
        """Of a pass over that many bytes."""
        return self.launch + size / self.bandwidth


class Passes(NamedTuple):
    """The three kinds of them."""

    look: Pass
    keep: Pass
    measure: Pass


def bytes_per_parameter(weights: float, moments: float) -> tuple[float, float, float]:
    """What each kind of pass reads and writes, in the order of :class:`Passes`."""
    seen = 2 * weights + 3 * FP32
    return seen, 2 * (weights + moments), seen


# Rounds ---------------------------------------------------------------------------------------------------------------


def rounds(steps: int) -> int:
    """R: the number of rounds.

    >>> rounds(100)
    20
    """
    return len(_ends(steps))


def looks(steps: int, sampled: int | None = DEFAULT.sampled) -> int:
    """H: the steps that are looked at. The last round that begins before the schedule falls has all of its own.

    >>> looks(100, sampled=None), looks(100, sampled=2)
    (51, 29)
    """
    falls = PCT_START + (1 - PCT_START) * math.acos(2 * DEFAULT.falling - 1) / math.pi
    ends = _ends(steps)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False) if start < falls * steps]
    apart = [1 if sampled is None else math.ceil(length / sampled) for length in lengths]
    return sum(math.ceil(length / own) for length, own in zip(lengths, apart, strict=True))


def _ends(steps: int) -> list[int]:
    """Of rounds: they grow, and the last two end at S - 1 and S."""
    ends = [1]
    while (end := next_end(ends[-1])) < steps - 1:
        ends.append(end)
    return [*ends, *(end for end in (steps - 1, steps) if end > ends[-1])]


# On paper -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The assumptions: GPUs, links and what is trained. Bytes, seconds, FLOP."""

    passes: Passes
    tokens: int
    flops: float
    utilisation: float
    gpus_per_node: int
    inside: float
    between: float
    latency: float
    weight_bytes: float
    moment_bytes: float
    sync_every: int
    keep: Literal["device", "host"]
    """Where one of two snapshots lies; the other is on the host."""
    pinned: float

    def step(self, parameters: float) -> float:
        """Seconds of a training step."""
        return 6 * parameters * self.tokens / (self.flops * self.utilisation)

    def link(self, gpus: int) -> float:
        """Bytes per second between that many GPUs."""
        return self.inside if gpus <= self.gpus_per_node else self.between

    def message(self, ranks: int) -> float:
        """Seconds of a collective of a few numbers."""
        return self.latency * math.ceil(math.log2(ranks))


class Cost(NamedTuple):
    """What one run pays; seconds and bytes of one GPU."""

    seconds: float
    """In the whole run."""
    percent: float
    """Of the run without it."""
    per_round: float
    """Seconds of the end of a round."""
    searching: float
    """Bytes while it searches; of a converge: its buffers."""
    kept: float
    """Bytes of the snapshot on the device, until the end of the run."""
    on_host: float
    """Bytes of snapshots in pinned host memory."""


def added(machine: Machine, parameters: float, gpus: int, steps: int, *, sharded: bool) -> Cost:
    """By ``auto``."""
    own = parameters / gpus if sharded else parameters
    look, end = _look(machine, own), _end(machine, own, gpus)
    seconds = looks(steps) * look + rounds(steps) * end
    percent = 100 * seconds / (steps * machine.step(parameters))
    snapshot, on_device = (machine.weight_bytes + machine.moment_bytes) * own, machine.keep == "device"
    return Cost(seconds, percent, end, 2 * FP32 * own, on_device * snapshot, (2 - on_device) * snapshot)


def _look(machine: Machine, own: float) -> float:
    size, *_ = bytes_per_parameter(machine.weight_bytes, machine.moment_bytes)
    return machine.passes.look.seconds(size * own)


def _end(machine: Machine, own: float, gpus: int) -> float:
    w, v = machine.weight_bytes, machine.moment_bytes
    passes, (_, kept, measured) = machine.passes, bytes_per_parameter(w, v)
    there = passes.keep.launch + (w + v) * own / machine.pinned
    here = passes.keep.seconds(kept * own) if machine.keep == "device" else there
    end = (here + there) / 2 + passes.measure.seconds(measured * own)
    if gpus > 1:
        end += (2 * w + FINGERPRINT) * own / passes.look.bandwidth + 2 * machine.message(gpus)
    return end


def fan_out(machine: Machine, parameters: float, gpus: int, steps: int, *, sharded: bool) -> Cost:
    """By training replicas apart and averaging them every ``sync_every`` steps."""
    shards = min(gpus, machine.gpus_per_node) if sharded else 1
    replicas, size = gpus // shards, machine.weight_bytes * parameters / shards
    if replicas == 1:
        return Cost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    wire = 2 * (replicas - 1) / replicas * size / machine.link(gpus)
    end = wire + machine.message(replicas) + MERGED * size / machine.passes.look.bandwidth
    seconds = math.ceil(steps / machine.sync_every) * end
    percent = 100 * seconds / (steps * machine.step(parameters))
    return Cost(seconds, percent, end, min(EXTRA_BYTES, size), 0.0, 0.0)
