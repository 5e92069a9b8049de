"""The settings of a trained fan-out, resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hdet.algorithm.rounds import Rounds
from hdet.state_rules import Rule, count, integer, maybe, one_of

__all__ = ["DECAYS", "SETTINGS", "Decay", "Settings"]

Decay = Literal["schedule", "exponential"]
DECAYS: tuple[Decay, ...] = ("schedule", "exponential")
SETTINGS: dict[str, Rule] = {
    "sync_every": count(1),
    "seed": integer,
    "decay": one_of(*DECAYS),
    "auto_lr_start": maybe(count(0)),
}
"""What :meth:`Settings.from_state` needs."""


@dataclass(frozen=True)
class Settings:
    """What the published method needs to know; no None stands for a default any more."""

    rounds: Rounds
    seed: int = 0
    decay: Decay = "schedule"
    start: int | None = 0
    """S_warm, the round end at which the controller begins; None: never."""

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint and the journal's header. total_steps is the face's to save."""
        return {
            "sync_every": self.rounds.length,
            "seed": self.seed,
            "decay": self.decay,
            "auto_lr_start": self.start,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], total_steps: int | None) -> Settings:
        """The settings of a checkpoint."""
        start = state["auto_lr_start"]
        rounds = Rounds(int(state["sync_every"]), total_steps)
        return cls(rounds, int(state["seed"]), state["decay"], None if start is None else int(start))
