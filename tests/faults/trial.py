"""One case: a run in which something goes wrong, a new start from its checkpoint, and the run where nothing did."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import stdev
from typing import Any

import hdet
from tests.faults.cases import GROUP_TIMEOUT, Case
from tests.faults.cluster import Outcome, start
from tests.faults.training import Plan

__all__ = ["Result", "undisturbed", "try_it"]


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
    """Whether the new start came to the end on every rank, with a journal of every round."""
    bit_equal: bool
    close: bool
    """Whether the final loss is at most 1 %, or two standard deviations over seeds, above the undisturbed run's."""
    seconds: float | None
    """Until the last of the others noticed; None: one of them did not."""
    named: bool
    """Whether an error of theirs names the rank. Where torch's own gradients fail first, the error is torch's."""
    by_torch: bool
    """Whether only torch noticed, in the exchange of gradients."""
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broken = start(plan, folder, trap, group_timeout=20.0 if trap.fault == "killed" else GROUP_TIMEOUT)
        resumed = start(plan, folder)
        journal = _steps(folder)
    whole, steps = undisturbed(plan)
    came_back = len(resumed.ends) == plan.ranks and journal == steps
    errors = [text for rank, text in broken.errors.items() if rank != trap.rank]
    by_hdet = [text for text in errors if "LostReplicaError" in text]
    noticed = broken.sprung_at is not None and len(errors) == plan.ranks - 1
    return Result(
        **{"way": plan.way, "ranks": plan.ranks, "point": trap.point, "fault": trap.fault},
        inside_rounds=plan.saves_inside_rounds,
        came_back=came_back,
        bit_equal=came_back and _digests(resumed) == _digests(whole),
        close=came_back and _is_close(plan, whole, resumed),
        seconds=max(broken.seconds_without(trap.rank)) if noticed else None,
        named=any(f"  rank {trap.rank}: " in text for text in by_hdet),
        by_torch=bool(errors) and not by_hdet,
        told="" if came_back else f"{case}: journal {journal}; {[text[-400:] for text in resumed.errors.values()]}",
    )


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
        return [record["step"] for record in hdet.read_journal(folder / "run.jsonl").rounds]
    except (hdet.HdetError, OSError):
        return []


def _digests(outcome: Outcome) -> list[str]:
    return [outcome.ends[rank].digest for rank in sorted(outcome.ends)]


def _is_close(plan: Plan, whole: Outcome, resumed: Outcome) -> bool:
    excess, bound = resumed.ends[0].loss - whole.ends[0].loss, 0.01 * whole.ends[0].loss
    return excess <= bound or excess <= 2 * _deviation(plan)


@cache
def _deviation(plan: Plan) -> float:
    """Of the final loss over four seeds."""
    losses = [undisturbed(replace(plan, seed=seed))[0].ends[0].loss for seed in range(4)]
    return stdev(losses)
