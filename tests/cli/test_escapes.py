"""What a journal, its folder or its name holds reaches the terminal as text: no command of the terminal's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import hdet
import hdet.cli
from hdet.errors import harmless
from tests.cli.command import Said, hdet_here
from tests.report.made_up import a_header, a_round, write_folder, write_journal

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202eback\x7f\r\x08\u2028"
KNOB = f"lr[{EVIL}]"


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def told(said: Said) -> str:
    assert is_harmless(said.out), said.out
    assert is_harmless(said.err), said.err
    return said.out + said.err


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Evil in every text that a journal has, and in its name."""
    rounds = [a_round(k, why=EVIL, event=EVIL, knobs=2, learned=[1.0, 2.0 + k], delta=[0.1, 0.2]) for k in range(3)]
    header = a_header([KNOB, "lr[b]"], 2, max_lr=0.1, total_steps=30, fanout=EVIL, note=EVIL)
    return write_journal(tmp_path / f"{EVIL}.jsonl", {**header, "hdet": EVIL, "time": EVIL}, *rounds)


@pytest.fixture
def folder(tmp_path: Path, journal: Path) -> Path:
    records = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return write_folder(tmp_path / f"run {EVIL}", *records)


def test_report_compare_and_export(
    tmp_path: Path, journal: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in (journal, folder):
        for options in ((), ("--json", "--force"), ("-o", tmp_path / f"page {EVIL}.html", "--force")):
            said = hdet_here(capsys, "report", run, *options)
            assert said.code == 0, said.err
            assert "owned" in told(said)
        for options in ((), ("--json",)):
            said = hdet_here(capsys, "export", run, *options)
            assert said.code == 0, said.err
            assert "owned" in told(said)
    for options in ((), ("--json",), ("-o", tmp_path / f"both {EVIL}.html")):
        said = hdet_here(capsys, "compare", journal, folder, *options)
        assert said.code == 0, said.err
        assert r"\x1b]0;owned\x07" in told(said)


def test_a_file_that_is_written_has_the_names_as_they_are(tmp_path: Path, journal: Path) -> None:
    with pytest.raises(SystemExit):
        hdet.cli.main(["export", str(journal), "-o", str(tmp_path / "schedule.csv")])
    assert KNOB.encode() in (tmp_path / "schedule.csv").read_bytes()


def test_complaints(tmp_path: Path, journal: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"no journal {EVIL}").write_text(f"{EVIL}\n{EVIL}\n")
    write_journal(tmp_path / "field.jsonl", a_header(), {**a_round(0), "step": EVIL}, a_round(1))
    for command in (
        ("report", tmp_path / f"no journal {EVIL}"),
        ("report", tmp_path / "field.jsonl"),
        ("report", f"/no/such/{EVIL}"),
        ("report", journal, "-o", journal),
        ("report", folder, f"--{EVIL}"),
        ("compare", journal, tmp_path / f"no journal {EVIL}"),
        ("export", tmp_path / "field.jsonl"),
        ("export", journal, "-o", journal),
    ):
        for options in ((), ("--json",)):
            said = hdet_here(capsys, *command, *options)
            assert said.code != 0
            told(said)


def test_errors_and_log_lines_of_the_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    (tmp_path / EVIL).write_text(EVIL)
    for call in (
        lambda: hdet.read_journal(tmp_path / EVIL),
        lambda: hdet.schedule_from(tmp_path / EVIL, optimizer),
        lambda: hdet.read_journal(f"/no/such/{EVIL}"),
        lambda: hdet.Journal(tmp_path / EVIL),
    ):
        with pytest.raises(hdet.HdetError) as raised:
            call()
        assert "owned" in str(raised.value)
        assert is_harmless(str(raised.value))
    first, second = hdet.Journal(tmp_path / f"{EVIL}.jsonl"), hdet.Journal(tmp_path / f"{EVIL}.jsonl")
    with caplog.at_level(logging.WARNING):
        first.lock()
        second.lock()
        second.close()
    assert "owned" in caplog.text
    assert is_harmless(caplog.text)


def test_harmless_leaves_words_alone() -> None:
    assert harmless("a: 日本 é – ×\n\tb \\x1b") == "a: 日本 é – ×\n\tb \\x1b"
    assert harmless("\x1b[0m\udc80\r") == r"\x1b[0m\udc80\r"
