"""What finding the rate adds to plain training: whole runs on a GPU, and the parts that they are made of.

    python benchmarks/probed.py --write benchmarks/results/probed_gpu.json      # on a GPU, five minutes
    python benchmarks/probed.py --device cpu --ranks 1,2,4                      # two cores, two minutes

A GPT trains with torch's OneCycleLR and with ``max_lr="auto"``, probe batches as large as training batches, AdamW. A
row of the GPU has the ratio of the times of whole runs, which go on in turns of some steps, warmed up; compiled models
have compiled everything before. ``landed`` is the same ratio of the last steps, where there is nothing left to find.
Parts, in ms: a training ``step``; a ``look``, which is what a step that is listened to adds; a ``forward`` of the
probe; ``keep``, the copy of weights and optimizer state; ``swap``, earlier weights put in place and back; an ``end`` of
a round as a whole. ``computed`` is the ratio that follows from them, for any length:

    1 + (looks * look + rounds * end) / (steps * step)

Steps that are repeated after going back are not in it. On a CPU, and for several gloo ranks, only the parts are timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from cost_model import looks, rounds
from gpt import GPT, SIZES, Size, batches, loss_of
from harness import parser, run_ranks, show
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.origin import Origin
from hdet.engine.probed.slots import Slots

GUESS, RATE = 1e-3, 1e-3
BATCHES = 64
REPEATED = 20
BLOCK = 20
"""Steps of one run before the other goes on."""
FALLING = 3
"""The last blocks of a run: the rate falls, and nothing is to be found any more."""
LONG = 10_000
"""Steps of a run whose rounds are timed one by one."""


class Row(NamedTuple):
    """A model, a length, and whether it is compiled."""

    model: str
    steps: int
    compiled: bool
    target: float
    turns: int = 1
    """Runs of each kind, of which the median counts."""


ROWS = (
    Row("gpt-0.8M", 200, False, 1.30, 3),
    Row("gpt-0.8M", 1000, False, 1.08, 3),
    Row("gpt-0.8M", 10_000, False, 1.01),
    Row("gpt-10M", 1000, False, 1.06, 3),
    Row("gpt-86M", 200, False, 1.25, 3),
    Row("gpt-86M", 1000, False, 1.06, 2),
    Row("gpt-86M", 200, True, 1.30, 3),
)


class Bench:
    """One model with its batches; runs on it begin from the same weights."""

    def __init__(self, size: Size, device: torch.device, compiled: bool = False, ddp: bool = False) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.plain = GPT(size).to(device)
        self.model: Any = DistributedDataParallel(self.plain) if ddp else self.plain
        if compiled:
            self.model = torch.compile(self.model)
        self.first = [p.detach().clone() for p in self.plain.parameters()]
        self.batches, self.probes = batches(size, BATCHES, device), batches(size, 2 * BATCHES, device)[BATCHES:]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(self.size, model, batch)

    def begin(self, steps: int, auto: bool) -> tuple[torch.optim.AdamW, Any]:
        """Weights as at first, a new optimizer and scheduler."""
        with torch.no_grad():
            for p, value in zip(self.plain.parameters(), self.first, strict=True):
                p.copy_(value)
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=GUESS)
        if not auto:
            return optimizer, OneCycleLR(optimizer, RATE, total_steps=steps)
        probe = hdet.ProbeBatch(self.model, self.loss, lambda k: self.probes[k % BATCHES])
        return optimizer, hdet.OneCycleLR(optimizer, "auto", total_steps=steps, probe=probe)

    def step(self, t: int, optimizer: torch.optim.Optimizer) -> None:
        """Forward, backward and update."""
        optimizer.zero_grad()
        self.loss(self.model, self.batches[t % BATCHES]).backward()
        optimizer.step()

    def seconds(self, work: Callable[[], object]) -> float:
        """Of some work, with all that the device has to do for it."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def train(self, steps: int, auto: bool) -> None:
        """A whole run."""
        optimizer, scheduler = self.begin(steps, auto)
        for t in range(steps):
            self.step(t, optimizer)
            scheduler.step()

    def seconds_of_blocks(self, steps: int) -> tuple[list[float], list[float]]:
        """Two runs of the same model, without and with auto, in turns of ``BLOCK`` steps: a noise that lasts hits both.

        What puts the weights of one in the place of the other's is not counted.
        """
        runs = [_Turns(self, steps, auto) for auto in (False, True)]
        for block in range(-(-steps // BLOCK)):
            for run in runs if block % 2 == 0 else runs[::-1]:
                run.block()
        return runs[0].seconds, runs[1].seconds

    def parts(self) -> dict[str, float]:
        """Median ms of each part."""
        optimizer, scheduler = self.begin(LONG, auto=True)
        ends, steps = [], []
        for t in range(40):
            steps.append(self.seconds(lambda t=t: self.step(t, optimizer)))  # type: ignore[misc]
            took = self.seconds(scheduler.step)
            ends += [took] if t > 8 and scheduler._run.way.rounds.ends_at(t + 1) else []
        plain, torchs = self.begin(LONG, auto=False)
        alone = []
        for t in range(REPEATED):
            alone.append(self.seconds(lambda t=t: (self.step(t, plain), torchs.step())))  # type: ignore[misc]
        probe, slots = scheduler._run.way.probe, Slots()
        weights = list(self.plain.parameters())
        origin, gradients = Origin(weights), Gradients()
        slots.keep(0, optimizer, self.plain)

        def swap() -> None:
            with slots.shown(0, optimizer, self.plain):
                pass

        timed = {
            "look": lambda: gradients.add(origin, weights, weights, 1e-3),
            "forward": probe,
            "keep": lambda: slots.keep(0, optimizer, self.plain),
            "swap": swap,
        }
        found = {"step": median(alone), "end": median(ends)}
        for name, work in timed.items():
            work()
            found[name] = median(self.seconds(work) for _ in range(REPEATED))
        return {name: 1e3 * value for name, value in found.items()}


class _Turns:
    """A run that goes on block by block, between others of the same model."""

    def __init__(self, bench: Bench, steps: int, auto: bool) -> None:
        self.bench, self.steps = bench, steps
        self.optimizer, self.scheduler = bench.begin(steps, auto)
        self.weights = [p.detach().clone() for p in bench.plain.parameters()]
        self.done = 0
        self.seconds: list[float] = []

    def block(self) -> None:
        """The next steps, timed."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.bench.plain.parameters()), self.weights)
        self.seconds.append(self.bench.seconds(self._steps))
        with torch.no_grad():
            torch._foreach_copy_(self.weights, list(self.bench.plain.parameters()))

    def _steps(self) -> None:
        until = min(self.done + BLOCK, self.steps)
        for t in range(self.done, until):
            self.bench.step(t, self.optimizer)
            self.scheduler.step()
        self.done = until


def computed(parts_ms: dict[str, float], steps: int) -> float:
    """The ratio that follows from the parts.

    >>> computed({"step": 1.0, "look": 0.0, "end": 1.0}, 100)
    1.2
    """
    added = looks(steps) * parts_ms["look"] + rounds(steps) * parts_ms["end"]
    return 1 + added / (steps * parts_ms["step"])


def copy_speeds(device: torch.device, size: int = 1 << 28) -> dict[str, float]:
    """GB/s of copies inside the device, and to pinned and pageable host memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    targets = {"device": torch.empty_like(source), "pageable": torch.empty(size, dtype=torch.uint8)}
    targets["pinned"] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found = {}
    for name, target in targets.items():
        took = []
        for _ in range(4):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            took.append(time.perf_counter() - began)
        found[name] = size / min(took) / 1e9
    return found


def on_gpu(rows: Sequence[Row], until: float, path: Path | None) -> dict[str, Any]:
    """All rows, those of a model one after the other; none is begun after ``until``.

    ``path`` has those so far; rows that it has are not run again.
    """
    device = torch.device("cuda")
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "hdet": hdet.__version__}
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    known = {(row["model"], row["steps"], row["compiled"]) for row in found}
    rows = [row for row in rows if (row.model, row.steps, row.compiled) not in known]
    result = {"rows": found, "copy_gb_per_s": copy_speeds(device), "versions": versions}
    for name, compiled in dict.fromkeys((row.model, row.compiled) for row in rows):
        bench = Bench(SIZES[name], device, compiled)
        bench.train(60, auto=True)  # kernels are loaded, models compiled
        bench.train(20, auto=False)
        parts = bench.parts()
        for row in rows:
            if (row.model, row.compiled) != (name, compiled):
                continue
            if time.time() > until:
                print(f"no time left for {row}", flush=True)
                continue
            turns = [bench.seconds_of_blocks(row.steps) for _ in range(row.turns)]
            ratios = [sum(auto) / sum(plain) for plain, auto in turns]
            made = {
                "model": row.model,
                "parameters": sum(p.numel() for p in bench.plain.parameters()),
                "tensors": len(list(bench.plain.parameters())),
                "tokens": bench.size.batch * bench.size.context,
                "steps": row.steps,
                "compiled": row.compiled,
                "ratio": median(ratios),
                "ratios": ratios,
                "landed": median(median(auto[-FALLING:]) / median(plain[-FALLING:]) for plain, auto in turns),
                "target": row.target,
                "computed": computed(parts, row.steps),
                "parts_ms": parts,
            }
            found.append(made)
            found.sort(key=lambda row: (row["parameters"], row["compiled"], row["steps"]))
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({key: made[key] for key in ("model", "steps", "compiled", "ratio", "ratios", "landed", "target")}), flush=True)
        del bench
        torch.cuda.empty_cache()
    return result


def parts_of_rank(rank: int, model: str) -> dict[str, float]:
    """On one of several gloo ranks under DDP."""
    return Bench(SIZES[model], torch.device("cpu"), ddp=torch.distributed.get_world_size() > 1).parts()


def on_cpu(ranks: Sequence[int], model: str, timeout: float) -> dict[str, float]:
    """Parts of real gloo ranks, of which the slowest counts, and what follows from them."""
    result: dict[str, float] = {}
    for n in ranks:
        every = run_ranks(parts_of_rank, n, model, timeout=timeout)
        parts = {name: max(one[name] for one in every) for name in every[0]}
        result |= {f"ranks_{n}_{name}_ms": value for name, value in parts.items()}
        for steps in (200, 2000, 10_000):
            result[f"ranks_{n}_percent_S_{steps}"] = 100 * (computed(parts, steps) - 1)
    return result


def main() -> None:
    line: argparse.ArgumentParser = parser(__doc__)
    line.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    line.add_argument("--models", default=",".join(dict.fromkeys(row.model for row in ROWS)), help="of the GPU's rows")
    line.add_argument("--long", action="store_true", help="also the run of 10 000 steps: some minutes more")
    line.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    line.add_argument("--write", type=Path, help="the GPU's rows, as JSON; rows that the file has are not run again")
    line.add_argument("--ranks", default="1,2,4", help="gloo processes on the CPU (default: 1,2,4)")
    line.add_argument("--size", choices=SIZES, default="gpt-0.8M", help="of the CPU's model")
    line.add_argument("--timeout", type=float, default=300.0, help="seconds for the ranks of one row on the CPU")
    given = line.parse_args()
    if given.device == "cpu":
        show(on_cpu([int(n) for n in given.ranks.split(",")], given.size, given.timeout), {}, given.json)
        return
    rows = [row for row in ROWS if row.model in given.models.split(",") and (given.long or row.steps < LONG)]
    result = on_gpu(rows, time.time() + given.seconds, given.write)
    if given.json:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
