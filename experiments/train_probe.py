"""Is a probe on the user's own training batches (``hdet.TrainProbe``) as good as one on held-out data?

    python experiments/train_probe.py            # some minutes on a free core; prints two tables

Small versions of the bundled tasks, Adam, one device, three seeds. Two questions:

*Lean.* A probe compares the weights of now with those of a round ago. On a batch that was trained on, how far off is
that comparison from the same on held-out data? The first batch of this round, of the round before, of three rounds
ago and of seven are compared by, in rounds of 16 steps and more, which are those that the rule judges by a sign.
Figures are in percent of the first loss; above 0: the newer weights look worse than they are.

*Loss.* Runs from a hundredth, once and a hundred times the best rate of a sweep, with a held-out probe, with TrainProbe
and, as a control, with a probe that is noise: final validation loss over that with the held-out probe.

Writes ``experiments/results/train_probe.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

import hdet
from hdet.algorithm.auto.constants import JUDGED
from hdet.algorithm.auto.rounds import Growing
from hdet.tasks import Batch, Task, task_named

RESULT = Path(__file__).parent / "results" / "train_probe.json"
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"width": 8, "batch_size": 32},
    "feed": {"users": 1008, "items": 1008, "history": 4, "width": 8, "depth": 1, "batch_size": 64},
    "text": {"width": 32, "depth": 1, "heads": 2, "context": 32, "batch_size": 8},
}
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
STARTS = (0.01, 1.0, 100.0)
"""The guess over the best rate."""
PROBES = ("held-out", "train", "noise")
AGES = (0, 1, 3, 7)
"""Rounds ago."""
CHOOSING = 1000
"""The seed of the sweep; those that are shown count from 0."""
STEPS, HELD_OUT = 400, 4


def train(task: Task, rate: float, seed: int, steps: int, probe: str | None) -> float:
    """One run: its validation loss. ``probe`` None: torch's own scheduler at that rate."""
    model = task.model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    if probe is None:
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    else:
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=steps, probe=_probe(probe, task, model, seed))
    for step in range(steps):
        batch = task.batch(seed, step)
        loss = _trained(task, model, optimizer, batch)
        if probe == "train":
            scheduler.observe(loss, batch=batch)
        if step + 1 < steps:  # torch's own counts the step of its constructor
            scheduler.step()
    return task.evaluate(model)["loss"]


def _probe(kind: str, task: Task, model: nn.Module, seed: int) -> Any:
    if kind == "train":
        return hdet.TrainProbe(model, task.loss)
    if kind == "held-out":
        return hdet.ProbeBatch(model, task.loss, lambda k: task.probe(seed, k))
    draws = torch.Generator().manual_seed(seed)
    return lambda: 1 + 0.1 * torch.randn((), generator=draws)


def _trained(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """One step; the loss before it."""
    optimizer.zero_grad()
    loss = task.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def leans(task: Task, rate: float, seed: int, steps: int) -> dict[int, list[float]]:
    """By the age of the batch: how far its comparison is off that on held-out data, a number per round."""
    model = task.model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=steps, probe=_probe("held-out", task, model, seed))
    rounds, firsts = Growing(steps), deque[Batch](maxlen=max(AGES) + 1)
    held_out = task.validation()[:HELD_OUT]
    first, before = _loss(task, model, held_out), deepcopy(model.state_dict())
    found: dict[int, list[float]] = {age: [] for age in AGES}
    for step in range(steps):
        batch = task.batch(seed, step)
        if step == 0 or rounds.ends_at(step):
            firsts.appendleft(batch)
        loss = _trained(task, model, optimizer, batch)
        now = deepcopy(model.state_dict())  # before the scheduler may go back
        scheduler.step(loss)
        if not rounds.ends_at(step + 1):
            continue
        begin, end = rounds.span(step + 1)
        if end - begin >= JUDGED and len(firsts) == firsts.maxlen:
            judged = [held_out, *([firsts[age]] for age in AGES)]
            held, *own = _changes(task, model, before, now, judged)
            for age, change in zip(AGES, own, strict=True):
                found[age].append(100 * (change - held) / first)
        before = deepcopy(model.state_dict())
    return found


def _changes(task: Task, model: nn.Module, before: Any, now: Any, judged: Sequence[Sequence[Batch]]) -> list[float]:
    """Loss of ``now`` less that of ``before``, on each of several sets of batches; the model is left as it is."""
    own, rows = deepcopy(model.state_dict()), []
    for state in (now, before):
        model.load_state_dict(state)
        rows.append([_loss(task, model, batches) for batches in judged])
    model.load_state_dict(own)
    return [later - earlier for later, earlier in zip(*rows, strict=True)]


def _loss(task: Task, model: nn.Module, batches: Sequence[Batch]) -> float:
    """As a probe sees it."""
    return fmean(float(hdet.ProbeBatch(model, task.loss, [batch])()) for batch in batches)


def measure(names: Sequence[str], seeds: Sequence[int], steps: int) -> dict[str, Any]:
    rows = []
    for name in names:
        task = task_named(name, **TASKS[name])
        sweep = {rate: train(task, rate, CHOOSING, steps, None) for rate in RATES}
        best = min(sweep, key=lambda rate: sweep[rate])
        lean = [leans(task, best, seed, steps) for seed in seeds]
        losses = {
            probe: {f"{start:g}": [train(task, start * best, seed, steps, probe) for seed in seeds] for start in STARTS}
            for probe in PROBES
        }
        found = {str(age): [value for run in lean for value in run[age]] for age in AGES}
        rows.append({"task": name, "options": TASKS[name], "best": best, "sweep": sweep, "lean": found, "loss": losses})
        print(table(rows[-1]), flush=True)
    about = {"experiment": "train_probe", "optimizer": "Adam", "steps": steps, "seeds": list(seeds)}
    return {**about, "rows": rows, "hdet": hdet.__version__, "torch": torch.__version__.partition("+")[0]}


def table(row: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{row['task']}: lean, % of the first loss"]
    for age, values in row["lean"].items():
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        lines.append(f"  batch of {age} rounds ago {fmean(values):8.2f} ± {error:.2f}   ({len(values)} rounds)")
    lines.append(f"{row['task']}: loss over that with a held-out probe, best rate {row['best']:g}")
    for probe, by_start in row["loss"].items():
        cells = []
        for start, values in by_start.items():
            pairs = zip(values, row["loss"]["held-out"][start], strict=True)
            ratios = [value / held for value, held in pairs]
            cells.append(f"{start}x {math.exp(fmean(map(math.log, ratios))):.3f} (worst {max(ratios):.3f})")
        lines.append(f"  {probe:9} {'   '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)  # these models are too small for several
    result = measure(given.tasks, range(given.seeds), given.steps)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
