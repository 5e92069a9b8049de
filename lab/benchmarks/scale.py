"""What a round's end costs with 8, 64 and 1024 ranks: bytes and seconds by a model, and what can be measured here.

    python lab/benchmarks/scale.py --write lab/benchmarks/results/scale.json      # two cores, about a minute
    python lab/benchmarks/scale.py --calculated --ranks 512 --weights 7e9 --bandwidth 100 --hop 5

- **calculated** (nothing runs): bytes that each rank sends in a converge, and seconds at stated bandwidths. An
  all-reduce of N ranks sends 2 (N - 1) / N times what is averaged, in fp32: the weights, and with arms under Adam two
  moments too. Buckets of 16 MiB each also wait 2 ceil(log2 N) times for a hop (NCCL's tree), and the gathering of
  the losses N - 1 times (its ring). N counts ranks: each rank of an arm sends. If weights are sharded, it counts the
  replicas, and ``--weights`` are those of a shard.
- **host**: the time that training waits for Python at a round's end: median and 95th percentile of several rounds of
  the real scheduler on torch's "fake" process group, which has N ranks in one process and sends nothing.
- **gloo**: real processes on this machine, and the bytes that went over its loopback device during a converge.
- **stacked**: replicas as rows of one tensor, as lab's experiments train them: their mean, written to all rows.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import hdet
from hdet.ensemble.controller import Corrected
from hdet.ensemble.design import Balanced, Permuted
from hdet.ensemble.normalised import Normalised
from hdet.ranks.average import EXTRA_BYTES

REPLICAS = (8, 64, 1024)
WEIGHTS = 10**9
BYTES = 4
"""Of a weight: sums are in fp32, also those of half precision."""
WITH_ADAM = 3
"""What arms average under Adam: weights and two moments."""
BANDWIDTHS = (450.0, 50.0, 12.5)
"""GB a second that one rank sends: what ``all_reduce_perf`` of nccl-tests prints as bus bandwidth."""
HOP = 10e-6
"""Seconds from one rank to the next, an assumption."""
KNOBS = (2, 4, 16)
"""A parameter group is a knob."""
TENSORS = 1000
"""Of a large model: each costs the host some time, however small it is."""
BUCKET = EXTRA_BYTES // 4
"""Bytes of a bucket on a device."""
ROW = 9
"""Numbers of 8 bytes that a rank gathers at a round's end."""


def sent(ranks: int, tensors: int = 1, weights: float = WEIGHTS) -> float:
    """Bytes that each rank sends in a converge.

    >>> sent(8) / 1e9, sent(8, WITH_ADAM) / 1e9
    (7.0, 21.0)
    """
    return 2 * (ranks - 1) / ranks * BYTES * weights * tensors


def waited(ranks: int, tensors: int = 1, weights: float = WEIGHTS, hop: float = HOP) -> float:
    """Seconds of a converge in which its buckets wait for hops.

    >>> [round(waited(n), 3) for n in (8, 64, 1024)]
    [0.014, 0.029, 0.048]
    """
    return hop * math.ceil(BYTES * weights * tensors / BUCKET) * 2 * math.ceil(math.log2(ranks))


def calculated(
    ranks: Sequence[int] = REPLICAS,
    bandwidths: Sequence[float] = BANDWIDTHS,
    hop: float = HOP,
    weights: float = WEIGHTS,
) -> list[dict[str, Any]]:
    """A row for each number of ranks, if only the network counts."""
    averaged = {"shared": 1, "arms": WITH_ADAM}
    return [
        {
            "ranks": n,
            "sent_gb": {name: sent(n, tensors, weights) / 1e9 for name, tensors in averaged.items()},
            "hops_s": {name: waited(n, tensors, weights, hop) for name, tensors in averaged.items()},
            "seconds": {
                f"{bandwidth:g} GB/s": {
                    name: sent(n, tensors, weights) / (1e9 * bandwidth) + waited(n, tensors, weights, hop)
                    for name, tensors in averaged.items()
                }
                for bandwidth in bandwidths
            },
            "gathered_kb": ROW * 8 * n / 1e3,
            "gather_s": hop * (n - 1),
        }
        for n in ranks
    ]


def timed(works: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each: median and 95th percentile of what passed, and the median of this process's CPU time.

    They are taken in turn, since other programs make this machine slower for minutes.
    """
    passed, used = {name: [] for name in works}, {name: [] for name in works}  # type: ignore[var-annotated]
    for _ in range(repetitions):
        for name, work in works.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            work()
            used[name].append(1e3 * (time.process_time() - began_cpu))
            passed[name].append(1e3 * (time.perf_counter() - began))
    last = math.ceil(0.95 * repetitions) - 1
    return {
        name: {"median": median(own), "p95": sorted(own)[last], "cpu": median(used[name])}
        for name, own in passed.items()
    }


def host(replicas: int, repetitions: int) -> dict[str, Any]:
    """What the host's parts and whole ends of rounds take; the sizes of the journal's line and of Python's lists."""
    rng = random.Random(0)
    signals, rounds = [rng.gauss(1, 0.1) for _ in range(replicas)], iter(range(1, 10**9))
    parts: dict[str, Callable[[], object]] = {}
    for knobs in KNOBS:
        x = Balanced().places(replicas, knobs, 0, 1)
        for design in (Permuted(), Balanced()):
            name = f"{type(design).__name__.lower()}_{knobs}"
            parts[name] = lambda design=design, knobs=knobs: design.places(replicas, knobs, 0, next(rounds))  # type: ignore[misc]
        for rule in (Corrected(), Normalised()):
            state, name = rule.init(knobs), f"{type(rule).__name__.lower()}_{knobs}"
            parts[name] = lambda rule=rule, state=state, x=x: rule.update(state, signals, x)  # type: ignore[misc]
    found: dict[str, Any] = {"replicas": replicas, **timed(parts, repetitions)}
    found["end_4"] = _end(replicas, 4, repetitions)["ms"]
    found[f"end_{TENSORS}"] = _end(replicas, TENSORS, repetitions)["ms"]
    found[f"end_{TENSORS}_arms"] = _end(replicas, TENSORS, repetitions, with_arms=True)["ms"]
    journal = _end(replicas, 4, repetitions, journal=True)
    return found | {"end_4_journal": journal["ms"], "line_kb": journal["line_kb"], "lists_kb": journal["lists_kb"]}


def _end(
    replicas: int, tensors: int, repetitions: int, *, with_arms: bool = False, journal: bool = False
) -> dict[str, Any]:
    """The end of a round, of one rank among many that are not there: tensors of 4 numbers in 4 groups, under Adam."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=replicas)
    written = io.StringIO()
    try:
        parameters = [nn.Parameter(torch.zeros(4)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.Adam([{"params": parameters[group::4]} for group in range(4)], lr=0.1)
        more: dict[str, Any] = {"journal": _Lines(written)} if journal else {}
        scheduler = hdet.OneCycleLR(
            optimizer,
            max_lr=0.1,
            total_steps=10**6,
            sync_every=1,
            auto_lr=True,
            auto_lr_start=1,
            group=hdet.arms(replicas) if with_arms else None,
            **more,
        )

        optimizer.step()  # makes the moments

        def a_round() -> None:
            scheduler.step(torch.tensor(1.0))

        for _ in range(3):  # the first connects the ranks, the next reserve memory
            a_round()
        ms = timed({"a round": a_round}, repetitions)["a round"]
        before = len(written.getvalue())
        tracemalloc.start()
        a_round()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return {"ms": ms, "line_kb": (len(written.getvalue()) - before) / 1e3, "lists_kb": peak / 1e3}
    finally:
        dist.destroy_process_group()


class _Lines:
    """A journal that is kept in memory."""

    def __init__(self, file: io.StringIO) -> None:
        self._file = file

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Nothing is open."""


def loopback() -> int | None:
    """Bytes that this machine has sent to itself; None if it does not say."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), None)


def on_rank(rank: int, weights: int, repetitions: int, arms: int) -> list[tuple[float, float | None]]:
    """For each repetition seconds of a round's end, and all ranks' bytes over those of one copy of the weights.

    ``arms``: their number; 0: gradients are shared.
    """
    ranks = dist.get_world_size()
    parameter = nn.Parameter(torch.full((weights,), float(rank * (arms or ranks) // ranks)))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    group = hdet.arms(arms) if arms else None
    scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10**6, sync_every=1, group=group)
    found = []
    for _ in range(repetitions + 1):
        optimizer.step()
        dist.barrier()
        before, began = loopback(), time.perf_counter()
        dist.barrier()  # all have looked
        scheduler.step(torch.tensor(1.0))
        took = time.perf_counter() - began
        dist.barrier()
        after = loopback()
        sent_over = None if before is None or after is None else (after - before) / (BYTES * weights)
        found.append((took, sent_over))
    return found[1:]  # the first one connects the ranks


def gloo(ranks: int, arms: int, weights: int, repetitions: int) -> dict[str, Any]:
    """A real converge; bytes are those of the repetition that other programs disturbed least."""
    answers = run_ranks(on_rank, ranks, weights, repetitions, arms, timeout=300.0)
    copies = [over for _, over in answers[0] if over is not None]
    return {
        "ranks": ranks,
        "arms": arms,
        "weights": weights,
        "seconds": min(max(took) for took in zip(*([took for took, _ in own] for own in answers), strict=True)),
        "copies_sent": min(copies) if copies else None,
        "copies_calculated": ranks * sent(ranks, WITH_ADAM if arms else 1, weights) / (BYTES * weights),
    }


def stacked(replicas: int, weights: int, repetitions: int) -> dict[str, Any]:
    """The mean over rows, written to all of them: what the rows hold is read once and written once."""
    rows = torch.randn(replicas, weights)

    def mean() -> None:
        rows.copy_(rows.mean(0, keepdim=True).expand_as(rows))

    ms = timed({"mean": mean}, repetitions)["mean"]["median"]
    return {"replicas": replicas, "weights": weights, "ms": ms, "gb_per_s": 2 * rows.nbytes / 1e6 / ms}


def measured(replicas: tuple[int, ...], repetitions: int, weights: int) -> dict[str, Any]:
    """What this machine can show."""
    torch.set_num_threads(1)
    return {
        "host": [host(n, repetitions) for n in replicas],
        "gloo": [gloo(ranks, arms, weights, 3) for ranks, arms in ((2, 0), (2, 2), (4, 0), (4, 4), (4, 2))],
        "stacked": [stacked(n, max(1, 4 * weights // n), 3) for n in replicas],
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
    }


def main(words: list[str] | None = None) -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = line.add_argument_group("the model")
    model.add_argument("--calculated", action="store_true", help="measure nothing")
    model.add_argument("--ranks", type=int, nargs="+", default=REPLICAS, help="default: 8 64 1024")
    model.add_argument("--weights", type=float, default=WEIGHTS, help="that a rank holds (default: 1e9)")
    model.add_argument("--bandwidth", type=float, nargs="+", default=BANDWIDTHS, help="GB/s (default: 450 50 12.5)")
    model.add_argument("--hop", type=float, default=1e6 * HOP, help="microseconds (default: 10)")
    line.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help="whose host work is measured")
    line.add_argument("--repetitions", type=int, default=30, help="of what takes milliseconds (default: 30)")
    line.add_argument("--converged", type=int, default=4_000_000, help="weights of the real converge")
    line.add_argument("--write", type=Path, help="a file for all of it as JSON; otherwise it is printed")
    given = line.parse_args(words)
    if min(*given.ranks, *given.replicas) < 2:
        line.error("--ranks and --replicas must be at least 2")
    if min(given.repetitions, given.converged, given.weights) < 1 or min(*given.bandwidth, given.hop) <= 0:
        line.error("--repetitions, --converged and --weights must be at least 1, --bandwidth and --hop above 0")
    found: dict[str, Any] = {"calculated": calculated(given.ranks, given.bandwidth, given.hop / 1e6, given.weights)}
    if not given.calculated:
        found |= measured(tuple(given.replicas), given.repetitions, given.converged)
    text = json.dumps(found, indent=1) + "\n"
    if given.write is None:
        print(text, end="")
    else:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text)


if __name__ == "__main__":
    main()
