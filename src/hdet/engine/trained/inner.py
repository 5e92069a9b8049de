"""Hierarchical rounds: replicas of one node are averaged more often than all of them."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.checks import is_int
from hdet.errors import ArgumentError

__all__ = ["Inner"]


@dataclass(frozen=True)
class Inner:
    """Replicas of one node are averaged every ``every`` steps, all of them at the end of a round.

    Args:
        every: T1, steps between averages inside a node; the round's T2 is ``sync_every``.
        ranks: how many consecutive ranks make a node.
    """

    every: int
    ranks: int

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("ranks", self.ranks)):
            if not (is_int(value) and value >= 1):
                raise ArgumentError(
                    f"{name} must be an integer, at least 1, but got {name}={value!r}; for instance {name}=8"
                )
