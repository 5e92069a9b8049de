"""What the trained fan-out costs on a GPU, in one process: a step, the end of a round, a converge over nccl and gloo.

A GPT of about 10 M parameters trains in bf16 autocast (on a CPU in fp32). Contestants take turns; times are wall time
between two synchronisations of the device. ``_host`` is the time until the calls have returned.

    percent_T = (T * (hdet's ordinary step - torch's step) + the end of a round) / (T * a training step)

hdet makes no collective where there is one replica. So the one rank sits on two seats of a group: then every line of a
round's end runs, over real collectives of one rank. Their sum, divided by two, halves the weights; each repetition
begins with the old ones. What is missing is the wire between GPUs: lab/benchmarks/scale.py computes it.

converge  scheduler.converge(): gather, finiteness, and average
average   the averaging alone: pack, all-reduce, divide, unpack, with bounded extra memory
flat      pack into one tensor, one all_reduce, divide, unpack: as much extra memory as the model has
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from converge import flat
from gpt import GPT, Size, batches, loss_of
from harness import parser, ratio, run_ranks, show
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.distributed.average import average_
from hdet.distributed.group import Distributed

LENGTHS = (1000, 200, 50)
"""T."""
NEVER = 10**7
"""Steps until a run and its first round end: further than any block goes."""
BACKENDS = {"cuda": ("nccl", "gloo"), "cpu": ("gloo",)}
"""The first is the one that DDP would use there."""
TARGETS = {"percent_T_1000": "the paper reports 0.1"}


class Sizes(NamedTuple):
    """What to measure, and how often."""

    device: str
    layers: int
    width: int
    batch: int
    context: int
    blocks: int
    """Turns of each contestant."""
    steps: int
    """Steps of a scheduler in a turn; a tenth of them are training steps."""

    @property
    def gpt(self) -> Size:
        """The model, and what it sees in a step."""
        heads, bf16 = max(1, self.width // 64), self.device == "cuda"
        return Size(self.layers, self.width, heads, self.context, self.batch, bf16)


class Training:
    """A model, its optimizer and one batch."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self._device = torch.device(sizes.device)
        self._size = sizes.gpt
        self.model = GPT(self._size).to(self._device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        (self._batch,) = batches(self._size, 1, self._device)
        self.loss = self.step()

    def step(self) -> Tensor:
        """Forward, backward and update."""
        loss = loss_of(self._size, self.model, self._batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def scheduler(self, sync_every: int, journal: Path | None = None) -> hdet.OneCycleLR:
        """hdet's, on two seats."""
        made = hdet.OneCycleLR(
            self.optimizer, 1e-3, NEVER, sync_every=sync_every, auto_lr_start=0, model=self.model, journal=journal
        )
        made._run.meeting.begin(two_seats())
        self.optimizer.step()  # torch warns if the scheduler is the first to step
        return made


def two_seats() -> Distributed:
    """Two replicas that are both this rank."""
    world = dist.group.WORLD
    assert world is not None  # run_ranks has made it
    return Distributed(world, [[0], [0]])


class Took(NamedTuple):
    """Seconds of one call in a block of them."""

    wall: float
    host: float


def timed(device: str, work: Callable[[], object], times: int = 1) -> Took:
    """Call ``work`` that often, between two synchronisations."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    returned = time.perf_counter()
    _wait(device)
    return Took((time.perf_counter() - began) / times, (returned - began) / times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Steps(NamedTuple):
    """Seconds, one entry for each block."""

    train: list[float]
    ours: list[float]
    torchs: list[float]


def step_contest(rank: int, sizes: Sizes) -> tuple[Steps, Steps]:
    """A training step, and ordinary steps of both schedulers, in turn: wall time, and time of the host."""
    training, other = Training(sizes), Training(sizes)
    ours, torchs = training.scheduler(NEVER), OneCycleLR(other.optimizer, 1e-3, NEVER)
    other.optimizer.step()
    walls, hosts = Steps([], [], []), Steps([], [], [])
    for block in range(-1, sizes.blocks):  # the first one warms up
        train = timed(sizes.device, training.step, max(1, sizes.steps // 10))
        ours.step(training.loss)  # after training the caches are cold: that should not count for the first alone
        torchs.step()
        took = (
            train,
            timed(sizes.device, lambda: ours.step(training.loss), sizes.steps),
            timed(sizes.device, torchs.step, sizes.steps),
        )
        if block >= 0:
            for wall, host, one in zip(walls, hosts, took, strict=True):
                wall.append(one.wall)
                host.append(one.host)
    return walls, hosts


class Ends(NamedTuple):
    """Seconds, one entry for each repetition."""

    end: list[float]
    converge: list[float]
    average: list[float]
    flat: list[float]


def end_contest(rank: int, sizes: Sizes) -> Ends:
    """The end of a round with its journal, and three ways to average, in turn."""
    training = Training(sizes)
    weights = [parameter.data for parameter in training.parameters]
    start = [tensor.clone() for tensor in weights]
    with tempfile.TemporaryDirectory() as folder:
        rounds = training.scheduler(1, Path(folder) / "journal.jsonl")
        scheduler, group = training.scheduler(NEVER), two_seats()
        contestants: tuple[Callable[[], object], ...] = (
            lambda: rounds.step(training.loss),
            scheduler.converge,
            lambda: average_(weights, group, [True, True]),
            lambda: flat(weights),
        )
        found = Ends([], [], [], [])
        for repetition in range(-2, sizes.blocks):  # two warm up: connections, buffers, the journal's first line
            for contestant, times, share in zip(contestants, found, (0.5, 0.5, 0.5, 1.0), strict=True):
                torch._foreach_copy_(weights, start)
                took = timed(sizes.device, contestant)
                if repetition >= 0:
                    times.append(took.wall)
                else:
                    _check(weights, start, share)
    return found


def _check(weights: Sequence[Tensor], start: Sequence[Tensor], share: float) -> None:
    """Every contestant must have done the work."""
    for tensor, value in zip(weights, start, strict=True):
        torch.testing.assert_close(tensor, share * value)


def measure(sizes: Sizes, timeout: float) -> dict[str, Any]:
    """The figures."""
    backends = BACKENDS[sizes.device]
    walls, hosts = run_ranks(step_contest, 1, sizes, timeout=timeout, backend=backends[0])[0]
    ends = {b: run_ranks(end_contest, 1, sizes, timeout=timeout, backend=b)[0] for b in backends}
    model = list(GPT(sizes.gpt).parameters())
    return {
        **percentages(walls, ends),
        "step_over_torch": ratio(walls.ours, walls.torchs),
        "step_over_torch_host": ratio(hosts.ours, hosts.torchs),
        "training_step_ms": 1e3 * median(walls.train),
        "ours_step_us": 1e6 * median(walls.ours),
        "torch_step_us": 1e6 * median(walls.torchs),
        "ours_step_host_us": 1e6 * median(hosts.ours),
        "torch_step_host_us": 1e6 * median(hosts.torchs),
        **{name: value for backend, times in ends.items() for name, value in averages(backend, times).items()},
        "parameters": sum(parameter.numel() for parameter in model),
        "tensors": len(model),
        "tokens": sizes.batch * sizes.context,
        "device": torch.cuda.get_device_name() if sizes.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def percentages(walls: Steps, ends: Mapping[str, Ends]) -> dict[str, float]:
    """For each T; the backend is named only where it is not the device's usual one, which comes first."""
    train, dearer = median(walls.train), median(walls.ours) - median(walls.torchs)
    return {
        f"percent_T_{T}" + (f"_{backend}" if place else ""): percent(T, dearer, median(times.end), train)
        for place, (backend, times) in enumerate(ends.items())
        for T in LENGTHS
    }


def averages(backend: str, times: Ends) -> dict[str, float]:
    """Ratios and milliseconds of one backend."""
    return {
        f"converge_over_flat_{backend}": ratio(times.converge, times.flat),
        f"average_over_flat_{backend}": ratio(times.average, times.flat),
        **{f"{name}_{backend}_ms": 1e3 * median(taken) for name, taken in times._asdict().items()},
    }


def percent(T: int, dearer: float, end: float, train: float) -> float:
    """Percent that a round of T steps adds. ``dearer``: hdet's ordinary step less torch's; all in seconds."""
    return 100 * (T * dearer + end) / (T * train)


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--device", choices=tuple(BACKENDS), default="cuda", help="cpu: only gloo (default: cuda)")
    line.add_argument("--layers", type=int, default=6, help="of the model (default: 6)")
    line.add_argument("--width", type=int, default=384, help="of the model (default: 384)")
    line.add_argument("--batch", type=int, default=64, help="texts per step (default: 64)")
    line.add_argument("--context", type=int, default=256, help="bytes per text (default: 256)")
    line.add_argument("--blocks", type=int, default=30, help="turns of each contestant (default: 30)")
    line.add_argument("--steps", type=int, default=100, help="steps of a scheduler per turn (default: 100)")
    line.add_argument("--timeout", type=float, default=120.0, help="seconds for each process (default: 120)")
    given = vars(line.parse_args())
    as_json, timeout = given.pop("json"), given.pop("timeout")
    sizes = Sizes(**given)
    if min(sizes[1:]) < 1:
        line.error("--layers, --width, --batch, --context, --blocks and --steps must be at least 1")
    if sizes.width > 64 and sizes.width % (sizes.width // 64):
        line.error(f"--width must be a multiple of {sizes.width // 64}, its number of heads, but got {sizes.width}")
    if sizes.device == "cuda" and not torch.cuda.is_available():
        print("trained_gpu.py needs a CUDA device and found none; --device cpu runs the same on gloo", file=sys.stderr)
        raise SystemExit(2)
    show(measure(sizes, timeout), TARGETS, as_json)


if __name__ == "__main__":
    main()
