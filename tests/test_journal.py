from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet import ArgumentError, Journal, JournalError, read_journal
from hdet.journal import SCHEMA, Several, open_journal, scalars

HEADER = {"kind": "header", "schema": SCHEMA}


def a_round(k: int, **more: object) -> dict[str, object]:
    return {"kind": "round", "round": k, **more}


def test_round_trip_of_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "run.jsonl")
    journal.write(HEADER)
    journal.write(a_round(0, loss=[math.nan, math.inf, -math.inf, 0.5, None]))
    for line in journal.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON
    (row,) = read_journal(journal.path).rounds
    assert math.isnan(row["loss"][0])
    assert row["loss"][1:] == [math.inf, -math.inf, 0.5, None]
    journal.close()


def test_last_line_of_a_round_wins_and_a_resume_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for record in (HEADER, a_round(0, x=1), a_round(1, x=1), {"kind": "resume", "step": 7}, a_round(1, x=2)):
        journal.write(record)
    data = read_journal(journal.path)
    assert [(r["round"], r["x"]) for r in data.rounds] == [(0, 1), (1, 2)]
    assert [r["step"] for r in data.resumes] == [7]
    journal.close()


def test_readable_when_the_last_line_is_cut_off_and_when_the_run_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(a_round(0)) + "\n" + '{"kind":"round","rou')
    assert [r["round"] for r in read_journal(path).rounds] == [0]
    journal = Journal(path)
    journal.write({"kind": "resume", "step": 3})
    journal.write(a_round(1))
    assert [r["round"] for r in read_journal(path).rounds] == [0, 1]
    journal.close()


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(HEADER) + "\nnonsense\n" + json.dumps(a_round(0)) + "\n")
    with pytest.raises(JournalError, match="line 2 is not JSON"):
        read_journal(path)


def test_a_second_run_in_the_same_file_is_read_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for record in (HEADER, a_round(0, x=1), a_round(1, x=1), HEADER, a_round(0, x=2)):
        journal.write(record)
    assert [r["x"] for r in read_journal(journal.path).rounds] == [2]
    journal.close()


@pytest.mark.parametrize(("text", "words"), [("", "no header"), ('{"kind":"header","schema":99}\n', "schema 99")])
def test_what_is_no_journal_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(JournalError, match=words):
        read_journal(path)


def test_an_open_journal_is_pickled_as_its_path(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    journal.write(HEADER)
    twin = pickle.loads(pickle.dumps(journal))
    assert twin == journal
    twin.write(a_round(0))
    assert len(read_journal(journal.path).rounds) == 1
    journal.close()
    twin.close()


def test_what_journal_may_be(tmp_path: Path) -> None:
    assert open_journal(None) is None
    assert open_journal(str(tmp_path / "a")) == Journal(tmp_path / "a")
    sink = Journal(tmp_path / "b")
    assert open_journal(sink) is sink
    with pytest.raises(ArgumentError, match="path"):
        open_journal(7)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="folder"):
        open_journal(tmp_path)
    with pytest.raises(ArgumentError, match="add_scalar"):
        open_journal(logging.getLogger("hdet"))  # has log(), but for text


@pytest.mark.parametrize("line", ["[1]", "7", '{"schema":1}', '{"kind":"round"}'])
def test_json_that_is_no_record_says_so(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps(HEADER) + "\n" + line + "\n" + json.dumps(a_round(0)) + "\n")
    with pytest.raises(JournalError, match="line 2 is no record"):
        read_journal(path)


def test_a_file_that_is_not_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(JournalError, match="not text"):
        read_journal(tmp_path / "checkpoint.pt")


# -- trackers: fakes with the signatures of the real ones -------------------------------------------------------------


class FakeSummaryWriter:
    """torch.utils.tensorboard.SummaryWriter, as far as it is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        assert global_step is not None
        assert walltime is None
        self.seen.append((tag, scalar_value, global_step))


class FakeWandbRun:
    """wandb.Run, as far as it is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.seen.append((data, step))

    def finish(self) -> None:
        pytest.fail("not ours to finish")


class FakeMlflow:
    """The module mlflow, as far as it is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(
        self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None
    ) -> object | None:
        self.seen.append((metrics, step))
        return None


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, record: Mapping[str, Any]) -> None:
        self.calls += 1
        raise OSError("no space left")


def run_with(journal: Any, steps: int = 4) -> None:
    """One replica, two groups, a round of two steps."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 20, sync_every=2, cycle_momentum=False, journal=journal)
    for t in range(steps):
        optimizer.step()
        scheduler.step(1.0 + t)


def test_a_summary_writer_gets_scalars_per_round() -> None:
    writer = FakeSummaryWriter()
    run_with(writer)
    assert [(tag, step) for tag, _, step in writer.seen[:2]] == [("hdet/base/lr[0]", 2), ("hdet/base/lr[1]", 2)]
    losses = {(tag, step): value for tag, value, step in writer.seen if tag.startswith("hdet/loss")}
    assert losses == {(f"hdet/loss/{how}", step): mean for step, mean in ((2, 1.5), (4, 3.5)) for how in HOWS}


HOWS = ("mean", "min", "max")


def test_wandb_and_mlflow_get_one_dict_per_round() -> None:
    run, mlflow = FakeWandbRun(), FakeMlflow()
    run_with([run, mlflow])
    assert [step for _, step in run.seen] == [step for _, step in mlflow.seen] == [2, 4]
    assert run.seen[0][0]["hdet/base/lr[1]"] == mlflow.seen[0][0]["hdet/base/lr.1"]  # mlflow refuses brackets
    assert all(isinstance(value, float) for value in run.seen[0][0].values())


def test_scalars_of_a_round_leave_out_what_is_no_number() -> None:
    replicas = [{"loss": 1.0, "divergence": 0.1}, {"loss": math.nan, "divergence": None}]
    record = a_round(0, base=[0.1, math.inf], delta=[0.5, None], replicas=replicas)
    assert scalars(record, ["lr[a]"]) == {
        "hdet/base/lr[a]": 0.1,
        "hdet/slope/lr[a]": 0.5,
        **{f"hdet/loss/{how}": 1.0 for how in HOWS},
        **{f"hdet/divergence/{how}": 0.1 for how in HOWS},
    }
    assert scalars({**record, "reach": 0.3}, ["lr[a]"])["hdet/reach"] == 0.3
    assert "hdet/reach" not in scalars({**record, "reach": 0.0}, ["lr[a]"])  # the gradients ask for nothing


def test_several_journals_at_once_and_one_that_breaks_does_not_stop_the_others(tmp_path: Path) -> None:
    path, writer, broken = tmp_path / "run.jsonl", FakeSummaryWriter(), Broken()
    run_with((path, broken, writer, None))
    assert [r["round"] for r in read_journal(path).rounds] == [0, 1]
    assert {step for _, _, step in writer.seen} == {2, 4}
    assert broken.calls == 1


def test_a_resumed_run_goes_on_in_the_file_and_the_tracker_learns_the_names(tmp_path: Path) -> None:
    path, writer = tmp_path / "run.jsonl", FakeSummaryWriter()
    header = {**HEADER, "knobs": ["lr[a]"]}
    for records in (
        (header, a_round(0, step=2)),
        (header, {"kind": "resume", "step": 2}, a_round(1, step=4, base=[1.0])),
    ):
        sinks = open_journal([path, writer])
        assert sinks is not None
        for record in records:
            sinks.write(record)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["header", "round", "resume", "round"]
    assert writer.seen == [("hdet/base/lr[a]", 1.0, 4)]


def test_lists_of_journals_are_equal_by_what_they_hold_and_collapse(tmp_path: Path) -> None:
    writer = FakeSummaryWriter()
    assert open_journal([tmp_path / "a", writer]) == open_journal((str(tmp_path / "a"), writer))
    assert isinstance(open_journal([tmp_path / "a", writer]), Several)
    assert open_journal([tmp_path / "a", None]) == Journal(tmp_path / "a")
    assert open_journal([]) is None
