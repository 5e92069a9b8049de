"""The verdict in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdet.report.data import RunData, load_run, told_apart
from hdet.report.verdict import compared, movements, table_of, verdict
from tests.report.made_up import a_header, a_round, write_folder, write_journal

pytestmark = pytest.mark.quick


def learned(tmp_path: Path, knobs: tuple[str, ...], ends: list[float], rounds: int = 38) -> RunData:
    """A run on a schedule from 1e-3 to 1e-6 whose knobs end at these factors."""
    records = []
    for k in range(rounds):
        plain = [1e-3 if k == 0 else 1e-4 if k < rounds - 1 else 1e-6] * len(knobs)
        m = ends if k == rounds - 1 else [1.0] * len(knobs)
        base = [p * x for p, x in zip(plain, m, strict=True)]
        records.append(a_round(k, [2.5, 3.5], len(knobs), learned=m, base=base))
    return load_run(write_folder(tmp_path / "run", a_header(knobs), *records))


def test_the_sentence(tmp_path: Path) -> None:
    knobs = ("lr[embedding]", "lr[transformer]", "lr[head]")
    run = learned(tmp_path, knobs, [4.1 * 2.1, 4.1 * 0.6, 4.1 / (2.1 * 0.6)])
    moved = "Peak rate moved from 1e-3 to [8.6e-3, 2.5e-3, 3.3e-3] in 38 rounds"
    assert verdict(run) == f"{moved}; last full round's train loss 3."


@pytest.mark.parametrize(
    ("knobs", "ends", "words"),
    [
        (("lr[0]",), [1.001], "Peak rate stayed at 1e-3 over 38 rounds; last full round's train loss 3."),
        (("lr[0]",), [1.02], "Peak rate moved from 1e-3 to 1.02e-3 in 38 rounds; last full round's train loss 3."),
        (("lr[0]", "lr[1]"), [4.0, 1.0], "from 1e-3 to [4e-3, 1e-3] in 38 rounds; last"),
    ],
)
def test_other_endings(tmp_path: Path, knobs: tuple[str, ...], ends: list[float], words: str) -> None:
    assert words in verdict(learned(tmp_path, knobs, ends))


def test_without_rounds_and_with_one(tmp_path: Path) -> None:
    assert verdict(load_run(write_journal(tmp_path / "a", a_header()))) == "No round has ended yet."
    one = load_run(write_journal(tmp_path / "b", a_header(), a_round(0)))
    assert verdict(one) == "Peak rate stayed at 0.1 over 1 round; last full round's train loss 1.5."


def test_other_knobs_are_told_by_their_values(tmp_path: Path) -> None:
    header = a_header(("dropout",), knobs={"dropout": {"base": 0.1}})
    record = a_round(0, base=[0.25], learned=[0.25])
    run = load_run(write_journal(tmp_path / "x", header, record))
    assert verdict(run) == "Dropout from 0.1 to 0.25; last full round's train loss 1.5."


def test_the_published_decay_is_named(tmp_path: Path) -> None:
    records = [a_round(0), a_round(1, base_before=[0.1], base=[0.001])]
    run = load_run(write_journal(tmp_path / "x", a_header(decay="exponential", max_lr=0.5), *records))
    assert verdict(run).startswith("Base rate moved from 0.1 to 1e-3 in 2 rounds, its decay included;")


def test_a_run_that_ended_before_its_peak_began_at_what_was_given(tmp_path: Path) -> None:
    records = [a_round(0, base=[0.02], learned=[2.0])]
    given = load_run(write_journal(tmp_path / "x", a_header(max_lr=[0.5]), *records))
    assert [(m.start, m.end) for m in movements(given)] == [(0.5, 1.0)]


def test_several_runs(tmp_path: Path) -> None:
    runs = [
        load_run(write_journal(tmp_path / name, a_header(), a_round(0, [loss])))
        for name, loss in (("fixed", 3.294), ("auto", 3.277), ("hot", None), ("a", 3.3), ("b", 3.4), ("c", 3.5))
    ]
    assert compared(runs) == "auto ended lowest, at 3.277."
    assert compared(runs[2:3]) == "1 runs, none of which has a final loss."


def ended(tmp_path: Path, steps: list[int], losses: list[float], **arguments: Any) -> RunData:
    """A run whose rounds end at these steps."""
    pairs = enumerate(zip(steps, losses, strict=True))
    records = [a_round(k, [loss], step=step) for k, (step, loss) in pairs]
    return load_run(write_journal(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", a_header(**arguments), *records))


@pytest.mark.parametrize(
    ("steps", "arguments", "expected"),
    [
        ([10, 20, 30, 31], {}, 3.0),
        ([10, 20, 29, 30], {"sync_every": 10, "total_steps": 30}, 3.0),  # as it is
        ([10, 20, 22, 23], {"sync_every": 10, "total_steps": 23}, 2.0),
        ([1, 3, 5, 7], {"guess": [0.1]}, 4.0),
        ([30, 60, 98, 99], {"guess": [0.1]}, 3.0),
    ],
)
def test_the_last_full_round_counts(
    tmp_path: Path, steps: list[int], arguments: dict[str, Any], expected: float
) -> None:
    run = ended(tmp_path, steps, [1.0, 2.0, 3.0, 4.0], **arguments)
    assert run.loss == expected
    assert f"last full round's train loss {expected:g}." in verdict(run)


def test_rounds_that_were_all_cut_short_have_no_last_loss(tmp_path: Path) -> None:
    run = ended(tmp_path, [2, 4, 5, 6], [1.0, 2.0, 3.0, 4.0], sync_every=10)
    assert run.loss is None
    assert verdict(run) == "Peak rate stayed at 0.1 over 4 rounds."


def test_runs_are_ranked_by_their_last_full_rounds(tmp_path: Path) -> None:
    lucky = ended(tmp_path, [10, 20, 21], [3.0, 2.0, 0.1])._replace(name="lucky")
    better = ended(tmp_path, [10, 20], [3.0, 1.0])._replace(name="better")
    assert compared([lucky, better]) == "better ended lowest, at 1."
    table = table_of([lucky, better])
    assert table.columns[1] == "last full round's train loss"
    assert [row[:2] for row in table.rows] == [("better", "1"), ("lucky", "2")]


def test_a_round_that_was_rolled_back_or_resumed_inside_does_not_count(tmp_path: Path) -> None:
    back = {"event": "rolled_back", "rolled_back_to": 10}
    run = load_run(write_journal(tmp_path / "a", a_header(), a_round(0, [1.0]), a_round(1, [9.0], **back)))
    assert run.loss == 1.0
    resume = {"kind": "resume", "step": 17, "mid_round": True}
    cut = load_run(write_journal(tmp_path / "b", a_header(), a_round(0, [1.0]), resume, a_round(1, [0.1])))
    assert cut.loss == 1.0


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / part / "logs" / "run.jsonl" for part in ("a", "b")]
    runs = [load_run(write_journal(path, a_header(), a_round(0))) for path in (*paths, tmp_path / "other.jsonl")]
    assert [run.name for run in told_apart(runs)] == ["a/logs/run.jsonl", "b/logs/run.jsonl", "other"]
    folders = [load_run(write_folder(tmp_path / part / "auto", a_header())) for part in ("x", "y")]
    names = ["x/auto/journal.jsonl", "y/auto/journal.jsonl"]
    assert [run.name for run in told_apart(folders)] == names
    assert [run.name for run in told_apart(runs[1:])] == ["run", "other"]
