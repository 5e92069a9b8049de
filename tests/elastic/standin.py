"""A stand-in for torchft's lighthouse and manager, on threads of one process, that fails where it is told to.

Written from the sources of torchft 0.2.0 (``manager.py``, ``manager.rs``, ``lighthouse.rs``): who is in a quorum, who
heals from whom, what happens to ``allreduce`` after an error, what a commit does. Quorums are synchronous, the world
size is dynamic.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

__all__ = ["Killed", "Lighthouse", "StandIn"]


class Killed(BaseException):
    """The replica is no more: nothing catches it but the end of its thread."""


@dataclass
class Quorum:
    """Those who are there, sorted by their ids, with what they asked with."""

    number: int
    steps: dict[str, int]
    exchange: Exchange

    @property
    def ids(self) -> list[str]:
        return list(self.steps)

    def healing(self, init_sync: bool) -> dict[str, str]:
        """Who loads the state of whom, as in ``compute_quorum_results``."""
        highest = max(self.steps.values())
        primary = next(one for one, step in self.steps.items() if step == highest)
        forced = init_sync and highest == 0
        behind = [one for one, step in self.steps.items() if step != highest or (forced and one != primary)]
        current = [one for one in self.steps if one not in behind]
        return {one: current[i % len(current)] for i, one in enumerate(behind)}


@dataclass
class Exchange:
    """The process group of one quorum. A sum is there once all members have given their part, if they live so long."""

    ids: list[str]
    lighthouse: Lighthouse
    timeout: float
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    states: dict[tuple[int, str], Any] = field(default_factory=dict)

    def give(self, one: str, number: int, tensor: Tensor) -> None:
        with self.lighthouse.changed:
            self.parts.setdefault(number, {})[one] = tensor.detach().clone()
            self.lighthouse.changed.notify_all()

    def sum_of(self, one: str, number: int) -> Tensor:
        with self.lighthouse.changed:
            is_mean = self.parts[number][one].numel() > 150  # of the weights: rows are shorter
            hit = {(number, one), (-1, one)} if is_mean else {(number, one)}
            for torn in hit & self.lighthouse.torn:
                self.lighthouse.torn.remove(torn)
                raise RuntimeError("connection closed by peer, in the middle of a sum")
            self._wait(lambda: len(self.parts.get(number, {})) == len(self.ids), self.missing_from(number))
            return torch.stack([self.parts[number][each] for each in self.ids]).sum(0)

    def missing_from(self, number: int) -> Callable[[], set[str]]:
        return lambda: set(self.ids) - set(self.parts.get(number, {}))

    def state_from(self, number: int, source: str) -> Any:
        with self.lighthouse.changed:
            self._wait(lambda: (number, source) in self.states, lambda: {source})
            return copy.deepcopy(self.states[number, source])

    def _wait(self, ready: Callable[[], bool], needed: Callable[[], set[str]]) -> None:
        """Until it is ready; gloo notices at once if somebody who is needed has closed a connection."""
        deadline = time.monotonic() + self.timeout
        while not ready():
            if needed() & self.lighthouse.dead or needed() & self.lighthouse.elsewhere(self):
                raise RuntimeError("connection closed by peer")
            if not self.lighthouse.changed.wait(max(0.0, deadline - time.monotonic())):
                raise RuntimeError("timed out")


class Lighthouse:
    """Decides who is in a quorum.

    Args:
        min_replicas: the fewest.
        join_timeout: seconds to wait for those who live and have not asked.
        timeout: seconds for a sum.
    """

    def __init__(self, min_replicas: int = 1, join_timeout: float = 60.0, timeout: float = 20.0) -> None:
        self.changed = threading.Condition()
        self.alive: set[str] = set()
        self.dead: set[str] = set()
        self.torn: set[tuple[int, str]] = set()
        """(number of the sum in a quorum, who does not get it): once each. -1: the first mean of weights."""
        self.quorums: list[Quorum] = []
        self._asking: dict[str, tuple[int, int]] = {}
        self._first = 0.0
        self.min_replicas, self._join, self._timeout = min_replicas, join_timeout, timeout

    def register(self, one: str) -> None:
        with self.changed:
            self.alive.add(one)
            self.changed.notify_all()

    def asking(self, one: str) -> bool:
        with self.changed:
            return one in self._asking

    def kill(self, one: str) -> None:
        with self.changed:
            self.alive.discard(one)
            self.dead.add(one)
            self._asking.pop(one, None)
            self._form()
            self.changed.notify_all()

    def elsewhere(self, exchange: Exchange) -> set[str]:
        """Those who are in a later quorum: their connections of this one are closed."""
        later = [q for q in self.quorums if q.exchange is exchange]
        since = self.quorums.index(later[-1]) if later else len(self.quorums)
        return {one for q in self.quorums[since + 1 :] if q.exchange is not exchange for one in q.ids}

    def quorum(self, one: str, step: int, failures: int, timeout: float) -> Quorum:
        deadline = time.monotonic() + timeout
        with self.changed:
            self._first = self._first if self._asking else time.monotonic()
            self._asking[one] = (step, failures)
            seen = len(self.quorums)
            self._form()
            while True:
                mine = next((q for q in self.quorums[seen:] if one in q.steps), None)
                if mine is not None:
                    return mine
                left = min(deadline - time.monotonic(), 0.1)
                if left <= 0:
                    self._asking.pop(one, None)
                    raise TimeoutError('status: Cancelled, message: "Timeout expired"')
                self.changed.wait(left)
                self._form()

    def _form(self) -> None:
        """As ``quorum_compute``: all of the last one are back, or more than half of those who live have asked."""
        asking = {one: self._asking[one] for one in sorted(self._asking) if one in self.alive}
        previous = self.quorums[-1] if self.quorums else None
        is_fast = previous is not None and set(previous.ids) <= set(asking)
        if not is_fast:
            if len(asking) < max(self.min_replicas, 1) or len(asking) <= len(self.alive) // 2:
                return
            if len(asking) < len(self.alive) and time.monotonic() - self._first < self._join:
                return
        changed = previous is None or previous.ids != list(asking) or any(bad for _, bad in asking.values())
        steps = {one: step for one, (step, _) in asking.items()}
        exchange = Exchange(list(asking), self, self._timeout) if changed or previous is None else previous.exchange
        self.quorums.append(Quorum(len(self.quorums) + 1, steps, exchange))
        self._asking.clear()
        self.changed.notify_all()


class _Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> bool:
        self._wait()
        return True


class StandIn:
    """``torchft.Manager`` with ``use_async_quorum=False``, as far as it is used.

    Args:
        lighthouse: of all.
        replica_id: this one's; a replica that comes back needs another, as torchft adds a uuid.
        min_replica_size: fewer do not commit.
        init_sync: whether all load the state of the first one at step 0.
        trap: called with the name of each point that is passed; may raise :class:`Killed`.
    """

    _use_async_quorum = False
    _group_world_size = 1

    def __init__(
        self,
        lighthouse: Lighthouse,
        replica_id: str,
        min_replica_size: int = 1,
        init_sync: bool = True,
        trap: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._lighthouse, self._id, self._trap = lighthouse, replica_id, trap
        self._min, self._init_sync = min_replica_size, init_sync
        self._loads: dict[str, Callable[[Any], None]] = {}
        self._states: dict[str, Callable[[], Any]] = {}
        self._step = self._batches = self._failures = self._sums = 0
        self._error: Exception | None = None
        self._quorum: Quorum | None = None
        lighthouse.register(replica_id)

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        assert key not in self._loads
        self._loads[key], self._states[key] = load_state_dict, state_dict

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step, self._batches = state_dict["step"], state_dict["batches_committed"]

    def current_step(self) -> int:
        return self._step

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, e: Exception) -> None:
        self._error = e

    def participating_rank(self) -> int | None:
        return None if self._quorum is None else self._quorum.ids.index(self._id)

    def num_participants(self) -> int:
        return 0 if self._quorum is None else len(self._quorum.ids)

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        self._trap("quorum")
        self._error = None
        before, seconds = self._quorum, 60.0 if timeout is None else timeout.total_seconds()
        found = self._lighthouse.quorum(self._id, self._step, self._failures, seconds)
        self._quorum = found
        if before is None or before.exchange is not found.exchange:
            self._sums = 0
        heals = found.healing(self._init_sync)
        try:
            if self._id in heals.values():
                state = {"user": {key: own() for key, own in self._states.items()}, "torchft": self.state_dict()}
                with self._lighthouse.changed:
                    found.exchange.states[found.number, self._id] = copy.deepcopy(state)
                    self._lighthouse.changed.notify_all()
            if self._id not in heals:
                return
            self._trap("healing")
            pending = found.exchange.state_from(found.number, heals[self._id])
        except Exception as error:
            self.report_error(error)
            return
        self.load_state_dict(pending["torchft"])
        self._step = max(found.steps.values())
        for key, load in self._loads.items():
            load(pending["user"][key])

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG) -> _Work:
        assert reduce_op == ReduceOp.SUM
        if self._error is not None:
            return _Work(lambda: None)
        assert self._quorum is not None
        self._trap("allreduce")
        exchange, number = self._quorum.exchange, self._sums
        self._sums += 1
        exchange.give(self._id, number, tensor)

        def wait() -> None:
            try:
                tensor.copy_(exchange.sum_of(self._id, number))
            except Exception as error:
                self.report_error(error)

        return _Work(wait)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self._trap("commit")
        agreed = self.num_participants() >= self._min and self._error is None
        if agreed:
            self._step += 1
            self._batches += self.num_participants()
            self._failures = 0
        else:
            self._failures += 1
        self._trap("committed")
        return agreed
