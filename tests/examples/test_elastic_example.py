"""examples/elastic.py, started as its first lines say: a lighthouse, three replicas, one of which is killed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hdet
from tests.elastic.worker import lighthouse_command
from tests.examples.launch import EXAMPLES, ROOT
from tests.patience import PATIENCE

pytest.importorskip("sklearn")
pytest.importorskip("torchft", reason="torchft has wheels for x86_64 alone: pip install torchft", exc_type=ImportError)
STEPS = 600


def test_one_is_killed_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://localhost:{port}")
    words = EXAMPLES.joinpath("elastic.py").read_text()
    assert "torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 2000" in words
    options = ("--min_replicas", 1, "--heartbeat_timeout_ms", 2000)

    environment, hold = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "hold"
    running: list[subprocess.Popen[bytes]] = []

    def start(log: str, *command: object) -> subprocess.Popen[bytes]:
        """Into a file: torchft tells so much that a pipe nobody reads would stop it."""
        with (tmp_path / log).open("wb") as file:
            words = [str(word) for word in command]
            running.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT))
        return running[-1]

    def replica(name: str, log: str) -> subprocess.Popen[bytes]:
        given = ("--name", name, "--steps", STEPS, "--journal", tmp_path / f"{name}.jsonl")
        return start(log, sys.executable, "-m", "tests.examples.paced", hold, EXAMPLES / "elastic.py", *given)

    try:
        start("lighthouse", lighthouse_command(), *options, "--bind", f"127.0.0.1:{port}")
        hold.touch()  # until all are there
        stayed = [replica("r0", "r0"), replica("r2", "r2")]
        lost = replica("r1", "r1, the first time")
        for log in ("r0", "r2", "r1, the first time"):
            wait_for(tmp_path / log, " begins at step ")
        hold.unlink()
        for name in ("r0", "r1", "r2"):
            wait_for(tmp_path / f"{name}.jsonl", '"kind":"round"', 5)
        hold.touch()  # until the lost one is back
        lost.kill()
        back = replica("r1", "r1")
        wait_for(tmp_path / "r1", " begins at step ")
        hold.unlink()
        for process in (*stayed, back):
            process.wait(PATIENCE)
    finally:
        for process in running:
            process.kill()
            process.wait()
    outputs = [(tmp_path / name).read_text(errors="replace") for name in ("r0", "r2", "r1")]
    ends = [re.search(r"ends: (.*)", output) for output in outputs]
    assert all(ends), [output[-3000:] for output in outputs]
    assert len({end[1] for end in ends if end is not None}) == 1, outputs
    accuracy = re.search(r"ends: .*accuracy ([\d.]+)%", outputs[0])
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    begun = re.search(r"r1 begins at step (\d+)", outputs[2])
    assert begun is not None
    assert int(begun[1]) > 0
    rounds = hdet.read_journal(tmp_path / "r0.jsonl").rounds
    assert any("r1" in told["joined"] for told in rounds[3:])
    assert rounds[-1]["step"] == STEPS
    assert sorted(rounds[-1]["names"]) == ["r0", "r1", "r2"]


def wait_for(file: Path, words: str, times: int = 1) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists() or file.read_text(errors="replace").count(words) < times:
        assert time.monotonic() < deadline, file.read_text(errors="replace")[-3000:] if file.exists() else file
        time.sleep(0.02)
