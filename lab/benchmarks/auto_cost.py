"""What finding the rate adds to plain training: whole runs, memory, and the parts that the time is made of.

    python lab/benchmarks/auto_cost.py --write lab/benchmarks/results/auto_cost.json      # on a GPU, some ten minutes
    python lab/benchmarks/auto_cost.py --device cpu --ranks 1,2,4                     # two cores, two minutes

A GPT trains with AdamW, with torch's OneCycleLR and with ``max_lr="auto"``, which is given the loss. On a GPU:

- **Time.** Two runs of one model go on in turns of some steps, warmed up; a row has the ratio of their times. Compiled
  models begin cold: every run is a process of its own with an empty cache, and its time has the compiling in it.
- **Memory.** By how much the largest number of bytes that are allocated at once is above that of a run with torch's
  scheduler, in units of the weights' bytes: while the rate is searched, and once the schedule falls; with snapshots to
  go back to, and with ``rollback=False``. And what lies in host memory.
- **Parts**, in ms: a training ``step``; a ``look``, which is what a step adds whose gradients are sampled; ``keep``, a
  snapshot of weights and optimizer state on the device; ``keep_host``, one in host memory; an ``end`` of a round as a
  whole, half of them with either. ``computed`` is the ratio that follows from them, for any length:

    1 + (looks * look + rounds * end) / (steps * step)

Steps that are repeated after going back are not in it, and copies to the host that go on beside training count in full.
On a CPU, and for several gloo ranks, the parts are timed, and memory is what tensors hold after a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from gpt import GPT, SIZES, Size, batches, loss_of
from harness import parser, run_ranks, show
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.rollback.snapshots import Snapshots
from hdet.search.constants import DEFAULT
from hdet.search.measure import Measure
from hdet.search.rule import next_end

GUESS, RATE = 1e-3, 1e-3
PCT_START = 0.3
"""Of OneCycle, as in torch."""
BATCHES = 64
REPEATED = 20
BLOCK = 20
"""Steps of one run before the other goes on."""
LONG = 10_000
"""Steps of a run whose rounds are timed one by one."""
HELD = 60
"""Steps of a run whose memory is measured; the schedule falls after some 26 of them."""
ON_DEVICE, ON_HOST = 0, 1
"""Slots of snapshots."""


class Row(NamedTuple):
    """A model, a length, and whether it is compiled."""

    model: str
    steps: int
    compiled: bool = False
    target: float = 0.0
    """Of the ratio; of a compiled model the seconds that may be added."""
    turns: int = 3
    """Runs of each kind, of which the median counts."""


ROWS = (
    Row("gpt-0.8M", 200),
    Row("gpt-0.8M", 1000, target=1.05),
    Row("gpt-0.8M", 10_000, target=1.01, turns=1),
    Row("gpt-86M", 200, target=1.10),
    Row("gpt-86M", 1000, target=1.03, turns=2),
    Row("gpt-86M", 10_000, turns=1),
    Row("gpt-86M", 200, compiled=True, target=1.0, turns=2),
)
REMEMBERED = ("gpt-86M", "gpt-1B")
"""Models whose memory is measured."""
TARGETS = {"searching": 5.0, "descent": 3.0, "searching_go_back_false": 2.0, "descent_go_back_false": 0.0}
"""Of memory, in units of the weights' bytes."""


class Bench:
    """One model with its batches; runs on it begin from the same weights."""

    def __init__(self, size: Size, device: torch.device, compiled: bool = False, ddp: bool = False) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.plain = GPT(size).to(device)
        self.model: Any = DistributedDataParallel(self.plain) if ddp else self.plain
        if compiled:
            self.model = torch.compile(self.model)
        self.first = [p.detach().to("cpu", copy=True) for p in self.plain.parameters()]
        self.batches = batches(size, BATCHES, device)

    @property
    def weights(self) -> list[Tensor]:
        return list(self.plain.parameters())

    def begin(self, steps: int, auto: bool, **more: Any) -> tuple[torch.optim.AdamW, Any]:
        """Weights as at first, a new optimizer and scheduler."""
        with torch.no_grad():
            for p, value in zip(self.weights, self.first, strict=True):
                p.copy_(value)
        optimizer = torch.optim.AdamW(self.weights, lr=GUESS)
        if auto:
            return optimizer, hdet.OneCycleLR(optimizer, "auto", total_steps=steps, **more)
        return optimizer, OneCycleLR(optimizer, RATE, total_steps=steps)

    def step(self, t: int, optimizer: torch.optim.Optimizer) -> Tensor:
        """Forward, backward and update; the loss."""
        optimizer.zero_grad()
        loss = loss_of(self.size, self.model, self.batches[t % BATCHES])
        loss.backward()
        optimizer.step()
        return loss.detach()

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
            _advance(scheduler, self.step(t, optimizer))

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
        ends: dict[int, list[float]] = {ON_DEVICE: [], ON_HOST: []}
        search = scheduler._run
        for t in range(60):
            loss, ended = self.step(t, optimizer) - t, search.memory.rounds  # it falls, or no snapshot is renewed
            took = self.seconds(lambda loss=loss: scheduler.step(loss))  # type: ignore[misc]
            if t > 8 and search.memory.rounds > ended:
                ends[search.found.snapshots[-1].slot].append(took)
        alone = self._alone()
        measure, snapshots = Measure([0]), Snapshots()
        measure.set_origin(optimizer)
        timed = {
            "look": lambda: measure.sample(optimizer),
            "keep": lambda: snapshots.keep(ON_DEVICE, optimizer, None),
            "keep_host": lambda: snapshots.keep(ON_HOST, optimizer, None),
        }
        found = {"step": alone, "end": fmean(median(own) for own in ends.values())}
        for name, work in timed.items():
            work()
            found[name] = median(self.seconds(work) for _ in range(REPEATED))
        return {name: 1e3 * value for name, value in found.items()}

    def _alone(self) -> float:
        """Median seconds of a training step with torch's scheduler."""
        optimizer, scheduler = self.begin(LONG, auto=False)
        took = []
        for t in range(REPEATED):
            took.append(self.seconds(lambda t=t: (self.step(t, optimizer), scheduler.step())))  # type: ignore[misc]
        return median(took)

    def memory(self) -> dict[str, float]:
        """What auto takes, in units of the weights' bytes, on the device and in host memory."""
        unit = sum(p.nbytes for p in self.weights)
        plain = self._peaks(auto=False)
        found: dict[str, float] = {}
        for name, more in (("", {}), ("_go_back_false", {"rollback": False})):
            for phase, (device, host) in self._peaks(auto=True, **more).items():
                found[f"{phase}{name}"] = (device - plain[phase][0]) / unit
                if self.device.type == "cuda":
                    found[f"{phase}{name}_host"] = (host - plain[phase][1]) / unit
        return found

    def _peaks(self, auto: bool, **more: Any) -> dict[str, tuple[int, int]]:
        """The most bytes at once on the device, and bytes in host memory, while the rate is searched and afterwards."""
        optimizer, scheduler = self.begin(HELD, auto, **more)
        found = {}
        for phase, until in (("searching", HELD // 3), ("descent", HELD - 2)):
            with _counted(self.device) as peak:
                for t in range(scheduler.last_epoch, until):
                    _advance(scheduler, self.step(t, optimizer))
                found[phase] = peak(), _alive("cpu")
            for t in range(until, until + HELD // 4 if phase == "searching" else until):  # into the descent
                _advance(scheduler, self.step(t, optimizer))
            optimizer.zero_grad()
        return found


def _advance(scheduler: Any, loss: Tensor) -> None:
    """hdet's scheduler is given the loss."""
    if isinstance(scheduler, hdet.OneCycleLR):
        scheduler.step(loss)
    else:
        scheduler.step()


@contextmanager
def _counted(device: torch.device) -> Iterator[Callable[[], int]]:
    """Inside, a function that tells the most bytes at once since; on a CPU those of now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
    else:
        yield lambda: _alive("cpu")


def _alive(kind: str) -> int:
    """Bytes of all tensors that anybody holds on such devices."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, torch.nn.Parameter) and one.device.type == kind:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class _Turns:
    """A run that goes on block by block, between others of the same model."""

    def __init__(self, bench: Bench, steps: int, auto: bool) -> None:
        self.bench, self.steps = bench, steps
        self.optimizer, self.scheduler = bench.begin(steps, auto)
        self.weights = [p.detach().clone() for p in bench.weights]
        self.done = 0
        self.seconds: list[float] = []

    def block(self) -> None:
        """The next steps, timed."""
        with torch.no_grad():
            torch._foreach_copy_(self.bench.weights, self.weights)
        self.seconds.append(self.bench.seconds(self._steps))
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.bench.weights)

    def _steps(self) -> None:
        until = min(self.done + BLOCK, self.steps)
        for t in range(self.done, until):
            _advance(self.scheduler, self.bench.step(t, self.optimizer))
        self.done = until


def round_ends(steps: int) -> list[int]:
    """The last step of each round: rounds grow, and the last two end at S - 1 and S.

    >>> len(round_ends(100))
    20
    """
    ends = [1]
    while (end := next_end(ends[-1])) < steps - 1:
        ends.append(end)
    return [*ends, *(end for end in (steps - 1, steps) if end > ends[-1])]


def looks(steps: int) -> int:
    """How many steps are looked at: at most ``sampled`` in each round that begins before the schedule falls.

    >>> looks(100)
    51
    """
    falls = PCT_START + (1 - PCT_START) * math.acos(2 * DEFAULT.fall_start - 1) / math.pi
    ends = round_ends(steps)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False) if start < falls * steps]
    return sum(math.ceil(length / math.ceil(length / DEFAULT.max_samples)) for length in lengths)


def computed(parts_ms: dict[str, float], steps: int) -> float:
    """The ratio that follows from the parts.

    >>> computed({"step": 1.0, "look": 0.0, "end": 1.0}, 100)
    1.2
    """
    added = looks(steps) * parts_ms["look"] + len(round_ends(steps)) * parts_ms["end"]
    return 1 + added / (steps * parts_ms["step"])


# Compiled models ------------------------------------------------------------------------------------------------------


def cold(model: str, device: str, steps: int, auto: bool) -> dict[str, float]:
    """A whole run of a compiled model in this process: seconds with the compiling, and the graphs that it has made."""
    bench = Bench(SIZES[model], torch.device(device), compiled=True)
    seconds = bench.seconds(lambda: bench.train(steps, auto))
    return {"seconds": seconds, "graphs": float(torch._dynamo.utils.counters["stats"]["unique_graphs"])}


def cold_runs(model: str, device: str, steps: int, turns: int) -> dict[str, Any]:
    """Without and with auto in turns, each in a process of its own with an empty cache."""
    found: dict[str, list[dict[str, float]]] = {"torch": [], "auto": []}
    for _ in range(turns):
        for kind, runs in found.items():
            runs.append(_in_a_new_process(model, device, steps, kind))
    seconds = {kind: [run["seconds"] for run in runs] for kind, runs in found.items()}
    ratios = [auto / plain for plain, auto in zip(seconds["torch"], seconds["auto"], strict=True)]
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "seconds": seconds,
        "added_seconds": median(seconds["auto"]) - median(seconds["torch"]),
        "graphs": {kind: [run["graphs"] for run in runs] for kind, runs in found.items()},
    }


def _in_a_new_process(model: str, device: str, steps: int, kind: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, __file__, "--device", device, "--cold", kind, "--size", model, "--steps", str(steps)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# Tables ---------------------------------------------------------------------------------------------------------------


class Table:
    """What was measured so far, in a file that is written after each row; what it has is not measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.rows: list[dict[str, Any]] = known.get("rows", [])
        self.memory: list[dict[str, Any]] = known.get("memory", [])
        self.more: dict[str, Any] = {}

    def has(self, row: Row) -> bool:
        return any(
            (one["model"], one["steps"], one["compiled"]) == (row.model, row.steps, row.compiled) for one in self.rows
        )

    def has_memory(self, model: str) -> bool:
        return any(one["model"] == model for one in self.memory)

    def write(self) -> dict[str, Any]:
        """All of it."""
        self.rows.sort(key=lambda row: (row["parameters"], row["compiled"], row["steps"]))
        self.memory.sort(key=lambda row: row["parameters"])
        result = {"rows": self.rows, "memory": self.memory, **self.more}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(result, indent=1) + "\n")
        return result


def on_gpu(rows: Sequence[Row], memory: Sequence[str], until: float, path: Path | None) -> dict[str, Any]:
    """All rows, those of a model one after the other; none is begun after ``until``."""
    device = torch.device("cuda")
    table = Table(path)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "hdet": hdet.__version__}
    table.more = {"versions": versions}
    rows = [row for row in rows if not table.has(row)]
    for name, compiled in dict.fromkeys((row.model, row.compiled) for row in rows):
        if time.time() > until:
            print(f"no time left for {name}", flush=True)
            continue
        bench = Bench(SIZES[name], device, compiled)
        bench.train(60, auto=True)  # kernels are loaded, models compiled
        bench.train(20, auto=False)
        about = {**about_model(bench, name), "parts_ms": bench.parts()}
        if compiled:
            bench.model = None  # the memory is for the processes to come
        for row in (row for row in rows if (row.model, row.compiled) == (name, compiled)):
            if time.time() > until:
                print(f"no time left for {row}", flush=True)
                continue
            made = {**about, "steps": row.steps, "compiled": compiled, "target": row.target}
            made |= cold_runs(name, "cuda", row.steps, row.turns) if compiled else warm_runs(bench, row)
            table.rows.append({**made, "computed": computed(about["parts_ms"], row.steps)})
            table.write()
            shown = ("model", "steps", "compiled", "ratio", "ratios", "added_seconds", "graphs", "target")
            print(json.dumps({key: made[key] for key in shown if key in made}), flush=True)
        del bench
        torch.cuda.empty_cache()
    for name in memory:
        if table.has_memory(name) or time.time() > until:
            continue
        bench = Bench(SIZES[name], device)
        table.memory.append({**about_model(bench, name), **bench.memory(), "targets": TARGETS})
        table.write()
        print(json.dumps(table.memory[-1]), flush=True)
        del bench
        torch.cuda.empty_cache()
    return table.write()


def about_model(bench: Bench, name: str) -> dict[str, Any]:
    """What a row says about its model."""
    return {
        "model": name,
        "parameters": sum(p.numel() for p in bench.weights),
        "tensors": len(bench.weights),
        "tokens": bench.size.batch * bench.size.context,
    }


def warm_runs(bench: Bench, row: Row) -> dict[str, Any]:
    """Runs in turns of blocks."""
    turns = [bench.seconds_of_blocks(row.steps) for _ in range(row.turns)]
    ratios = [sum(auto) / sum(plain) for plain, auto in turns]
    return {"ratio": median(ratios), "ratios": ratios}


def parts_of_rank(rank: int, model: str) -> dict[str, float]:
    """On one of several gloo ranks under DDP."""
    return Bench(SIZES[model], torch.device("cpu"), ddp=torch.distributed.get_world_size() > 1).parts()


def on_cpu(ranks: Sequence[int], model: str, timeout: float) -> dict[str, float]:
    """Parts of real gloo ranks, of which the slowest counts, what follows from them, and memory."""
    result: dict[str, float] = {}
    for n in ranks:
        every = run_ranks(parts_of_rank, n, model, timeout=timeout)
        parts = {name: max(one[name] for one in every) for name in every[0]}
        result |= {f"ranks_{n}_{name}_ms": value for name, value in parts.items()}
        for steps in (200, 1000, 10_000):
            result[f"ranks_{n}_percent_S_{steps}"] = 100 * (computed(parts, steps) - 1)
    memory = Bench(SIZES[model], torch.device("cpu")).memory()
    return result | {f"memory_{name}": value for name, value in memory.items()}


def main() -> None:
    line: argparse.ArgumentParser = parser(__doc__)
    line.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    line.add_argument("--models", default=",".join(dict.fromkeys(row.model for row in ROWS)), help="of the GPU's rows")
    line.add_argument("--memory", default=",".join(REMEMBERED), help="models whose memory is measured on the GPU")
    line.add_argument("--long", action="store_true", help="also the runs of 10 000 steps: ten minutes more")
    line.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    line.add_argument("--write", type=Path, help="the GPU's rows, as JSON; rows that the file has are not run again")
    line.add_argument("--ranks", default="1,2,4", help="gloo processes on the CPU (default: 1,2,4)")
    line.add_argument("--size", choices=SIZES, default="gpt-0.8M", help="of the CPU's model")
    line.add_argument("--timeout", type=float, default=300.0, help="seconds for the ranks of one row on the CPU")
    line.add_argument("--cold", choices=("torch", "auto"), help="only one compiled run of --size, with its compiling")
    line.add_argument("--steps", type=int, default=200, help="of that run (default: 200)")
    given = line.parse_args()
    if given.cold is not None:
        print(json.dumps(cold(given.size, given.device, given.steps, given.cold == "auto")), flush=True)
        return
    if given.device == "cpu":
        show(on_cpu([int(n) for n in given.ranks.split(",")], given.size, given.timeout), {}, given.json)
        return
    rows = [row for row in ROWS if row.model in given.models.split(",") and (given.long or row.steps < LONG)]
    memory = [name for name in given.memory.split(",") if name]
    result = on_gpu(rows, memory, time.time() + given.seconds, given.write)
    if given.json:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
