"""The arguments of the ensemble: checked, resolved, compared between replicas, saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from hdet.algorithm.rounds import Growing, Rounds, default_length
from hdet.errors import ArgumentError

__all__ = ["DECAYS", "Settings", "refuse_nan"]

DECAYS = ("schedule", "exponential")


@dataclass(frozen=True)
class Settings:
    """What the method needs to know, resolved: no None stands for a default any more."""

    rounds: Rounds | Growing
    seed: int
    decay: str
    auto_lr_start: int | None
    """S_warm, the round end at which the controller begins; None: never."""

    @classmethod
    def resolve(
        cls,
        *,
        total_steps: int,
        warm_up_end: float,
        spread: float,
        sync_every: int | str | None,
        auto_lr_start: int | None,
        decay: str,
        seed: int,
        probed: bool = False,
    ) -> Settings:
        """Check the arguments and fill in defaults."""
        if not (_is_real(spread) and 0 <= spread <= 1):
            raise ArgumentError(
                f"spread must be at least 0 and at most 1, but got spread={spread!r}; it is the relative distance of "
                "the outermost replicas from the base rate, published as 1/9, and 0 means no fan-out"
            )
        if probed and sync_every == "auto":
            sync_every = None
        if sync_every is not None and not (not isinstance(sync_every, str) and _is_int(sync_every) and sync_every >= 1):
            raise ArgumentError(
                f"sync_every must be an integer, at least 1, but got sync_every={sync_every!r}; "
                f"leave it out for max(1, min(1000, total_steps // 50)) = {default_length(total_steps)}"
            )
        if decay not in DECAYS:
            raise ArgumentError(f"decay must be one of {DECAYS}, but got decay={decay!r}; leave it out for 'schedule'")
        if not _is_int(seed):
            raise ArgumentError(f"seed must be an integer, but got seed={seed!r}; leave it out for 0")
        if probed:
            takes_off = not auto_lr_start
            growing = Growing.for_run(total_steps, None if sync_every is None else int(sync_every))
            growing = growing if takes_off else replace(growing, landed=0)
            return cls(growing, int(seed), decay, 0 if takes_off else _checked_start(auto_lr_start, total_steps))
        rounds = Rounds(int(sync_every or default_length(total_steps)), total_steps)
        start = _resolve_start(auto_lr_start, rounds, total_steps, warm_up_end)
        return cls(rounds, int(seed), decay, start)

    @property
    def agreed(self) -> dict[str, float]:
        """As numbers that must be equal on all replicas."""
        return {
            "total_steps": math.nan if self.rounds.total_steps is None else float(self.rounds.total_steps),
            "sync_every": float(self.rounds.length or 0),
            "seed": float(self.seed),
            "decay (0: schedule, 1: exponential)": float(DECAYS.index(self.decay)),
            "auto_lr_start": math.nan if self.auto_lr_start is None else float(self.auto_lr_start),
        }

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint. total_steps is torch's to save."""
        return {
            "sync_every": self.rounds.length if self.rounds.length is not None else "auto",
            "seed": self.seed,
            "decay": self.decay,
            "auto_lr_start": self.auto_lr_start,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], total_steps: int | None) -> Settings:
        """The settings of a checkpoint."""
        return cls(
            _rounds_of(state, total_steps),
            int(state["seed"]),
            str(state["decay"]),
            None if state["auto_lr_start"] is None else int(state["auto_lr_start"]),
        )


def _rounds_of(state: Mapping[str, Any], total_steps: int | None) -> Rounds | Growing:
    """A probed fan-out saves where take-off landed."""
    length = None if state["sync_every"] == "auto" else int(state["sync_every"])
    if "landed" in state:
        return replace(Growing.for_run(total_steps, length), landed=state["landed"])
    return Rounds(int(state["sync_every"]), total_steps)


def refuse_nan(**arguments: object) -> None:
    """Raise for an argument that is or contains NaN: every rate computed from it would be NaN."""
    for name, value in arguments.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (Real, Tensor)) and bool(item != item) for item in items):
            raise ArgumentError(
                f"{name} must not be NaN, but got {name}={value!r}; every learning rate would become NaN"
            )


def _resolve_start(auto_lr_start: int | None, rounds: Rounds, total_steps: int, warm_up_end: float) -> int | None:
    """S_warm: a round end. By default the end of the warm-up rounded up to a round; never if that is past the end."""
    if auto_lr_start is None:
        start = max(1, math.ceil(warm_up_end / rounds.length)) * rounds.length
        return start if start <= total_steps else None
    return rounds.next_end(_checked_start(auto_lr_start, total_steps))


def _checked_start(auto_lr_start: Any, total_steps: int) -> int:
    if not (_is_int(auto_lr_start) and 0 <= auto_lr_start <= total_steps):
        raise ArgumentError(
            f"auto_lr_start must be an integer from 0 to total_steps = {total_steps}, but got "
            f"auto_lr_start={auto_lr_start!r}; leave it out for the end of the warm-up, or use auto_lr=False for never"
        )
    return int(auto_lr_start)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
