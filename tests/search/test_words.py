"""A search says what it knows: its status, and warnings where nothing was learned."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hdet
from hdet.report.data import load_run
from hdet.report.verdict import advice, verdict
from hdet.rule.enums import Reason
from tests.problems import batch_of, loss_of, network
from tests.processes import run_ranks

STEPS = 100
NOTHING = "the train loss was "
Losses = Callable[[nn.Module, int], Tensor]


def learns(model: nn.Module, t: int) -> Tensor:
    return loss_of(model, batch_of(t))


def labels_of_nothing(model: nn.Module, t: int) -> Tensor:
    """New ones in each step."""
    g = torch.Generator().manual_seed(t)
    return cross_entropy(
        model(torch.randn(64, 6, generator=g)).expand(-1, 2) * torch.tensor([1.0, -1.0]),
        torch.randint(0, 2, (64,), generator=g),
    )


def constant(model: nn.Module, t: int) -> Tensor:
    """With gradients that are noise."""
    out = learns(model, t) * math.sin(t)
    return 2.3 + out - out.detach()


def noisy(model: nn.Module, t: int) -> Tensor:
    return constant(model, t) + 0.2 * torch.randn((), generator=torch.Generator().manual_seed(t))


class Run:
    """A model that trains, and what it has said."""

    def __init__(
        self, loss: Losses = learns, steps: int | None = STEPS, *, maximize: bool = False, **more: Any
    ) -> None:
        self.model, self.loss, self.said = network(), loss, list[str]()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, maximize=maximize)
        with self._listening():
            self.scheduler = hdet.auto(self.optimizer, total_steps=steps, **more)

    def _listening(self) -> Any:
        return _Heard(self.said)

    def go_on(self, steps: int = STEPS, *, tells: bool = True) -> Run:
        with self._listening():
            for _ in range(steps):
                self.optimizer.zero_grad()
                loss = self.loss(self.model, self.scheduler.last_epoch)
                loss.backward()
                self.optimizer.step()
                self.scheduler.step(*([loss.detach()] if tells else []))
        return self

    def spoil(self) -> Run:
        """Its weights are NaN."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(math.nan)
        return self

    @property
    def found(self) -> Any:
        return self.scheduler.found

    @property
    def doubts(self) -> list[str]:
        """What it has said of losses."""
        return [words for words in self.said if words.startswith(NOTHING)]


class _Heard(warnings.catch_warnings):  # type: ignore[type-arg]
    """Inside, warnings are kept as texts."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(record=True)
        self._said = said

    def __enter__(self) -> Any:
        self._caught = super().__enter__()
        warnings.simplefilter("always")
        return self._caught

    def __exit__(self, *error: object) -> None:
        self._said += [str(one.message) for one in self._caught or () if one.category is hdet.SearchWarning]
        super().__exit__(*error)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.INFO, "hdet"):
        yield lambda: [record.message for record in caplog.records]


def test_a_run_that_learns_says_nothing_of_it(lines: Callable[[], list[str]]) -> None:
    run = Run().go_on()
    assert run.found.status in ("settled", "unsure")
    assert run.doubts == []
    assert sum("has settled" in line for line in lines()) == run.found.settled
    assert "use again" in lines()[-1]


@pytest.mark.parametrize("loss", [labels_of_nothing, constant, noisy])
def test_a_run_that_learns_nothing_says_so(loss: Losses, lines: Callable[[], list[str]], tmp_path: Path) -> None:
    run = Run(loss, journal=tmp_path / "run.jsonl").go_on()
    assert (run.found.status, run.found.settled) == ("stopped", False)
    assert "has not fallen" in run.found.why
    assert run.found.why in str(run.found)
    assert run.found.why in run.scheduler._repr_html_()
    assert f"at step {STEPS}:" in run.doubts[-1]
    assert "scheduler.step()" in run.doubts[-1]  # what to do if it need not fall
    assert not any("settled" in line or "use again" in line for line in lines())
    assert lines()[-1] == str(run.found)
    last = hdet.read_journal(tmp_path / "run.jsonl").rounds[-1]
    assert (last["status"], last["why"]) == ("stopped", "not_fallen")
    told = load_run(tmp_path / "run.jsonl")
    assert "the search has stopped" in verdict(told)
    assert advice(told) is None


def test_what_is_flat_is_said_at_the_peak_already() -> None:
    run = Run(constant).go_on(40)
    assert [words.partition(". ")[0] for words in run.doubts] == [
        "the train loss was 2.3 and is 2.3 at step 30: nothing was learned so far"
    ]
    assert len(run.go_on(STEPS - 40).doubts) == 2
    assert Run(noisy).go_on(40).doubts == []  # too early to say


def test_without_a_loss_nothing_is_said_of_it() -> None:
    run = Run(constant).go_on(tells=False)
    assert run.doubts == []
    assert run.found.status in ("settled", "unsure")


def gain(model: nn.Module, t: int) -> Tensor:
    return -learns(model, t)


def test_what_is_maximised_must_rise() -> None:
    assert Run(gain, maximize=True).go_on().doubts == []
    words = Run(lambda model, t: -constant(model, t), maximize=True).go_on().doubts[-1]
    assert words.startswith("the train loss was -2.3 and is -2.3 ")


def test_a_run_that_is_too_short(lines: Callable[[], list[str]]) -> None:
    run = Run(steps=30).go_on(30)
    assert run.found.status == "too short"
    assert not run.found.settled
    assert not any("settled" in line for line in lines())


def test_an_alarm_stops_the_search() -> None:
    run = Run()
    with run._listening():
        for _ in range(STEPS):
            run.scheduler.step(1.0)
    assert (run.found.status, run.found.why) == ("stopped", Reason.NEVER_MOVED.text)
    assert str(run.found) == f"at 0.0001, stopped ({Reason.NEVER_MOVED.text}), never rolled back"


def test_a_rate_that_is_searched_has_no_reason() -> None:
    found = Run().go_on(7).found
    assert (found.status, found.why) == ("searching", "")


@pytest.mark.parametrize("at", [20, 50, 99])
@pytest.mark.parametrize("loss", [learns, constant])
def test_a_resumed_run_says_the_same(loss: Losses, at: int, lines: Callable[[], list[str]]) -> None:
    whole = Run(loss).go_on()
    told = len(lines())
    first = Run(loss).go_on(at)
    second = Run(loss)
    state = copy.deepcopy([first.model.state_dict(), first.optimizer.state_dict(), first.scheduler.state_dict()])
    second.model.load_state_dict(state[0])
    second.optimizer.load_state_dict(state[1])
    second.scheduler.load_state_dict(state[2])
    second.scheduler.load_search_state_dict(first.scheduler.search_state_dict())
    assert second.found == first.found
    second.go_on(STEPS - at)
    assert second.found == whole.found
    assert first.doubts + second.doubts == whole.doubts
    assert lines()[told:] == lines()[:told]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("progress", [["start", [[1.0]]]]),
        ("progress", [["start", []], ["stretches", [[1.0, 2]]], ["last", []], ["fell", False]]),
    ],
)
def test_a_damaged_state_is_refused(name: str, value: object) -> None:
    run = Run()
    state = copy.deepcopy(run.scheduler.state_dict())
    state["hdet"][name] = value
    with pytest.raises(hdet.ArgumentError, match="hdet state"):
        run.scheduler.load_state_dict(state)


def _told(rank: int) -> tuple[str, str, list[str]]:
    """Only the loss of one rank rises; the mean over both is what is judged."""
    run = Run()
    run.model = nn.parallel.DistributedDataParallel(run.model)
    run.loss = lambda model, t: learns(model, t) + (t / 20 if rank else 0.0)
    found = run.go_on().found
    return found.status, found.why, run.doubts


@pytest.mark.slow
def test_ranks_have_one_status_and_one_of_them_speaks() -> None:
    (mine, why, said), (theirs, their_why, unsaid) = run_ranks(_told, 2)
    assert (mine, why) == (theirs, their_why)
    assert mine == "stopped"
    assert said
    assert not unsaid
