"""Meetings of replicas that come and go, with a stand-in for torchft on threads."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hdet
from hdet.report.data import load_run
from tests.elastic.standin import Killed, Lighthouse, StandIn
from tests.elastic.training import EVERY, SPREAD, STEPS, expected, one_step, replica, seeded, trained
from tests.patience import PATIENCE
from tests.processes import run_ranks

N = 4


class Ensemble:
    """Replicas on threads. One that is killed may be started again."""

    def __init__(self, folder: Path, lighthouse: Lighthouse | None = None) -> None:
        self.folder = folder
        self.has_journals = True
        self.lighthouse = lighthouse or Lighthouse()
        self.results: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, BaseException] = {}
        self.threads: dict[str, threading.Thread] = {}
        self._lives: dict[str, int] = {}

    def start(
        self,
        name: str,
        trap: Callable[[str, int], None] = lambda point, count: None,
        inside: Callable[[StandIn, str, int], None] = lambda manager, point, count: None,
        **more: Any,
    ) -> None:
        """``trap`` and ``inside`` are called at every point with how often it was passed before."""
        life = self._lives[name] = self._lives.get(name, 0) + 1
        identity, passed = f"{name}:{life}", {}

        def at(point: str, *_: Any) -> None:
            passed[point] = passed.get(point, 0) + 1
            trap(point, passed[point] - 1)
            inside(manager, point, passed[point] - 1)

        given = {key: more.pop(key) for key in ("init_sync", "min_replica_size") if key in more}
        manager = StandIn(self.lighthouse, identity, trap=at, **given)

        def run() -> None:
            try:
                journal = self.folder / f"{name}.jsonl" if self.has_journals else None
                self.results[name] = trained(manager, name, journal, passing=at, **more)
            except Killed:
                pass
            except BaseException as error:
                self.errors[name] = error
            finally:
                self.lighthouse.kill(identity)

        self.threads[identity] = threading.Thread(target=run, daemon=True)
        self.threads[identity].start()

    def wait(self, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while any(thread.is_alive() for thread in self.threads.values()):
            assert time.monotonic() < deadline, f"hangs: {[i for i, t in self.threads.items() if t.is_alive()]}"
            time.sleep(0.01)
        assert not self.errors, self.errors

    def rounds(self, name: str) -> list[dict[str, Any]]:
        return hdet.read_journal(self.folder / f"{name}.jsonl").rounds

    def check(self, witness: str, first: str = "r0", **how: Any) -> list[dict[str, Any]]:
        """All who are there at the end are equal, and equal to the reference with the members that a journal names."""
        rounds = self.rounds(witness)
        mine = self.results[witness]
        for result in self.results.values():
            assert result["state"] == mine["state"]
            assert result["step"] == STEPS
            for kind in ("weights", "moments"):
                assert all(torch.equal(a, b) for a, b in zip(result[kind], mine[kind], strict=True))
        wanted = expected(first, rounds, **how)
        for kind in ("weights", "moments"):
            for a, b in zip(mine[kind], wanted[kind], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        assert mine["state"]["learned"] == pytest.approx([wanted["learned"]], rel=1e-9)
        return rounds


def killed_at(point: str, count: int) -> Callable[[str, int], None]:
    def trap(passed: str, times: int) -> None:
        if (passed, times) == (point, count):
            raise Killed

    return trap


@pytest.fixture
def ensemble(tmp_path: Path) -> Ensemble:
    return Ensemble(tmp_path)


def everybody(ensemble: Ensemble, *others: str, **more: Any) -> None:
    """Start them at the same time: the first quorum waits for all that are known."""
    for name in others or [f"r{i}" for i in range(N)]:
        ensemble.start(name, **more)


def test_nobody_is_lost(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=N)
    everybody(ensemble)
    ensemble.wait()
    rounds = ensemble.check("r0")
    assert [told["step"] for told in rounds] == [4, 8, 12, 16, 20, 23, 24]
    assert all(told["names"] == ["r0", "r1", "r2", "r3"] and not told["absent"] for told in rounds)
    assert rounds[-1]["learned"] != [1.0]


@pytest.mark.parametrize("point", ["step", "quorum", "allreduce", "commit", "committed"])
@pytest.mark.parametrize("late", [0, 1])
def test_one_dies_and_comes_back(ensemble: Ensemble, point: str, late: int) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=N)
    count = {"step": 5, "quorum": 2, "allreduce": 6, "commit": 2, "committed": 2}[point] + late
    for name in ("r0", "r1", "r3"):
        ensemble.start(name)
    ensemble.start("r2", killed_at(point, count))
    begin(ensemble)
    while "r2:1" not in ensemble.lighthouse.dead:
        time.sleep(0.001)
    ensemble.start("r2")
    ensemble.wait()
    assert set(ensemble.results) == {"r0", "r1", "r2", "r3"}
    rounds = ensemble.check("r0")
    assert any(2 in told["absent"] for told in rounds) or any(len(told["names"]) == 3 for told in rounds)
    assert any("r2" in told["joined"] for told in rounds)
    assert len(rounds[-1]["names"]) == N
    for told in rounds:
        factors = [row["multipliers"][0] for row in told["replicas"]]
        assert sum(factors) / len(factors) == pytest.approx(1.0)
        assert sorted(2 - f for f in factors) == pytest.approx(sorted(factors))
        assert max(factors) == pytest.approx(1 + SPREAD if len(factors) > 1 else 1.0)


def test_without_losses_a_newcomer_adds_nothing_to_the_mean(ensemble: Ensemble) -> None:
    """It holds a peer's weights, which would count twice."""
    ensemble.lighthouse = Lighthouse(min_replicas=2)
    at_five, has_asked = threading.Event(), threading.Event()

    def waits(point: str, count: int) -> None:
        if (point, count) == ("step", 5):
            at_five.set()
            has_asked.wait(PATIENCE)

    ensemble.start("r0", waits, tells=False)
    ensemble.start("r1", tells=False)
    begin(ensemble)
    at_five.wait(PATIENCE)
    ensemble.start("r2", tells=False)
    while not ensemble.lighthouse.asking("r2:1"):
        time.sleep(0.002)
    has_asked.set()
    ensemble.wait()
    rounds = ensemble.check("r0", tells=False)
    assert rounds[1]["joined"] == ["r2"]
    assert rounds[-1]["learned"] == [1.0]


def test_two_die_at_once_and_the_last_goes_on_alone(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=N)
    ensemble.start("r0")
    ensemble.start("r1", killed_at("step", 13))
    ensemble.start("r2", killed_at("allreduce", 7))
    ensemble.start("r3", killed_at("allreduce", 7))
    begin(ensemble)
    ensemble.wait()
    rounds = ensemble.check("r0")
    assert [len(told["names"]) for told in rounds][-1] == 1
    assert rounds[-1]["replicas"][0]["multipliers"] == [1.0]


def begin(ensemble: Ensemble, fewest: int = 1) -> None:
    """All have met once: from now on a quorum may be smaller."""
    while not ensemble.lighthouse.quorums:
        time.sleep(0.002)
    ensemble.lighthouse.min_replicas = fewest


def torn_at(commit: int) -> Callable[[StandIn, str, int], None]:
    """The last sum of a meeting has failed here, and not on the others."""

    def trap(manager: StandIn, point: str, count: int) -> None:
        if (point, count) == ("commit", commit):
            manager.report_error(RuntimeError("connection closed by peer"))

    return trap


def test_one_that_alone_misses_a_commit_heals(ensemble: Ensemble) -> None:
    """The others have committed: it is a step behind, waits for their next meeting and is as they are."""
    ensemble.lighthouse = Lighthouse(min_replicas=N)
    for name in ("r0", "r2", "r3"):
        ensemble.start(name)
    ensemble.start("r1", inside=torn_at(2))
    ensemble.wait()
    rounds = ensemble.check("r0")
    missed = next(k for k, told in enumerate(rounds) if "r1" in told["joined"])
    assert rounds[missed]["absent"] == [1]
    assert rounds[missed + 1]["absent"] == []


@pytest.mark.slow
def test_a_sum_that_some_do_not_get_is_tried_again(ensemble: Ensemble) -> None:
    """The mean of the weights, the seventh sum, in the middle of which a connection is lost."""
    ensemble.lighthouse = Lighthouse(min_replicas=N, timeout=2.0)
    ensemble.lighthouse.torn = {(6, "r1:1"), (6, "r3:1")}
    everybody(ensemble)
    ensemble.wait()
    rounds = ensemble.check("r0")
    assert not ensemble.lighthouse.torn
    assert all(not told["absent"] for told in rounds)


@pytest.mark.slow
def test_a_last_sum_that_some_do_not_get_counts_for_nobody(ensemble: Ensemble) -> None:
    """Without journals the mean is the last sum but for the one that confirms it: nobody commits alone."""
    ensemble.has_journals = False
    ensemble.lighthouse = Lighthouse(min_replicas=N, timeout=2.0)
    ensemble.lighthouse.torn = {(-1, "r1:1"), (-1, "r3:1")}
    everybody(ensemble)
    ensemble.wait()
    assert not ensemble.lighthouse.torn
    assert all(len(set(quorum.steps.values())) == 1 for quorum in ensemble.lighthouse.quorums)
    mine = ensemble.results["r0"]
    for result in ensemble.results.values():
        assert result["state"] == mine["state"]
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], mine["weights"], strict=True))


def test_replicas_that_went_on_apart_come_together(ensemble: Ensemble) -> None:
    """A join time-out that is shorter than a round: r0 commits, the others do not, and meet again without it.

    Then all managers are at the same step, and torchft would heal nobody.
    """
    lighthouse = ensemble.lighthouse = Lighthouse(min_replicas=3, join_timeout=0.3)
    is_back = threading.Event()

    def waits_for_the_others(point: str, count: int) -> None:
        while (point, count) == ("step", 10) and lighthouse.quorums[-1].ids != ["r1:1", "r2:1"]:
            time.sleep(0.01)
        if (point, count) == ("quorum", 3):
            is_back.set()

    def wait_for_it(point: str, count: int) -> None:
        if (point, count) == ("step", 10):
            is_back.wait(10)

    ensemble.start("r0", waits_for_the_others)
    ensemble.start("r1", wait_for_it, torn_at(2))
    ensemble.start("r2", wait_for_it, torn_at(2))
    begin(ensemble, fewest=2)
    ensemble.wait()
    assert {"r0:1": 3, "r1:1": 3, "r2:1": 3} in [quorum.steps for quorum in lighthouse.quorums]
    rounds = ensemble.check("r1")
    assert rounds[2]["names"] == ["r1", "r2"]
    assert rounds[2]["joined"] == ["r0"]
    assert rounds[-1]["names"] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random_while_others_come_and_go(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ensemble = Ensemble(tmp_path, Lighthouse(min_replicas=N))
    points = {"step": STEPS, "quorum": 6, "allreduce": 30, "commit": 6, "committed": 6}
    traps = {}
    for victim in draw.sample(["r1", "r2", "r3"], 2):
        point = draw.choice(list(points))
        traps[victim] = killed_at(point, draw.randrange(1, points[point]))
    for name in ("r0", "r1", "r2", "r3"):
        ensemble.start(name, traps.get(name, lambda point, count: None))
    begin(ensemble)
    back: set[str] = set()
    while ensemble.threads["r0:1"].is_alive():
        for victim in traps:
            if f"{victim}:1" in ensemble.lighthouse.dead and victim not in back and victim not in ensemble.results:
                back.add(victim)
                again = killed_at("healing", 0) if draw.random() < 0.3 else (lambda point, count: None)
                ensemble.start(victim, again)
        time.sleep(0.002)
    ensemble.wait()  # one that came after the end has begun anew, alone
    ensemble.results = {name: result for name, result in ensemble.results.items() if name in _last(ensemble)}
    ensemble.check("r0")


def _last(ensemble: Ensemble) -> set[str]:
    """Who was at the last meeting of r0."""
    told = ensemble.rounds("r0")[-1]
    return {name for r, name in enumerate(told["names"]) if r not in told["absent"]} | set(told["joined"])


def test_another_sync_every_is_refused_on_the_one_that_has_it(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=3)
    ensemble.start("r0")
    ensemble.start("r1", sync_every=3)
    ensemble.start("r2")
    while "r1" not in ensemble.errors:
        time.sleep(0.01)
    error = ensemble.errors.pop("r1")
    assert isinstance(error, hdet.DisagreementError)
    assert "sync_every = 4" in str(error)
    assert "sync_every = 3" in str(error)
    ensemble.lighthouse.min_replicas = 1
    ensemble.wait()
    assert ensemble.check("r0")[0]["names"] == ["r0", "r2"]


def test_without_init_sync_all_say_that_arguments_differ(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=2)
    ensemble.start("r0", init_sync=False)
    ensemble.start("r1", init_sync=False, sync_every=3)
    while len(ensemble.errors) < 2:
        time.sleep(0.01)
    assert all("sync_every" in str(error) for error in ensemble.errors.values())


def failure_of(ensemble: Ensemble, name: str) -> BaseException:
    with pytest.raises(AssertionError):
        ensemble.wait()
    return ensemble.errors[name]


def test_too_few_replicas_end_by_the_time_out(ensemble: Ensemble) -> None:
    started = time.monotonic()
    ensemble.start("r0", min_replica_size=2, timeout=1.5)
    error = failure_of(ensemble, "r0")
    assert time.monotonic() - started < 10
    assert isinstance(error, hdet.LostReplicaError)
    assert "1 replicas are too few to go on" in str(error)
    assert "min_replica_size" in str(error)


def test_no_quorum_ends_by_the_time_out(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=2)
    ensemble.start("r0", timeout=0.5)
    error = failure_of(ensemble, "r0")
    assert isinstance(error, hdet.LostReplicaError)
    assert "has not met the others within 0.5 s" in str(error)
    assert "TORCHFT_LIGHTHOUSE" in str(error)


class Without:
    """A manager of a torchft to come, in which one name has changed."""

    def __init__(self, manager: StandIn, renamed: str) -> None:
        self._manager, self._renamed = manager, renamed

    def __getattr__(self, name: str) -> Any:
        if name == self._renamed:
            raise AttributeError(name)
        return getattr(self._manager, name)


def test_bad_input() -> None:
    manager = StandIn(Lighthouse(), "r0:1")
    with pytest.raises(hdet.ArgumentError, match="manager must be a torchft"):
        hdet.torchft(3)
    for renamed in ("_group_world_size", "_use_async_quorum", "should_commit"):
        with pytest.raises(hdet.ArgumentError, match=f"torchft 0.2, but got .* has no {renamed}; pip install"):
            hdet.torchft(Without(manager, renamed))
    manager._use_async_quorum = True
    with pytest.raises(hdet.ArgumentError, match="use_async_quorum=False"):
        hdet.torchft(manager)
    manager._use_async_quorum = False
    for bad in ({"name": ""}, {"name": 3}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": "1"}):
        with pytest.raises(hdet.ArgumentError, match=next(iter(bad))):
            hdet.torchft(manager, **bad)
    group = hdet.torchft(manager, name="r0")
    net, scheduler = replica(group, "r0")
    with pytest.raises(hdet.ArgumentError, match=r"call group.join\(scheduler\)"):
        scheduler.step(1.0)
    with pytest.raises(hdet.ArgumentError, match="made with this group="):
        group.join(replica(None, "r0")[1])
    with pytest.raises(hdet.ArgumentError, match="made with this group="):
        group.join(None)
    group.join(scheduler)
    with pytest.raises(hdet.ArgumentError, match="once"):
        group.join(scheduler)
    with pytest.raises(hdet.ArgumentError, match="serves another scheduler"):
        group.join(replica(group, "r0")[1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(hdet.ArgumentError, match="find the rate without torchft"):
        hdet.auto(optimizer, total_steps=100, group=group)


def one_of_two_ranks(rank: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The weights after joining, and what the journal got in a round, on a rank of the only replica."""
    manager, written = StandIn(Lighthouse(), f"r0:{rank}"), list[dict[str, Any]]()
    manager._group_world_size = 2
    group = hdet.torchft(manager, name="r0")
    net, scheduler = replica(group, f"r{rank}", journal=SimpleNamespace(write=written.append))
    group.join(scheduler)
    weights = [tensor.clone() for tensor in net.state_dict().values()]
    for t in range(EVERY):
        one_step(net, scheduler.optimizer, "r0", t)
        scheduler.step(1.0 + rank)
    return weights, [record for record in written if record["kind"] == "round"]


def test_a_replica_of_two_ranks_begins_with_the_weights_of_the_first_and_tells_their_mean_loss() -> None:
    (first, written), (second, nothing) = run_ranks(one_of_two_ranks, 2)
    expected_weights = seeded(0).state_dict().values()
    for own in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(own, expected_weights, strict=True))
    assert [row["loss"] for row in written[0]["replicas"]] == [1.5]
    assert nothing == []


def test_between_meetings_nothing_is_averaged(ensemble: Ensemble) -> None:
    group = hdet.torchft(StandIn(Lighthouse(), "r0:1"), name="r0")
    _, scheduler = replica(group, "r0")
    group.join(scheduler)
    scheduler.converge()
    with scheduler.consensus():
        pass
    scheduler.step(1.0)
    for call in (scheduler.converge, lambda: scheduler.consensus().__enter__()):
        with pytest.raises(hdet.ArgumentError, match=f"save at step {EVERY}"):
            call()


def test_one_that_is_not_finite_is_left_out_and_stays(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=N)

    def ruins(point: str, count: int) -> None:
        if (point, count) == ("step", 9):
            raise_nan.set()

    raise_nan = threading.Event()
    for name in ("r0", "r1", "r3"):
        ensemble.start(name)
    ensemble.start("r2", ruins, spoiled=raise_nan)
    ensemble.wait()
    told = ensemble.rounds("r0")[2]
    assert told["excluded"] == [2]
    assert told["absent"] == []
    mine = ensemble.results["r0"]
    for result in ensemble.results.values():
        assert result["state"] == mine["state"]
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], mine["weights"], strict=True))
        assert all(bool(w.isfinite().all()) for w in result["weights"])


def test_all_that_are_not_finite_end_with_words(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=2)
    for name in ("r0", "r1"):
        spoiled = threading.Event()
        spoiled.set()
        ensemble.start(name, spoiled=spoiled)
    error = failure_of(ensemble, "r0")
    assert isinstance(error, hdet.DivergedError)
    assert isinstance(ensemble.errors["r1"], hdet.DivergedError)


class OtherKnobs:
    """hdet.Ensemble on a schedule of its own, without model=, which steps ahead to look ahead."""

    def __init__(self) -> None:
        self.lighthouse = Lighthouse()
        self.ends: dict[str, tuple[int, dict[str, Any], list[torch.Tensor]]] = {}
        self.threads: list[threading.Thread] = []

    def start(self, name: str, passing: Callable[[str, int], None]) -> None:
        self.threads.append(threading.Thread(target=self._run, args=(name, passing), daemon=True))
        self.threads[-1].start()

    def asked(self, name: str) -> None:
        while not self.lighthouse.asking(name):
            time.sleep(0.002)

    def _run(self, name: str, passing: Callable[[str, int], None]) -> None:
        net, passed = seeded(int(name[1])), Counter[str]()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

        def at(point: str) -> None:
            passing(point, passed[point])
            passed[point] += 1

        group = hdet.torchft(StandIn(self.lighthouse, name, trap=at), name=name, timeout=30.0)
        knobs = [hdet.knobs.lr(optimizer), hdet.knobs.optimizer(optimizer, "momentum", spread=0.3)]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        one = hdet.Ensemble(optimizer, schedule, knobs, sync_every=2, total_steps=20, group=group)
        group.join(one)
        began = step = one.state_dict()["step"]
        while step < 20:
            at("step")
            one.step(one_step(net, optimizer, name, step))
            step = one.state_dict()["step"]
        self.ends[name] = (began, one.state_dict(), [p.detach().clone() for p in net.parameters()])
        self.lighthouse.kill(name)

    def check(self) -> None:
        for thread in self.threads:
            thread.join(30)
        _, state, weights = self.ends["r0"]
        assert state["plain_lrs"] == [pytest.approx(0.1 * 0.9**20)]
        for _, other, others in self.ends.values():
            assert other["hdet"] == state["hdet"]
            assert other["plain_lrs"] == state["plain_lrs"]
            assert other["schedule"]["last_epoch"] == state["schedule"]["last_epoch"] == 20
            assert all(torch.equal(a, b) for a, b in zip(others, weights, strict=True))


def test_an_ensemble_of_other_knobs() -> None:
    both = OtherKnobs()
    at_five, goes_on = threading.Event(), threading.Event()

    def waits(point: str, count: int) -> None:
        if (point, count) == ("step", 5):
            at_five.set()
            goes_on.wait(20)

    both.start("r0", waits)
    at_five.wait(20)
    both.start("r1", lambda point, count: None)
    both.asked("r1")
    goes_on.set()
    both.check()
    assert [both.ends[name][0] for name in ("r0", "r1")] == [0, 6]


def test_one_comes_to_the_second_try_of_a_meeting() -> None:
    """The first one has failed when the other had decided already: nothing of that may reach the one that comes."""
    both = OtherKnobs()
    has_failed = threading.Event()

    def waits(point: str, count: int) -> None:
        if (point, count) == ("allreduce", 8):  # the confirmation of the second round, the third sum of a meeting alone
            both.lighthouse.torn.add((8, "r0"))
        if (point, count) == ("commit", 2):
            has_failed.set()
            both.asked("r1")

    both.start("r0", waits)
    has_failed.wait(20)
    both.start("r1", lambda point, count: None)
    both.check()
    assert not both.lighthouse.torn
    assert both.ends["r1"][0] == 4


def test_a_copy_has_not_joined() -> None:
    group = hdet.torchft(StandIn(Lighthouse(), "r0:1"), name="r0")
    _, scheduler = replica(group, "r0")
    group.join(scheduler)
    clone = copy.deepcopy(scheduler)
    with pytest.raises(hdet.ArgumentError, match="before the replica has joined"):
        clone.step(1.0)


def test_a_probe_loader_is_refused() -> None:
    group = hdet.torchft(StandIn(Lighthouse(), "r0:1"), name="r0")
    net = seeded(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for loader, fits in ((iter([1]), False), ([torch.ones(2, 6)], True), (lambda k: torch.ones(2, 6), True)):
        probe = hdet.ProbeLoss(hdet.ProbeBatch(net, lambda model, x: model(x).mean(), loader))
        if fits:
            hdet.Ensemble(optimizer, signal=probe, group=group, sync_every=2)
        else:
            with pytest.raises(hdet.ArgumentError, match="batch_fn"):
                hdet.Ensemble(optimizer, signal=probe, group=group, sync_every=2)


def test_the_report_says_who_was_gone(ensemble: Ensemble) -> None:
    ensemble.lighthouse = Lighthouse(min_replicas=3)
    ensemble.start("r0")
    ensemble.start("r1", killed_at("step", 13))
    ensemble.start("r2")
    begin(ensemble)
    ensemble.wait()
    run = load_run(ensemble.folder / "r0.jsonl")
    assert "r1 gone" in [event.text for event in run.events]
    assert "replica 1 left out" not in [event.text for event in run.events]
