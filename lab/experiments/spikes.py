"""Four faults in the middle of a run, and how to meet them: nothing, clipping, skipping, ``hdet.Guard``.

    python lab/experiments/spikes.py --write          # some eight minutes on a free core
    python lab/experiments/spikes.py --workloads digits --faults flip --seeds 1 --runs 0 --steps 80
    python lab/experiments/spikes.py --table          # of the file, as in docs/guard.md

Three small workloads of lab.tasks: a CNN with BatchNorm on digits (SGD with momentum, linear decay), a GPT on Python's
library (AdamW, cosine), a recommender (Adam, exponential decay). The faults, once after half the run:

    batch     one batch whose loss is 1000 times too large, as by a wrong unit
    rate      the rate is four times too high from there to the end
    overflow  one step whose gradients went through fp16 at a fixed loss scale that is too large
    flip      the highest exponent bit of one weight is flipped

Score: final held-out loss over that of the undisturbed plain run of the same seed. Targets, written down before: 1.02
for the guard at every workload and fault, and no roll back in --runs undisturbed runs. Writes
lab/experiments/results/spikes.json with --write.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import checkout  # noqa: F401
import torch
from provenance import commit, versions
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import hdet
from lab.tasks import Batch, DigitsTask, FeedTask, Task, TextTask

RESULTS = Path(__file__).parent / "results" / "spikes.json"
FAULTS = ("none", "batch", "rate", "overflow", "flip")
WAYS = ("nothing", "clip", "skip", "guard", "clip + guard")
EVERY, TARGET = 8, 1.02
CLIP = 1.0
"""The norm that gradients are clipped to."""
SKIP, MEMORY = 5.0, 0.95
"""A step is skipped if its gradient is so many times as long as usual; a running mean says what is."""
SCALE = 2.0**24
_ROLLED_BACK = re.compile(r"ruined at step (\d+): the weights of step (\d+)")


class Workload(NamedTuple):
    task: Callable[[], Task]
    make: Callable[[Any], Optimizer]
    schedule: Callable[[float], float]
    """A factor on the rate, at a part of the run."""


WORKLOADS = {
    "digits": Workload(
        cache(lambda: DigitsTask(width=4, batch_size=32)),
        lambda parameters: SGD(parameters, lr=0.4, momentum=0.9),
        lambda part: 1.0 - part,
    ),
    "text": Workload(
        cache(lambda: TextTask(width=32, depth=1, heads=2, context=16, batch_size=16)),
        lambda parameters: AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), fused=True),
        lambda part: 0.5 * (1 + math.cos(math.pi * part)),
    ),
    "feed": Workload(
        cache(lambda: FeedTask(users=500, items=512, history=4, width=8, depth=1, batch_size=64, horizon=64 * 400)),
        lambda parameters: Adam(parameters, lr=5e-3, fused=True),
        lambda part: 0.1**part,
    ),
}


class Ran(NamedTuple):
    loss: float
    lost: int
    """Steps that were undone or left out."""
    times: int
    """How often training went back; where steps are skipped, how many were."""


@cache
def batches(workload: str, seed: int, steps: int) -> list[Batch]:
    return [WORKLOADS[workload].task().batch(seed, t) for t in range(steps)]


class _Skipping:
    """Leaves out steps whose gradients are far longer than usual, or not finite."""

    def __init__(self) -> None:
        self._usual: float | None = None

    def skips(self, norm: float) -> bool:
        if self._usual is not None and not norm <= SKIP * self._usual:
            return True
        if math.isfinite(norm):
            self._usual = norm if self._usual is None else MEMORY * self._usual + (1 - MEMORY) * norm
        return not math.isfinite(norm)


def trained(workload: str, fault: str, way: str, seed: int, steps: int) -> Ran:
    """One run."""
    task, make, shape = WORKLOADS[workload]
    at, model = steps // 2 + 5 * seed, task().model(seed)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: shape(t / steps) * (4.0 if fault == "rate" and t >= at else 1.0)
    )
    guard = hdet.Guard(optimizer, model, every=EVERY) if "guard" in way else None
    skipping, skipped = _Skipping(), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hdet.RollbackWarning)
        for t, batch in enumerate(batches(workload, seed, steps)):
            loss = task().loss(model, batch) * (1000.0 if fault == "batch" and t == at else 1.0)
            optimizer.zero_grad()
            loss.backward()
            if fault == "overflow" and t == at:
                overflow(model)
            if "clip" in way:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if way == "skip" and skipping.skips(gradient_norm(model)):
                skipped += 1
            else:
                optimizer.step()
            if fault == "flip" and t == at:
                flip(model, seed)
            schedule.step()
            if guard is not None:
                guard.step(loss.detach())
    backs = [_ROLLED_BACK.search(str(one.message)) for one in caught if one.category is hdet.RollbackWarning]
    lost = sum(int(found[1]) - int(found[2]) for found in backs if found)
    final = task().evaluate(model)["loss"]
    return Ran(final if math.isfinite(final) else math.inf, lost + skipped, len(backs) + skipped)


def gradient_norm(model: nn.Module) -> float:
    """Of all gradients together."""
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


def overflow(model: nn.Module) -> None:
    """Gradients as fp16 holds them where the loss was scaled by 2^24: what is above 0.004 is infinite."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = (p.grad * SCALE).half().float() / SCALE


@torch.no_grad()
def flip(model: nn.Module, seed: int) -> None:
    """The highest exponent bit of one weight of a matrix: a number below 2 becomes a huge one."""
    draw = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    chosen = matrices[int(torch.randint(len(matrices), (), generator=draw))].view(-1).view(torch.int32)
    chosen[int(torch.randint(len(chosen), (), generator=draw))] ^= 1 << 30


Run = tuple[str, str, str, int, int]
"""The arguments of :func:`trained`."""


def rows_of(found: dict[Run, Ran]) -> list[dict[str, Any]]:
    """A row for each workload, fault and way, with a number for each seed."""
    rows = []
    for workload, fault, way in dict.fromkeys(run[:3] for run in found):
        own = {run: ran for run, ran in found.items() if run[:3] == (workload, fault, way)}
        plain = [found[(workload, "none", "nothing", *run[3:])].loss for run in own]
        row = {"workload": workload, "fault": fault, "way": way}
        row |= {"ratios": [ran.loss / loss for ran, loss in zip(own.values(), plain, strict=True)]}
        rows.append(row | {"lost": [ran.lost for ran in own.values()], "times": [ran.times for ran in own.values()]})
    return rows


def all_trained(runs: Sequence[Run], processes: int) -> dict[Run, Ran]:
    """In as many processes; one line each."""
    found = {}
    with multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else nullcontext() as pool:
        for run, ran in zip(runs, (map if pool is None else pool.imap)(_trained, runs), strict=True):
            found[run] = ran
            print(json.dumps([*run, *ran]), flush=True)
    return found


def _trained(run: Run) -> Ran:
    torch.set_num_threads(1)
    return trained(*run)


def mean(ratios: Sequence[float]) -> float:
    """Geometric.

    >>> mean([2.0, 0.5]), mean([1.0, math.inf])
    (1.0, inf)
    """
    return math.exp(fmean(map(math.log, ratios))) if all(map(math.isfinite, ratios)) else math.inf


def table(content: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| workload | fault | nothing | clipping | skipping | guard | both | worst seed of guard | lost steps |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_name = {(row["workload"], row["fault"], row["way"]): row for row in content["rows"]}
    for workload, fault in dict.fromkeys((row["workload"], row["fault"]) for row in content["rows"]):
        scores = [_shown(mean(by_name[workload, fault, way]["ratios"])) for way in WAYS]
        own = by_name[workload, fault, "guard"]
        lost = ", ".join(map(str, own["lost"]))
        lines.append(f"| {workload} | {fault} | {' | '.join(scores)} | {_shown(max(own['ratios']))} | {lost} |")
    return "\n".join(lines)


def _shown(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}" if ratio < 1e4 else "lost"


def verdict(content: dict[str, Any]) -> str:
    """PASS or MISS against the targets."""
    own = [row for row in content["rows"] if row["way"] == "guard" and row["fault"] != "none"]
    missed = [f"{row['workload']}/{row['fault']}" for row in own if mean(row["ratios"]) > TARGET]
    alarms, runs = content["false_alarms"], content["undisturbed_runs"]
    losses = f"MISS on {', '.join(missed)}" if missed else "PASS"
    return f"at most {TARGET}: {losses}\nno false alarm in {runs} runs: {'MISS' if alarms else 'PASS'} ({alarms})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=100, help="undisturbed runs, over all workloads")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--table", action="store_true", help=f"print the table of {RESULTS.name}, and run nothing")
    given = parser.parse_args(arguments)
    if given.table:
        content = json.loads(RESULTS.read_text(encoding="utf-8"))
        print(f"{table(content)}\n\n{verdict(content)}")
        return
    names, faults = given.workloads.split(","), dict.fromkeys(["none", *given.faults.split(",")])
    runs = [(*run, given.steps) for run in product(names, faults, WAYS, range(given.seeds))]
    undisturbed = [(names[k % len(names)], "none", "guard", 1000 + k, given.steps) for k in range(given.runs)]
    found = all_trained([*runs, *undisturbed], given.processes)
    content = {
        "command": "python lab/experiments/spikes.py --write",
        "commit": commit(),
        **versions(torch.device("cpu")),
        "steps": given.steps,
        "every": EVERY,
        "undisturbed_runs": given.runs,
        "false_alarms": sum(found[run].times for run in undisturbed),
        "rows": rows_of({run: found[run] for run in runs}),
    }
    print(f"{table(content)}\n\n{verdict(content)}")
    if given.write:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
