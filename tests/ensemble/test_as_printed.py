"""The paper to the letter: its recursion of the rate by hand and by property, its checkpoints, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hdet
from hdet.ensemble.bases import Bases
from tests.models import batch, groups_of, make_optimizer, two_layer
from tests.processes import run_ranks

RATIO = 25 / 1e4
"""f_div / f_final at torch's defaults."""


def scheduler_of(steps: int = 40, **changes: Any) -> hdet.OneCycleLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    arguments: dict[str, Any] = {"sync_every": 4, "auto_lr_start": 20, "auto_lr": hdet.AsPrinted()}
    return hdet.OneCycleLR(optimizer, 0.1, steps, **{**arguments, **changes})


def stepped(scheduler: hdet.OneCycleLR, steps: int) -> list[float]:
    """The rate that each step had."""
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        scheduler.optimizer.step()
        scheduler.step(1.0)
    return rates


def test_equal_losses_leave_the_rate_to_gamma_alone() -> None:
    """From the rate of step 20 on, constant in each round; after K = 5 rounds 1/400 of it, not OneCycle's floor."""
    rates = stepped(scheduler_of(), 40)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    torch_scheduler = torch.optim.lr_scheduler.OneCycleLR(plain, 0.1, 40)
    for rate in rates[:20]:
        assert rate == plain.param_groups[0]["lr"]
        plain.step()
        torch_scheduler.step()
    expected = [rates[19] * RATIO ** ((1 + k) / 5) for k in range(5) for _ in range(4)]
    assert rates[20:] == pytest.approx(expected, rel=1e-12)


def test_unmended_the_rate_grows() -> None:
    rates = stepped(scheduler_of(auto_lr=hdet.AsPrinted(mend_gamma=False)), 40)
    assert rates[-1] / rates[19] == pytest.approx(400, rel=1e-9)


@given(st.floats(1e-6, 1e6), st.floats(1, 1e4))
def test_gamma_takes_the_rate_through_the_ratio_of_the_factors(ratio: float, rounds: float) -> None:
    printed, mended = (hdet.AsPrinted(mend_gamma=one).gamma(ratio, rounds) for one in (False, True))
    assert (1 - printed) ** rounds == pytest.approx(1 / ratio, rel=1e-6)
    assert (1 - mended) ** rounds == pytest.approx(min(ratio, 1 / ratio), rel=1e-6)
    assert 0 <= mended < 1


def test_gamma_at_the_edges() -> None:
    rule = hdet.AsPrinted(mend_gamma=False)
    assert rule.gamma(RATIO, 0.0) == 0.0  # S_warm is the last step: nothing is left to decay in
    assert math.isfinite(rule.gamma(RATIO, 1e-3))  # e^6000 is no float
    assert rule.gamma(1.0, 7.0) == 0.0


@given(
    st.floats(1e-8, 1e2),
    st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=20),
    st.floats(0.01, 0.6),
)
def test_the_recursion_is_the_papers(rate: float, rounds: list[list[float]], gamma: float) -> None:
    """Against the equations, written out; and its scale is that of the rate: twice the rate, twice every base."""
    rule, rho = hdet.AsPrinted(), [0.7, 0.9, 1.1, 1.3]
    found, v, base = {}, 0.0, rate
    for scale in (1.0, 2.0):
        bases, now, state = Bases.begin([1.0], rule), scale * rate, rule.init(1)
        for losses in rounds:
            update = rule.update(state, losses, [[now * (one - 1)] for one in rho])
            state = update.state
            bases = bases.as_printed(update.moves, [now], [gamma])
            now = bases.decayed[0]
        found[scale] = now
    for losses in rounds:
        eta = [base * one for one in rho]
        s = [(sum(losses) / 4 - loss) / 0.1 for loss in losses]
        w = [math.exp(one - max(s)) for one in s]
        v = 0.9 * v + 0.1 * (sum(a * b for a, b in zip(w, eta, strict=True)) / sum(w) - sum(eta) / 4)
        base = base * (1 - gamma) + 0.5 * v
    assert found[1.0] == pytest.approx(base, rel=1e-9, abs=1e-12 * rate)
    assert found[2.0] == pytest.approx(2 * found[1.0], rel=1e-9, abs=1e-12 * rate)


def test_the_base_can_fall_below_0() -> None:
    """Replicas below the base win ten rounds in a row: v outlives the rate. The corrected rule stays above 0."""
    answers = run_ranks(_lower_wins, 2)
    for printed, corrected in answers:
        assert printed[-1] < 0
        assert min(corrected) > 0
        assert printed == answers[0][0]


def _lower_wins(rank: int) -> tuple[list[float], list[float]]:
    rows = []
    for rule in ({"auto_lr": hdet.AsPrinted()}, {"auto_lr": True, "decay": "exponential"}):
        scheduler, rates = scheduler_of(spread=0.9, **rule), []  # type: ignore[arg-type]
        for _ in range(40):
            scheduler.optimizer.step()
            scheduler.step(scheduler.multipliers[0])  # the loss is lower where the rate is
            rates.append(float(scheduler.base_lrs_now[0]))
        rows.append(rates)
    return rows[0], rows[1]


def test_rounds_that_are_no_multiple_of_t_move_nothing() -> None:
    """Averages at S - 1 and S are ours; the paper's rate changes every T steps only."""
    rates = stepped(scheduler_of(steps=42), 42)
    assert rates[40] == rates[41] != rates[39]


@pytest.mark.parametrize("mended", [True, False])
def test_a_checkpoint_goes_on_bit_by_bit(mended: bool) -> None:
    answers = run_ranks(_resumed, 2, mended)
    for straight, resumed, state in answers:
        assert resumed == straight
        assert state["controller"] == "AsPrinted"
        assert ["mend_gamma", mended] in [list(pair) for pair in state["controller_arguments"]]
        assert state["decay"] == "printed"


def _resumed(rank: int, mended: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    def build(**rule: Any) -> tuple[torch.nn.Module, hdet.OneCycleLR]:
        model = two_layer()
        optimizer = make_optimizer("sgd", groups_of(model))
        return model, hdet.OneCycleLR(optimizer, 1e-3, 40, sync_every=4, auto_lr_start=8, spread=0.3, **rule)

    def train(model: torch.nn.Module, scheduler: hdet.OneCycleLR, first: int, last: int) -> list[float]:
        rates = []
        for t in range(first, last):
            x, y = batch(t, rank)
            loss = torch.nn.functional.mse_loss(model(x), y)
            scheduler.optimizer.zero_grad()
            loss.backward()
            scheduler.optimizer.step()
            scheduler.step(loss)
            rates.append(float(scheduler.optimizer.param_groups[1]["lr"]))
        return rates

    model, scheduler = build(auto_lr=hdet.AsPrinted(mend_gamma=mended))
    train(model, scheduler, 0, 24)
    state = scheduler.state_dict()
    weights, moments = model.state_dict(), scheduler.optimizer.state_dict()
    weights, moments = {n: p.clone() for n, p in weights.items()}, torch.load(_saved(moments))
    straight = train(model, scheduler, 24, 40)
    other, again = build()  # with the default controller: the checkpoint brings its own
    other.load_state_dict(weights)
    again.optimizer.load_state_dict(moments)
    again.load_state_dict(state)
    return straight, train(other, again, 24, 40), state["hdet"]


def _saved(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_refuses_another_decay() -> None:
    words = r"decay must be left out with auto_lr=hdet\.AsPrinted\(\).*got decay='exponential'"
    with pytest.raises(hdet.ArgumentError, match=words):
        scheduler_of(decay="exponential")


def test_an_ensemble_refuses_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(hdet.ArgumentError, match=r"controller must not be AsPrinted.*give hdet\.Corrected\(\)"):
        hdet.Ensemble(optimizer, controller=hdet.AsPrinted())


def test_a_group_that_is_added_begins_at_its_own_schedule() -> None:
    scheduler = scheduler_of()
    stepped(scheduler, 26)
    bounds = {"max_lr": 0.2, "initial_lr": 0.008, "min_lr": 8e-7, "max_momentum": 0.95, "base_momentum": 0.85}
    scheduler.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **bounds})
    stepped(scheduler, 2)
    old, new = (float(rate) for rate in scheduler.base_lrs_now)
    assert 0 < new < 0.2
    before = new
    stepped(scheduler, 4)
    assert float(scheduler.base_lrs_now[1]) == pytest.approx(before * RATIO ** (1 / 5), rel=1e-9)
    assert float(scheduler.base_lrs_now[0]) == pytest.approx(old * RATIO ** (1 / 5), rel=1e-9)
