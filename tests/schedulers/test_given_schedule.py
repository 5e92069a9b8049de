"""What may be given as schedule=: functions of an optimizer and of the step, torch's schedulers; nothing is copied."""

from __future__ import annotations

import math
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as torchs

import hdet
from tests.problems import network, train, weights_of

STEPS = 1000


def several_groups(n: int = 3) -> Adam:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 / (g + 1), "name": f"g{g}"} for g in range(n)]
    return Adam(groups, weight_decay=0.1)


class Trainer:
    """What a schedule can reach: locks, data, a model. Copying any of it raises."""

    def __init__(self) -> None:
        self.lock, self.calls, self.model = threading.Lock(), list[Any](), nn.Linear(2, 1)
        self.optimizer = Adam([{"params": [p], "owner": self} for p in self.model.parameters()], lr=1e-3)

    def warm_up(self, t: int) -> float:
        with self.lock:
            self.calls.append(t)
        return min(1.0, (t + 1) / 100)

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("copied")

    __copy__ = __deepcopy__ = __reduce_ex__ = refuse  # type: ignore[assignment]


GIVEN: dict[str, Callable[[Trainer], Any]] = {
    "method": lambda trainer: trainer.warm_up,
    "function": lambda trainer: lambda t: trainer.warm_up(t),
    "lambda made": lambda trainer: torchs.LambdaLR(trainer.optimizer, trainer.warm_up),
    "lambda": lambda trainer: lambda o: torchs.LambdaLR(o, trainer.warm_up),
    "chained made": lambda trainer: torchs.ChainedScheduler([torchs.LambdaLR(trainer.optimizer, trainer.warm_up)]),
    "sequential": lambda trainer: partial(in_sequence, trainer),
    "sequential made": lambda trainer: in_sequence(trainer, trainer.optimizer),
}


def made_of(scheduler: hdet.AutoScheduler) -> Any:
    """The schedule of the user's that a scheduler follows."""
    return scheduler.schedule  # type: ignore[attr-defined]  # it is not the trapezoid


def in_sequence(trainer: Trainer, optimizer: Optimizer) -> Any:
    parts = [torchs.LambdaLR(optimizer, trainer.warm_up), torchs.CosineAnnealingLR(optimizer, STEPS)]
    return torchs.SequentialLR(optimizer, parts, milestones=[500])


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.filterwarnings("ignore")
def test_nothing_that_a_schedule_can_reach_is_copied(name: str) -> None:
    trainer = Trainer()
    scheduler = hdet.auto(trainer.optimizer, schedule=GIVEN[name](trainer), total_steps=STEPS)
    assert scheduler.state_dict()["schedule"]["peak"] == 99


class Holding(torchs.CosineAnnealingLR):
    """Holds a large list, as a trainer might hold its data."""

    def __init__(self, optimizer: Optimizer, data: list[Any]) -> None:
        self.data = data
        super().__init__(optimizer, STEPS)


def test_memory_does_not_grow_with_what_a_schedule_holds() -> None:
    optimizer, data = several_groups(), [1.0] * 10**6
    made = Holding(optimizer, data)
    hdet.auto(several_groups(), schedule=lambda t: 1.0, total_steps=STEPS)  # whatever is imported
    tracemalloc.start()
    hdet.auto(optimizer, schedule=made, total_steps=STEPS)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10**6  # the list has eight


def test_a_group_that_was_added_before_the_search_and_after_the_schedule() -> None:
    """Newer versions of torch refuse to step such a schedule, older ones leave the group alone."""
    optimizer = several_groups()
    made = torchs.LambdaLR(optimizer, lambda t: 1.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1})
    with suppress(hdet.ArgumentError):
        assert len(hdet.auto(optimizer, schedule=made, total_steps=STEPS).state_dict()["schedule"]["peak_lrs"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 50])
@pytest.mark.parametrize("steps", [10, STEPS, 10**15])
@pytest.mark.parametrize("peak", [0.0, 0.3, 1.0])
def test_a_function_of_the_step_is_asked_for_each_step_once_and_for_none_outside_of_the_run(
    groups: int, steps: int, peak: float
) -> None:
    calls: list[int] = []

    def shape(t: int) -> float:
        factor = 1 - abs(t / steps - peak)  # of an optimizer, with which it is called first, there is none
        calls.append(t)
        return factor

    hdet.auto(several_groups(groups), schedule=shape, total_steps=steps)
    looked_at = calls[1:-1]  # the first call is to see what it is, and the last one is the first step of the run
    assert looked_at == [*range(len(looked_at))]
    assert len(looked_at) <= min(steps, 2**17)


@pytest.mark.filterwarnings("ignore")
def test_a_lambda_lr_that_was_made_is_followed_itself() -> None:
    optimizer = several_groups()
    made = torchs.LambdaLR(optimizer, lambda t: min(1.0, t / 200))
    scheduler = hdet.auto(optimizer, schedule=made, total_steps=STEPS)
    assert (scheduler.state_dict()["schedule"]["peak"], made_of(scheduler)) == (200, made)
    assert made.last_epoch == 0


@pytest.mark.filterwarnings("ignore")
def test_a_function_of_an_optimizer_is_built_on_one_stand_in() -> None:
    seen: list[Any] = []

    def cosine(optimizer: Any) -> Any:
        seen.append(optimizer)
        return torchs.CosineAnnealingLR(optimizer, STEPS)

    optimizer = several_groups()
    keys = [set(group) for group in optimizer.param_groups]
    hdet.auto(optimizer, schedule=cosine, total_steps=STEPS)
    stand_in, own = seen
    assert own is optimizer
    assert all(set(group) >= known for group, known in zip(stand_in.param_groups, keys, strict=True))
    assert [group["name"] for group in stand_in.param_groups] == ["g0", "g1", "g2"]
    assert all(group["weight_decay"] == 0.1 for group in stand_in.param_groups)
    weights = {id(p) for one in seen for group in one.param_groups for p in group["params"]}
    assert len(weights) == 6
    assert sum(p.numel() for group in stand_in.param_groups for p in group["params"]) == 3


def test_one_function_for_each_group() -> None:
    def each(optimizer: Any) -> Any:
        rises = [100 * (g + 1) for g in range(len(optimizer.param_groups))]
        return torchs.LambdaLR(optimizer, [lambda t, rise=rise: min(1.0, t / rise) for rise in rises])

    state = hdet.auto(several_groups(), schedule=each, total_steps=STEPS).state_dict()["schedule"]
    assert state["peak"] == 100
    assert state["peak_lrs"] == pytest.approx([0.1, 0.1 / 2 / 2, 0.1 / 3 / 3])


class Own:
    """A scheduler of nobody's kind, whose state is changed in place."""

    def __init__(self, optimizer: Any, rise: int = 100) -> None:
        self.optimizer, self.rise, self.seen = optimizer, rise, [0]

    def step(self) -> None:
        self.seen[0] += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.seen[0] + 1) / self.rise)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class Lines(torchs.LRScheduler):
    """A subclass of torch's with rates of its own."""

    def get_lr(self) -> Any:
        return [base * (1 - self.last_epoch / STEPS) for base in self.base_lrs]


@pytest.mark.parametrize("kind", [Own, Lines, partial(Own, rise=5), lambda adam: Own(adam)])
def test_any_scheduler_is_taken_from_a_function(kind: Any) -> None:
    scheduler = hdet.auto(several_groups(), schedule=kind, total_steps=STEPS)
    assert isinstance(made_of(scheduler), (Own, Lines))
    seen = getattr(made_of(scheduler), "seen", [0])
    assert seen == [0]


@pytest.mark.parametrize("kind", [Own, Lines])
def test_one_that_was_made_already_is_refused_if_it_would_have_to_be_copied(kind: Any) -> None:
    optimizer = several_groups()
    made = kind(optimizer)
    before = repr((optimizer.state_dict(), made.state_dict()))
    words = rf"a {kind.__name__} that was made already.*schedule=lambda optimizer: {kind.__name__}\(optimizer, \.\.\.\)"
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.auto(optimizer, schedule=made, total_steps=STEPS)
    assert repr((optimizer.state_dict(), made.state_dict())) == before


@pytest.mark.filterwarnings("ignore")
def test_one_inside_another_is_refused_too() -> None:
    optimizer = several_groups()
    made = torchs.SequentialLR(optimizer, [Lines(optimizer), torchs.ConstantLR(optimizer)], milestones=[5])
    with pytest.raises(hdet.ArgumentError, match="a Lines that was made already"):
        hdet.auto(optimizer, schedule=made, total_steps=STEPS)


def test_a_step_that_somebody_has_replaced_is_not_called() -> None:
    optimizer = several_groups()
    made = torchs.CosineAnnealingLR(optimizer, STEPS)
    made.step = lambda: pytest.fail("called")  # type: ignore[method-assign, assignment]
    with pytest.raises(hdet.ArgumentError, match="made already"):
        hdet.auto(optimizer, schedule=made, total_steps=STEPS)


def test_a_subclass_that_only_begins_in_another_way_is_torchs() -> None:
    class Mine(torchs.CosineAnnealingLR):
        def __init__(self, optimizer: Optimizer) -> None:
            super().__init__(optimizer, STEPS)

    optimizer = several_groups()
    made = Mine(optimizer)
    assert made_of(hdet.auto(optimizer, schedule=made, total_steps=STEPS)) is made


def broken(value: Any) -> Callable[[int], Any]:
    return lambda t: 1.0 if t < 500 else value


def raising(t: int) -> float:
    return 1 / (999 - t)


def steps_of(optimizer: Optimizer, *lrs: float) -> Any:
    """A scheduler that puts these rates, one after the other, and then raises."""
    made, left = Own(optimizer), [*lrs]

    def step() -> None:
        if not left:
            raise TypeError("no more")
        optimizer.param_groups[0]["lr"] = left.pop(0)

    made.step = step  # type: ignore[method-assign]
    return made


WRONG: dict[str, tuple[Any, str]] = {
    "number": (3.0, r"schedule must be a function from an optimizer.*got schedule=3.0; for instance schedule=lambda"),
    "list": ([torchs.ConstantLR(several_groups())], "schedule must be a function from an optimizer"),
    "optimizer": (several_groups(), "schedule must be a function from an optimizer"),
    "nothing": (
        lambda optimizer: None,
        "for an optimizer it returned None, and for step 0 it returned None; for instance",
    ),
    "words": (lambda t: "half", "for step 0 it returned 'half'; for instance"),
    "truth": (lambda t: t < 100, "for step 0 it returned True"),
    "no length": (lambda optimizer: torchs.CosineAnnealingLR(optimizer), "raised TypeError: .*T_max.*; for instance"),
    "two arguments": (lambda a, b: 1.0, "raised TypeError"),
    "zero division": (lambda t: 1 / t, "for step 0 it raised ZeroDivisionError"),
    "raises late": (
        raising,
        "for each step from 0 to 999, but at step 999 it raised ZeroDivisionError.*; for instance",
    ),
    "nan": (
        broken(math.nan),
        r"a finite number, not below 0, .* it returned nan; for instance schedule=lambda t: 1 - t",
    ),
    "nan at first": (lambda t: math.nan, "at step 0 it returned nan"),
    "infinite": (broken(math.inf), "it returned inf"),
    "huge": (broken(10**400), "it returned 1000"),
    "negative": (lambda t: 0.5 - t / STEPS, r"it returned -0\."),
    "late words": (broken("half"), "it returned 'half'"),
    "zero": (lambda t: 0.0, "schedule must be above 0 at some step, but got schedule=0.0; give one that has a peak"),
    "zero lambda": (lambda o: torchs.LambdaLR(o, lambda t: 0.0), "schedule must be above 0 at some step"),
    "nan lambda": (
        lambda o: torchs.LambdaLR(o, broken(math.nan)),
        "finite and not below 0, but got nan at step 500; build it for the 1000 steps",
    ),
    "negative lambda": (lambda o: torchs.LambdaLR(o, lambda t: -1.0), r"not below 0, but got -0\.\d* at step 0; build"),
    "nan rate": (lambda o: steps_of(o, 0.1, math.nan), "finite and not below 0, but got nan at step 2; build it for"),
    "negative rate": (lambda o: steps_of(o, -0.1), r"finite and not below 0, but got -0\.1 at step 1"),
    "too short": (
        lambda o: torchs.OneCycleLR(o, 0.1, 50),
        "the 1000 steps of the run, but its step 51 raised ValueError",
    ),
    "raising": (lambda o: steps_of(o, 0.1), "its step 2 raised TypeError: 'no more'; build it for as many steps"),
    "plateau": (torchs.ReduceLROnPlateau, "ReduceLROnPlateau depends on a metric"),
    "another": (lambda _: torchs.ConstantLR(OTHER), "belongs to another optimizer; build it on the one that is given"),
}
OTHER = several_groups()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_a_schedule_is_refused_before_anything_is_changed(name: str) -> None:
    optimizer = several_groups()
    before = repr(optimizer.state_dict())
    given, words = WRONG[name]
    with pytest.raises(hdet.ArgumentError, match=f"(?s){words}"):
        hdet.auto(optimizer, schedule=given, total_steps=STEPS)
    assert repr(optimizer.state_dict()) == before


def test_a_scheduler_that_was_made_cannot_serve_several_optimizers() -> None:
    one, two = several_groups(), several_groups()
    with pytest.raises(hdet.ArgumentError, match="schedule must be a function from an optimizer"):
        hdet.auto([one, two], schedule=torchs.ConstantLR(one), total_steps=STEPS)


# -- a run on a function of the step ----------------------------------------------------------------------------------

RUN = 120


def tent(t: int) -> float:
    return min((t + 1) / 20, (RUN - t) / (RUN - 20))


def table(t: int) -> float:
    return [tent(i) for i in range(RUN)][t]  # nothing beyond the run


def searched(schedule: Any, steps: range = range(RUN), state: Any = None, kind: Any = SGD) -> tuple[Any, Any, Any]:
    model = network()
    optimizer = kind(model.parameters(), lr=1e-4)
    scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=RUN, model=model)
    if state is not None:
        for part, own in zip((model, optimizer, scheduler), state, strict=True):
            part.load_state_dict(own)
    train(model, optimizer, scheduler, steps)
    return model, optimizer, scheduler


@pytest.mark.parametrize("kind", [SGD, lambda p, lr: SGD(p, lr=torch.tensor(lr))])
@pytest.mark.parametrize("given", [tent, table, lambda t: torch.tensor(tent(t), dtype=torch.float64)])
def test_it_is_the_run_of_a_lambda_lr(given: Any, kind: Any) -> None:
    model = searched(given, kind=kind)[0]
    same = searched(lambda optimizer: torchs.LambdaLR(optimizer, tent), kind=kind)[0]
    assert torch.equal(weights_of(model), weights_of(same))


def test_it_resumes() -> None:
    state = [part.state_dict() for part in searched(tent, range(60))]
    scheduler = searched(tent, range(60, RUN), state)[2]
    assert made_of(scheduler).last_epoch == RUN
    whole = searched(tent)[2]
    assert made_of(scheduler).state_dict() == made_of(whole).state_dict() == {"last_epoch": RUN}


def test_another_schedules_state_is_refused() -> None:
    state = searched(Own, range(3))[2].state_dict()
    with pytest.raises(hdet.ArgumentError, match="here it is a StepFunction"):
        searched(tent, range(0))[2].load_state_dict(state)


def test_a_state_may_come_from_a_torch_with_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's schedulers had `verbose` up to 2.6, and private keys come and go."""
    cosine = partial(torchs.CosineAnnealingLR, T_max=RUN)
    state = searched(cosine, range(3))[2].state_dict()
    plain = torchs.LRScheduler.state_dict
    monkeypatch.setattr(torchs.LRScheduler, "state_dict", lambda own: {**plain(own), "verbose": False, "_new": 0})
    scheduler = searched(cosine, range(0))[2]
    scheduler.load_state_dict(state)
    assert made_of(scheduler).last_epoch == 3


def test_several_optimizers_follow_it_together() -> None:
    calls: list[int] = []

    def counted(t: int) -> float:
        calls.append(t)
        return tent(t)

    model = network()
    both = [SGD(layer.parameters(), lr=lr) for layer, lr in ((model[0], 1e-3), (model[2], 1e-4))]
    scheduler = hdet.auto(both, schedule=counted, total_steps=RUN)
    assert scheduler.state_dict()["schedule"]["peak_lrs"] == pytest.approx([1e-3, 1e-4])
    calls.clear()
    for _ in range(RUN):
        model(torch.ones(4, 6)).sum().backward()
        for optimizer in both:
            optimizer.step()
        scheduler.step()
    assert calls == [*range(1, RUN), RUN - 1]
    one, two = (optimizer.param_groups[0]["lr"] for optimizer in both)
    assert one == pytest.approx(10 * two)


def test_a_group_that_is_added_follows_it() -> None:
    model = network()
    optimizer = SGD(model[2].parameters(), lr=1e-4)
    scheduler = hdet.auto(optimizer, schedule=tent, total_steps=RUN)
    train(model, optimizer, scheduler, range(60))
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-4})
    train(model, optimizer, scheduler, range(60, RUN - 1))
    one, two = (group["lr"] for group in optimizer.param_groups)
    assert one == pytest.approx(two)


def test_a_function_that_fails_in_the_run_says_at_which_step() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=1e-4)
    bad: dict[int, Any] = {}
    scheduler = hdet.auto(optimizer, schedule=lambda t: bad.get(t, 1.0), total_steps=RUN)
    bad[51] = "half"
    with pytest.raises(hdet.ArgumentError, match="at step 51 it returned 'half'"):
        train(model, optimizer, scheduler, range(RUN))


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_the_rates_of_every_group_are_looked_at(bad: float) -> None:
    optimizer = several_groups(2)
    with pytest.raises(hdet.ArgumentError, match="finite and not below 0"):
        hdet.auto(optimizer, total_steps=100, schedule=lambda o: torchs.LambdaLR(o, [lambda t: 1.0, lambda t: bad]))
