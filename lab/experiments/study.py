"""Is there a rate, a phase or a T at which replicas that differ beat plain training at its own best rate?

    python lab/experiments/study.py --tasks feed --seconds 500      # on a GPU; goes on where it stopped
    python lab/experiments/study.py --tasks text,movielens --seconds 500
    python lab/experiments/study.py --table
    python lab/experiments/study.py --quick --results FOLDER        # in miniature, on a CPU

Three tasks of a million weights: the feed, a byte-level GPT on the source of Python's standard library, and a
recommender with three tasks on MovieLens (``make bench-data``). Eight replicas, 5000 steps of OneCycleLR with Adam; all
replicas together see the same samples whatever the method. Passes, each of which is kept in the task's file:

scan    plain training at 13 rates a factor 2 apart, one seed: the best one
grid    every method and T at half that rate, it, twice and four times it, one seed; beyond, until the best is inside
fresh   each at its own best rate, five other seeds
auto    ``hdet.auto`` on all ranks, which is one run with the whole batch, from three guesses, three seeds
bytes   plain training that sends as many bytes as arms do: for 3/T of the steps, and so with 3/T of the samples, the
        last ones, since the feed drifts and its held-out samples are those that follow; and "accumulated", with
        gradients summed over T/3 batches, so with all samples; five rates and beyond, five seeds
guard   ``hdet.Guard`` on plain training at the best rate, twice and four times it, three seeds; runs by themselves
grid    on, at a tenth, a quarter and eight times plain training's best rate
fresh   on, at the neighbours of each one's best rate

A method's width is how far its rates of the grid reach that are within 2 % of its best. The placebo trains at the rates
of what it is the control of.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - so that lab is found
import torch
from auto_runs import AutoRuns, Run
from crashes import has_crashed
from provenance import commit, library, versions
from real.ledger import rounded, save
from real_lr import tidy
from stacked import Adam, Stack
from stacked_bench import Bench, Evaluation
from stacked_replicas import Column, Method
from study_settings import CLIP, ROWS, SETTINGS, SPREAD, Setting, small
from study_table import CONTROL_OF, chosen_rate, front, mean_loss, neighbours, page
from torch import Tensor

import hdet
from lab.tasks import Task
from lab.tasks.task import moved

RESULTS = Path(__file__).parent / "results" / "study"
FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the rates in the grid to plain training's best."""
FIRST = FACTORS[2:6]
"""Of these, those that are tried first."""
TAIL = 0.1
"""The share of a run whose weights are averaged for the row "averaged"; ten of them."""
_WEIGHTS_AT_ONCE, _ITEMS_AT_ONCE = 700_000_000, 360_000
"""Weights, and samples or tokens, of all replicas in a stack. Bound memory, and the time between two savings."""


class Tail:
    """The mean of ten of the last weights of each run."""

    def __init__(self, steps: int) -> None:
        self._begins, self._every = (1 - TAIL) * steps, max(1, round(TAIL * steps / 10))
        self._sum, self._count = torch.zeros(()), 0

    def __call__(self, t: int, theta: Tensor) -> None:
        """After each step."""
        if t > self._begins and t % self._every == 0:
            self._sum = self._sum.to(theta) + theta
            self._count += 1

    @property
    def mean(self) -> Tensor:
        return self._sum / max(1, self._count)


class Study:
    """One task: its passes, and the file that they are kept in.

    Args:
        setting: what is trained.
        folder: of the file.
        device: where.
        until: the moment; nothing is begun after it, nor a stack that would end after it at the pace of the last one.
        processes: how many guarded runs train side by side.
    """

    def __init__(
        self, setting: Setting, folder: Path, device: torch.device, until: float = math.inf, processes: int = 1
    ) -> None:
        self.setting, self._device, self._until, self._processes = setting, device, until, processes
        self._path = folder / f"{setting.task}.json"
        there = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._bench = Bench(setting.make_task(), device)
        constants = {"spread": SPREAD, "clip": CLIP, "tail": TAIL, "factors": FACTORS}
        data = {"reference": self._bench.reference()}  # another Python has another standard library, so another text
        head = rounded({"arguments": vars(setting), **constants, **data})
        other = [key for key in head if there and there.get(key) != head[key]]
        if other:
            raise SystemExit(
                f"{self._path} has runs of other settings or data ({', '.join(other)}); move it away, and they will be "
                "made anew"
            )
        self.content: dict[str, Any] = {"runs": [], **there, **head, "task": setting.task}
        here = versions(device)
        kept = {key: here[key] for key in ("device", "python", "torch")}
        self._provenance = {"commit": commit(), "library": library(), **kept}
        self._pace: dict[str, float] = self.content.setdefault("seconds_of_a_step", {})
        """Of one run, by the device and by its replicas, as the last stack had them; zero before the first."""

    def run(self) -> bool:
        """All passes, as far as there is time; whether all are done."""
        grid, widened = partial(self._grid, FIRST), partial(self._grid, FACTORS)
        first = (self._scan, grid, self._fresh, self._auto, self._bytes, self._guard)
        return all(part() for part in (*first, widened, self._beside))

    # -- passes -------------------------------------------------------------------------------------------------------

    def _scan(self) -> bool:
        octaves = self.setting.octaves
        rates = [self.setting.centre * 2.0**k for k in range(-octaves, octaves + 1)]
        if not self._train("scan", [Column("plain", ROWS["plain"], 0, rate) for rate in rates], self.setting.chosen_by):
            return False
        best = min(self._of("scan", "plain"), key=lambda row: mean_loss(row["loss"]))
        self.content["best"] = best["rate"]
        return True

    def _grid(self, factors: Sequence[float]) -> bool:
        return self._bracketed(self._chosen(), factors, partial(self._train, "grid", seeds=self.setting.chosen_by))

    def _bracketed(
        self, columns: Sequence[Column], factors: Sequence[float], train: Callable[[Sequence[Column]], bool]
    ) -> bool:
        """At factors of plain training's best rate, and beyond until the best of each is between two others."""
        tried = [column._replace(rate=factor * self.content["best"]) for factor in factors for column in columns]
        while tried:
            if not train(tried):
                return False
            tried = [one for column in columns if (one := self._beyond(column)) is not None]
        return True

    def _beyond(self, column: Column) -> Column | None:
        """One more rate, if its best of those tried is not between two others, and not too many octaves away."""
        best, beside = self._best_rate(column), self._beside_best(column)
        is_highest, is_lowest = all(rate < best for rate in beside), all(rate > best for rate in beside)
        rate = best * 2 if is_highest else best / 2 if is_lowest else math.nan
        most = 2**self.setting.octaves
        is_near = FIRST[0] / most <= rate / self.content["best"] <= FIRST[-1] * most
        return column._replace(rate=rate) if is_near else None

    def _chosen(self) -> list[Column]:
        """Methods whose rates are chosen; a control's are not."""
        return [column for column in self._columns() if column.key not in CONTROL_OF]

    def _fresh(self) -> bool:
        columns = [column._replace(rate=self._best_rate(column)) for column in self._columns()]
        return self._train("fresh", columns, self.setting.seeds)

    def _beside(self) -> bool:
        """Every method and T at its best rate, which a wider grid may have moved, and at those beside it."""
        columns = [
            column._replace(rate=rate)
            for column in self._columns()
            for rate in (self._best_rate(column), *self._beside_best(column))
        ]
        return self._train("fresh", columns, self.setting.seeds)

    def _best_rate(self, column: Column) -> float:
        return chosen_rate(self.content["runs"], (column.key, _meets(column)))

    def _beside_best(self, column: Column) -> list[float]:
        return neighbours(self.content["runs"], (column.key, _meets(column)))

    def _bytes(self) -> bool:
        for every in self.setting.phased:
            fewer, longer = round(3 / every * self.setting.steps), math.ceil(every / 3)
            summed = Bench(self.setting.make_task(longer), self._device)
            last = replace(self._bench, first=self.setting.steps - fewer)
            for row, steps, bench in (
                ("bytes", fewer, last),
                ("accumulated", self.setting.steps // longer, summed),
            ):
                column = Column(row, ROWS["plain"], every, math.nan)
                train = partial(self._train, row, seeds=self.setting.seeds, steps=max(2, steps), bench=bench)
                if not self._bracketed([column], FACTORS[2:], train):
                    return False
        return True

    def _auto(self) -> bool:
        """One stack of plain runs, whose rates the library's rule finds."""
        if self._of("auto", "auto"):
            return True
        if self._left() < 0:
            return False
        setting = self.setting
        seeds, guesses = setting.seeds[:3], [factor * self.content["best"] for factor in (0.1, 1.0, 4.0)]
        stack = Stack(self._bench.task, seeds, len(guesses), self._device)
        runs = AutoRuns(stack, Adam(stack.theta), [[Run(setting.steps, guess) for guess in guesses] for _ in seeds])
        supply = self._bench.supply(setting.seeds, setting.steps)  # those of the pass before
        step = runs.train_step(tuple(part[:, : len(seeds)] for part in supply.batches))
        for t in range(1, setting.steps + 1):
            step()
            runs.end_rounds(t)
        evaluated = Evaluation(stack)
        for k, guess in enumerate(guesses):
            metrics = [evaluated(stack.theta[u, k]) for u in range(len(seeds))]
            more = {"found": [runs.runs[u, k].found for u in range(len(seeds))]}
            self._keep("auto", guess, seeds, metrics, more)
        self._save()
        return True

    def _guard(self) -> bool:
        """Runs by themselves; each rate is kept as soon as its seeds have ended."""
        seeds = self.setting.seeds[:3]
        there = {row["rate"] for row in self._of("guard", "guard")}
        rates = [factor * self.content["best"] for factor in (1.0, 2.0, 4.0)]
        left = [rate for rate in rates if rounded(rate) not in there]
        if not left or self._left() < 0:
            return not left
        jobs = [(self.setting, rate, seed, str(self._device)) for rate in left for seed in seeds]
        with ExitStack() as stack:
            if self._processes > 1:
                context = multiprocessing.get_context("spawn")
                found = stack.enter_context(ProcessPoolExecutor(self._processes, context)).map(guarded, jobs)
            else:
                found = map(guarded, jobs)
            for rate in left:
                metrics = [next(found) for _ in seeds]
                more = {"rollbacks": [one.pop("rollbacks") for one in metrics]}
                self._keep("guard", rate, seeds, metrics, more)
                self._save()
        return True

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _columns(self) -> list[Column]:
        """Every method and T, at no rate yet; those that never meet once."""
        setting = self.setting
        return [
            Column(key, method, every, math.nan)
            for key, method in ROWS.items()
            for every in ((0,) if method.is_plain else setting.every if _is_whole(method) else setting.phased)
        ]

    def _train(
        self,
        stage: str,
        columns: Sequence[Column],
        seeds: Sequence[int],
        steps: int | None = None,
        bench: Bench | None = None,
    ) -> bool:
        """Those that the file lacks, in stacks; whether all are there now. A run without replicas is one with the
        whole batch."""
        steps, bench = steps or self.setting.steps, bench or self._bench
        there = {(row["row"], row["T"], row["rate"]) for row in self.content["runs"] if row["pass"] == stage}
        named = [column._replace(rate=rounded(column.rate)) for column in columns]  # as the file has it
        left = [column for column in named if (column.key, _meets(column), column.rate) not in there]
        longer = _items(bench.task) / _items(self._bench.task)
        for replicas in (1, self.setting.replicas):
            some = [column for column in left if column.method.is_plain == (replicas == 1)]
            some.sort(key=lambda column: column.key in CONTROL_OF)
            while some:
                each = self._pace.get(self._kind(replicas), 0.0) * longer * len(seeds) * steps
                most = _at_once(bench.task, replicas, len(seeds), self._left() / each if each else math.inf)
                part, some = some[:most], some[most:]
                if not part or self._left() < 0:
                    return False
                part.sort(key=lambda column: not column.method.shares)
                self._train_together(stage, part, seeds, replicas, steps, bench)
        return True

    def _train_together(
        self, stage: str, columns: Sequence[Column], seeds: Sequence[int], replicas: int, steps: int, bench: Bench
    ) -> None:
        began = time.time()
        tail = Tail(steps) if replicas == 1 and stage in ("grid", "fresh") else None
        own = [column._replace(every=column.every or steps) for column in columns]
        trained = bench.train(own, seeds, replicas, steps, tail or (lambda t, theta: None))
        reference = self.content["reference"]
        for column, row in zip(columns, trained.results(reference, seeds), strict=True):
            self._append({"pass": stage, **_short(row), "T": _meets(column)})
        if tail is not None:
            for column, row in zip(columns, trained.results(reference, seeds, tail.mean), strict=True):
                if column.key == "plain":
                    self._append({"pass": stage, **_short(row), "T": None, "row": "averaged"})
        if bench is self._bench:
            self._pace[self._kind(replicas)] = (time.time() - began) / (len(columns) * len(seeds) * steps)
        self._save()
        tidy()

    def _keep(
        self,
        row: str,
        rate: float,
        seeds: Sequence[int],
        metrics: Sequence[Mapping[str, float]],
        more: Mapping[str, Any],
    ) -> None:
        """A row that has a stage to itself."""
        crashed = [has_crashed(one["loss"], self.content["reference"]) for one in metrics]
        about = {"pass": row, "row": row, "T": None, "rate": rate, "seeds": [*seeds], "crashed": crashed}
        by_name = {key: [one[key] for one in metrics] for key in metrics[0]}
        self._append({**about, **by_name, **more})

    def _append(self, run: Mapping[str, Any]) -> None:
        self.content["runs"].append(rounded({**run, **self._provenance}))

    def _save(self) -> None:
        save(self._path, self.content)

    def _kind(self, replicas: int) -> str:
        """Of stacks that are equally fast."""
        return f"{self._provenance['device']}, {replicas}"

    def _left(self) -> float:
        """Seconds."""
        return self._until - time.time()

    def _of(self, stage: str, row: str) -> list[dict[str, Any]]:
        return [one for one in self.content["runs"] if (one["pass"], one["row"]) == (stage, row)]


def guarded(job: tuple[Setting, float, int, str]) -> dict[str, float]:
    """One run of plain training under `hdet.Guard`, as a user writes it."""
    setting, rate, seed, device = job
    torch.set_num_threads(1)
    task = setting.make_task()
    model = task.model(seed).to(device)
    optimizer = torch.optim.Adam(task.groups(model), lr=rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, setting.steps, cycle_momentum=False)
    guard = hdet.Guard(optimizer, model)
    for step in range(setting.steps):
        loss = task.loss(model, moved(task.batch(seed, step), device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        try:
            guard.step(loss)
        except hdet.DivergedError:  # there is nothing to roll back to
            return {**task.evaluate(model), "loss": math.nan, "rollbacks": guard.rollbacks}
    return {**task.evaluate(model), "rollbacks": guard.rollbacks}


def _at_once(task: Task, replicas: int, seeds: int, in_time: float) -> int:
    """How many columns train together, if there is time for so many; one at least, if there is time for one."""
    weights = sum(p.numel() for p in task.model(0).parameters())
    most = max(1, min(_WEIGHTS_AT_ONCE // (weights * replicas * seeds), _ITEMS_AT_ONCE // (_items(task) * seeds)))
    return max(0, int(min(most, in_time)))


def _items(task: Task) -> int:
    """Samples or tokens of a step."""
    return task.batch(0, 0)[0].numel()


def _is_whole(method: Method) -> bool:
    return method.apart == (0.0, 1.0)


def _meets(column: Column) -> int | None:
    """T, for those that meet, or whose bytes are those of arms that do."""
    return column.every or None


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what no table needs; of train losses the last part of each run."""
    kept = {key: value for key, value in row.items() if key not in ("label", "summary")}
    return {**kept, "train_loss": [run[-1] for run in row["train_loss"]]}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(SETTINGS), help=f"some of {','.join(SETTINGS)}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that ends after so many seconds")
    parser.add_argument("--processes", type=int, default=1, help="guarded runs side by side")
    parser.add_argument("--quick", action="store_true", help="in miniature; needs --results of its own")
    parser.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    given = parser.parse_args(words)
    names = given.tasks.split(",")
    if not {*names} <= {*SETTINGS}:
        parser.error(f"--tasks must be some of {','.join(SETTINGS)}, but got {given.tasks}")
    if given.quick and given.results == RESULTS:
        parser.error("--quick needs --results, a folder of its own: its figures are no results")
    if given.table:
        print(front(given.results), page(given.results), sep="\n\n")
        return
    torch.set_num_threads(1)  # batches are made by many threads, each of which works alone
    device, until = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.time() + given.seconds
    for name in names:
        setting = small(SETTINGS[name]) if given.quick else SETTINGS[name]
        done = Study(setting, given.results, device, until, given.processes).run()
        print(f"{name}: {'done' if done else 'not done: call it again'}", flush=True)


if __name__ == "__main__":
    main()
