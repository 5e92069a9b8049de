"""The fault matrix: ranks are killed at named points, the run goes on, and is compared with one that was not killed.

``python -m tests.faults.matrix`` tries all of it and prints a table; ``make test`` tries some.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.engine.trained import way as trained_way
from hdet.faces import checkpoint_file
from tests.models import batch, make_optimizer, two_layer
from tests.ranks import run_ranks, try_ranks

STEPS, ROUND = 48, 6
WAYS, RANKS, VICTIMS = ("trained", "arms", "probed"), (2, 3, 4), ("first", "last", "some")
POINTS = {"in converge": ("trained", "arms"), "in take-off": ("probed",), "between rounds": WAYS}
OF_RANK_0 = ("in a checkpoint's write", "in a journal's write")


class Case(NamedTuple):
    """One kill."""

    way: str
    ranks: int
    victim: str
    point: str
    late: int = 0
    """0, 1 or 2: how far the run has come."""

    @property
    def rank(self) -> int:
        return {"first": 0, "last": self.ranks - 1, "some": (7 * self.ranks + self.late) % self.ranks}[self.victim]


class Outcome(NamedTuple):
    """What came of it."""

    case: Case
    came_back: bool
    equal: bool
    """Weights, and base rates of all rounds, bit by bit."""
    noticed: float
    """Seconds until the last of the survivors knew; NaN where nobody survived or somebody did not."""
    words: str


def every_case() -> Iterator[Case]:
    """216 kills."""
    for way, ranks, late in product(WAYS, RANKS, range(3)):
        for point, ways in POINTS.items():
            yield from (Case(way, ranks, victim, point, late) for victim in VICTIMS if way in ways)
        yield from (Case(way, ranks, "first", point, late) for point in OF_RANK_0)


# -- the run that is killed -------------------------------------------------------------------------------------------


def squared(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def job(rank: int, case: Case, folder: str, fatal: bool) -> tuple[str, Any]:
    """A run that saves as it goes, and goes on from what is there. Survivors say when they noticed."""
    try:
        with _death(rank, case, folder) if fatal else _life():
            return "done", _trained(rank, case, Path(folder), fatal)
    except (hdet.HdetError, RuntimeError) as error:
        return "noticed", (time.time(), f"{type(error).__name__}: {error}")


def _trained(rank: int, case: Case, folder: Path, fatal: bool) -> torch.Tensor:
    plain = two_layer(dtype=torch.float32)
    arms = hdet.arms(case.ranks) if case.way == "arms" else None
    model: nn.Module = plain if arms is not None else DistributedDataParallel(plain)
    optimizer = make_optimizer("adam", [list(plain.parameters())])
    journal = folder / "journal.jsonl" if rank == 0 else None
    if case.way == "probed":
        probe = hdet.ProbeBatch(plain, squared, [_single(batch(1000 + k, 0)) for k in range(3)])
        scheduler = hdet.OneCycleLR(optimizer, "auto", STEPS, probe=probe, journal=journal)
    else:
        scheduler = hdet.OneCycleLR(optimizer, 0.02, STEPS, sync_every=ROUND, group=arms, journal=journal)
    parts = {"model": plain, "optimizer": optimizer, "scheduler": scheduler}
    path = folder / "run.pt"
    begin = hdet.load(path, **parts)["step"] if path.exists() else 0
    for step in range(begin, STEPS):
        if fatal and case.point in ("between rounds", "in take-off") and step == _step_of(case) and rank == case.rank:
            _die(folder)
        loss = squared(model, _single(batch(step, rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if (step + 1) % ROUND == 0:
            hdet.save(path, **parts, step=step + 1)
    return torch.cat([p.detach().flatten() for p in plain.parameters()])


def _single(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].float(), pair[1].float()


def _step_of(case: Case) -> int:
    """The step at which it happens."""
    return (2, 5, 9)[case.late] if case.point == "in take-off" else (8, 20, 40)[case.late]


def _die(folder: str | Path) -> None:
    (Path(folder) / "died").write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _life() -> Iterator[None]:
    yield


@contextmanager
def _death(rank: int, case: Case, folder: str) -> Iterator[None]:
    """Inside, this rank dies where the case says so, if it is the victim. Its process ends, so nothing is put back."""
    if rank == case.rank:
        nth = 2 + 2 * case.late
        if case.point == "in converge":
            trained_way.converge = _dying(trained_way.converge, nth, lambda *_: _die(folder))
        elif case.point == "in a checkpoint's write":
            written = (30, 900, 6000)[case.late]  # bytes of the second checkpoint
            counted = _Bytes(checkpoint_file._Hashed.write, 2, written, folder)
            checkpoint_file._Hashed.write = lambda self, data: counted(self, data)  # type: ignore[method-assign]
        elif case.point == "in a journal's write":
            hdet.Journal.write = _dying(hdet.Journal.write, nth, functools.partial(_half_a_line, folder))  # type: ignore[method-assign]
    yield


def _dying(original: Callable[..., Any], nth: int, end: Callable[..., None]) -> Callable[..., Any]:
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            end(*args)
        return original(*args, **kwargs)

    return dying


def _half_a_line(folder: str, journal: hdet.Journal, record: Any) -> None:
    with journal.path.open("a") as file:
        file.write('{"kind":"round","round":')
    _die(folder)


class _Bytes:
    """Writes of checkpoints, until one of them has come so far."""

    def __init__(self, original: Callable[..., int], number: int, length: int, folder: str) -> None:
        self._original, self._number, self._length, self._folder = original, number, length, folder
        self._files: list[int] = []
        self._written = 0

    def __call__(self, hashed: Any, data: Any) -> int:
        if id(hashed) not in self._files[-1:]:
            self._files.append(id(hashed))
            self._written = 0
        self._written += len(data)
        if len(self._files) == self._number and self._written >= self._length:
            self._original(hashed, bytes(data)[: len(data) // 2])
            hashed._file.flush()
            _die(self._folder)
        return self._original(hashed, data)


# -- trying -----------------------------------------------------------------------------------------------------------


@functools.cache
def undisturbed(way: str, ranks: int) -> tuple[torch.Tensor, list[Any]]:
    """Final weights and base rates of the run that nobody killed."""
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(job, ranks, Case(way, ranks, "first", "between rounds"), folder, False)
        return answers[0][1], _bases(folder)


def attempt(case: Case) -> Outcome:
    """Kill, go on, compare."""
    weights, bases = undisturbed(case.way, case.ranks)
    with tempfile.TemporaryDirectory() as folder:
        answers = try_ranks(job, case.ranks, case, folder, True)
        died = float((Path(folder) / "died").read_text()) if (Path(folder) / "died").exists() else float("nan")
        survivors = [answer for rank, answer in enumerate(answers) if rank != case.rank]
        told = [value[1] for ok, value in survivors if ok and value[0] == "noticed"]
        noticed = max((at - died for at, _ in told), default=0.0) if len(told) == len(survivors) else float("nan")
        again = try_ranks(job, case.ranks, case, folder, False)
        came_back = all(ok and value[0] == "done" for ok, value in again)
        words = "; ".join(str(value)[:300] for ok, value in again if not ok or value[0] != "done")
        equal = came_back and all(torch.equal(value[1], weights) for _, value in again) and _bases(folder) == bases
        return Outcome(case, came_back and died == died, equal, noticed, words)


def _bases(folder: str) -> list[Any]:
    return [(record["step"], record["base"]) for record in hdet.read_journal(Path(folder) / "journal.jsonl").rounds]


def main() -> int:
    """The table."""
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for case in every_case():
        outcome = attempt(case)
        rows.setdefault((case.way, case.point), []).append(outcome)
        if not (outcome.came_back and outcome.equal):
            print(f"{case}: {outcome}", file=sys.stderr, flush=True)
    print("| way | killed | tried | came back | bit-equal | lost | noticed after, s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for (way, point), outcomes in rows.items():
        back, same = sum(o.came_back for o in outcomes), sum(o.equal for o in outcomes)
        slowest = max(o.noticed for o in outcomes)
        print(f"| {way} | {point} | {len(outcomes)} | {back} | {same} | {len(outcomes) - back} | {slowest:.2f} |")
    return int(any(not outcome.came_back for outcomes in rows.values() for outcome in outcomes))


if __name__ == "__main__":
    from tests.faults import matrix  # ranks look for the functions under this name

    sys.exit(matrix.main())
