"""The record of a round in the journal; docs/journal.md says what each key means."""

from __future__ import annotations

from typing import Any

from hdet.ensemble.steering import Decision, Steering


def record_of(
    steering: Steering, decision: Decision, divergence: list[float] | None, seconds: dict[str, float]
) -> dict[str, Any]:
    """A round that ends, for the journal. Call it before the base values move.

    Args:
        steering: the knobs and their base values.
        decision: what the replicas have concluded.
        divergence: how far each replica was from the mean; None: there is only one.
        seconds: how long each phase of the round's end took.
    """
    end, roll, place, bases, update = decision
    (before, after), specs, settings = end.span, steering.specs, steering.settings
    base = steering.bases.all_values(end.schedule(before), specs, settings, before)
    places = steering.standing(before, place).places
    weights = iter(() if update is None else update.weights)  # none for replicas that are left out
    return {
        "kind": "round",
        "round": steering.rounds.index(before),
        "step": after,
        "replicas": [
            {
                "loss": loss if roll.has_losses else None,
                "signal": signal,
                "values": [spec.value(b, x) for spec, b, x in zip(specs, base, row, strict=True)],
                "multipliers": [spec.factor(x) for spec, x in zip(specs, row, strict=True)],
                "divergence": distance,
            }
            for loss, signal, row, distance in zip(
                roll.losses, roll.signals, places, divergence or [0.0] * len(places), strict=True
            )
        ],
        "excluded": [r for r, live in enumerate(roll.live) if not live],
        "weights": None if update is None else [next(weights) if live else 0.0 for live in roll.live],
        "delta": None if update is None else update.deltas,
        "velocity": getattr(bases.controller, "velocity", None),
        "error": getattr(bases.controller, "error", None),
        "learned": bases.learned,
        "base_before": base,
        "base": bases.all_values(end.schedule(after), specs, settings, after),
        "seconds": seconds,
    }
