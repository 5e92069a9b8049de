"""The demonstration: what its two scenes run, and what they show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hdet.report import numbers as say
from hdet.report.verdict import Movement, Table, base_movement
from lab.runs.folder import Folder
from lab.runs.plan import AUTO, Plan
from lab.runs.result import Result

__all__ = ["Scene", "ensemble", "ensemble_table", "guess_table", "guess_words", "guesses", "movement_of"]

GOOD = 1e-2
FAR = 100.0


class Scene(NamedTuple):
    """Runs that are started together."""

    title: str
    words: str
    folders: list[Folder]
    plans: list[Plan]


def guesses(out: Path, steps: int) -> Scene:
    """A bad guess: torch's OneCycleLR uses it as given, hdet.auto only starts from it."""
    rates = {"100× too low": GOOD / FAR, "100× too high": GOOD * FAR}
    plans = [_digits("torch, a good rate", steps, method="none", lr=GOOD)]
    for words, rate in rates.items():
        plans.append(_digits(f"torch, {words}", steps, method="none", lr=rate))
        plans.append(_digits(f"hdet, {words}", steps, method="search", lr=AUTO, guess=rate))
    return Scene(
        "Scene one: a bad guess",
        f"A small CNN learns handwritten digits with Adam, {steps} steps on one device. A good rate is {GOOD:g}; "
        f"here it is {rates['100× too low']:g}, and then {rates['100× too high']:g}.",
        [Folder(out / plan.name.replace(", ", "-").replace(" ", "-").replace("×", "x")) for plan in plans],
        plans,
    )


def _digits(name: str, steps: int, *, method: str, lr: float | str, guess: float = GOOD) -> Plan:
    return Plan(task="digits", name=name, steps=steps, method=method, lr=lr, guess=guess)


def movement_of(run: Result) -> Movement | None:
    """How the run's rate has moved: of a run without a journal, which has one rate, not at all."""
    if run.journal is not None:
        return base_movement(run.journal)
    given = say.finite(run.about.get("arguments", {}).get("lr"))
    return None if given is None else Movement("base rate", given, given)


def _final_loss(run: Result) -> str:
    return say.loss(run.final.get("loss"))


def guess_table(runs: Sequence[Result]) -> Table:
    """Of :func:`guesses`, in its order."""
    good, *others = runs
    rows = [["about right", f"{GOOD:g}", _final_loss(good), "", ""]]
    given = (("100× too low", GOOD / FAR), ("100× too high", GOOD * FAR))
    for (words, rate), torch_run, ours in zip(given, others[::2], others[1::2], strict=True):
        found = movement_of(ours)
        losses = [_final_loss(run) for run in (torch_run, ours)]
        rows.append([words, f"{rate:g}", *losses, say.rate(found.end if found else None)])
    columns = ("rate", "given", "torch.OneCycleLR", "hdet.auto", "rate that hdet found")
    return Table(columns, rows, "A bad guess: validation loss on handwritten digits")


def guess_words(runs: Sequence[Result]) -> str:
    """What scene one comes to, in a sentence."""
    good, *others = runs
    found = [say.rate(base.end if base else None) for base in map(movement_of, others[1::2])]
    ours, theirs = ([_final_loss(run) for run in part] for part in (others[1::2], others[::2]))
    return (
        f"From guesses 100× too low and 100× too high hdet found {found[0]} and {found[1]}, and came to a validation "
        f"loss of {ours[0]} and {ours[1]}; torch came to {theirs[0]} and {theirs[1]}, and with a good rate to "
        f"{_final_loss(good)}."
    )


def ensemble(out: Path, steps: int, replicas: int) -> Scene:
    """The ensemble: replicas that train at different rates and are averaged."""
    plan = Plan(
        task="feed",
        name="ensemble",
        steps=steps,
        replicas=replicas,
        method="replicas",
        lr=5e-3,
        batch_size=48,
        eval_every=max(1, steps // 2),
    )
    return Scene(
        "Scene two: the ensemble",
        f"{replicas} processes train a recommender's model on a stream of users and items, each at its own rate around "
        f"the schedule; every {plan.round_length} steps they are averaged, and their losses vote on the rate.",
        [Folder(out / "ensemble")],
        [plan],
    )


def ensemble_table(run: Result) -> Table:
    """Where the ensemble began and ended."""
    base, journal, final = movement_of(run), run.journal, run.final
    names = [name for name in final if name.startswith("auc_")]
    columns = ("replicas", "rounds", "validation loss", *(name.replace("auc_", "AUC, ") for name in names), "peak rate")
    moved = "{} → {}".format(*say.rates(base.start, base.end)) if base else say.NOTHING
    cells = [
        str(journal.replicas if journal else say.NOTHING),
        str(journal.length if journal else 0),
        _final_loss(run),
        *(say.loss(final[n]) for n in names),
    ]
    return Table(columns, [[*cells, moved]], "The ensemble: the feed task")
