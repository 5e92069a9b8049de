"""The journal's record of a round: what it was, as plain data."""

from __future__ import annotations

from typing import Any

from hdet.distributed.rollcall import RollCall

__all__ = ["round_record"]


def round_record(
    *,
    k: int,
    step: int,
    roll: RollCall,
    base: list[float],
    values: list[list[float]],
    multipliers: list[list[float]],
    learned: list[float],
    new_base: list[float],
    divergence: list[float],
    seconds: dict[str, float],
    weights: list[float] | None = None,
    deltas: list[float] | None = None,
    memory: Any = None,
) -> dict[str, Any]:
    """One round. Lists of knobs are in the header's order.

    ``weights``, ``deltas``, ``memory``: what the controller says and what it remembers; None without a signal.
    """
    replicas = [
        {
            "loss": loss if roll.has_losses else None,
            "signal": signal,
            "values": row,
            "multipliers": rho,
            "divergence": far,
        }
        for loss, signal, row, rho, far in zip(roll.losses, roll.signals, values, multipliers, divergence, strict=True)
    ]
    excluded = [r for r, live in enumerate(roll.live) if not live]
    return {
        "kind": "round",
        "round": k,
        "step": step,
        "replicas": replicas,
        "excluded": excluded,
        "weights": _with_zeros(weights, excluded),
        "delta": deltas,
        "velocity": getattr(memory, "velocity", None),
        "error": getattr(memory, "error", None),
        "learned": learned,
        "base_before": base,
        "base": new_base,
        "seconds": seconds,
    }


def _with_zeros(weights: list[float] | None, excluded: list[int]) -> list[float] | None:
    """The controller's weights per replica: those it did not see count nothing."""
    if weights is None:
        return None
    padded = list(weights)
    for r in excluded:
        padded.insert(r, 0.0)
    return padded
