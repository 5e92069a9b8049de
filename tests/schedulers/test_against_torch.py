"""One replica is torch's OneCycleLR, number for number."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

import hdet
from tests.processes import run_ranks

TORCH = lr_scheduler.OneCycleLR
OURS = hdet.OneCycleLR


def optimizer_of(kind: type[Optimizer] = SGD, groups: int = 2, tensor_lr: bool = False, **more: Any) -> Optimizer:
    rows = [
        {
            "params": [torch.nn.Parameter(torch.ones(2))],
            "lr": torch.tensor(0.1 * (g + 1)) if tensor_lr else 0.1 * (g + 1),
        }
        for g in range(groups)
    ]
    if kind is SGD:
        more.setdefault("momentum", 0.9)
    return kind(rows, lr=0.1, **more)  # type: ignore[arg-type,call-arg]


def snapshot(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: copy.deepcopy(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups]


def run(make: Callable[[Optimizer], Any], optimizer: Optimizer, steps: int) -> list[Any]:
    scheduler = make(optimizer)
    rows = [
        (snapshot(optimizer), copy.deepcopy(scheduler.get_last_lr()))
    ]  # torch 2.6 gives the optimizer's own tensors
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rows.append((snapshot(optimizer), copy.deepcopy(scheduler.get_last_lr())))
    return rows


ARGUMENTS: list[dict[str, Any]] = [
    {"max_lr": 0.5, "total_steps": 20},
    {"max_lr": [0.5, 0.2], "epochs": 4, "steps_per_epoch": 5},
    {"max_lr": 0.5, "total_steps": 20, "three_phase": True},
    {"max_lr": 0.5, "total_steps": 20, "anneal_strategy": "linear", "pct_start": 0.6},
    {"max_lr": 0.5, "total_steps": 20, "cycle_momentum": False, "div_factor": 7.0, "final_div_factor": 11.0},
    {"max_lr": 0.5, "total_steps": 20, "base_momentum": [0.7, 0.6], "max_momentum": [0.8, 0.9]},
    {"max_lr": 0.5, "total_steps": 1},
    {"max_lr": 0.0, "total_steps": 20},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_rates_and_momenta(arguments: dict[str, Any], kind: type[Optimizer], tensor_lr: bool) -> None:
    steps = arguments.get("total_steps", 20)
    theirs = run(lambda o: TORCH(o, **arguments), optimizer_of(kind, tensor_lr=tensor_lr), steps)
    ours = run(lambda o: OURS(o, sync_every=3, **arguments), optimizer_of(kind, tensor_lr=tensor_lr), steps)
    assert repr(ours) == repr(theirs)


def test_signature_is_torchs_then_keywords() -> None:
    parameters = inspect.signature(TORCH).parameters.values()
    theirs = [p for p in parameters if p.name != "verbose"]  # without effect in torch 2.6, and gone after it
    ours = list(inspect.signature(OURS).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(theirs) :])
    assert issubclass(OURS, TORCH)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_state_dict_is_torchs_plus_one_key(tensor_lr: bool) -> None:
    theirs = TORCH(optimizer_of(tensor_lr=tensor_lr), 0.5, 20)
    ours = OURS(optimizer_of(tensor_lr=tensor_lr), 0.5, 20)
    for scheduler in (theirs, ours):
        for _ in range(7):
            scheduler.optimizer.step()
            scheduler.step()
    state = ours.state_dict()
    state.pop("hdet")
    assert repr(state) == repr(theirs.state_dict())


def test_state_dict_keys_do_not_depend_on_progress_and_load_with_weights_only(tmp_path: Any) -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    keys = _keys(scheduler.state_dict())
    for _ in range(20):
        scheduler.optimizer.step()
        scheduler.step(0.3)
    assert _keys(scheduler.state_dict()) == keys
    torch.save(scheduler.state_dict(), tmp_path / "s.pt")
    assert torch.load(tmp_path / "s.pt", weights_only=True) == scheduler.state_dict()


def _keys(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {key for name, item in value.items() for key in _keys(item, f"{path}.{name}")}
    if isinstance(value, list):
        return {key for i, item in enumerate(value) for key in _keys(item, f"{path}.{i}")}
    return {path}


@pytest.mark.parametrize("order", ["scheduler first", "optimizer first"])
def test_resume_goes_on_as_if_never_stopped(order: str) -> None:
    def fresh() -> tuple[Optimizer, Any]:
        optimizer = optimizer_of(Adam)
        return optimizer, OURS(optimizer, [0.5, 0.1], 20)

    optimizer, scheduler = fresh()
    expected = run(lambda _: scheduler, optimizer, 20)
    optimizer, scheduler = fresh()
    for _ in range(8):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer, scheduler = fresh()
    if order == "scheduler first":
        scheduler.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
    else:
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
    rows = run(lambda _: scheduler, optimizer, 12)
    assert repr(rows) == repr(expected[8:])


def test_loads_a_checkpoint_of_torchs_own_and_the_other_way_round() -> None:
    theirs, ours = TORCH(optimizer_of(), 0.5, 20), OURS(optimizer_of(), 0.5, 20)
    for _ in range(5):
        theirs.optimizer.step()
        theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert ours.last_epoch == 5
    for scheduler in (theirs, ours):
        scheduler.optimizer.step()
        scheduler.step()
    assert ours.get_last_lr() == theirs.get_last_lr()
    again = TORCH(optimizer_of(), 0.5, 20)
    again.load_state_dict(ours.state_dict())
    assert again.last_epoch == 6


def test_a_checkpoint_overrides_the_constructor() -> None:
    rule, more = hdet.Corrected(sigma=0.7), {"decay": "exponential", "auto_lr_start": 8}
    first = OURS(optimizer_of(), 0.5, 20, sync_every=4, spread=0.2, seed=3, auto_lr=rule, **more)
    second = OURS(optimizer_of(), 0.5, 100)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.total_steps == 20


def unequal(one: Any, other: Any) -> set[str]:
    """The attributes in which two schedulers differ. torch compares its own in this way."""
    mine, theirs = vars(one), vars(other)
    same = {name for name in mine.keys() & theirs.keys() if mine[name] == theirs[name]}
    return (mine.keys() | theirs.keys()) - same - {"optimizer"}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize(
    ("arguments", "of_the_second"),
    [
        ({"max_lr": 0.5, "total_steps": 100}, {}),
        ({"max_lr": 0.5, "total_steps": 100}, {"max_lr": 0.1, "pct_start": 0.6, "spread": 0.3, "seed": 2}),
        ({"max_lr": 0.5, "total_steps": 100, "decay": "exponential", "auto_lr_start": 4, "sync_every": 4}, {}),
    ],
)
def test_equal_states_are_equal_attribute_by_attribute(
    arguments: dict[str, Any], of_the_second: dict[str, Any], tensor_lr: bool
) -> None:
    first = OURS(optimizer_of(tensor_lr=tensor_lr), **arguments)
    second = OURS(optimizer_of(tensor_lr=tensor_lr), **{**arguments, **of_the_second})
    for _ in range(10):
        for group in first.optimizer.param_groups:
            group["params"][0].grad = group["params"][0].detach().clone()
        first.optimizer.step()
        first.step(torch.tensor(1.0))
    assert unequal(first, second) >= {"last_epoch", "_last_lr"}
    second.load_state_dict(first.state_dict())
    assert unequal(first, second) == set()


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("total_steps", [100, None])
def test_a_search_that_was_loaded_is_equal(total_steps: int | None, tensor_lr: bool) -> None:
    first, second = (hdet.auto(optimizer_of(tensor_lr=tensor_lr), total_steps) for _ in range(2))
    for _ in range(10):
        for group in first.optimizer.param_groups:
            group["params"][0].grad = group["params"][0].detach().clone()
        first.optimizer.step()
        first.step(torch.tensor(1.0))
    assert unequal(first, second) >= {"_t", "_last_lr", "search"}
    second.load_state_dict(first.state_dict())
    assert unequal(first, second) == {"_schedule"}
    assert first._schedule.state_dict() == second._schedule.state_dict()


@pytest.mark.parametrize("face", ["onecycle", "auto"])
def test_other_states_and_other_journals_are_unequal(face: str, tmp_path: Any) -> None:
    def make(journal: str, **more: Any) -> Any:
        optimizer, path = optimizer_of(), tmp_path / journal
        if face == "auto":
            return hdet.auto(optimizer, 100, journal=path, **more)
        return OURS(optimizer, 0.5, 100, journal=path, **more)

    first, part = make("run.jsonl"), "_run" if face == "onecycle" else "search"
    assert unequal(first, make("run.jsonl")) == (set() if face == "onecycle" else {"_schedule"})
    assert part in unequal(first, make("another.jsonl"))
    third = make("run.jsonl", **({"spread": 0.3} if face == "onecycle" else {}))
    if face == "auto":  # its arguments are no part of its state
        third.step(1.0)
    assert part in unequal(first, third)


@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_pickle_and_deepcopy(copied: Callable[[Any], Any]) -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    for _ in range(5):
        scheduler.optimizer.step()
        scheduler.step(1.0)
    twin = copied(scheduler)
    for one in (scheduler, twin):
        one.optimizer.step()
        one.step()
    assert twin.get_last_lr() == scheduler.get_last_lr()
    assert twin.state_dict() == scheduler.state_dict()


def sequential(kind: type[TORCH], optimizer: Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, kind(optimizer, [0.5, 0.3], 15)], milestones=[6])


def sequential_in_the_middle(kind: type[TORCH], optimizer: Optimizer) -> Any:
    last = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, [kind(optimizer, 0.5, 15), last], milestones=[10])


def chained(kind: type[TORCH], optimizer: Optimizer) -> Any:
    decay = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.ChainedScheduler([kind(optimizer, 0.5, 30), decay], optimizer)


@pytest.mark.parametrize("compose", [sequential, sequential_in_the_middle, chained])
def test_composition(compose: Callable[..., Any]) -> None:
    theirs = run(lambda o: compose(TORCH, o), optimizer_of(), 18)
    ours = run(lambda o: compose(OURS, o), optimizer_of(), 18)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("compose", [sequential, sequential_in_the_middle, chained])
@pytest.mark.parametrize("at", [3, 6, 9, 13])
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_resumed_composition(compose: Callable[..., Any], at: int, optimizer_first: bool) -> None:
    expected = run(lambda o: compose(TORCH, o), optimizer_of(), 18)
    optimizer = optimizer_of()
    scheduler = compose(OURS, optimizer)
    for _ in range(at):
        optimizer.step()
        scheduler.step()
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer = optimizer_of()
    scheduler = compose(OURS, optimizer)
    loads = [(optimizer, saved[0]), (scheduler, saved[1])]
    for target, state in loads if optimizer_first else loads[::-1]:
        target.load_state_dict(state)
    rows = run(lambda _: scheduler, optimizer, 18 - at)
    assert repr(rows) == repr(expected[at:])


def test_step_takes_what_torch_takes() -> None:
    theirs, ours = TORCH(optimizer_of(), 0.5, 20), OURS(optimizer_of(), 0.5, 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scheduler in (theirs, ours):
            scheduler.optimizer.step()
            scheduler.step(2)
            scheduler.step(epoch=5)
    texts = [str(w.message) for w in caught]
    assert texts[:2] == texts[2:]
    assert ours.last_epoch == theirs.last_epoch == 5
    assert ours.get_last_lr() == theirs.get_last_lr()


def test_an_integer_after_losses_is_refused_unless_it_is_called_an_epoch() -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    scheduler.optimizer.step()
    scheduler.step(0.5)
    with pytest.raises(hdet.ArgumentError, match=r"a loss must be a float .*integer 3; .*step\(epoch=3\)"):
        scheduler.step(3)
    assert scheduler.last_epoch == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler.step(0.25, epoch=5)
    assert scheduler.last_epoch == 5


def test_fractions_of_an_epoch_and_groups_added_later_work_as_in_torch() -> None:
    rates = []
    for kind in (TORCH, OURS):
        scheduler = kind(optimizer_of(), 0.5, 20)
        scheduler.optimizer.step()
        scheduler.step(epoch=2.5)  # type: ignore[arg-type]
        group = {key: value for key, value in scheduler.optimizer.param_groups[0].items() if key != "params"}
        scheduler.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], **group})
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1]
    assert len(rates[0]) == 3


def test_a_group_added_after_s_warm_decays_from_the_schedule(tmp_path: Any) -> None:
    optimizer = optimizer_of(groups=1)
    journal = tmp_path / "run.jsonl"
    scheduler = OURS(optimizer, 1.0, 20, sync_every=2, auto_lr_start=4, decay="exponential", journal=journal)
    for t in range(12):
        if t == 7:  # right before a round ends
            group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], **group})
        optimizer.step()
        scheduler.step(0.5)
        assert all(float(group["lr"]) > 1e-5 for group in optimizer.param_groups), t
    assert len(hdet.read_journal(journal).rounds) == 6


@pytest.mark.slow
def test_a_scheduler_with_a_group_can_be_copied() -> None:
    assert run_ranks(_copy_with_group, 2) == [True, True]


def _copy_with_group(rank: int) -> bool:
    scheduler = OURS(optimizer_of(), 0.5, 20, group=dist.group.WORLD)
    return bool(copy.deepcopy(scheduler).get_last_lr() == scheduler.get_last_lr())


def test_warns_like_torch_when_called_before_the_optimizer() -> None:
    messages = []
    for kind in (TORCH, OURS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler = kind(optimizer_of(), 0.5, 20)
            scheduler.step()
        messages.append([(w.category, str(w.message)) for w in caught])
    assert messages[0] == messages[1]
    assert len(messages[0]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_lr": 0.1},
        {"max_lr": 0.1, "total_steps": 0},
        {"max_lr": 0.1, "total_steps": 1.5},
        {"max_lr": 0.1, "epochs": -1, "steps_per_epoch": 3},
        {"max_lr": 0.1, "total_steps": 5, "pct_start": 2.0},
        {"max_lr": 0.1, "total_steps": 5, "pct_start": 1},
        {"max_lr": 0.1, "total_steps": 5, "anneal_strategy": "CATS"},
        {"max_lr": [0.1] * 3, "total_steps": 5},
        {"max_lr": 0.1, "total_steps": 5, "last_epoch": 3},
    ],
)
def test_raises_what_torch_raises(arguments: dict[str, Any]) -> None:
    errors = []
    for kind in (TORCH, OURS):
        with pytest.raises(Exception) as caught:  # noqa: PT011  the point is that both are the same
            kind(optimizer_of(), **arguments)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_raises_like_torch_for_what_is_no_optimizer_or_has_no_momentum() -> None:
    for kind in (TORCH, OURS):
        with pytest.raises(TypeError, match="is not an Optimizer"):
            kind("adam", 0.1, 5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must support momentum"):
            kind(torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))]), 0.1, 5)


def test_raises_like_torch_past_the_end() -> None:
    errors = []
    for kind in (TORCH, OURS):
        scheduler = kind(optimizer_of(), 0.5, 4)
        for _ in range(4):
            scheduler.optimizer.step()
            scheduler.step()
        with pytest.raises(ValueError, match="Tried to step 5 times") as caught:
            scheduler.step()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_warns_like_torch_before_it_raises() -> None:
    seen = []
    for kind in (TORCH, OURS):
        scheduler = kind(optimizer_of(), 0.5, 4)
        scheduler.optimizer.step()
        with warnings.catch_warnings(record=True) as caught, pytest.raises(ValueError, match="Tried to step 9 times"):
            warnings.simplefilter("always")
            scheduler.step(9)
        seen.append([str(w.message) for w in caught])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 1


def test_no_reference_cycle_through_the_optimizer() -> None:
    gc.collect()
    gc.disable()
    try:
        optimizer = optimizer_of()
        scheduler = OURS(optimizer, 0.5, 20)
        optimizer.step()
        scheduler.step(0.3)
        scheduler.load_state_dict(scheduler.state_dict())
        watch = weakref.ref(scheduler)
        del scheduler
        assert watch() is None
        watch = weakref.ref(optimizer)  # type: ignore[arg-type]
        del optimizer
        assert watch() is None
    finally:
        gc.enable()


def test_the_global_rng_is_neither_read_nor_seeded() -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    scheduler = OURS(optimizer_of(), 0.5, 20)
    for _ in range(20):
        scheduler.optimizer.step()
        scheduler.step(0.3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_loading_keeps_the_rate_tensor() -> None:
    optimizer = optimizer_of(groups=1, tensor_lr=True)
    scheduler = OURS(optimizer, 0.5, 20)
    own = optimizer.param_groups[0]["lr"]
    scheduler.load_state_dict(scheduler.state_dict())
    assert optimizer.param_groups[0]["lr"] is own


def test_the_loss_may_be_any_one_number() -> None:
    scheduler = OURS(optimizer_of(), 0.5, 200, auto_lr=False)
    values = [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]]).half(), torch.tensor(3), math.nan]
    for value in values:
        scheduler.optimizer.step()
        scheduler.step(value)
    scheduler.step(loss=2)
    scheduler.observe(1)
    assert scheduler.last_epoch == len(values) + 1


@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_loss(value: bool) -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    for call in (scheduler.step, scheduler.observe, lambda v: scheduler.step(loss=v)):
        with pytest.raises(ValueError, match="a loss must be"):
            call(value)
    assert (scheduler.last_epoch, scheduler._run.losses.count) == (0, 0)


def test_a_loss_that_no_float_can_hold_is_refused() -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    for call in (scheduler.observe, lambda v: scheduler.step(loss=v)):
        with pytest.raises(ValueError, match="a loss must be"):
            call(10**400)
    assert (scheduler.last_epoch, scheduler._run.losses.count) == (0, 0)


def test_a_loss_tensor_may_be_reused_at_once() -> None:
    scheduler = OURS(optimizer_of(), 0.5, 1000, sync_every=500)
    loss = torch.tensor(1.0, requires_grad=True)
    scheduler.observe(loss)
    with torch.no_grad():
        loss.fill_(99)
    scheduler.observe(3.0)
    assert scheduler._run.losses.mean() == 2.0


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0), "0.5", [0.5], torch.tensor(1j), object()])
def test_what_is_no_loss_is_refused_before_anything_changes(value: Any) -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    scheduler.optimizer.step()
    before = copy.deepcopy(scheduler.state_dict())
    for call in (scheduler.step, scheduler.observe, lambda v: scheduler.step(loss=v)):
        with pytest.raises(ValueError, match="a loss must be"):
            call(value)
    assert scheduler.state_dict() == before
    assert scheduler._run.losses.count == 0


@pytest.mark.parametrize("arguments", [{"epoch": "x"}, {"epoch": torch.tensor(1)}])
def test_a_bad_epoch_is_no_type_error(arguments: dict[str, Any]) -> None:
    scheduler = OURS(optimizer_of(), 0.5, 20)
    with pytest.raises(ValueError, match="epoch must be"):
        scheduler.step(**arguments)
    with pytest.raises(ValueError, match="two losses"):
        scheduler.step(0.5, loss=0.6)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"spread": -0.1}, "spread"),
        ({"spread": 1.1}, "spread"),
        ({"spread": math.nan}, "spread"),
        ({"spread": "wide"}, "spread"),
        ({"sync_every": 0}, "sync_every"),
        ({"sync_every": 2.5}, "sync_every"),
        ({"sync_every": True}, "sync_every"),
        ({"auto_lr_start": 21}, "auto_lr_start"),
        ({"auto_lr_start": -1}, "auto_lr_start"),
        ({"auto_lr_start": 2.5}, "auto_lr_start"),
        ({"decay": "linear"}, "decay"),
        ({"seed": 0.5}, "seed"),
        ({"group": 3}, "group"),
        ({"model": 3}, "model"),
        ({"auto_lr": "yes"}, "auto_lr"),
        ({"journal": 7}, "journal"),
        ({"max_lr": math.nan}, "max_lr"),
        ({"max_lr": [0.1, math.nan]}, "max_lr"),
        ({"max_lr": torch.tensor(math.nan)}, "max_lr"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(arguments: dict[str, Any], name: str) -> None:
    optimizer = optimizer_of()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=f"{name}.*(must|needs) .*but got.*;") as caught:
        OURS(optimizer, **{"max_lr": 0.5, "total_steps": 20, **arguments})
    assert isinstance(caught.value, hdet.HdetError)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("name", ["sigma", "meta_momentum", "meta_lr"])
@pytest.mark.parametrize("more", [{"auto_lr": hdet.Corrected()}, {}])
def test_a_controllers_arguments_are_given_to_the_controller(more: dict[str, Any], name: str) -> None:
    """There is one place for them, where they count: beside a controller or a search they would be ignored."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        OURS(optimizer_of(), 0.5, total_steps=20, **more, **{name: 0.5})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        hdet.auto(optimizer_of(), total_steps=20, **{name: 0.5})


def test_a_start_is_for_something_that_starts() -> None:
    with pytest.raises(hdet.ArgumentError, match=r"auto_lr_start is for .*but got auto_lr_start=10; leave it out"):
        OURS(optimizer_of(), 0.5, 20, auto_lr=False, auto_lr_start=10)
    OURS(optimizer_of(), 0.5, 20, auto_lr=False, auto_lr_start=10, decay="exponential")  # which starts there


def test_looking_at_the_rates() -> None:
    scheduler = OURS(optimizer_of(), [0.5, 0.2], 20)
    assert scheduler.base_lrs_now == scheduler.get_last_lr()
    assert scheduler.multipliers == [1.0, 1.0]


def test_auto_lr_start_is_rounded_up_to_a_round() -> None:
    def start(**more: Any) -> int | None:
        return OURS(optimizer_of(), 0.5, 100, **more)._run.steering.settings.start  # type: ignore[attr-defined]

    assert start(sync_every=10) == 30  # the warm-up ends at step 29
    assert start(sync_every=25) == 50
    assert start(sync_every=25, auto_lr_start=50) == 50
    assert start(sync_every=25, auto_lr_start=51) == 75
    assert start(sync_every=25, auto_lr_start=0) == 25
    assert start(sync_every=40, pct_start=0.9) is None  # rounded up to 120: past the end, never
    assert start(sync_every=40, auto_lr_start=95) == 99


def test_exponential_decay_of_one_replica_by_hand() -> None:
    """S = 10, T = 2, S_warm = 4: K = 3 rounds from OneCycle(4) down to min_lr, constant within a round."""
    optimizer = optimizer_of(groups=1)
    arguments: dict[str, Any] = {"max_lr": 1.0, "total_steps": 10}
    scheduler = OURS(optimizer, **arguments, sync_every=2, auto_lr_start=4, decay="exponential")
    plain_optimizer = optimizer_of(groups=1)
    plain = TORCH(plain_optimizer, **arguments)
    lrs, plain_lrs = [], []
    for _ in range(10):
        lrs.append(optimizer.param_groups[0]["lr"])
        plain_lrs.append(plain_optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["momentum"] == plain_optimizer.param_groups[0]["momentum"]
        for scheduler_ in (scheduler, plain):
            scheduler_.optimizer.step()
            scheduler_.step()
    start, floor = plain_lrs[4], optimizer.param_groups[0]["min_lr"]
    q = (floor / start) ** (1 / 3)
    assert lrs[:4] == plain_lrs[:4]
    assert lrs[4:] == pytest.approx([start * q, start * q, start * q**2, start * q**2, floor, floor])
