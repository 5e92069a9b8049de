"""Replicas that come and go with torchft itself: a lighthouse on the loopback, processes that are killed."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.elastic.training import STEPS, expected, seeded
from tests.elastic.worker import lighthouse_command, live, managed
from tests.patience import PATIENCE
from tests.processes import CONTEXT

pytest.importorskip("torchft", reason="torchft has wheels for x86_64 alone: pip install torchft", exc_type=ImportError)

N, KILLS, SOME, LONG = 4, 20, 400, 1200
POINTS = {"step": 12, "quorum": 4, "allreduce": 20, "commit": 4, "committed": 4}
"""Where a replica may die, and how far at most from its start."""


class Processes:
    """Replicas in processes, and the lighthouse."""

    def __init__(self, folder: Path) -> None:
        from torchft.coordination import LighthouseServer

        self.folder = folder
        given = {"min_replicas": 1, "join_timeout_ms": 60_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
        self.lighthouse = LighthouseServer(bind="0.0.0.0:0", **given)
        self.address = f"http://localhost:{self.lighthouse.address().rpartition(':')[2]}"
        self.running: dict[str, list[BaseProcess]] = {}
        self._all: list[BaseProcess] = []

    def start(
        self,
        name: str,
        trap: tuple[str, int] | None = None,
        pause: float = 0.03,
        timeout: float = 120.0,
        ranks: int = 1,
        beside: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """``beside``: those who have its first quorum too, however slowly they start."""
        (self.folder / f"{name}.store").unlink(missing_ok=True)
        for rank in range(ranks):
            given = (name, self.address, self.folder, trap, pause, timeout, rank, ranks, beside, more)
            process = CONTEXT.Process(target=live, args=given, daemon=True)
            process.start()
            self.running[name] = [*(self.running.get(name, []) if rank else []), process]
            self._all.append(process)

    def wait(self, *names: str) -> None:
        for name in names or self.running:
            for process in self.running[name]:
                process.join(PATIENCE)
                assert process.exitcode == 0, self.log(name)

    def is_dead(self, name: str) -> bool:
        return all(process.exitcode == -signal.SIGKILL for process in self.running[name])

    def log(self, name: str) -> str:
        texts = [path.read_text()[-4000:] for path in sorted(self.folder.glob(f"{name}.*.log"))]
        return f"{name}: " + "\n".join(texts)

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def trained_until(self, name: str, rounds: int) -> None:
        """Wait until a replica has ended so many rounds."""
        deadline = time.monotonic() + PATIENCE
        while self.count(name) < rounds:
            assert time.monotonic() < deadline, self.log(name)
            assert self.running[name][0].is_alive(), self.log(name)
            time.sleep(0.05)

    def count(self, name: str) -> int:
        path = self.folder / f"{name}.jsonl"
        return path.read_text().count('"kind":"round"') if path.exists() else 0

    def joined(self, witness: str, name: str, since: int = 0) -> None:
        """Wait until another one has come to a round of a replica."""
        deadline = time.monotonic() + PATIENCE
        while not any(name in told["joined"] for told in self.rounds(witness)[since:]):
            assert time.monotonic() < deadline, self.log(name)
            assert self.running[witness][0].is_alive(), self.log(witness)
            time.sleep(0.05)

    def rounds(self, name: str) -> list[dict[str, Any]]:
        return hdet.read_journal(self.folder / f"{name}.jsonl").rounds

    def check(self, witness: str, steps: int = STEPS, rtol: float = 1e-9) -> list[dict[str, Any]]:
        """As with the stand-in: all equal at the end, and equal to the reference with the same members per round."""
        rounds = self.rounds(witness)
        assert [told["round"] for told in rounds] == list(range(len(rounds)))
        told = rounds[-1]
        last = {name for r, name in enumerate(told["names"]) if r not in told["absent"]} | set(told["joined"])
        files = [path for name in last for path in self.folder.glob(f"{name}.*.pt")]
        results = {path.name: torch.load(path, weights_only=False) for path in files}
        mine, wanted = results[f"{witness}.0.pt"], expected(rounds[0]["names"][0], rounds, steps)
        assert len(results) >= len(last)
        for name, result in results.items():
            assert result["step"] == steps
            assert result["state"] == mine["state"]
            for kind in ("weights", "moments"):
                assert all(torch.equal(a, b) for a, b in zip(result[kind], mine[kind], strict=True)), name
        for kind in ("weights", "moments"):
            for a, b in zip(mine[kind], wanted[kind], strict=True):
                torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 100)
        assert mine["state"]["learned"] == pytest.approx([wanted["learned"]], rel=rtol)
        return rounds

    def close(self) -> None:
        for process in self._all:
            if process.is_alive():
                process.kill()
            process.join()
        self.lighthouse.shutdown()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def test_one_comes_later_than_the_others(processes: Processes) -> None:
    first = ("r0", "r1", "r2")
    for name in first:
        processes.start(name, pause=0.1, total_steps=SOME, beside=first)
    processes.trained_until("r0", 2)
    processes.start("r3", pause=0.1, total_steps=SOME)
    processes.joined("r0", "r3")
    processes.hurry()
    processes.wait()
    rounds = processes.check("r0", SOME, rtol=1e-8)
    assert rounds[-1]["names"] == ["r0", "r1", "r2", "r3"]


def test_killed_at_twenty_random_moments(processes: Processes) -> None:
    """In training, in a meeting, while others come: three of four replicas, each started again at once."""
    draw, kills = random.Random(0), 0
    victims = ["r1", "r2", "r3"]

    def start(name: str) -> None:
        trap = None
        if kills < KILLS:
            point = draw.choice(list(POINTS))
            trap = (point, draw.randrange(1 if point == "committed" else 0, POINTS[point]))
        processes.start(name, trap, total_steps=LONG, beside=["r0"])

    processes.start("r0", total_steps=LONG, beside=victims)
    for name in victims:
        start(name)
    deadline = time.monotonic() + PATIENCE
    while kills < KILLS:
        assert time.monotonic() < deadline, processes.log("r0")
        assert processes.running["r0"][0].is_alive(), processes.log("r0")
        for name in victims:
            if processes.is_dead(name):
                kills += 1
                start(name)
            assert processes.running[name][0].exitcode in (None, -signal.SIGKILL), processes.log(name)
        time.sleep(0.02)
    for name in victims:  # those who have yet to die may do so, and come back for good
        while (process := processes.running[name][0]).is_alive() and time.monotonic() < deadline:
            if any(name in told["names"] for told in processes.rounds("r0")[-1:]) and process.exitcode is None:
                break
            time.sleep(0.05)
    processes.hurry()
    while any(processes.running[name][0].is_alive() for name in processes.running) and time.monotonic() < deadline:
        for name in victims:
            if processes.is_dead(name):
                kills += 1
                processes.start(name, total_steps=LONG)
        time.sleep(0.02)
    processes.wait("r0")
    rounds = processes.check("r0", LONG, rtol=1e-6)
    assert kills >= KILLS
    assert sum(bool(told["absent"]) for told in rounds) >= KILLS / 4
    assert sum(len(told["joined"]) for told in rounds) >= KILLS / 2


def test_two_die_at_once_and_the_last_goes_on_alone(processes: Processes) -> None:
    names = [f"r{i}" for i in range(N)]
    for name in names:
        processes.start(name, pause=0.1, beside=names)
    processes.trained_until("r0", 1)
    for name in ("r1", "r2"):
        processes.running[name][0].kill()
    processes.trained_until("r0", 3)
    processes.running["r3"][0].kill()
    processes.wait("r0")
    rounds = processes.check("r0")
    assert any(len(told["absent"]) == 2 for told in rounds) or any(len(told["names"]) == 2 for told in rounds)
    assert rounds[-1]["names"] == ["r0"]
    assert rounds[-1]["replicas"][0]["multipliers"] == [1.0]


def test_replicas_of_two_ranks(processes: Processes) -> None:
    """torchft#171: each rank has a manager; the ranks of a replica decide together."""
    names = ("r0", "r1")
    for name in names:
        processes.start(name, ranks=2, pause=0.1, total_steps=SOME, beside=names)
    processes.trained_until("r0", 2)
    for process in processes.running["r1"]:
        process.kill()
    before = processes.count("r0")
    processes.trained_until("r0", before + 2)
    processes.start("r1", ranks=2, pause=0.1, total_steps=SOME)
    processes.joined("r0", "r1", since=before + 1)
    processes.hurry()
    processes.wait()
    rounds = processes.check("r0", SOME, rtol=1e-8)
    assert rounds[-1]["names"] == ["r0", "r1"]
    assert len(list(processes.folder.glob("*.pt"))) == 4


def test_a_lost_lighthouse_ends_by_the_time_out(processes: Processes) -> None:
    port = free_port()
    lighthouse = subprocess.Popen([lighthouse_command(), "--min_replicas", "1", "--bind", f"127.0.0.1:{port}"])
    try:
        processes.address = f"http://127.0.0.1:{port}"
        processes.start("r0", pause=0.3, timeout=5.0)
        processes.trained_until("r0", 1)
    finally:
        lighthouse.kill()
        lighthouse.wait()
    lost = time.monotonic()
    processes.running["r0"][0].join(60)
    assert processes.running["r0"][0].exitcode == 1
    assert time.monotonic() - lost < 30
    assert "LostReplicaError" in processes.log("r0")
    assert "TORCHFT_LIGHTHOUSE" in processes.log("r0")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_what_torchft_gives_is_refused_where_it_does_not_fit(processes: Processes) -> None:
    from torchft import Manager, Optimizer
    from torchft.ddp import PureDistributedDataParallel

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager: Manager = managed("r0", processes.address, ("localhost", store.port))
    net = seeded(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(hdet.ArgumentError, match="give the optimizer inside"):
        hdet.auto(Optimizer(manager, optimizer), total_steps=100)
    with pytest.raises(hdet.ArgumentError, match="find the rate without torchft"):
        hdet.auto(optimizer, total_steps=100, model=PureDistributedDataParallel(manager, net))
    with pytest.raises(hdet.ArgumentError, match="find the rate without torchft"):
        hdet.auto(optimizer, total_steps=100, group=hdet.torchft(manager))
    manager._use_async_quorum = True
    with pytest.raises(hdet.ArgumentError, match="use_async_quorum=False"):
        hdet.torchft(manager)
    manager.shutdown(wait=False)
