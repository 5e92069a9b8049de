"""Plans: what they refuse, and that they survive JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

import hdet
from lab.runs.plan import Plan, usual_rate
from lab.tests.runs.small import SMALL, a_plan


def test_survives_json() -> None:
    plan = a_plan(lr=0.1, name="x", start="there.pt", noise=0.01)
    assert Plan.of(json.loads(json.dumps(plan.arguments()))) == plan


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"method": "wide"}, "method must be one of search, replicas, none"),
        ({"steps": 0}, "steps must be an integer, at least 1"),
        ({"replicas": 0}, "replicas must be"),
        ({"eval_every": -1}, "eval_every must be"),
        ({"lr": 0.0}, "lr must be a finite number above 0"),
        ({"lr": float("nan")}, "lr must be a finite number above 0"),
        ({"lr": "fast"}, "lr must be a finite number above 0"),
        ({"lr": "auto"}, "lr=auto needs method=search"),
        ({"method": "search", "lr": "auto", "guess": -1.0}, "guess must be"),
        ({"method": "search"}, "method=search finds the rate, but got lr=0.005; use lr=auto, and the number as guess"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd"),
        ({"device": "tpu"}, "device must be one of"),
    ],
)
def test_refuses(own: dict[str, Any], words: str) -> None:
    with pytest.raises(hdet.ArgumentError, match=words):
        a_plan(**own)


def test_refuses_arguments_of_another_version() -> None:
    with pytest.raises(hdet.ArgumentError, match="another version"):
        Plan.of({"task": "feed", "steps": 3, "colour": "red"})
    with pytest.raises(hdet.ArgumentError, match="another version"):
        Plan.of({})


def test_held_out_samples_come_after_the_run() -> None:
    assert a_plan(steps=10, replicas=3, batch_size=7).make_task().horizon == 210  # type: ignore[attr-defined]
    assert a_plan(options=SMALL | {"horizon": 5}).make_task().horizon == 5  # type: ignore[attr-defined]


def test_defaults_follow_the_length() -> None:
    plan = a_plan(steps=1000, eval_every=None, sync_every=None)
    assert (plan.evaluates_every, plan.round_length) == (100, 20)
    assert a_plan(steps=3, eval_every=None, sync_every=None).evaluates_every == 1


def test_usual_rates() -> None:
    assert usual_rate("digits", "sgd") == pytest.approx(10 * usual_rate("digits", "adam"))
