"""Golden histories of ``hdet.auto``: slopes and bowls in one or two numbers, so that a person can check them.

Plain SGD in float64, on torch's OneCycleLR. On a slope the gradient is the same everywhere, so a step subtracts the
rate. ``pytest --regenerate`` writes the files again; read the difference before you commit it.
``test_what_a_person_can_check`` does the first sums by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    # The loss 10 + x has gradient 1 everywhere: nothing ever says stop but the run's length.
    "slope": {"slopes": [1.0], "guess": 1.0, "steps": 60},
    # The same, and every third step is left out: rounds count the others.
    "skipped": {"slopes": [1.0], "guess": 1.0, "steps": 60, "skips": list(range(2, 60, 3))},
    # 10 + x + y / 2, each its own group: one factor for both.
    "two_slopes": {"slopes": [1.0, 0.5], "guess": 1.0, "steps": 100, "arguments": {"pct_start": 0.5}},
    # x^2 / 2 from 1, a guess a thousand times too low: up to a rate that gets to the bottom, and no further.
    "bowl": {"bends": [1.0], "guess": 1e-3, "steps": 200},
    # The same from a guess a million times too high: the first step is undone.
    "restart": {"bends": [1.0], "guess": 1e6, "steps": 60},
    # x^2 / 2 + y^2 / 200 from (1, 10): what is too much for x is too little for y.
    "two_bowls": {
        "bends": [1.0, 0.01],
        "start": [1.0, 10.0],
        "guess": 1e-3,
        "steps": 120,
        "arguments": {"pct_start": 0.95},
    },
    # One gradient is a million: step 8 in the search, step 50 after it.
    "thrown_early": {"bends": [1.0], "guess": 1.0, "steps": 60, "thrown": 8},
    "thrown_late": {"bends": [1.0], "guess": 1.0, "steps": 80, "thrown": 50},
    # Without a loss the size of gradients shows it.
    "thrown_unseen": {"bends": [1.0], "guess": 1.0, "steps": 80, "thrown": 20, "gives_loss": False},
    # Too short to search: the guess on torch's schedule.
    "short": {"bends": [1.0], "guess": 0.1, "steps": 20},
}
pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:training diverged:hdet.errors.SearchWarning"),
    pytest.mark.filterwarnings("ignore:a run of 20 steps:hdet.errors.SearchWarning"),
]


@pytest.mark.parametrize("case", CASES)
def test_history(case: str, regenerate: bool) -> None:
    history = {"case": CASES[case], **_train(**CASES[case])}
    path = GOLDEN / f"{case}.json"
    if regenerate:
        path.parent.mkdir(exist_ok=True)
        path.write_text(_written(history))
    expected = json.loads(path.read_text())
    assert history["event"] == expected["event"]
    for key in ("rate", "theta", "end", "loss", "estimated_rate", "learned"):
        assert len(history[key]) == len(expected[key]), key
        for place, (ours, theirs) in enumerate(zip(history[key], expected[key], strict=True)):
            expects = pytest.approx(theirs, rel=1e-9, abs=1e-15) if theirs is not None else None
            assert ours == expects, (key, place)


def test_what_a_person_can_check() -> None:
    """On the slope a step of rate r moves theta from 1 by r. The path is straight: each round doubles the target.

    The peak is at step 17. Until (t + 1) / 18 is more, steps are made at 0.3 of the target.
    """
    history = _train(**CASES["slope"])
    rate, theta, loss, estimated_rate, learned = (
        history[key] for key in ("rate", "theta", "loss", "estimated_rate", "learned")
    )
    assert history["end"][:7] == [1, 3, 5, 7, 9, 11, 13]
    assert rate[0] == [pytest.approx(1e-3)]  # begin, times the guess 1
    assert theta[0] == [pytest.approx(0.999)]  # q = 1e-3
    assert rate[1] == [pytest.approx(5e-3)]  # so that a step moves the weights by 5e-3 of their norm
    assert learned[0] == [pytest.approx(5e-3 / 0.3)]
    assert rate[2:6] == [[pytest.approx(r)] for r in (5e-3, 1e-2, 1e-2, 4 * 5e-3 / 0.3 * 6 / 18)]
    assert loss[:3] == pytest.approx([11.0, (10.999 + 10.994) / 2, (10.989 + 10.979) / 2])
    # Two steps of 5e-3: the numerator is 0 and 5e-3, the denominator 2 times the sum of rates. Then two of
    # twice the rate, each with four times the weight.
    numerator = (0 + 5e-3) / 4 + 10e-3 + 20e-3
    assert estimated_rate[:3] == pytest.approx([0.0, 5e-3 / 2, numerator / (2 / 4 + 2)])
    raised = [b[0] / a[0] for a, b in pairwise(learned)]
    falls = sum(end < 30 for end in history["end"]) - 1  # cos: below 0.9 of the peak from step 26 on
    assert raised[:8] == pytest.approx([2.0] * 8)
    assert all(growth == 1 for growth in raised[falls:])
    assert history["event"] == ["first_step", *[None] * (len(raised))]


def test_where_steps_are_left_out_the_others_are_as_without() -> None:
    """Until the rise: r(t) goes by the schedule's steps."""
    plain, skipped = (_train(**CASES[case]) for case in ("slope", "skipped"))
    assert skipped["end"][:5] == [1, 4, 7, 10, 13]  # every third step of the schedule is none of the optimizer's
    assert [skipped["rate"][t] for t in (0, 1, 3)] == plain["rate"][:3]
    assert skipped["theta"][2] == skipped["theta"][1]


@pytest.mark.parametrize(
    ("case", "seen", "back"), [("thrown_early", 11, 1), ("thrown_late", 51, 36), ("thrown_unseen", 25, 13)]
)
def test_what_throws_the_weights_away_is_undone(case: str, seen: int, back: int) -> None:
    """Seen once most of the last losses are those of the thrown weights; snapshots are four steps apart at least."""
    history = _train(**CASES[case])
    k = history["end"].index(seen)
    assert history["event"][k] == "rolled_back"
    assert back <= CASES[case]["thrown"] < seen
    assert history["theta"][seen - 1] == history["theta"][back - 1]
    assert history["learned"][k] == pytest.approx([history["learned"][k - 1][0] / 3])


def test_in_a_bowl_the_rate_stops_where_steps_go_to_and_fro() -> None:
    """Above 2 it would explode."""
    history = _train(**CASES["bowl"])
    assert 0.2 < 1e-3 * history["learned"][-1][0] < 2
    assert abs(history["theta"][-1][0]) < 1e-3


def _train(
    guess: float,
    steps: int,
    bends: Sequence[float] = (),
    slopes: Sequence[float] = (),
    start: Sequence[float] = (1.0, 1.0),
    thrown: int | None = None,
    skips: Collection[int] = (),
    gives_loss: bool = True,
    arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    numbers = [
        torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x, _ in zip(start, bends or slopes, strict=False)
    ]

    def loss_now() -> Tensor:
        if slopes:
            return 10 + torch.stack([slope * x for slope, x in zip(slopes, numbers, strict=True)]).sum()
        return torch.stack([bend * x * x / 2 for bend, x in zip(bends, numbers, strict=True)]).sum()

    optimizer = torch.optim.SGD([{"params": [x]} for x in numbers], lr=guess)
    rounds = _Rounds()

    def onecycle(stand_in: torch.optim.Optimizer) -> OneCycleLR:
        peaks = [group["lr"] for group in stand_in.param_groups]
        return OneCycleLR(stand_in, peaks, steps, cycle_momentum=False, **(arguments or {}))

    scheduler = hdet.auto(optimizer, steps, onecycle, journal=rounds)
    history: dict[str, Any] = {"rate": [], "theta": []}
    for t in range(steps):
        optimizer.zero_grad()
        loss = loss_now()
        loss.backward()
        if t == thrown:
            numbers[0].grad = torch.full_like(numbers[0], 1e6)
        history["rate"].append([float(group["lr"]) for group in optimizer.param_groups])
        if t not in skips:
            optimizer.step()
        scheduler.step(loss if gives_loss else None)
        history["theta"].append([x.item() for x in numbers])
    records, losses = rounds.records, [record["replicas"][0]["signal"] for record in rounds.records]
    return {
        **history,
        "end": [record["step"] for record in records],
        "event": [record["event"] for record in records],
        "loss": [None if math.isnan(loss) else loss for loss in losses],
        "estimated_rate": [record["estimated_rate"] for record in records],
        "learned": [record["learned"] for record in records],
    }


class _Rounds:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            self.records.append(record)


def _written(history: dict[str, Any]) -> str:
    """One line per step or round, so that a difference can be read."""
    parts = []
    for key, value in history.items():
        rows = ",\n  ".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
        parts.append(f' "{key}": [\n  {rows}\n ]' if rows else f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"
