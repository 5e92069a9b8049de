"""``hdet.auto`` on a real model agrees with its slow twin, step by step, in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from itertools import chain, takewhile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.errors import SearchWarning
from hdet.rule.enums import Reason
from tests.ensemble import twin as published_reference
from tests.models import batch, two_layer
from tests.search import twin

Groups = list[list[Tensor]]
MU = {"adam": 0.9, "momentum": 0.9, "sgd": 0.0}
SENSIBLE = {"adam": 0.02, "momentum": 0.02, "sgd": 0.1}
"""Rates at which each optimizer trains this network well."""
FIRST, AGAIN = "first_step", "restarted"
CLOSE = 1e-6
"""Relative. The rate that is found is at the edge of what is stable: there rounding errors grow."""
HARDER = "false_alarm"

pytestmark = [
    pytest.mark.filterwarnings("ignore:training diverged:hdet.errors.SearchWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


class Lesson:
    """A small network, its batches, and what goes wrong with them.

    Args:
        groups: parameter groups, one or two.
        outliers: the targets of a step are this many times too large: it throws the weights away.
        tells: what is said of the true loss of step t; None: nothing.
        still: until this step gradients are 0.
        unit: what the loss is multiplied by; below 0 it is to be maximised.
        skips: steps that the optimizer does not make.
        broken: at these steps a gradient is NaN.
    """

    def __init__(
        self,
        groups: int = 1,
        outliers: dict[int, float] | None = None,
        tells: Callable[[float, int], float | None] = lambda loss, t: loss,
        still: int = 0,
        unit: float = 1.0,
        skips: Collection[int] = (),
        broken: Collection[int] = (),
    ) -> None:
        self.model = two_layer()
        first, last = list(self.model[0].parameters()), list(self.model[2].parameters())
        self.groups: Groups = [first + last] if groups == 1 else [first, last]
        self.flat = [p for group in self.groups for p in group]
        self.outliers, self.tells, self.still, self.unit = outliers or {}, tells, still, unit
        self.skips, self.broken = skips, broken

    def loss_and_grad(self, t: int) -> tuple[float | None, list[Tensor]]:
        x, y = batch(t, 0)
        loss = mse_loss(self.model(x), y * self.outliers.get(t, 1.0)) * self.unit * float(t >= self.still)
        gradients = list(torch.autograd.grad(loss, self.flat))
        if t in self.broken:
            gradients[0] = torch.full_like(gradients[0], math.nan)
        return self.tells(loss.item(), t), gradients

    def load(self, theta: twin.Theta) -> None:
        with torch.no_grad():
            for xs, ys in zip(self.groups, theta, strict=True):
                for x, y in zip(xs, ys, strict=True):
                    x.copy_(y)


class Sink:
    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            self.rounds.append(record)


def make_optimizer(
    kind: str, groups: Groups, guesses: list[float], ascends: list[bool], *, as_tensor: bool
) -> torch.optim.Optimizer:
    rates = [torch.tensor(guess, dtype=torch.float64) if as_tensor else guess for guess in guesses]
    rows = [{"params": g, "lr": r, "maximize": up} for g, r, up in zip(groups, rates, ascends, strict=True)]
    if kind == "adam":
        return torch.optim.Adam(rows, foreach=False)
    return torch.optim.SGD(rows, momentum=MU[kind])


class Reference:
    """The published method's slow optimizers, at a momentum that is not cycled."""

    def __init__(self, kind: str) -> None:
        self.rule = published_reference.Adam() if kind == "adam" else published_reference.Momentum()
        self.mu = MU[kind]

    def __call__(self, theta: twin.Theta, g: twin.Theta, eta: list[float], /) -> twin.Theta:
        return self.rule(theta, g, eta, [self.mu] * len(eta))


def trained(
    lesson: Lesson, kind: str, guesses: list[float], S: int, ascends: list[bool], as_tensor: bool, **arguments: Any
) -> dict[str, Any]:
    """By the product."""
    optimizer = make_optimizer(kind, lesson.groups, guesses, ascends, as_tensor=as_tensor)
    sink = Sink()
    shape: Any = None
    if arguments.pop("anneal_strategy", "cos") == "cos":
        own = {name: arguments.pop(name) for name in ("pct_start", "div_factor") if name in arguments}

        def shape(stand_in: torch.optim.Optimizer) -> OneCycleLR:
            peaks = [float(group["lr"]) for group in stand_in.param_groups]
            return OneCycleLR(stand_in, peaks, S, cycle_momentum=False, **own)

    scheduler = hdet.auto(optimizer, S, shape, journal=sink, **arguments)
    out: dict[str, Any] = {"rate": [], "loss": [], "theta": [], "rounds": sink.rounds}
    for t in range(S):
        loss, gradients = lesson.loss_and_grad(t)
        for p, gradient in zip(lesson.flat, gradients, strict=True):
            p.grad = gradient
        out["rate"].append([float(group["lr"]) for group in optimizer.param_groups])
        out["loss"].append(loss)
        if t not in lesson.skips:
            optimizer.step()
        scheduler.step(loss)
        out["theta"].append([p.detach().clone() for p in lesson.flat])
    return out


def simulated(
    lesson: Lesson, kind: str, guesses: list[float], S: int, ascends: list[bool], **letters: Any
) -> twin.History:
    """By the twin."""
    theta0 = [[p.detach().clone() for p in group] for group in lesson.groups]

    def loss_and_grad(theta: twin.Theta, t: int) -> tuple[float | None, twin.Theta]:
        lesson.load(theta)
        loss, gradients = lesson.loss_and_grad(t)
        rest = iter(gradients)
        return loss, [[next(rest) for _ in group] for group in lesson.groups]

    settings = twin.Settings(S=S, guess=guesses, ascends=ascends, **letters)
    return twin.simulate(settings, theta0, loss_and_grad, lambda: Reference(kind), lesson.skips.__contains__)


def assert_equal(ours: dict[str, Any], expected: twin.History) -> None:
    rounds = ours["rounds"]
    assert [r["step"] for r in rounds] == expected.end
    for k, record in enumerate(rounds):
        assert record["estimated_rate"] == pytest.approx(expected.estimated_rate[k], rel=CLOSE, abs=0.0), k
        found = min(expected.m[k], expected.C[k])
        assert record["learned"] == pytest.approx([found] * len(record["learned"]), rel=CLOSE), k
        end = expected.end[k]
        assert record["base_before"] == pytest.approx(expected.rate[end - 1], rel=CLOSE), k
        assert end == expected.end[-1] or record["base"] == pytest.approx(expected.rate[end], rel=CLOSE), k
        event, detail = [*(expected.event[k] or "").split(), None, None][:2]
        assert record["event"] == event, k
        assert event not in ("rolled_back", "bad_batch") or record["rolled_back_to"] == int(detail), k
    for t, rates in enumerate(expected.rate):
        assert ours["rate"][t] == pytest.approx(rates, rel=CLOSE), t
        if expected.loss[t] is not None:
            assert ours["loss"][t] == pytest.approx(expected.loss[t], rel=CLOSE, nan_ok=True), t
        mine, theirs = (torch.cat([x.flatten() for x in xs]) for xs in (ours["theta"][t], chain(*expected.theta[t])))
        assert torch.equal(mine.isfinite(), theirs.isfinite()), t
        mine, theirs = mine.nan_to_num(0.0, 0.0, 0.0), theirs.nan_to_num(0.0, 0.0, 0.0)
        assert (mine - theirs).norm() <= CLOSE * theirs.norm(), t
    assert ours["rate"][:20] == [pytest.approx(rates, rel=1e-9) for rates in expected.rate[:20]]


def both(
    kind: str,
    guesses: list[float],
    S: int,
    arguments: dict[str, Any] | None = None,
    ascends: list[bool] | None = None,
    as_tensor: bool = False,
    **wrong: Any,
) -> list[str]:
    """Product and twin agree; what happened; of first steps the last one."""
    given, up = arguments or {}, ascends or [False] * len(guesses)
    ours = trained(Lesson(len(guesses), **wrong), kind, guesses, S, up, as_tensor, **given)
    expected = simulated(Lesson(len(guesses), **wrong), kind, guesses, S, up, **given)
    assert_equal(ours, expected)
    story = [event for event in expected.event if event]
    firsts = len(list(takewhile(FIRST.__eq__, story)))
    return story[max(firsts - 1, 0) :]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("wrong_by", [1e-5, 1.0, 1e4])
@pytest.mark.parametrize("kind", MU)
def test_from_any_guess_it_goes_the_way_of_the_twin(kind: str, wrong_by: float, groups: int) -> None:
    guesses = [SENSIBLE[kind] * wrong_by * factor for factor in (1.0, 0.5)[:groups]]
    first, *_ = both(kind, guesses, 220)
    assert first == (AGAIN if wrong_by > 1 else FIRST)


@pytest.mark.parametrize(
    "arguments",
    [
        {"pct_start": 0.2},
        {"pct_start": 0.9, "div_factor": 3.0},
        {"anneal_strategy": "trapezoid"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", MU)
def test_with_other_schedules_too(kind: str, arguments: dict[str, Any]) -> None:
    both(kind, [1.0], 150, arguments)


@pytest.mark.parametrize("guesses", [[0.01, 0.0], [0.0, 0.01]], ids=str)
@pytest.mark.parametrize("kind", MU)
def test_a_group_at_0_is_left_alone(kind: str, guesses: list[float]) -> None:
    assert both(kind, guesses, 120)[0] == FIRST


@pytest.mark.parametrize("kind", MU)
def test_what_is_maximised(kind: str) -> None:
    both(kind, [1.0, 0.5], 150, ascends=[True, True], unit=-1.0)


def test_groups_in_two_directions_are_not_judged_by_the_loss() -> None:
    """One layer climbs, so the loss explodes, and that is right."""
    assert both("adam", [0.1, 0.1], 80, ascends=[False, True]) == [FIRST]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_rate_that_is_a_tensor(kind: str) -> None:
    assert both(kind, [1e-3, 2e-3], 120, as_tensor=True)[0] == FIRST


@pytest.mark.parametrize(
    "skips",
    [{0}, {0, 1, 2, 3}, {1, 2, 17, 18, 60}, set(range(0, 150, 2)), {148, 149}],
    ids=["first", "first four", "some", "every other", "last two"],
)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_steps_that_are_left_out_only_move_the_schedule(kind: str, skips: set[int]) -> None:
    assert both(kind, [1e-3], 150, skips=skips)[0] == FIRST


@pytest.mark.parametrize(
    ("kind", "guesses", "outliers", "goes_back"),
    [
        pytest.param("sgd", [0.1], {10: 1e4}, [1], id="early"),
        pytest.param("momentum", [0.1, 0.3], {20: 1e4}, [15], id="in the search, two groups"),
        pytest.param("adam", [0.1], {45: 1e4}, [43], id="in the search, and Adam remembers"),
        pytest.param("momentum", [0.1], {120: 1e4}, [104], id="after the peak"),
        pytest.param("adam", [0.1, 0.2], {120: 1e4}, [104], id="after the peak, and Adam remembers"),
        pytest.param("sgd", [0.1], {20: 1e4, 23: 1e5, 60: 1e4, 150: 1e4}, [15, 51, 124], id="again and again"),
    ],
)
def test_it_goes_back_where_the_twin_does(
    kind: str, guesses: list[float], outliers: dict[int, float], goes_back: list[int]
) -> None:
    """Batches with targets far too large: the weights are thrown away."""
    story = both(kind, guesses, 200, outliers=outliers)
    assert story == [FIRST, *(f"rolled_back {t}" for t in goes_back)]


def test_a_first_step_to_nowhere_is_undone_until_one_is_known() -> None:
    assert both("sgd", [1.0], 80, outliers={0: 1e200}) == [AGAIN, FIRST, FIRST]  # a thousandth of it was too little


def test_first_steps_that_are_lost_in_rounding_are_repeated() -> None:
    both("sgd", [1e-14], 80, unit=1e-4)
    for guess, firsts in ((1e-9, 4), (1e-6, 3), (0.1, 1)):
        ours = trained(Lesson(1), "sgd", [guess], 80, [False], False)
        events = [record["event"] for record in ours["rounds"]]
        assert events[: firsts + 1] == [*[FIRST] * firsts, None]


@pytest.mark.parametrize("kind", MU)
def test_a_search_begins_with_the_first_gradient(kind: str) -> None:
    first, *_ = both(kind, [SENSIBLE[kind] / 100], 120, still=20)
    assert first == FIRST


@pytest.mark.filterwarnings("ignore:a run of:hdet.errors.SearchWarning")
@pytest.mark.parametrize("steps", [1, 2, 39])
def test_a_short_run_is_plain_onecycle(steps: int) -> None:
    assert both("momentum", [0.03], steps) == []


def test_the_shortest_run_that_searches() -> None:
    assert both("momentum", [0.03], 40) == [FIRST]


def test_the_guess_is_kept_to_where_the_twin_does() -> None:
    with pytest.warns(SearchWarning, match=Reason.NEVER_MOVED.text):
        story = both("sgd", [0.1, 0.1], 120, still=120)
    assert story == ["stopped never_moved"]


@pytest.mark.parametrize("dark", [{0}, {1}, {0, 4, 9}, set(range(3, 6))], ids=str)
def test_losses_that_are_no_numbers_do_not_end_the_search(dark: set[int]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?!training diverged)")
        first, *then = both("adam", [0.01], 120, tells=lambda loss, t: math.nan if t in dark else loss)
    assert first == FIRST
    assert not [event for event in then if not event.startswith("rolled_back")]


@pytest.mark.parametrize(("sign", "offset"), [(1.0, 0.0), (1e-6, 0.0), (1.0, 1e6), (1.0, -1e3)])
def test_neither_unit_nor_zero_point_of_the_loss_matter(sign: float, offset: float) -> None:
    """The weights go the same way, since gradients are the same."""
    plain = trained(Lesson(outliers={60: 1e4}), "sgd", [0.1], 120, [False], False)
    other = trained(
        Lesson(outliers={60: 1e4}, tells=lambda loss, t: sign * loss + offset), "sgd", [0.1], 120, [False], False
    )
    assert other["rate"] == plain["rate"]
    assert [r["event"] for r in other["rounds"]] == [r["event"] for r in plain["rounds"]]
    assert any("rolled_back" in (r["event"] or "") for r in plain["rounds"])


@pytest.mark.parametrize("kind", MU)
@pytest.mark.parametrize("outliers", [{}, {60: 1e6}], ids=str)
def test_without_a_loss_gradients_are_judged(kind: str, outliers: dict[int, float]) -> None:
    story = both(kind, [0.01], 600, outliers=outliers, tells=lambda loss, t: None)
    assert story[0] == FIRST
    assert any("rolled_back" in event for event in story) == (bool(outliers) and kind != "adam")  # it has seen worse


@pytest.mark.parametrize(
    "given", [lambda t: t >= 30, lambda t: t < 30, lambda t: t % 3 == 0], ids=["late", "early", "every third"]
)
def test_losses_of_some_steps_only(given: Callable[[int], bool]) -> None:
    both("sgd", [0.01], 200, outliers={60: 1e4}, tells=lambda loss, t: loss if given(t) else None)


def test_harder_data_are_a_false_alarm() -> None:
    """From step 60 on the loss is higher by a thousand, whatever the weights."""
    story = both("sgd", [0.01], 600, tells=lambda loss, t: loss + 1000 * (t >= 60))
    assert HARDER in story
    assert sum("rolled_back" in event for event in story) == 1


@pytest.mark.parametrize("broken", [{0}, {3}, {30}, {30, 31, 32}], ids=str)
def test_gradients_that_are_no_numbers(broken: set[int]) -> None:
    """SGD writes them into the weights: the search goes back. Losses were fine until then, so the rate stays."""
    story = both("sgd", [0.01], 120 if min(broken) < 30 else 600, broken=broken)
    excused = "bad_batch {}"
    back = {0: None, 3: excused.format(2), 30: excused.format(30)}[min(broken)]
    if 0 in broken:
        assert story[0] == AGAIN
        assert {*story[1:]} == {FIRST}
    else:
        assert story == [FIRST, back]


def test_without_snapshots_it_slows_down() -> None:
    first, *rest = both("adam", [0.1], 120, {"rollback": False}, outliers={45: 1e4})
    assert first == FIRST
    assert {*rest} == {"slowed_down"}
