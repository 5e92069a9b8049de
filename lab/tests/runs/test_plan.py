"""Plans: what they refuse, and what they leave to the task and to the length of the run."""

from __future__ import annotations

from typing import Any

import pytest

import hdet
from lab.tests.runs.small import SMALL, a_plan


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"steps": 0}, "steps must be an integer, at least 1"),
        ({"replicas": 0}, "replicas must be"),
        ({"replicas": 10**6}, "replicas must be at most 1024"),
        ({"eval_every": -1}, "eval_every must be"),
    ],
)
def test_refuses(own: dict[str, Any], words: str) -> None:
    with pytest.raises(hdet.ArgumentError, match=words):
        a_plan(**own)


def test_held_out_samples_come_after_the_run() -> None:
    assert a_plan(steps=10, replicas=3, batch_size=7).make_task().horizon == 210  # type: ignore[attr-defined]
    assert a_plan(options=SMALL | {"horizon": 5}).make_task().horizon == 5  # type: ignore[attr-defined]


def test_defaults_follow_the_length() -> None:
    plan = a_plan(steps=1000, eval_every=None, sync_every=None)
    assert (plan.evaluates_every, plan.round_length) == (100, 20)
    assert a_plan(steps=3, eval_every=None, sync_every=None).evaluates_every == 1
