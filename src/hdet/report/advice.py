"""What to do next: with the rate that was found, or about a search that could not find one."""

from __future__ import annotations

import json
from typing import NamedTuple

from hdet.report import numbers as say
from hdet.report.data import RunData, kind_of
from hdet.report.series import alarms
from hdet.report.verdict import base_movement, movements

__all__ = ["CURE", "Advice", "Warned", "advice", "warned"]

CURE = "Do not use the rate of this run. Cure that first, as the run's warning says, and train again."


class Advice(NamedTuple):
    """How to use what a run found."""

    found: str
    """A sentence."""
    codes: tuple[str, ...]
    """Lines to paste: one or the other."""

    def __str__(self) -> str:
        return f"{self.found} Use again: {', or '.join(f'`{code}`' for code in self.codes)}"


class Warned(NamedTuple):
    """What makes a run's rate worthless."""

    run: str
    step: int
    text: str

    def __str__(self) -> str:
        return f"{self.run}, step {self.step}: {self.text}. {CURE}"


def advice(run: RunData) -> Advice | None:
    """None where nothing was learned, or where what was learned means nothing."""
    base = base_movement(run)
    if base is None or not run.rounds or run.summary.crashed or alarms(run):
        return None
    again = f"hdet.schedule_from({_journal(run)}, optimizer)"
    so_far = " so far" if run.rounds[-1].step < (run.total_steps or 0) else ""
    found = f"{'Found' if base.moved else 'Stayed at'} {say.rate(base.end)}{so_far}."
    if run.decays_by_itself or "max_lr" not in run.arguments or "schedule" in run.arguments:  # no peak can be given
        return Advice(found, (again,))
    return Advice(found, (f"max_lr={_peaks(run)}", again))


def _peaks(run: RunData) -> str:
    """One number, or one per parameter group where they differ."""
    found = [say.rate(one.end) for one in movements(run) if kind_of(one.knob) == "lr"]
    return found[0] if len(set(found)) == 1 else f"[{', '.join(found)}]"


def _journal(run: RunData) -> str:
    """The journal's path, in quotes."""
    path = run.path / "journal.jsonl" if run.path.is_dir() else run.path
    return json.dumps(str(path), ensure_ascii=False)


def warned(run: RunData) -> tuple[Warned, ...]:
    """The journal's alarms, without their full stops."""
    return tuple(Warned(run.name, one.step, one.text.rstrip(". ")) for one in alarms(run))
