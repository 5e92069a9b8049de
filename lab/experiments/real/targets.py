"""What the tables must show, as it was set before the rule was made. Pure: scores in, PASS or MISS out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from real.score import TUNED, Summary

OURS = "auto"
CONTROLS = ("auto-alone", "placebo", "onecycle")
"""No methods of their own: they are never the fastest, and are not drawn."""
TUNED_PEERS = (TUNED, "schedulefree-tuned")
APART = ("sorting",)
"""It learns at a transition: its losses differ by decades, and are in no mean."""


class Target(NamedTuple):
    """What a split must show."""

    mean: float
    worst: float | None = None
    ahead: bool = False
    """Of every peer that is not tuned, in mean, worst and area."""


TARGETS = {"dev": Target(0.99, 1.15), "seen": Target(1.02, 1.15, ahead=True), "test": Target(1.03, 1.15, ahead=True)}
NEAR, ALONE, PLACEBO, SORTING = 0.8, 1.1, 1.3, 2.0


class Duel(NamedTuple):
    """Our summary and a peer's, both over the workloads that the peer has run: one that left some out still counts."""

    ours: Summary
    peer: Summary


class Check(NamedTuple):
    """One target, and what came of it."""

    split: str
    what: str
    found: str
    asked: str
    met: bool


def checks(
    splits: Mapping[str, Mapping[str, Summary]],
    apart: Mapping[str, Mapping[float | None, float]],
    duels: Mapping[str, Mapping[str, Duel]],
) -> list[Check]:
    """Every target that has been measured.

    Args:
        splits: the methods of each split.
        apart: by workload and start, our final loss over the best.
        duels: for each split, our summary beside each peer's, on the workloads that the peer has run.
    """
    found = []
    for split, target in TARGETS.items():
        if OURS in splits.get(split, {}):
            found += _of_split(split, target, splits[split], duels.get(split, {}))
    for name, ratios in apart.items():
        found.append(_at_most("apart", f"{name}, the worst start", max(ratios.values()), SORTING))
    return found


def is_peer(name: str) -> bool:
    """Whether a method is somebody else's, and was not tuned."""
    return name not in (OURS, *CONTROLS, *TUNED_PEERS)


def _of_split(split: str, target: Target, all_of: Mapping[str, Summary], duels: Mapping[str, Duel]) -> list[Check]:
    ours = all_of[OURS]
    found = [_at_most(split, "mean", ours.ratio, target.mean)]
    if target.worst is not None:
        found.append(_at_most(split, "worst", ours.worst, target.worst))
    if target.ahead:
        found += [
            _ahead(split, "mean", {name: duel.peer.ratio - duel.ours.ratio for name, duel in duels.items()}),
            _ahead(split, "worst", {name: duel.peer.worst - duel.ours.worst for name, duel in duels.items()}),
            _ahead(split, "area", {name: duel.ours.area - duel.peer.area for name, duel in duels.items()}),
        ]
    what = "runs near the best rate or its loss"
    found.append(Check(split, what, f"{ours.near:.0%}", f"at least {NEAR:.0%}", ours.near >= NEAR))
    if "auto-alone" in all_of:
        behind = all_of["auto-alone"].ratio / ours.ratio
        found.append(_at_most(split, "`step()` alone, mean over that with losses", behind, ALONE))
    if "placebo" in all_of:
        mean = all_of["placebo"].ratio
        found.append(Check(split, "placebo, mean", f"{mean:.3f}", f"at least {PLACEBO:g}", mean >= PLACEBO))
    return found


def _at_most(split: str, what: str, value: float, most: float) -> Check:
    return Check(split, what, f"{value:.3f}", f"at most {most:g}", value <= most)


def _ahead(split: str, what: str, margins: Mapping[str, float]) -> Check:
    """``margins``: by how much each peer is behind."""
    better = [name for name, margin in margins.items() if margin <= 0]
    found = f"not of {', '.join(better)}" if better else f"of all {len(margins)}"
    return Check(split, f"ahead of untuned peers in {what}", found, "of all", not better)


def check_table(found: Sequence[Check]) -> str:
    """One line per target."""
    head = "| split | what | found | target | |\n| --- | --- | --- | --- | --- |"
    lines = [f"| {c.split} | {c.what} | {c.found} | {c.asked} | {'PASS' if c.met else 'MISS'} |" for c in found]
    return "\n".join([head, *lines])
