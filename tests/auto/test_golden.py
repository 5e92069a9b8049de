"""Golden histories of ``max_lr="auto"``: bowls and slopes in one or two numbers, so that a person can check them.

Plain SGD in float64; the probe is the loss itself, so every batch is the same. ``pytest --regenerate`` writes the files
anew; read the difference before you commit it. ``test_what_a_person_can_check`` does the first sums by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hdet

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    # x^2 / 2 from 1, a guess a thousand times too low: up to a rate that gets to the bottom, and no further.
    "auto_bowl": {"bends": [1.0], "guess": 1e-3, "steps": 200},
    # The same from a guess a million times too high: the first step is undone.
    "auto_restart": {"bends": [1.0], "guess": 1e6, "steps": 60},
    # The loss 10 + x has gradient 1 everywhere: nothing ever says stop but the run's length.
    "auto_slope": {"slopes": [1.0], "guess": 1.0, "steps": 60},
    # 10 + x + y / 2, each its own group: one factor for both.
    "auto_two_slopes": {"slopes": [1.0, 0.5], "guess": 1.0, "steps": 100, "arguments": {"pct_start": 0.5}},
    # x^2 / 2 + y^2 / 200 from (1, 10): what is too much for x is too little for y.
    "auto_two_bowls": {
        "bends": [1.0, 0.01],
        "start": [1.0, 10.0],
        "guess": 1e-3,
        "steps": 120,
        "arguments": {"pct_start": 0.95},
    },
    # One gradient is a million: step 8 in the search, step 50 after it.
    "auto_thrown_early": {"bends": [1.0], "guess": 1.0, "steps": 60, "thrown": 8},
    "auto_thrown_late": {"bends": [1.0], "guess": 1.0, "steps": 80, "thrown": 50},
    # Too short to search: the guess on torch's schedule.
    "auto_short": {"bends": [1.0], "guess": 0.1, "steps": 20},
}


@pytest.mark.filterwarnings("ignore:a run of 20 steps:hdet.errors.ProbeWarning")
@pytest.mark.parametrize("case", CASES)
def test_history(case: str, regenerate: bool) -> None:
    history = {"case": CASES[case], **_train(**CASES[case])}
    path = GOLDEN / f"{case}.json"
    if regenerate:
        path.write_text(_written(history))
    expected = json.loads(path.read_text())
    assert history["event"] == expected["event"]
    for key in ("rate", "theta", "end", "probe", "before", "reach", "learned"):
        assert len(history[key]) == len(expected[key]), key
        for place, (ours, theirs) in enumerate(zip(history[key], expected[key], strict=True)):
            expects = pytest.approx(theirs, rel=1e-9, abs=1e-15) if theirs is not None else None
            assert ours == expects, (key, place)


def test_what_a_person_can_check() -> None:
    """On the slope a step of rate r moves theta from 1 by r. The way is straight: each round raises the target twofold.

    The peak is at step 17. Until (t + 1) / 18 to the power 0.7 is more, steps are made at 0.3 of the target.
    """
    history = _train(**CASES["auto_slope"])
    rate, theta, probe, before, reach, learned = (
        history[key] for key in ("rate", "theta", "probe", "before", "reach", "learned")
    )
    assert rate[0] == [pytest.approx(1e-3)]  # begin, times the guess 1
    assert theta[0] == [pytest.approx(0.999)]  # q = 1e-3
    assert rate[1] == [pytest.approx(2e-3)]  # so that a step moves the weights by 2e-3 of their norm
    assert learned[0] == [pytest.approx(2e-3 / 0.3)]
    assert rate[2] == [pytest.approx(2e-3)]
    third, fourth = (2 * 2e-3 / 0.3 * (n / 18) ** 0.7 for n in (4, 5))
    assert rate[3:5] == [[pytest.approx(third)], [pytest.approx(fourth)]]
    assert probe[:2] == pytest.approx([10.999, 10.999 - 4e-3])
    assert before[0] is None
    assert before[1] == pytest.approx(10.999)
    # Two steps of 2e-3: asked is 0 and 2e-3, and the gain is 2 times the way, which is the sum of rates. Then two more:
    # weights go by the squares of rates.
    w, v = (2e-3 / fourth) ** 2, (third / fourth) ** 2
    asked = w * (0 + 2e-3) + v * 4e-3 + (4e-3 + third)
    assert reach[:3] == pytest.approx([0.0, 2e-3 / 2, asked / (w * 2 + v + 1)])
    raised = [b[0] / a[0] for a, b in pairwise(learned)]
    assert raised[:5] == pytest.approx([2.0] * 5)
    assert max(raised) <= 2 * (1 + 1e-12)
    ends = history["end"]
    assert all(growth == 1 for growth, end in zip(raised, ends[1:], strict=True) if end > 30)  # the schedule falls
    assert history["event"] == ["first step", *[None] * (len(ends) - 1)]


def test_what_throws_the_weights_away_is_undone() -> None:
    for case in ("auto_thrown_early", "auto_thrown_late"):
        history, thrown = _train(**CASES[case]), CASES[case]["thrown"]
        end = history["end"]
        k = next(k for k in range(len(end)) if end[k] > thrown)
        assert history["event"][k] == f"too hot: went back to step {end[k - 2]}"
        assert history["theta"][end[k] - 1] == history["theta"][end[k - 2] - 1]
        assert history["learned"][k] == pytest.approx([history["learned"][k - 1][0] / 3])


def _train(
    guess: float,
    steps: int,
    bends: Sequence[float] = (),
    slopes: Sequence[float] = (),
    start: Sequence[float] = (1.0, 1.0),
    thrown: int | None = None,
    arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    numbers = [
        torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x, _ in zip(start, bends or slopes, strict=False)
    ]

    def loss() -> Tensor:
        if slopes:
            return 10 + sum(slope * x for slope, x in zip(slopes, numbers, strict=True))
        return torch.stack([bend * x * x / 2 for bend, x in zip(bends, numbers, strict=True)]).sum()

    optimizer = torch.optim.SGD([{"params": [x]} for x in numbers], lr=guess)
    rounds = _Rounds()
    scheduler = hdet.OneCycleLR(
        optimizer, "auto", steps, cycle_momentum=False, probe=loss, journal=rounds, **(arguments or {})
    )
    history: dict[str, Any] = {"rate": [], "theta": []}
    for t in range(steps):
        optimizer.zero_grad()
        loss().backward()
        if t == thrown:
            numbers[0].grad = torch.full_like(numbers[0], 1e6)
        history["rate"].append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
        history["theta"].append([x.item() for x in numbers])
    records = rounds.records
    return {
        **history,
        "end": [record["step"] for record in records],
        "event": [record["event"] for record in records],
        "probe": [record["replicas"][0]["signal"] for record in records],
        "before": [None if math.isnan(record["loss_before"]) else record["loss_before"] for record in records],
        "reach": [record["reach"] for record in records],
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
