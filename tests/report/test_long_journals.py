"""Journals of long runs: what a report keeps of them, and how much memory readers take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hdet.journal.file import encoded
from hdet.journal.reading import found_schedules
from hdet.report.data import MOST, RunData, load_run
from hdet.report.page import write_report
from hdet.report.series import comparison_figures, run_figures
from hdet.report.verdict import advice, verdict
from tests.report.made_up import a_header, a_round

ROUNDS = 20_000
SPIKE, BACK, STOPPED = 12_345, 15_002, 17_003


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounds of ten steps with a spike, a rollback, an alarm, and a last round of one step; some were undone."""
    path = tmp_path_factory.mktemp("long") / "run.jsonl"
    with path.open("wb") as file:
        file.write(encoded({"run": "a", **a_header(max_lr=0.1, sync_every=10, total_steps=10 * ROUNDS)}))
        for k in range(ROUNDS - 1):
            if k == 10_000:
                for undone in range(10_000, 11_000):
                    file.write(line_of(undone, loss=99.0))
                file.write(encoded({"run": "a", "kind": "resume", "step": 100_000, "mid_round": False}))
            file.write(line_of(k, loss=50.0 if k == SPIKE else 2.0 - k / ROUNDS, **happened(k)))
        file.write(line_of(ROUNDS - 1, loss=0.001, step=10 * (ROUNDS - 1) + 1))
    return path


def happened(k: int) -> dict[str, Any]:
    if k == BACK:
        return {"event": "rolled_back", "rolled_back_to": 10 * (k - 5)}
    return {"event": "stopped", "why": "rate_ignored"} if k == STOPPED else {}


def line_of(k: int, loss: float, **more: Any) -> bytes:
    record = a_round(k, [loss, loss + 0.1], delta=[0.01 * (k % 7 - 3)], **more)
    return encoded({"run": "a", **record})


@pytest.fixture(scope="module")
def run(journal: Path) -> RunData:
    return load_run(journal)


def test_all_rounds_are_counted_and_those_that_stand_out_are_kept(run: RunData) -> None:
    assert run.length == ROUNDS
    assert len(run.rounds) < 2 * MOST
    kept = {r.step: r for r in run.rounds}
    assert {10, 10 * (SPIKE + 1), 10 * (BACK + 1), 10 * (STOPPED + 1), 10 * (ROUNDS - 1) + 1} <= kept.keys()
    assert max(r.loss for r in run.rounds if r.loss is not None) == pytest.approx(50.05)  # and none that was undone
    assert [r.step for r in run.rounds] == sorted(kept)
    (loss,) = (figure for figure in run_figures(run) if figure.title == "Loss")
    assert max(loss.traces[-1].line.known) == pytest.approx(50.05)


def test_what_is_said_is_said_of_all_rounds(run: RunData) -> None:
    assert f"over {ROUNDS} rounds" in verdict(run)
    assert "last full round's train loss" in verdict(run)
    assert run.loss == pytest.approx(2.05 - (ROUNDS - 2) / ROUNDS)
    assert [event.text for event in run.events] == [
        "resumed",
        f"diverged: rolled back to step {10 * (BACK - 5)}",
        "search stopped: update size does not scale with the learning rate; using the given rate",
    ]
    assert run.phases["train"] == pytest.approx(8.0 * ROUNDS)
    assert [(one.step, advice(run)) for one in run.alarms] == [(10 * (STOPPED + 1), None)]
    assert comparison_figures([run, run])


def test_many_events_are_listed_from_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [line_of(k, 1.0, excluded=[k % 2]) for k in range(3000)]
    path.write_bytes(b"".join([encoded({"run": "a", **a_header()}), *lines]))
    listed = load_run(path).events
    assert len(listed) == 1001
    assert [listed[0].step, listed[-1].step] == [10, 30_000]
    assert listed[500].text == "2000 earlier events are not listed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "bytes_per_round"),
    [
        (lambda path: write_report([load_run(path)], path.with_suffix(".html")), 1200),
        (found_schedules, 150),
    ],
    ids=["report", "replay"],
)
def test_memory_per_round(journal: Path, reader: Callable[[Path], object], bytes_per_round: int) -> None:
    """A report of every round took 6000 bytes for each. The first one also loads plotly, which does not count."""
    small = journal.with_name("small.jsonl")
    small.write_bytes(encoded({"run": "a", **a_header()}) + line_of(0, 1.0))
    reader(small)
    tracemalloc.start()
    try:
        reader(journal)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bytes_per_round * ROUNDS
