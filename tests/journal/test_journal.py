from __future__ import annotations

import io
import json
import logging
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet import ArgumentError, Journal, JournalError, read_journal
from hdet.journal import SCHEMA, open_journal, scalars
from hdet.journal.file import encoded
from hdet.journal.writer import JournalWriter

pytestmark = pytest.mark.quick

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
    path.write_bytes(b"".join(encoded({"run": "a", **record}) for record in (HEADER, a_round(0))) + b'{"run":"a","ki')
    assert [r["round"] for r in read_journal(path).rounds] == [0]
    journal = Journal(path)
    journal.write({"run": "a", "kind": "resume", "step": 3})
    journal.write(a_round(1, run="a"))
    assert [r["round"] for r in read_journal(path).rounds] == [0, 1]
    journal.close()


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(HEADER) + "\nnonsense\n" + json.dumps(a_round(0)) + "\n")
    with pytest.raises(JournalError, match="line 2 is not a record"):
        read_journal(path)


def test_a_second_run_in_the_same_file_is_read_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for record in (HEADER, a_round(0, x=1), a_round(1, x=1), HEADER, a_round(0, x=2)):
        journal.write(record)
    assert [r["x"] for r in read_journal(journal.path).rounds] == [2]
    journal.close()


@pytest.mark.parametrize(
    ("text", "words"), [("", "no header"), ('{"kind":"header","schema":99}\n', "schema .* version = 99, but")]
)
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
    journal.close()
    twin.write(a_round(0))
    assert len(read_journal(journal.path).rounds) == 1
    twin.close()


def test_what_journal_may_be(tmp_path: Path) -> None:
    assert open_journal(None) == []
    assert open_journal(str(tmp_path / "a")) == [Journal(tmp_path / "a")]
    sink = Journal(tmp_path / "b")
    assert open_journal(sink)[0] is sink
    with pytest.raises(ArgumentError, match="path"):
        open_journal(7)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="folder"):
        open_journal(tmp_path)
    with pytest.raises(ArgumentError, match="add_scalar"):
        open_journal(logging.getLogger("hdet"))  # has log(), but for text


class Dashboard:
    """A tracker whose ``add_scalar`` is not TensorBoard's."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def add_scalar(self, chart: str) -> None:
        raise AssertionError

    def log(self, data: dict[str, float], *, step: int) -> None:
        self.rows.append((step, data))


def test_a_tracker_is_called_in_the_way_that_it_takes() -> None:
    tracker = Dashboard()
    (sink,) = open_journal(tracker)
    sink.write({"kind": "round", "step": 3, "base": [0.1]})
    assert tracker.rows == [(3, {"hdet/base/knob[0]": 0.1})]


OTHER_FILES = {
    "a script": b"import torch\n\nprint(1)\n",
    "a checkpoint": b"PK\x03\x04\xff\xfe" * 100,
    "a table": b"step,loss\n1,0.5\n",
    "another log": b'{"loss": 0.5}\n{"loss": 0.4}\n',
    "another log of kinds": b'{"kind":"metric","value":1}\n',
    "a number": b"7",
    "a cut log of others": b'{"loss": 0.5, "st',
    "one endless line": b"x" * 3_000_000,
    "a journal behind something else": b"hello\n" + json.dumps(HEADER).encode() + b"\n",
}


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES.keys())
def test_a_file_that_is_no_journal_is_refused_before_anything_is_changed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    for given in (path, [None, str(path)]):
        with pytest.raises(
            ArgumentError, match=r"journal must be .* but got .*train\.py'; it has other content; name another f"
        ):
            hdet.OneCycleLR(optimizer, 0.1, 100, sync_every=2, journal=given)
    assert path.read_bytes() == content
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "initial_lr" not in optimizer.param_groups[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name on this system")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"journal must be the path of a file, but .*pipe'; it is .* a pipe"):
        Journal(tmp_path / "pipe")


def test_a_journal_that_was_cut_anywhere_is_still_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run_with(path)
    whole = path.read_bytes()
    for size in [*range(120), whole.index(b"\n"), whole.index(b"\n") + 1, *range(len(whole) - 20, len(whole) + 1)]:
        path.write_bytes(whole[:size])
        run_with(path)
        assert [record["round"] for record in read_journal(path).rounds] == [0, 1]


def test_an_empty_file_and_one_with_a_long_header_are_journals(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text in ("", "\n", *(encoded({"run": "a", **HEADER, "max_lr": [0.1] * size}).decode() for size in (1, 10**5))):
        path.write_text(text)
        run_with(path)
        assert [record["round"] for record in read_journal(path).rounds] == [0, 1]
        assert path.read_text().startswith(text)


@pytest.mark.parametrize("line", ["[1]", "7", '{"schema":1}', '{"kind":"round"}'])
def test_json_that_is_no_record_says_so(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps(HEADER) + "\n" + line + "\n" + json.dumps(a_round(0)) + "\n")
    with pytest.raises(JournalError, match="line 2 is not a record"):
        read_journal(path)


def test_a_file_that_is_not_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(JournalError, match="line 1 is not a record"):
        read_journal(tmp_path / "checkpoint.pt")


# -- resumes, and two runs in one file: tests/journal/test_lock.py has who may write ----------------------------------


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_journal(path).rounds]


def test_a_resume_takes_back_the_rounds_after_its_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for record in (HEADER, *(a_round(k, step=10 * (k + 1)) for k in range(8)), {"kind": "resume", "step": 40}):
        journal.write(record)
    assert steps_in(journal.path) == [10, 20, 30, 40]
    journal.write(a_round(4, step=45))
    journal.write({"kind": "resume", "step": 47})  # inside a round: what ended before it stays
    assert steps_in(journal.path) == [10, 20, 30, 40, 45]
    journal.close()


def resumable(path: Path) -> tuple[torch.optim.Optimizer, hdet.OneCycleLR]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return optimizer, hdet.OneCycleLR(optimizer, 0.1, 100, sync_every=2, cycle_momentum=False, journal=path)


def test_a_run_that_is_resumed_before_what_its_journal_has_reads_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    optimizer, scheduler = resumable(path)
    for t in range(8):
        optimizer.step()
        scheduler.step(1.0)
        if t == 3:
            state = scheduler.state_dict()
    del scheduler
    optimizer, scheduler = resumable(path)
    scheduler.load_state_dict(state)
    for _ in range(2):
        optimizer.step()
        scheduler.step(2.0)
    assert steps_in(path) == [2, 4, 6]
    assert [r["replicas"][0]["loss"] for r in read_journal(path).rounds] == [1.0, 1.0, 2.0]
    assert len({json.loads(line)["run"] for line in path.read_text().splitlines()}) == 1


def test_lines_of_another_run_that_got_in_between_are_left_out(tmp_path: Path) -> None:
    """As may happen on a file system without locks."""
    journal = Journal(tmp_path / "run.jsonl")
    for run, record in (
        ("a", HEADER),
        ("a", a_round(0, step=2)),
        ("b", HEADER),
        ("a", a_round(1, step=4)),
        ("b", a_round(0, step=3)),
    ):
        journal.write({**record, "run": run})
    assert steps_in(journal.path) == [3]
    journal.close()


def test_two_runs_in_one_file_have_different_ids(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        run_with(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["run"] for record in records}) == 2
    assert len({record["run"] for record in records[: len(records) // 2]}) == 1


class Full:
    """A disk that is full for some rounds."""

    def __init__(self, full: range) -> None:
        self.full, self.tried = full, 0
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "round":
            self.tried += 1
            if self.tried - 1 in self.full:
                raise OSError("no space left")
        self.records.append(record)


def test_after_a_failed_write_the_next_round_tries_again_and_says_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = Full(range(2, 5))
    run_with(disk, steps=16)
    rounds = [record for record in disk.records if record["kind"] == "round"]
    assert [record["round"] for record in rounds] == [0, 1, 5, 6, 7]
    assert [record.get("lost") for record in rounds] == [None, None, 3, None, None]
    assert "no space left. Rounds lost: 1; the next one tries again" in caplog.text
    assert "is written again; rounds lost: 3" in caplog.text


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.write(HEADER)
    before = path.read_bytes()

    class Short(io.FileIO):
        def write(self, line: Any) -> int:
            return super().write(line[:7])

    journal.close()
    journal._file = Short(path, "ab")
    with pytest.raises(OSError, match="no room"):
        journal.write(a_round(0))
    assert path.read_bytes() == before
    journal.write(a_round(1))
    assert [r["round"] for r in read_journal(path).rounds] == [1]
    journal.close()


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
    assert losses == {("hdet/loss", 2): 1.5, ("hdet/loss", 4): 3.5}  # once: there is one replica
    assert not any(tag.startswith("hdet/divergence") for tag, _, _ in writer.seen)


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
    assert scalars({**record, "estimated_rate": 0.3}, ["lr[a]"])["hdet/estimated_rate"] == 0.3
    assert "hdet/estimated_rate" not in scalars({**record, "estimated_rate": 0.0}, ["lr[a]"])


def test_several_journals_at_once_and_one_that_breaks_does_not_stop_the_others(tmp_path: Path) -> None:
    path, writer, broken = tmp_path / "run.jsonl", FakeSummaryWriter(), Broken()
    run_with((path, broken, writer, None))
    assert [r["round"] for r in read_journal(path).rounds] == [0, 1]
    assert {step for _, _, step in writer.seen} == {2, 4}
    assert broken.calls == 2  # tried again at the next round


def test_a_resumed_run_goes_on_in_the_file_and_the_tracker_learns_the_names(tmp_path: Path) -> None:
    path, writer = tmp_path / "run.jsonl", FakeSummaryWriter()
    for step in (0, 2):
        journal_writer = JournalWriter(open_journal([path, writer]), {})
        if step:
            journal_writer.resume(step, False)
        record = a_round(step // 2, step=step + 2, base=[1.0], replicas=[{}], seconds={})
        journal_writer.write(record, ["lr[a]"], ended=0.0)
        journal_writer.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["header", "round", "resume", "round"]
    assert len({record["run"] for record in records}) == 1
    assert writer.seen == [("hdet/base/lr[a]", 1.0, 2), ("hdet/base/lr[a]", 1.0, 4)]


def test_lists_of_journals_are_equal_by_what_they_hold_and_may_be_nested(tmp_path: Path) -> None:
    writer, file = FakeSummaryWriter(), Journal(tmp_path / "a")
    assert open_journal([tmp_path / "a", writer]) == open_journal((str(tmp_path / "a"), [None, writer]))
    assert open_journal([tmp_path / "a", None]) == [file]
    assert open_journal([]) == []
