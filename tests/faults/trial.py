"""One case: a run in which something goes wrong, a new start from its checkpoint, and the run where nothing did."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import stdev
from typing import Any

import hdet
from tests.faults.cases import GROUP_TIMEOUT, Case
from tests.faults.cluster import Outcome, start
from tests.faults.disks import SPOILS, disk, repair
from tests.faults.training import Plan
from tests.patience import GROUP_PATIENCE

__all__ = ["Result", "try_it", "undisturbed"]


@dataclass(frozen=True)
class Result:
    """What came of a case."""

    way: str
    ranks: int
    point: str
    fault: str
    inside_rounds: bool
    """Whether checkpoints were written inside rounds of replicas that train apart."""

    came_back: bool
    """Whether the new start went on from the last checkpoint to the end on every rank, with a whole journal."""
    bit_equal: bool
    buffers_equal: bool
    """Whether running statistics are bit-equal too."""
    close: bool
    """Whether the final loss is at most 1 %, or two standard deviations over seeds, above the undisturbed run's."""
    seconds: float | None
    """Until the last of the others noticed; None: one of them did not, or had no need to."""
    named: bool
    """Whether an error of theirs names the rank."""
    by_torch: bool
    """Whether all their errors are torch's own, of the exchange of gradients, which name nobody."""
    told: str
    """Why it did not come back."""

    @property
    def lost(self) -> bool:
        """Whether work was lost."""
        return not (self.came_back and self.close)

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def try_it(case: Case) -> Result:
    """Go through with a case."""
    plan, trap = case.plan, case.trap
    broken, resumed, journal = _gone_through(case)
    whole, steps = undisturbed(plan)
    if resumed is broken:  # a journal that cannot be written is no reason to stop; it misses rounds
        went_on = set(journal) < set(steps)
    else:
        last_saved = trap.step - trap.step % plan.save_every  # or later: the trap may spring some steps after it is set
        went_on = journal == steps and all(end.began >= last_saved for end in resumed.ends.values())
    came_back = len(resumed.ends) == plan.ranks and went_on
    errors = [text for rank, text in broken.errors.items() if rank != trap.rank]
    by_hdet = [text for text in errors if "hdet.errors." in text]
    return Result(
        way=plan.way,
        ranks=plan.ranks,
        point=trap.point,
        fault=trap.fault,
        inside_rounds=plan.saves_inside_rounds,
        came_back=came_back,
        bit_equal=came_back and all(resumed.ends[rank].digest == end.digest for rank, end in whole.ends.items()),
        buffers_equal=came_back and all(resumed.ends[rank].buffers == end.buffers for rank, end in whole.ends.items()),
        close=came_back and _is_close(plan, whole, resumed),
        seconds=max(broken.seconds_without(trap.rank)) if len(errors) == plan.ranks - 1 else None,
        named=any(f" rank {trap.rank}: " in text for text in by_hdet),
        by_torch=bool(errors) and not by_hdet,
        told="" if came_back else f"{case}: journal {journal}; {[text[-400:] for text in resumed.errors.values()]}",
    )


def _gone_through(case: Case) -> tuple[Outcome, Outcome, list[int]]:
    """The run where something goes wrong; the one that goes on, if need be; where the rounds of their journal end."""
    plan, trap = case.plan, case.trap
    with tempfile.TemporaryDirectory() as name, ExitStack() as inside:
        folder, spoiled = Path(name), Path(name) / trap.point  # the folder of the checkpoint or of the journal
        if trap.fault in SPOILS:
            trap = replace(trap, folder=str(spoiled))
            inside.enter_context(disk(spoiled))
        broken = start(plan, folder, trap, group_timeout=GROUP_PATIENCE if trap.fault == "killed" else GROUP_TIMEOUT)
        if broken.sprung_at is None:
            raise RuntimeError(f"{case}: nothing went wrong, {broken.errors}")
        if trap.fault in SPOILS:
            repair(spoiled)
        resumed = broken if len(broken.ends) == plan.ranks else start(plan, folder)
        return broken, resumed, _steps(folder)


@cache
def undisturbed(plan: Plan) -> tuple[Outcome, list[int]]:
    """The run where nothing goes wrong, and the rounds in its journal."""
    with tempfile.TemporaryDirectory() as name:
        outcome = start(plan, Path(name))
        if len(outcome.ends) < plan.ranks:
            raise RuntimeError(f"{plan} does not even run undisturbed: {outcome.errors}")
        return outcome, _steps(Path(name))


def _steps(folder: Path) -> list[int]:
    """Where the rounds of a journal end; none where it cannot be read."""
    try:
        return [record["step"] for record in hdet.read_journal(folder / "journal" / "run.jsonl").rounds]
    except (hdet.HdetError, OSError):
        return []


def _is_close(plan: Plan, whole: Outcome, resumed: Outcome) -> bool:
    excess, bound = resumed.ends[0].loss - whole.ends[0].loss, 0.01 * whole.ends[0].loss
    return excess <= bound or excess <= 2 * _deviation(plan)


@cache
def _deviation(plan: Plan) -> float:
    """Of the final loss over four seeds."""
    losses = [undisturbed(replace(plan, seed=seed))[0].ends[0].loss for seed in range(4)]
    return stdev(losses)
