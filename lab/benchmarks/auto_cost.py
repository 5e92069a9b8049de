"""What finding the rate adds to plain training: whole runs, memory, and the parts that the time is made of.

    python lab/benchmarks/auto_cost.py --write lab/benchmarks/results/auto_cost.json      # on a GPU, some ten minutes
    python lab/benchmarks/auto_cost.py --device cpu --models gpt-0.8M --memory gpt-0.8M   # two cores, some minutes

A GPT trains with AdamW, with torch's OneCycleLR and with ``hdet.auto``, which is given the loss.

- **Time.** Two runs of one model go on in turns of some steps, warmed up; a row has the ratio of their times.
- **Memory.** By how much the largest number of bytes that are allocated at once is above that of a run with torch's
  scheduler, in units of the weights' bytes: while the rate is searched, and once the schedule falls; with snapshots to
  go back to, and with ``rollback=False``. And what lies in host memory. On a CPU it is what tensors hold after a step.
- **Parts**, in ms: a training ``step``; a ``look``, which is what a step adds whose gradients are sampled; ``keep``, a
  snapshot of weights and optimizer state on the device; ``keep_host``, one in host memory; an ``end`` of a round as a
  whole, half of them with either.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from gpt import GPT, SIZES, Size, batches, loss_of
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.rollback.snapshots import Snapshots
from hdet.search.measure import Measure

GUESS, RATE = 1e-3, 1e-3
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
    """A model and a length."""

    model: str
    steps: int
    target: float = 0.0
    """Of the ratio."""
    turns: int = 3
    """Runs of each kind, of which the median counts."""


ROWS = (
    Row("gpt-0.8M", 200),
    Row("gpt-0.8M", 1000, target=1.05),
    Row("gpt-86M", 200, target=1.10),
    Row("gpt-86M", 1000, target=1.03, turns=2),
)
REMEMBERED = ("gpt-86M", "gpt-1B")
"""Models whose memory is measured."""
TARGETS = {"searching": 5.0, "descent": 3.0, "searching_go_back_false": 2.0, "descent_go_back_false": 0.0}
"""Of memory, in units of the weights' bytes."""


class Bench:
    """One model with its batches; runs on it begin from the same weights."""

    def __init__(self, size: Size, device: torch.device, *, fused: bool | None = None) -> None:
        torch.manual_seed(0)
        self.size, self.device, self.fused = size, device, fused
        self.model = GPT(size).to(device)
        self.first = [p.detach().to("cpu", copy=True) for p in self.model.parameters()]
        self.batches = batches(size, BATCHES, device)

    @property
    def weights(self) -> list[Tensor]:
        return list(self.model.parameters())

    @torch.no_grad()
    def restart(self) -> None:
        """The weights are as at first."""
        for p, value in zip(self.weights, self.first, strict=True):
            p.copy_(value)

    def begin(self, steps: int, auto: bool, **more: Any) -> tuple[Any, Any]:
        """Weights as at first, a new optimizer and scheduler; with ``check_every`` a guard in the scheduler's place."""
        self.restart()
        optimizer = torch.optim.AdamW(self.weights, lr=GUESS, fused=self.fused)
        if auto and "check_every" in more:
            return optimizer, hdet.Guard(optimizer, self.model, **more)
        if auto:
            return optimizer, hdet.auto(optimizer, total_steps=steps, **more)
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

    def train(self, steps: int, auto: bool, **more: Any) -> None:
        """A whole run."""
        optimizer, scheduler = self.begin(steps, auto, **more)
        for t in range(steps):
            _advance(scheduler, self.step(t, optimizer))

    def ratios(self, steps: int, turns: int, **more: Any) -> list[float]:
        """Seconds with auto over those without, of runs in turns of ``BLOCK`` steps: a noise that lasts hits both.

        What puts the weights of one in the place of the other's is not counted.
        """
        found = []
        for _ in range(turns):
            plain, auto = _Turns(self, steps, False), _Turns(self, steps, True, **more)
            for block in range(-(-steps // BLOCK)):
                for run in (plain, auto) if block % 2 == 0 else (auto, plain):
                    run.block()
            found.append(sum(auto.seconds) / sum(plain.seconds))
        return found

    def parts(self) -> dict[str, float]:
        """Median ms of each part."""
        optimizer, scheduler = self.begin(LONG, auto=True)
        ends: dict[int, list[float]] = {ON_DEVICE: [], ON_HOST: []}
        search = scheduler.search
        for t in range(60):
            loss, ended = self.step(t, optimizer) - t, search.memory.rounds  # it falls, or no snapshot is renewed
            took = self.seconds(lambda loss=loss: scheduler.step(loss))  # type: ignore[misc]
            if t > 8 and search.memory.rounds > ended:
                ends[search.learned.snapshots[-1].slot].append(took)
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
            with counted(self.device) as peak:
                for t in range(scheduler.last_epoch, until):
                    _advance(scheduler, self.step(t, optimizer))
                found[phase] = peak(), _alive("cpu")
            for t in range(until, until + HELD // 4 if phase == "searching" else until):  # into the descent
                _advance(scheduler, self.step(t, optimizer))
            optimizer.zero_grad()
        return found


def _advance(scheduler: Any, loss: Tensor) -> None:
    """What is not torch's is given the loss."""
    if type(scheduler).__module__.startswith("torch."):
        scheduler.step()
    else:
        scheduler.step(loss)


@contextmanager
def counted(device: torch.device) -> Iterator[Callable[[], int]]:
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

    def __init__(self, bench: Bench, steps: int, auto: bool, **more: Any) -> None:
        self.bench, self.steps = bench, steps
        self.optimizer, self.scheduler = bench.begin(steps, auto, **more)
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


class Table:
    """What was measured so far, in a file that is written after each row; what it has is not measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.rows: list[dict[str, Any]] = known.get("rows", [])
        self.memory: list[dict[str, Any]] = known.get("memory", [])

    def has(self, row: Row) -> bool:
        return any((one["model"], one["steps"]) == (row.model, row.steps) for one in self.rows)

    def has_memory(self, model: str) -> bool:
        return any(one["model"] == model for one in self.memory)

    def write(self, device: torch.device) -> None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        versions = {"torch": torch.__version__, "device": name, "hdet": hdet.__version__}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"rows": self.rows, "memory": self.memory, "versions": versions}
            self._path.write_text(json.dumps(content, indent=1) + "\n")


def measured(table: Table, rows: Sequence[Row], memory: Sequence[str], device: torch.device, until: float) -> None:
    """All rows, those of a model one after the other; none is begun after ``until``."""
    rows = [row for row in rows if not table.has(row)]
    for name in dict.fromkeys(row.model for row in rows):
        bench = Bench(SIZES[name], device)
        bench.train(60, auto=True)  # kernels are loaded
        bench.train(20, auto=False)
        about = {**about_model(bench, name), "parts_ms": bench.parts()}
        for row in (row for row in rows if row.model == name):
            if time.time() > until:
                print(f"no time left for {row}", flush=True)
                continue
            ratios = bench.ratios(row.steps, row.turns)
            made = {"steps": row.steps, "target": row.target, "ratio": median(ratios), "ratios": ratios}
            table.rows.append({**about, **made})
            table.write(device)
            print(json.dumps({"model": name, **made}), flush=True)
        del bench
    for name in memory:
        if table.has_memory(name) or time.time() > until:
            continue
        bench = Bench(SIZES[name], device)
        table.memory.append({**about_model(bench, name), **bench.memory(), "targets": TARGETS})
        table.write(device)
        print(json.dumps(table.memory[-1]), flush=True)
        del bench
        gc.collect()


def about_model(bench: Bench, name: str) -> dict[str, Any]:
    """What a row says about its model."""
    return {
        "model": name,
        "parameters": sum(p.numel() for p in bench.weights),
        "tensors": len(bench.weights),
        "tokens": bench.size.batch * bench.size.context,
    }


def main(words: list[str] | None = None) -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    line.add_argument("--models", default=",".join(dict.fromkeys(row.model for row in ROWS)))
    line.add_argument("--memory", default=",".join(REMEMBERED), help="models whose memory is measured")
    line.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    line.add_argument("--write", type=Path, help="all of it as JSON; rows that the file has are not run again")
    given = line.parse_args(words)
    rows = [row for row in ROWS if row.model in given.models.split(",")]
    memory = [name for name in given.memory.split(",") if name]
    measured(Table(given.write), rows, memory, torch.device(given.device), time.time() + given.seconds)


if __name__ == "__main__":
    main()
