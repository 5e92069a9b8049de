"""A run as data, from journals of every age."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hdet.errors import ArgumentError, JournalError
from hdet.report.data import Event, load_run
from tests.report.made_up import a_header, a_round, searched_folder, write_folder, write_journal

pytestmark = pytest.mark.quick


def test_a_journal_alone(tmp_path: Path) -> None:
    path = write_journal(
        tmp_path / "first.jsonl", a_header(("lr[a]",), spread=0.1), a_round(0), a_round(1, delta=[0.2])
    )
    run = load_run(path)
    assert (run.name, run.knobs, run.replicas, run.searched) == ("first", ("lr[a]",), 2, False)
    assert [r.step for r in run.rounds] == [10, 20]
    assert run.rounds[0].losses == (1.0, 2.0)
    assert run.rounds[0].plain == (0.1,)
    assert run.rounds[0].slopes == (None,)
    assert (run.rounds[1].slopes, run.rounds[1].errors) == ((0.2,), (None,))
    assert run.arguments["spread"] == 0.1


def test_a_journal_with_everything(tmp_path: Path) -> None:
    run = load_run(searched_folder(tmp_path / "somewhere"))
    assert (run.name, run.searched, run.replicas) == ("somewhere", True, 1)
    assert [(event.step, event.text) for event in run.events] == [
        (4, "first step"),
        (run.rounds[20].step, f"diverged: rolled back to step {run.rounds[20].rolled_back_to}"),
        (run.rounds[29].step, "resumed"),
    ]
    assert run.rounds[0].estimated_rate is None
    assert run.rounds[1].estimated_rate == pytest.approx(2.5e-6, rel=1e-2)
    assert [k for k, r in enumerate(run.rounds) if r.rolled_back_to is not None] == [20]
    assert run.starts == (1.0, 1.0, 1.0)
    assert run.rates == (0, 1, 2)


def test_the_plain_schedule_is_the_shape_times_what_was_learned_at_first(tmp_path: Path) -> None:
    described = {"lr[0]": {"base": 1.0}, "dropout": {"base": 0.1}}
    header = a_header(("lr[0]", "dropout"), knobs=described)
    derived = a_round(0, knobs=2, base=[0.3, 0.2], learned=[3.0, 0.2])
    given = {**a_round(1, knobs=2, base=[0.3, 0.2], learned=[3.0, 0.2]), "shape": [0.05, 1.0]}
    run = load_run(write_journal(tmp_path / "x", header, derived, given))
    assert run.rounds[0].plain == pytest.approx((0.1, 0.1))
    assert run.rounds[1].plain == pytest.approx((0.05, 0.1))


def test_the_published_decay_has_no_plain_schedule_unless_the_journal_says_it(tmp_path: Path) -> None:
    run = load_run(write_journal(tmp_path / "x", a_header(decay="exponential"), a_round(0)))
    assert run.decays_by_itself
    assert run.rounds[0].plain == (None,)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    record = a_round(0, [math.nan, None, 1.0], excluded=[0], base=[math.inf], delta=[math.nan])
    record["replicas"][2]["signal"] = math.inf
    run = load_run(write_journal(tmp_path / "x", a_header(), record))
    (r,) = run.rounds
    assert r.losses == (None, None, 1.0)
    assert r.signals == (None, None, None)
    assert (r.base, r.slopes, run.events) == ((None,), (None,), (Event(10, "replica 0 left out"),))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"delta": [-0.5], "error": [0.2]}, (-0.5, 0.1)),  # signals 1 and 2: deviation 1/2
        ({"delta": [0.5], "error": None}, (0.5, None)),
        ({"delta": [0.5], "error": [0.0]}, (0.5, 0.0)),  # the error of a single round
        ({"delta": [None], "error": None}, (None, None)),
    ],
)
def test_what_a_round_said(
    tmp_path: Path, more: dict[str, object], expected: tuple[float | None, float | None]
) -> None:
    (r,) = load_run(write_journal(tmp_path / "x", a_header(), {**a_round(0), **more})).rounds
    assert (*r.slopes, *r.errors) == expected


def test_groups_that_were_added_later(tmp_path: Path) -> None:
    later = {**a_round(1, knobs=2), "knobs": ["lr[0]", "lr[1]"]}
    run = load_run(write_journal(tmp_path / "x", a_header(("lr[0]",)), a_round(0), later))
    assert run.knobs == ("lr[0]", "lr[1]")
    assert [r.base for r in run.rounds] == [(0.1, None), (0.1, 0.1)]


def test_a_header_alone_is_a_run_without_rounds(tmp_path: Path) -> None:
    assert load_run(write_journal(tmp_path / "x", a_header())).rounds == ()


def test_a_journal_in_a_folder_is_named_after_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "mine", a_header())
    assert load_run(tmp_path / "mine" / "journal.jsonl").name == "mine"
    assert load_run(tmp_path / "mine").name == "mine"


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"nowhere does not exist; check"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(JournalError, match=r"there is none at .*journal.jsonl"):
        load_run(tmp_path)
    with pytest.raises(ArgumentError, match=r"does not fit .*'step'"):
        load_run(write_journal(tmp_path / "x", a_header(), {"kind": "round", "round": 0}))
    with pytest.raises(ArgumentError, match=r"the journal of .*y does not fit .* it is damaged"):
        load_run(write_journal(tmp_path / "y", a_header(), a_round(0, replicas=[7])))
