"""The cases of the matrix, the same every time."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tests.faults.disks import SPOILS, possible
from tests.faults.training import ROUND, STEPS, WAYS, Plan
from tests.faults.traps import POINTS, Trap

__all__ = ["GROUP_TIMEOUT", "Case", "a_few", "kills", "others"]

GROUP_TIMEOUT = 5.0
"""Seconds, where somebody is late or silent: the others wait so long."""


@dataclass(frozen=True)
class Case:
    """What is trained, and what goes wrong."""

    plan: Plan
    trap: Trap

    def __str__(self) -> str:
        plan, trap = self.plan, self.trap
        saved = ", saved inside rounds" if plan.saves_inside_rounds else ""
        return f"{plan.way} on {plan.ranks}{saved}: rank {trap.rank} {trap.fault} in {trap.point}, step {trap.step}"


def kills(count: int = 200, seed: int = 0) -> list[Case]:
    """So many: every way, point, number of ranks and victim once, then again at other steps."""
    dice = random.Random(seed)
    everything = list(itertools.product(WAYS, POINTS, (2, 3, 4), ("first", "last", "any")))
    sensible = [one for one in everything if one[0] == "search" or one[1] != "take-off"]  # only a search takes off
    found: list[Case] = []
    while len(found) < count:
        dice.shuffle(sensible)
        found += [_case(dice, *one) for one in sensible]
    return found[:count]


def a_few() -> list[Case]:
    """Twelve for daily tests: every way, point and victim, on few plans, since each needs a run to compare with."""
    chosen = [
        ("trained", 3, "converge", 0),
        ("trained", 3, "checkpoint", 0),
        ("trained", 3, "journal", 2),
        ("trained", 3, "between rounds", 1),
        ("search", 2, "converge", 1),
        ("search", 2, "checkpoint", 1),
        ("search", 2, "journal", 0),
        ("search", 2, "take-off", 0),
        ("arms", 4, "converge", 3),
        ("arms", 4, "checkpoint", 0),
        ("arms", 4, "journal", 1),
        ("arms", 4, "between rounds", 2),
    ]
    return [
        Case(Plan(way, ranks, 3 if way == "search" else ROUND), Trap(rank, point, 4 if point == "take-off" else 20))
        for way, ranks, point, rank in chosen
    ]


def others() -> list[Case]:
    """Ranks that are silent, ranks that are late by more than the process group waits, and disks."""
    faults = itertools.product(("silent", "late"), WAYS, ("converge", "between rounds"))
    of_ranks = [
        Case(Plan(way, 3, 3 if way == "search" else ROUND), Trap(2, point, 20, fault, seconds=2 * GROUP_TIMEOUT))
        for fault, way, point in faults
    ]
    spoils = itertools.product(SPOILS, WAYS, ("checkpoint", "journal"))
    return of_ranks + [_spoiled(fault, way, point) for fault, way, point in spoils if possible(fault, point)]


def _spoiled(fault: str, way: str, point: str) -> Case:
    never_opens = (fault, point) == ("read-only folder", "journal")  # one that is open already is written on
    return Case(Plan(way, 2, 3 if way == "search" else ROUND), Trap(0, point, 0 if never_opens else 20, fault))


def _case(dice: random.Random, way: str, point: str, ranks: int, victim: str) -> Case:
    rank = {"first": 0, "last": ranks - 1, "any": dice.randrange(ranks)}[victim]
    save_every = 3 if way == "search" else dice.choice((ROUND, 5))
    step = dice.randrange(2, 9) if point == "take-off" else dice.randrange(4, STEPS - ROUND)
    return Case(Plan(way, ranks, save_every), Trap(rank, point, step, share=dice.choice((0.0, 0.3, 0.7, 1.0))))
