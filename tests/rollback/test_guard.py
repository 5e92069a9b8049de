"""hdet.Guard in plain loops: what it puts back, what the rate does, and what it refuses."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import hdet
from hdet.optimizer import parts_of
from tests.problems import batch_of, loss_of, recorded
from tests.rollback.guarded import EVERY, STEPS, Guarded, adam, blow_up, flip, not_a_number, run

FAULTS = {"flip": flip, "blown up": blow_up, "not a number": not_a_number}


@pytest.fixture(scope="module")
def plain() -> Guarded:
    return run(guarded=False)[0]


def test_an_undisturbed_run_is_the_run_without_a_guard(plain: Guarded) -> None:
    ran, words = run()
    assert words == []
    assert ran.equals(plain)
    assert ran.rates == plain.rates
    assert ran.applied == plain.applied


@pytest.mark.parametrize("at", [0, 60, 115, 119, 120, 123, 126])
@pytest.mark.parametrize("fault", FAULTS)
def test_diverged_weights_are_rolled_back_wherever_it_happens(plain: Guarded, fault: str, at: int) -> None:
    """Within a round, and just before and after its end, where a snapshot is kept."""
    spoilt, _ = run({at: FAULTS[fault]}, guarded=False)
    assert not spoilt.final < 1.02 * plain.final
    ran, words = run({at: FAULTS[fault]})
    if at == 0 and fault != "not a number":
        return  # nothing had been gained yet: weights cannot be told from bad first ones
    assert 1 <= len(words) <= 2
    assert ran.final < (1.05 if at else 1.1) * plain.final
    assert ran.rates == plain.rates, "the schedule has seen something"


def test_a_fault_costs_two_looks_at_most() -> None:
    left_out, text = run({123: flip})[1]
    assert left_out.startswith("gradients out of all proportion were not used, and training goes on: step 124 (norm")
    assert text.startswith("training diverged at step 126: rolled back to step 120, and the rate stays")
    (text,) = run({119: not_a_number})[1]  # a snapshot is due there, and is not sound
    assert text.startswith("training diverged at step 121: rolled back to step 112, and the rate stays")
    assert "weights, buffers or optimizer state are NaN" in text


def spoil_gradients(ran: Guarded, factor: Callable[[], float]) -> None:
    """Before the guard sees them, as the backward pass would."""

    def spoil(optimizer: Optimizer, *_: Any) -> None:
        times = factor()
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(times)

    handle = ran.optimizer.register_step_pre_hook(spoil)
    ran.optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("times", [math.nan, math.inf, 1e4])
@pytest.mark.parametrize("at", [60, 83, 119, 120])
def test_a_bad_gradient_is_not_used_at_all(at: int, times: float) -> None:
    """Weights and optimizer state are those of a run that leaves this step out, bit by bit; the rate pays nothing."""
    ran, count = Guarded(), iter(range(STEPS))
    spoil_gradients(ran, lambda: times if next(count) == at else 1.0)
    with recorded() as caught:
        ran.go(0, 200)
    plain = Guarded(guarded=False)
    plain.go(0, at)
    plain.optimizer.zero_grad()
    loss_of(plain.model, batch_of(at)).backward()  # batch norms have seen the batch
    plain.schedule.step()
    plain.go(at + 1, 200)
    assert [str(one.message).split(":")[0] for one in caught] == [
        "gradients out of all proportion were not used, and training goes on"
    ]
    assert (ran.watching.rollbacks, ran.watching.factor) == (0, 1.0)
    assert ran.equals(plain)


def test_gradients_that_are_larger_from_some_step_on_are_usual_soon() -> None:
    """As with another weight of the loss: two steps are not used, and those that are held tell that it is no fault."""
    ran, plain = Guarded(), Guarded(guarded=False)
    with recorded() as caught:
        for one in (ran, plain):
            one.go(0, 100)
            spoil_gradients(one, lambda: 100.0)
            one.go(100, STEPS)
    assert len(caught) <= 2
    assert (ran.watching.rollbacks, ran.watching.factor) == (0, 1.0)
    assert ran.final < 1.05 * plain.final


def test_gradients_that_are_never_finite_end_the_run() -> None:
    ran = Guarded().go(0, 50)
    spoil_gradients(ran, lambda: math.nan)
    with recorded(), pytest.raises(hdet.DivergedError, match="the losses or gradients of the last 64 steps"):
        ran.go(50, 200)


def noisy_run(seed: int, fault: str, guarded: bool) -> float:
    """The held-out loss of a small network whose losses are noisy, at a rate that is as high as it may be."""
    draw = torch.Generator().manual_seed(seed)

    def batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(size, 8, generator=draw)
        return x, x[:, :1].exp().clamp(max=5) + (2 * x[:, 1:2]).sin() * x[:, 2:3]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    guard = hdet.Guard(optimizer, model, check_every=10) if guarded else None
    for t in range(300):
        times = 30 if fault == "rate" and 150 <= t < 160 else 1
        x, y = batch()
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        (-loss if fault == "sign" and 150 <= t < 160 else loss).backward()
        optimizer.param_groups[0]["lr"] *= times
        optimizer.step()
        optimizer.param_groups[0]["lr"] /= times
        schedule.step()
        if guard is not None:
            guard.step(loss)
    x, y = batch(4000)
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "seeds"), [("rate", (0, 1, 2)), ("sign", (0, 4, 5))])
def test_what_was_reached_and_is_lost_is_put_back(fault: str, seeds: tuple[int, ...]) -> None:
    """A rate 30 times too high for ten steps, and a loss of the wrong sign for as many: a guard loses little more than
    these steps."""
    with recorded():
        undisturbed = [noisy_run(seed, "none", guarded=False) for seed in seeds]
        guarded = [noisy_run(seed, fault, guarded=True) for seed in seeds]
        spoilt = [noisy_run(seed, fault, guarded=False) for seed in seeds]
    assert max(ours / theirs for ours, theirs in zip(guarded, undisturbed, strict=True)) < 1.15
    assert max(ours / theirs for ours, theirs in zip(spoilt, undisturbed, strict=True)) > 1.2


def test_an_infinite_moment_has_diverged_though_no_loss_shows_it(plain: Guarded) -> None:
    """Adam would never move that weight again."""

    def overflow(model: nn.Module) -> None:
        ran.optimizer.state[ran.model[0].weight]["exp_avg_sq"].fill_(math.inf)  # type: ignore[index,union-attr]

    ran = Guarded()
    with pytest.warns(hdet.RollbackWarning):
        ran.go(0, STEPS, {100: overflow})
    assert ran.final < 1.05 * plain.final
    assert all(tensor.isfinite().all() for tensor in ran.numbers)


def test_buffers_go_back_too(plain: Guarded) -> None:
    def spoil(model: nn.Module) -> None:
        model[1].running_mean.fill_(math.nan)  # type: ignore[index,union-attr,operator]

    ran, words = run({100: spoil})
    assert len(words) == 1
    assert ran.final < 1.05 * plain.final


def test_buffers_that_were_never_finite_say_nothing() -> None:
    ran = Guarded()
    ran.model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    ran.model.register_buffer("unknown", torch.tensor([math.nan]))
    ran.guard = hdet.Guard(ran.optimizer, ran.model, check_every=EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran.go(0, 40)


# -- the rate ---------------------------------------------------------------------------------------------------------


def two_groups(parameters: Any) -> Optimizer:
    first, *others = parameters
    two = [2e-3] if torch.__version__ >= "2.11" else 2e-3  # schedules of old torch write into no vector
    return AdamW([{"params": [first], "lr": torch.tensor(3e-3)}, {"params": others, "lr": torch.tensor(two)}])


MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "float": adam,
    "tensor": lambda parameters: Adam(parameters, lr=torch.tensor(3e-3, dtype=torch.float64)),
    "two tensors": two_groups,
    "shared tensor": lambda ps: SGD([{"params": [p]} for p in ps], lr=torch.tensor(3e-3), momentum=0.9),
}


@pytest.mark.parametrize("kind", MAKES)
def test_the_factor_is_on_the_rate_during_the_step_alone_and_recovers(kind: str) -> None:
    """The first rollback leaves the rate alone; the second one, soon after, does not."""
    plain, _ = run(guarded=False, make=MAKES[kind])
    ran, words = run({103: not_a_number, 123: not_a_number}, make=MAKES[kind], recover=4, factor=0.25)
    diverged = [text for text in words if "diverged" in text]
    assert ["the rate stays as it is" in text for text in diverged] == [True, False]
    assert ran.rates == plain.rates
    ratios = [ours / theirs for ours, theirs in zip(ran.applied, plain.applied, strict=True)]
    lowered = next(t for t, ratio in enumerate(ratios) if ratio != 1)
    assert 124 <= lowered <= 128, "two strange steps, and one to see what was at fault"
    expected = [min(0.25 * 4 ** (k / (4 * EVERY)), 1.0) for k in range(STEPS - lowered)]
    assert ratios[lowered:] == pytest.approx(expected, rel=1e-6)


def test_the_factor_stays_if_asked() -> None:
    plain, _ = run(guarded=False)
    ran, _ = run({103: not_a_number, 123: not_a_number}, recover=None)
    assert ran.applied[-1] == pytest.approx(plain.applied[-1] / 3)
    assert ran.watching.factor == pytest.approx(1 / 3)


@pytest.mark.slow
def test_the_factor_stays_where_it_happens_again_soon() -> None:
    ran, words = run({103: not_a_number, 123: not_a_number, 143: not_a_number}, recover=2, steps=400)
    assert sum("diverged" in text for text in words) == 3
    assert ran.watching.factor == pytest.approx(1 / 3)  # it had recovered for 20 steps, and is lowered again
    once, _ = run({103: not_a_number, 303: not_a_number}, recover=2, steps=400)
    assert once.watching.factor == 1


@pytest.mark.slow
def test_a_rate_that_is_far_too_high_is_lowered_for_good() -> None:
    def steep(parameters: Any) -> Optimizer:
        return SGD(parameters, lr=0.05, momentum=0.9)

    def wrong(ran: Guarded) -> Guarded:
        ran.go(0, 60)
        ran.optimizer.param_groups[0]["lr"] = 50.0
        return ran.go(60, 400)

    fine, spoilt = Guarded(make=steep, guarded=False).go(0, 400), wrong(Guarded(make=steep, guarded=False))
    assert not spoilt.final < 2 * fine.final
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hdet.RollbackWarning)
        ran = wrong(Guarded(make=steep, max_rollbacks=20))
    assert ran.watching.rollbacks > 1
    assert ran.watching.factor < 0.1
    assert ran.final < 1.2 * fine.final


def test_every_step_is_slowed_down_however_often_the_guard_is_told() -> None:
    ran, _ = run({103: not_a_number, 113: not_a_number}, recover=None, steps=120)
    before = len(ran.applied)
    for _ in range(3):
        ran.optimizer.step()
    assert ran.applied[before:] == pytest.approx([ran.optimizer.param_groups[0]["lr"] / 3] * 3)


def test_a_step_that_raises_leaves_no_factor_behind() -> None:
    ran, _ = run({103: not_a_number}, recover=None, steps=120)
    before = ran.optimizer.param_groups[0]["lr"]
    handle = ran.optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        ran.optimizer.step()
    handle.remove()
    ran.watching.step(0.1)
    assert ran.optimizer.param_groups[0]["lr"] == before


# -- losses -----------------------------------------------------------------------------------------------------------


def test_harder_data_are_a_false_alarm_and_do_not_count() -> None:
    """The rollback does not help: the rate is as before, and another rollback is left."""
    ran = Guarded(max_rollbacks=1)
    with recorded() as caught:
        for t in range(STEPS):
            ran.optimizer.zero_grad()
            loss = loss_of(ran.model, batch_of(t)) + (50.0 if t >= 120 else 0.0)
            loss.backward()
            ran.optimizer.step()
            ran.watching.step(loss)
    assert caught == [], "it is no warning that people must read"
    assert (ran.watching.rollbacks, ran.watching.factor) == (0, 1.0)
    assert ran.watching.held == 2  # a fiftieth of 120 steps


def test_without_losses_weights_that_are_no_numbers_are_seen() -> None:
    ran = Guarded(guarded=False)
    guard = hdet.Guard(ran.optimizer, ran.model, check_every=EVERY)
    ran.go(0, 1)
    with recorded() as caught:
        for t in range(1, 60):
            ran.go(t, t + 1, {35: not_a_number})
            guard.step()
    assert sum("diverged" in str(one.message) for one in caught) == guard.rollbacks == 1
    assert math.isfinite(ran.final)


def test_a_loss_that_is_maximised() -> None:
    model = nn.Linear(6, 1)
    optimizer = SGD(model.parameters(), lr=0.01, maximize=True)
    guard = hdet.Guard(optimizer, model, check_every=EVERY)
    with recorded() as caught:
        for t in range(200):
            optimizer.zero_grad()
            gain = -loss_of(model, batch_of(t))
            gain.backward()
            optimizer.step()
            if t == 150:
                blow_up(model)
            guard.step(gain)
    assert {one.category for one in caught} == {hdet.RollbackWarning}
    assert guard.rollbacks == 1


# -- limits and words -------------------------------------------------------------------------------------------------


def test_at_most_so_often_then_it_raises() -> None:
    faults = dict.fromkeys((53, 93, 133), not_a_number)
    with pytest.raises(hdet.DivergedError, match=r"after 2 rollbacks that each followed soon .*max_rollbacks=2"):
        run(faults, max_rollbacks=2)
    assert sum("diverged" in text for text in run(faults, max_rollbacks=3)[1]) == 3
    assert run(dict.fromkeys((40, 100, 160), not_a_number), max_rollbacks=1, recover=1)[0].watching.rollbacks == 3
    with pytest.raises(hdet.DivergedError):
        run(faults, max_rollbacks=0)


@pytest.mark.parametrize("change", ["thawed", "frozen", "added"])
def test_what_a_snapshot_has_is_put_back_after_layers_have_changed(change: str) -> None:
    """In the round in which a layer is thawed, frozen or added; what the snapshot does not have stays as it is."""
    ran = Guarded()
    ran.model[0].requires_grad_(change != "thawed")
    ran.go(0, 25)
    before = {name: p.detach().clone() for name, p in ran.model.named_parameters()}
    ran.model[0].requires_grad_(change != "frozen")
    if change == "added":
        ran.model.append(nn.Linear(1, 1))
        nn.init.ones_(ran.model[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(ran.model[-1].bias)  # type: ignore[arg-type]
        ran.optimizer.add_param_group({"params": list(ran.model[-1].parameters())})
    with recorded() as caught:
        ran.go(25, 36, {25: lambda model: model[3].weight.data.fill_(math.nan)})
    assert sum("diverged" in str(one.message) for one in caught) == ran.watching.rollbacks == 1
    for name in ("3.weight", "3.bias"):
        assert torch.allclose(ran.model.get_parameter(name), before[name], atol=0.1), name
        assert ran.model.get_parameter(name).isfinite().all()
    assert math.isfinite(ran.go(36, 60).final)


def test_a_frozen_weight_that_is_not_finite_is_named_at_once() -> None:
    ran = Guarded()
    ran.model[0].requires_grad_(False)
    words = r"0\.weight has values that are NaN or infinite, and could not be rolled back, because this optimizer"
    with pytest.raises(hdet.DivergedError, match=words), recorded() as caught:
        ran.go(0, 60, {30: not_a_number})
    assert ran.watching.rollbacks <= 1
    assert len(caught) <= 1


def test_layers_that_thaw_have_nothing_to_go_back_to_until_the_next_snapshot() -> None:
    ran = Guarded()
    ran.model[0].requires_grad_(False)
    ran.go(0, 25)
    ran.model[0].requires_grad_(True)
    words = r"0\.weight has values that are NaN or infinite, and could not be rolled back"
    with recorded(), pytest.raises(hdet.DivergedError, match=words):
        ran.go(25, 40, {26: not_a_number})


def test_every_roll_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hdet"):
        _, words = run({123: flip})
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "to see whether weights or data are at fault" not in text] == words
    assert len(told) == len(words) + 1


def test_the_warning_points_at_the_users_line() -> None:
    with recorded() as caught:
        Guarded().go(0, 140, {123: flip})
    assert [one.filename.endswith("guarded.py") for one in caught] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"check_every": 7}, "check_every must be an integer, at least 8, but got check_every=7"),
        ({"check_every": "50"}, "check_every must be"),
        ({"factor": 0}, "factor must be a number above 0, at most 1, but got factor=0"),
        ({"factor": 3}, "factor must be"),
        ({"recover": 0}, "recover must be an integer, at least 1"),
        ({"max_rollbacks": -1}, "max_rollbacks must be an integer, at least 0"),
        ({"model": None}, "model must be an nn.Module"),
        ({"optimizer": 3}, "optimizer must be a torch optimizer"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.Guard(**{"optimizer": SGD(model.parameters(), lr=0.1), "model": model, **arguments})


def test_a_loss_that_is_none_changes_nothing() -> None:
    ran = Guarded().go(0, 5)
    before = ran.watching.state_dict()["step"]
    with pytest.raises(hdet.ArgumentError, match="a loss must be one real number"):
        ran.watching.step(torch.ones(3))
    assert ran.watching.state_dict()["step"] == before


def test_steps_that_call_no_hook_are_refused() -> None:
    """As those of a CUDA graph; or those of another optimizer."""
    model = nn.Linear(2, 1)
    guard = hdet.Guard(SGD(model.parameters(), lr=0.1), model, check_every=8)
    with pytest.raises(hdet.ArgumentError, match=r"has made no step: .*CUDA graph"):
        for _ in range(100):
            guard.step(1.0)


def test_once_a_step_was_heard_many_calls_without_one_are_fine() -> None:
    """As with steps that are left out, or batches that are accumulated."""
    ran = Guarded().go(0, 1)
    for _ in range(100):
        ran.watching.step(1.0)
    assert ran.watching.rollbacks == 0


@pytest.mark.parametrize("at", [120, 121, 122, 123])
def test_one_loss_that_is_not_finite_is_no_fault_and_two_are(at: int) -> None:
    """One may be a metric's; two in a row are rolled back at once, and the next tells that the weights were good."""
    ran = Guarded().go(0, at)
    ran.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran.watching.step(math.nan)
    ran.optimizer.step()
    ran.watching.step(math.nan)
    assert ran.watching._state.hold is not None
    with pytest.warns(hdet.RollbackWarning, match=f"diverged at step {at + 2}: rolled back to step"):
        ran.go(at, at + 2)
    assert ran.watching.rollbacks == 1


class Far(nn.Parameter):
    """As on a device, whose numbers are read late."""

    is_cpu = False


def test_on_a_device_numbers_are_read_two_steps_late_and_after_a_strange_one_at_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight = Far(torch.ones(1, 1))
    optimizer = SGD(model.parameters(), lr=1e-3)
    guard = hdet.Guard(optimizer, model)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(34):
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()
            guard.step(math.nan if 23 <= t < 28 else 1.0)
            seen.append((guard._state.strange, guard.rollbacks))
    assert seen[24] == (0, 0), "the look of steps 20 to 23 comes two steps later"
    assert seen[25] == (1, 0)
    assert seen[26][0] == 2, "steps 24, 25 and 26 are read at once"
    assert seen[28][1] == 1


def test_weights_of_zero_may_grow() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=0.1)
    guard = hdet.Guard(optimizer, model)
    for t in range(24):
        model.weight.grad = torch.full((1, 1), -float(t >= 16))
        optimizer.step()
        guard.step(1.0)
    assert (guard.rollbacks, model.weight.item()) == (0, pytest.approx(0.8))


def test_a_guard_that_is_gone_leaves_no_hooks() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    guard = hdet.Guard(optimizer, model)
    assert len(optimizer._optimizer_step_pre_hooks) > before[0]
    del guard
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == before


def test_a_grad_scaler_leaves_steps_out() -> None:
    """The step is skipped where gradients overflow, but buffers of that batch are not: they go back."""
    ran = Guarded()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=50)
    with recorded() as caught:
        for t in range(STEPS):
            ran.optimizer.zero_grad()
            x, y = batch_of(t)
            loss = nn.functional.mse_loss(ran.model(x * (math.inf if t == 100 else 1.0)), y)
            scaler.scale(loss).backward()
            scaler.step(ran.optimizer)
            scaler.update()
            ran.watching.step(loss)
    assert len(caught) == ran.watching.rollbacks == 1
    assert scaler.get_scale() < 8.0 * 2**5
    assert ran.final < 1.05 * run(guarded=False)[0].final


def test_a_closure() -> None:
    ran = Guarded(guarded=False)
    guard = hdet.Guard(ran.optimizer, ran.model, check_every=EVERY)
    with recorded() as caught:
        for t in range(160):

            def closure(t: int = t) -> torch.Tensor:
                ran.optimizer.zero_grad()
                loss = loss_of(ran.model, batch_of(t))
                loss.backward()
                return loss

            loss = ran.optimizer.step(closure)  # type: ignore[arg-type]
            if t == 100:
                flip(ran.model)
            guard.step(loss)
    assert sum("diverged" in str(one.message) for one in caught) == guard.rollbacks == 1


# -- scalers, changes that were meant, averages ------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_scalers_own_skips_are_no_faults(fused: bool) -> None:
    """A fused optimizer is stepped even then, with gradients that are scaled and infinite: its kernels leave it out."""
    ran = Guarded(make=lambda parameters: Adam(parameters, lr=3e-3, fused=fused))
    plain = Guarded(make=lambda parameters: Adam(parameters, lr=3e-3, fused=fused), guarded=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hdet.RollbackWarning)
        for one in (ran, plain):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10**6)
            for t in range(160):
                one.optimizer.zero_grad()
                loss = loss_of(one.model, batch_of(t))
                scaler.scale(loss).backward()
                if t % 10 == 9:
                    one.model[0].weight.grad.fill_(math.inf)  # type: ignore[union-attr,operator]
                scaler.step(one.optimizer)
                scaler.update()
                if one.guard is not None:
                    one.guard.step(loss)
    assert ran.equals(plain)
    assert (ran.watching.rollbacks, ran.watching.held) == (0, 0)


def test_weights_that_are_not_finite_are_never_restored() -> None:
    """They were NaN when the losses were strange; then the data stay so for longer than the guard holds still."""
    ran = Guarded().go(0, 120)

    def worse(t: int) -> float:
        return 1e3 if t >= 122 else 1.0

    for t in range(120, 160):
        ran.optimizer.zero_grad()
        loss = loss_of(ran.model, batch_of(t)) * worse(t)
        loss.backward()
        ran.optimizer.step()
        if t == 121:
            with torch.no_grad():
                ran.model[0].weight.fill_(math.nan)  # type: ignore[union-attr,operator]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hdet.RollbackWarning)
            ran.watching.step(loss)
        assert t < 125 or all(p.isfinite().all() for p in ran.model.parameters()), t
    assert math.isfinite(ran.final)


def new_head(ran: Guarded) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        ran.model[-1].weight.data.normal_(0, 30)  # type: ignore[union-attr,operator]


def test_a_change_that_is_meant_is_forgiven_before_and_after_it_was_rolled_back() -> None:
    for late in (0, 2):
        ran = Guarded().go(0, 120)
        new_head(ran)
        meant = ran.model[-1].weight.detach().clone()  # type: ignore[union-attr,operator]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hdet.RollbackWarning)
            ran.go(120, 120 + late)
            assert (ran.watching._state.hold is not None) is bool(late)
            ran.watching.forgive()
            assert (ran.model[-1].weight - meant).abs().max() < 1  # type: ignore[union-attr,operator]
            before = ran.watching.held
            ran.go(120 + late, 200)
        assert (ran.watching.rollbacks, ran.watching.held) == (0, before)
        assert ran.watching.factor == 1.0


def test_without_being_forgiven_it_is_undone() -> None:
    ran = Guarded().go(0, 120)
    was = ran.model[-1].weight.detach().clone()  # type: ignore[union-attr,operator]
    new_head(ran)
    with pytest.warns(hdet.RollbackWarning):
        ran.go(120, 126)
    assert torch.allclose(ran.model[-1].weight, was, atol=0.2)  # type: ignore[union-attr,arg-type]


def test_averages_of_the_weights_are_rolled_back_too() -> None:
    ran = Guarded(guarded=False)
    average = torch.optim.swa_utils.AveragedModel(
        ran.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    ran.guard = hdet.Guard(ran.optimizer, ran.model, check_every=EVERY, also=[average])
    for t in range(120):
        ran.go(t, t + 1)
        average.update_parameters(ran.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hdet.RollbackWarning)
        for t in range(120, 128):
            ran.go(t, t + 1, {121: not_a_number})
            average.update_parameters(ran.model)
    assert ran.watching.rollbacks == 1
    assert all(tensor.isfinite().all() for tensor in average.state_dict().values())


@pytest.mark.parametrize("also", [[3], 3, nn.Linear(1, 1)])
def test_what_is_no_list_of_averages_is_refused(also: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(hdet.ArgumentError, match=r"also must be a list of nn\.Modules"):
        hdet.Guard(SGD(model.parameters(), lr=0.1), model, also=also)


# -- bad data, and harder data -----------------------------------------------------------------------------------------


def longer_run(change: str, guarded: bool, steps: int = 1200) -> tuple[float, hdet.Guard | None]:
    """A run in which targets are wrong for 15 steps, or differ from there on."""
    ran = Guarded(guarded=guarded, check_every=50) if guarded else Guarded(guarded=False)
    for t in range(steps):
        x, y = batch_of(t)
        if change == "bad" and 900 <= t < 915:
            y = -3 * y
        if change == "harder" and t >= 900:
            y = y + 3.0
        ran.optimizer.zero_grad()
        loss = nn.functional.mse_loss(ran.model(x), y)
        loss.backward()
        ran.optimizer.step()
        if ran.guard is not None:
            ran.guard.step(loss)
    return float(nn.functional.mse_loss(ran.model(x), y).detach()) if change == "harder" else ran.final, ran.guard


@pytest.mark.slow
def test_bad_data_are_left_out_and_the_rate_pays_nothing() -> None:
    with recorded() as caught:
        undisturbed, _ = longer_run("none", guarded=False)
        spoilt, _ = longer_run("bad", guarded=False)
        final, guard = longer_run("bad", guarded=True)
    assert guard is not None
    assert final < 1.05 * undisturbed < spoilt
    assert 12 <= guard.held <= 18
    assert (guard.rollbacks, guard.factor) == (1, 1.0)
    assert "the data were bad around step 90" in str(caught[-1].message)


@pytest.mark.slow
def test_harder_data_cost_a_fiftieth_of_the_steps_at_most() -> None:
    with recorded() as caught:
        plain, _ = longer_run("harder", guarded=False)
        final, guard = longer_run("harder", guarded=True)
    assert guard is not None
    assert {str(one.message).split(",")[0] for one in caught} <= {"gradients out of all proportion were not used"}
    assert guard.held <= 1200 / 50
    assert guard.rollbacks == 0
    assert final < 1.1 * plain


def slowed(guard: hdet.Guard) -> None:
    """As after rollbacks."""
    guard._state = guard._state._replace(slowed=guard._state.slowed._replace(low=0.25, ceiling=0.25))


def test_a_closure_that_raises_leaves_a_chainable_schedule_the_whole_rate() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard, seen, breaks = hdet.Guard(optimizer, model), [], True
    slowed(guard)

    def closure() -> torch.Tensor:
        seen.append(optimizer.param_groups[0]["lr"])
        if breaks:
            raise RuntimeError("out of memory")
        return model(torch.ones(1, 2)).sum()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)  # type: ignore[arg-type]
    breaks = False
    optimizer.step(closure)  # type: ignore[arg-type]
    schedule.step()
    guard.step()
    assert seen == pytest.approx([0.025, 0.025])
    assert optimizer.param_groups[0]["lr"] == 0.05
    breaks = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)  # type: ignore[arg-type]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("several", [False, True])
def test_one_optimizer_has_a_search_or_a_guard(several: bool) -> None:
    """Each would take back what the other has written."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = Adam(model.parameters())
    searched = [optimizer, Adam(other.parameters())] if several else optimizer
    guard = hdet.Guard(optimizer, model)
    with pytest.raises(hdet.ArgumentError, match=r"this Adam has hdet\.Guard already; .*leave the guard out"):
        hdet.auto(searched, total_steps=1000)
    assert "initial_lr" not in optimizer.param_groups[0]
    del guard
    scheduler = hdet.auto(searched, total_steps=1000)
    with pytest.raises(hdet.ArgumentError, match=r"this Adam has hdet\.auto already"):
        hdet.Guard(optimizer, model)
    copied = copy.deepcopy(scheduler)
    with pytest.raises(hdet.ArgumentError, match=r"this Adam has hdet\.auto already"):
        hdet.Guard(parts_of(copied.optimizer)[0], model)
    del scheduler
    hdet.Guard(optimizer, model)


def test_a_layer_that_is_frozen_after_the_backward_pass_is_kept_from_a_bad_gradient() -> None:
    """Optimizers step every parameter that has a gradient, frozen or not."""
    ran = Guarded().go(0, 30)
    ran.optimizer.zero_grad()
    loss_of(ran.model, batch_of(30)).mul(math.nan).backward()
    for p in ran.model.parameters():
        p.requires_grad_(False)
    before = [tensor.clone() for tensor in ran.numbers]
    ran.optimizer.step()
    assert all(map(torch.equal, ran.numbers, before))
    assert all(p.grad is not None for p in ran.model.parameters())


@pytest.mark.parametrize("power", [16, 66, 120])
def test_scaled_gradients_of_a_fused_step_are_in_proportion_however_large_the_scale_is(power: int) -> None:
    """A scaler grows its scale until gradients overflow, and squares of them overflow earlier."""
    ran, plain = (
        Guarded(make=lambda parameters: Adam(parameters, lr=3e-3, fused=True), guarded=guarded)
        for guarded in (True, False)
    )
    for one in (ran, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=10**6)
        for t in range(70):
            one.optimizer.zero_grad()
            loss = loss_of(one.model, batch_of(t))
            scaler.scale(loss).backward()
            scaler.step(one.optimizer)
            scaler.update()
            if one.guard is not None:
                one.guard.step(loss)
    assert ran.watching.held == 0
    assert ran.equals(plain)


def test_an_optimizer_that_is_saved_after_a_step_that_raised_has_its_own_rates_and_gradients() -> None:
    """As by a handler that saves whatever there is when training breaks off."""

    class Breaks(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("out of memory")

    model = nn.Linear(2, 1)
    optimizer = Breaks(model.parameters(), lr=0.1)
    guard = hdet.Guard(optimizer, model)
    slowed(guard)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    gradients = [p.grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * guard.factor)
    assert guard.factor < 1
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    assert [p.grad for p in model.parameters()] == gradients
