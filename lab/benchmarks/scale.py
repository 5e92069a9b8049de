"""What a round's end costs with 8, 64 and 1024 replicas: bytes and seconds by a model, and what can be measured here.

    python lab/benchmarks/scale.py --write lab/benchmarks/results/scale.json      # two cores, about two minutes

- **calculated** (nothing runs): bytes that each rank sends in a converge, and seconds at stated bandwidths. An
  all-reduce sends 2 (N - 1) / N times what is averaged, in fp32: the weights, and with arms under Adam two moments
  too. Buckets of 16 MiB each also wait 2 ceil(log2 N) times for a hop (NCCL's tree).
- **host**: the time that training waits for Python at a round's end: the CPU time of the fastest of several rounds of
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
from collections.abc import Callable
from pathlib import Path
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
BANDWIDTHS = {"450 GB/s (NVLink)": 450e9, "50 GB/s (400 Gb/s)": 50e9, "12.5 GB/s (100 Gb/s)": 12.5e9}
"""Bytes a second that one rank sends."""
HOP = 10e-6
"""Seconds from one rank to the next, an assumption."""
BUCKET = EXTRA_BYTES // 4
"""Bytes of a bucket on a device."""
ROW = 9
"""Numbers of 8 bytes that a rank gathers at a round's end."""


def sent(replicas: int, tensors: int = 1, weights: int = WEIGHTS) -> float:
    """Bytes that each rank sends in a converge.

    >>> sent(8) / 1e9, sent(8, WITH_ADAM) / 1e9
    (7.0, 21.0)
    """
    return 2 * (replicas - 1) / replicas * BYTES * weights * tensors


def seconds(replicas: int, bandwidth: float, tensors: int = 1, weights: int = WEIGHTS) -> float:
    """A converge, if only the network counts.

    >>> round(seconds(8, 50e9), 3), round(seconds(8, 50e9) - sent(8) / 50e9, 3)
    (0.154, 0.014)
    """
    hops = math.ceil(BYTES * weights * tensors / BUCKET) * 2 * math.ceil(math.log2(replicas))
    return sent(replicas, tensors, weights) / bandwidth + HOP * hops


def calculated() -> list[dict[str, Any]]:
    """A row for each number of replicas."""
    return [
        {
            "replicas": n,
            "sent_gb": {"shared": sent(n) / 1e9, "arms": sent(n, WITH_ADAM) / 1e9},
            "seconds": {
                name: {"shared": seconds(n, speed), "arms": seconds(n, speed, WITH_ADAM)}
                for name, speed in BANDWIDTHS.items()
            },
            "gathered_kb": ROW * 8 * n / 1e3,
        }
        for n in REPLICAS
    ]


def fastest(work: Callable[[], object], repetitions: int) -> float:
    """Milliseconds of CPU time."""
    took = []
    for _ in range(repetitions):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return 1e3 * min(took)


def host(replicas: int, repetitions: int) -> dict[str, Any]:
    """Milliseconds of the host's parts and of whole ends of rounds; what the journal and Python's lists take."""
    rng = random.Random(0)
    signals, rounds = [rng.gauss(1, 0.1) for _ in range(replicas)], iter(range(1, 10**9))
    places = {knobs: Balanced().places(replicas, knobs, 0, 1) for knobs in (1, 2, 4)}
    found: dict[str, Any] = {"replicas": replicas}
    for knobs, x in places.items():
        parts: dict[str, Callable[[], object]] = {
            "permuted": lambda knobs=knobs: Permuted().places(replicas, knobs, 0, next(rounds)),  # type: ignore[misc]
            "balanced": lambda knobs=knobs: Balanced().places(replicas, knobs, 0, next(rounds)),  # type: ignore[misc]
        }
        for rule in (Corrected(), Normalised()):
            state = rule.init(knobs)
            name = type(rule).__name__.lower()
            parts[name] = lambda rule=rule, state=state, x=x: rule.update(state, signals, x)  # type: ignore[misc]
        found |= {f"{name}_{knobs}": fastest(work, repetitions) for name, work in parts.items()}
    found |= {f"end_{groups}": _end(replicas, groups, repetitions)["ms"] for groups in (1, 4)}
    journal = _end(replicas, 4, repetitions, journal=True)
    return found | {"end_4_journal": journal["ms"], "line_kb": journal["line_kb"], "lists_kb": journal["lists_kb"]}


def _end(replicas: int, groups: int, repetitions: int, journal: bool = False) -> dict[str, float]:
    """The end of a round and the beginning of the next, of one rank among many that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=replicas)
    written = io.StringIO()
    try:
        parameters = [nn.Parameter(torch.zeros(4)) for _ in range(groups)]
        optimizer = torch.optim.Adam([{"params": [p]} for p in parameters], lr=0.1)
        more = {"journal": _Lines(written)} if journal else {}
        scheduler = hdet.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=10**6, sync_every=2, auto_lr=True, auto_lr_start=2, **more
        )

        def a_round() -> None:
            for _ in range(2):
                optimizer.step()
                scheduler.step(torch.tensor(1.0))

        a_round()
        ms, before = fastest(a_round, repetitions), len(written.getvalue())
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


def on_rank(rank: int, weights: int, repetitions: int, with_arms: bool) -> list[tuple[float, float | None]]:
    """For each repetition seconds of a round's end, and all ranks' bytes over those of one copy of the weights."""
    parameter = nn.Parameter(torch.full((weights,), float(rank)))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    group = hdet.arms(dist.get_world_size()) if with_arms else None
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


def gloo(ranks: int, weights: int, repetitions: int) -> dict[str, Any]:
    """A real converge; bytes are those of the repetition that other programs disturbed least."""
    row: dict[str, Any] = {"ranks": ranks, "weights": weights}
    for name, with_arms in (("shared", False), ("arms", True)):
        answers = run_ranks(on_rank, ranks, weights, repetitions, with_arms, timeout=300.0)
        copies = [over for _, over in answers[0] if over is not None]
        tensors = WITH_ADAM if with_arms else 1
        row[name] = {
            "seconds": min(max(took) for took in zip(*([took for took, _ in own] for own in answers), strict=True)),
            "copies_sent": min(copies) if copies else None,
            "copies_calculated": ranks * sent(ranks, tensors, weights) / (BYTES * weights),
        }
    return row


def stacked(replicas: int, weights: int, repetitions: int) -> dict[str, Any]:
    """The mean over rows, written to all of them: what the rows hold is read once and written once."""
    rows = torch.randn(replicas, weights)

    def mean() -> None:
        rows.copy_(rows.mean(0, keepdim=True).expand_as(rows))

    ms = fastest(mean, repetitions)
    return {"replicas": replicas, "weights": weights, "ms": ms, "gb_per_s": 2 * rows.nbytes / 1e6 / ms}


def measured(replicas: tuple[int, ...], repetitions: int, weights: int) -> dict[str, Any]:
    """What this machine can show."""
    torch.set_num_threads(1)
    return {
        "host": [host(n, repetitions) for n in replicas],
        "gloo": [gloo(n, weights, 3) for n in (2, 4)],
        "stacked": [stacked(n, max(1, 4 * weights // n), 3) for n in replicas],
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
    }


def main(words: list[str] | None = None) -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help="whose host work is measured")
    line.add_argument("--repetitions", type=int, default=30, help="of what takes milliseconds (default: 30)")
    line.add_argument("--weights", type=int, default=4_000_000, help="of the real converge (default: 4,000,000)")
    line.add_argument("--write", type=Path, help="a file for all of it as JSON; otherwise it is printed")
    given = line.parse_args(words)
    if min(given.replicas) < 2 or given.repetitions < 1 or given.weights < 1:
        line.error("--replicas must be at least 2, --repetitions and --weights at least 1")
    found = {"calculated": calculated(), **measured(tuple(given.replicas), given.repetitions, given.weights)}
    text = json.dumps(found, indent=1) + "\n"
    if given.write is None:
        print(text, end="")
    else:
        given.write.parent.mkdir(parents=True, exist_ok=True)
        given.write.write_text(text)


if __name__ == "__main__":
    main()
