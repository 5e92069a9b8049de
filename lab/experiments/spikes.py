"""Six faults in the middle of a run, and how to meet them: nothing, clipping, skipping, ``hdet.Guard``.

    python lab/experiments/spikes.py --write --processes 2          # some 20 minutes on two free cores
    python lab/experiments/spikes.py --workloads digits --faults flip --seeds 1 --runs 0 --steps 80
    python lab/experiments/spikes.py --table          # of the file, as in docs/guard.md

Three small workloads of lab.tasks: a CNN with BatchNorm on digits (SGD with momentum, linear decay), a GPT on Python's
library (AdamW, cosine), a recommender (Adam, exponential decay); and a small regression (Adam, cosine). The faults,
once after half the run:

    batch     one batch whose loss is 1000 times too large, as by a wrong unit
    rate      the rate is four times too high from there to the end
    overflow  one step whose gradients went through fp16 at a fixed loss scale that is too large
    flip      the highest exponent bit of one weight is flipped
    hot       the rate is 30 times too high for ten steps
    sign      the loss has the wrong sign for five steps

Score: final held-out loss over that of the undisturbed plain run of the same seed. *left out* is the run that leaves
out the faulty steps: what a guard could reach at best. Targets, written down before: 1.02 for the guard at 11 of 14,
which are the four first faults on lab.tasks and the two last on the regression; and no false alarm in --runs
undisturbed runs, some of which have losses that rise by themselves (``spike_problems.py``). A false alarm is a roll
back that is not taken back, or that costs 1 %. Writes lab/experiments/results/spikes.json with --write.
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
from spike_problems import FAMILIES, Regression
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import hdet
from lab.tasks import Batch, DigitsTask, FeedTask, Task, TextTask

RESULTS = Path(__file__).parent / "results" / "spikes.json"
FAULTS = ("none", "batch", "rate", "overflow", "flip", "hot", "sign")
LASTING = {"hot": 10, "sign": 5}
"""Steps of the faults that last; the others are one step, or all that follow."""
WAYS = ("nothing", "clip", "skip", "guard", "left out")
HOT = 30.0
EVERY, TARGET = 8, 1.02
CLIP = 1.0
"""The norm that gradients are clipped to."""
SKIP, MEMORY = 5.0, 0.95
"""A step is skipped if its gradient is so many times as long as usual; a running mean says what is."""
SCALE = 2.0**24
_ROLLED_BACK = re.compile(r"diverged at step (\d+): rolled back to step (\d+)")


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
    "regression": Workload(
        cache(Regression),  # type: ignore[arg-type]  # all of a task that is used here
        lambda parameters: Adam(parameters, lr=1e-2),
        lambda part: 0.5 * (1 + math.cos(math.pi * part)),
    ),
}
COUNTED = [(w, f) for w in ("digits", "text", "feed") for f in ("batch", "rate", "overflow", "flip")]
COUNTED += [("regression", fault) for fault in LASTING]
"""What the first target counts."""


class Ran(NamedTuple):
    loss: float
    lost: int
    """Steps that were undone or left out."""
    times: int
    """How often training went back; where steps are skipped, how many were."""
    left: int = 0
    """Roll backs that were not taken back."""


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
    last = at + LASTING.get(fault, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: (
            shape(t / steps)
            * (4.0 if fault == "rate" and t >= at else HOT if fault == "hot" and at <= t < last else 1.0)
        ),
    )
    guard = hdet.Guard(optimizer, model, check_every=EVERY) if way == "guard" else None
    skipping, skipped = _Skipping(), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hdet.RollbackWarning)
        for t, batch in enumerate(batches(workload, seed, steps)):
            loss = task().loss(model, batch) * (1000.0 if fault == "batch" and t == at else 1.0)
            optimizer.zero_grad()
            (-loss if fault == "sign" and at <= t < last else loss).backward()
            if fault == "overflow" and t == at:
                overflow(model)
            if way == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            is_faulty = fault not in ("none", "rate", "flip") and at <= t < last
            if (way == "left out" and is_faulty) or (way == "skip" and skipping.skips(gradient_norm(model))):
                skipped += 1
            else:
                optimizer.step()
            if fault == "flip" and t == at and way != "left out":
                flip(model, seed)
            schedule.step()
            if guard is not None:
                guard.step(loss.detach())
    backs = [found for one in caught if (found := _ROLLED_BACK.search(str(one.message)))]
    lost = sum(int(found[1]) - int(found[2]) for found in backs)
    final = task().evaluate(model)["loss"]
    left = guard.rollbacks if guard is not None else 0
    return Ran(final if math.isfinite(final) else math.inf, lost + skipped, len(backs) + skipped, left)


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
    """In as many processes."""
    return dict(zip(runs, mapped(_trained, runs, processes), strict=True))


def mapped(work: Callable[[Run], Any], runs: Sequence[Run], processes: int) -> list[Any]:
    """What ``work`` makes of each run; one line each."""
    found = []
    with multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else nullcontext() as pool:
        for run, result in zip(runs, (map if pool is None else pool.imap)(work, runs), strict=True):
            found.append(result)
            print(json.dumps([*run, *result]), flush=True)
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
        "| workload | fault | nothing | clipping | skipping | guard | left out | guard, worst | lost steps |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_name = {(row["workload"], row["fault"], row["way"]): row for row in content["rows"]}
    for workload, fault in dict.fromkeys((row["workload"], row["fault"]) for row in content["rows"]):
        scores = [_shown(mean(by_name[workload, fault, way]["ratios"])) for way in WAYS]
        own = by_name[workload, fault, "guard"]
        lost = ", ".join(map(str, own["lost"]))
        lines.append(f"| {workload} | {fault} | {' | '.join(scores)} | {_shown(max(own['ratios']))} | {lost} |")
    return "\n".join(lines)


def page_cells(content: dict[str, Any], fault: str) -> str:
    """A fault's cells as docs/guard.md has them: for each way the workloads in turn, or one entry if all are alike."""
    by_name = {(row["workload"], row["way"]): row for row in content["rows"] if row["fault"] == fault}
    workloads = dict.fromkeys(workload for workload, _ in by_name)
    cells = []
    for way in WAYS:
        shown = [_shown(mean(by_name[workload, way]["ratios"])) for workload in workloads]
        cells.append(shown[0] if len({*shown}) == 1 else "/".join(shown))
    return " | ".join(cells)


def _shown(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}" if ratio < 1e4 else "lost"


def verdict(content: dict[str, Any]) -> str:
    """PASS or MISS against the targets."""
    own = {(row["workload"], row["fault"]): mean(row["ratios"]) for row in content["rows"] if row["way"] == "guard"}
    counted = [pair for pair in COUNTED if pair in own]
    missed = ["/".join(pair) for pair in counted if own[pair] > TARGET]
    reached = len(counted) - len(missed)
    losses = (
        f"{'PASS' if reached >= 11 else 'MISS'}: {reached} of {len(counted)}; above it {', '.join(missed) or 'none'}"
    )
    alarms, runs = content["false_alarms"], content["undisturbed_runs"]
    names = ", ".join(f"{name} {ratio:.3f}" for name, ratio in alarms)
    return f"at most {TARGET}: {losses}\nfalse alarms in {runs} runs: {len(alarms)}{f' ({names})' if names else ''}"


def alarm(undisturbed: Run) -> tuple[str, float, int, int]:
    """Of one run: its family, the guard's score over that without one, roll backs that were not taken back, and all."""
    torch.set_num_threads(1)
    family, _, _, seed, steps = undisturbed
    found = []
    for guarded in (True, False):
        if family in WORKLOADS:
            ran = trained(family, "none", "guard" if guarded else "nothing", seed, steps)
            found.append((ran.loss, ran.left, ran.times))
            continue
        training = FAMILIES[family](seed, steps)
        guards = [hdet.Guard(*part, check_every=EVERY) for part in training.parts] if guarded else []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", hdet.RollbackWarning)
            for t in range(steps):
                for guard, loss in zip(guards, training.losses(t), strict=False):
                    guard.step(loss)
        found.append((training.score(), sum(guard.rollbacks for guard in guards), len(caught)))
    (ours, left, times), (plain, _, _) = found
    return family, ours / plain, left, times


def false_alarms(runs: Sequence[tuple[str, float, int, int]]) -> list[tuple[str, float]]:
    """Those whose roll back was not taken back, and families in which such runs cost 1 % in the mean."""
    kept = [(family, ratio) for family, ratio, left, _ in runs if left]
    families = {family: [ratio for name, ratio, _, times in runs if name == family and times] for family, *_ in runs}
    costly = [(f"{name} (mean of {len(own)})", mean(own)) for name, own in families.items() if own and mean(own) > 1.01]
    return kept + costly


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=200, help="undisturbed runs, over all workloads and families")
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
    everybody = [*names, *FAMILIES]
    undisturbed = [(everybody[k % len(everybody)], "none", "guard", 1000 + k, given.steps) for k in range(given.runs)]
    found = all_trained(runs, given.processes)
    alarms = mapped(alarm, undisturbed, given.processes)
    content = {
        "command": "python lab/experiments/spikes.py --write",
        "commit": commit(),
        **versions(torch.device("cpu")),
        "steps": given.steps,
        "check_every": EVERY,
        "undisturbed_runs": given.runs,
        "false_alarms": false_alarms(alarms),
        "roll_backs_taken_back": sum(times - left for _, _, left, times in alarms),
        "rows": rows_of({run: found[run] for run in runs}),
    }
    print(f"{table(content)}\n\n{verdict(content)}")
    if given.write:
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
