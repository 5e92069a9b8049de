"""What is measured in real training, against the formula in plain letters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet.rule.estimate import Measured, Sums, balance, estimate, straightness
from hdet.search.measure import Measure
from tests.search.paths import ListedPath

pytestmark = pytest.mark.quick


def result(measure: Measure, optimizer: torch.optim.Optimizer) -> Measured:
    """On one rank."""
    return measure.measured([measure.row([float(value) for value in measure.scalars(optimizer)])])


def by_the_formula(
    gradients: list[list[Tensor]], places: list[list[Tensor]], rates: list[float], end: list[Tensor]
) -> float:
    """Everything is kept, nothing is summed on the way; weights are squares of rates."""

    def inner(a: list[Tensor], b: list[Tensor]) -> float:
        return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))

    def less(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return [x - y for x, y in zip(a, b, strict=True)]

    start = places[0]
    unit = rates[-1] ** 2
    numerator = sum(r * r / unit * inner(g, less(start, x)) for r, g, x in zip(rates, gradients, places, strict=True))
    denominator = sum(r * r / unit * inner(g, less(start, end)) for r, g in zip(rates, gradients, strict=True))
    return estimate(Sums(numerator, denominator, sum(rates)))


def numbers_of(tensors: Sequence[Tensor]) -> list[float]:
    found: list[float] = torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
    return found


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_it_is_the_formula_for_any_optimizer_and_any_unit_of_the_loss(make: type, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(5, 3).double()
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    parameters = list(model.parameters())
    optimizer = make(parameters, lr=1.0)
    measure = Measure([0])
    rates = [1e-4 * 1.7**k / (scale if make is torch.optim.SGD else 1.0) for k in range(9)]
    gradients, places = [], []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        x = torch.randn(16, 5, generator=generator, dtype=torch.float64)
        (scale * (model(x) - x[:, :3]).square().mean()).backward()
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        places.append([p.detach().clone() for p in parameters])
        measure.set_origin(optimizer)
        measure.sample(optimizer)
        optimizer.step()
    found = result(measure, optimizer)
    assert found.estimated_rate > rates[-1] / 10
    assert found.estimated_rate == pytest.approx(by_the_formula(gradients, places, rates, parameters), rel=1e-9)
    path = ListedPath(numbers_of(places[0]))
    for gradient, place, rate in zip(gradients, places, rates, strict=True):
        path.step(numbers_of(gradient), numbers_of(place), rate)
    totals = path.at(numbers_of(parameters))
    formulas = estimate(totals), straightness(totals), balance(totals)
    assert (found.estimated_rate, found.straightness, found.balance) == pytest.approx(formulas)
    assert found.gradients == pytest.approx([max(float(g.abs().max()) for g in gs) for gs in gradients])
    way, origin = (torch.cat([p.detach().flatten() for p in ps]) for ps in (parameters, places[0]))
    assert found.moved == pytest.approx(float((way - origin).norm() / origin.norm()))
    assert (found.rates, found.path_steps) == (pytest.approx(sum(rates)), 9)
    assert not found.is_broken


def descend(
    measure: Measure,
    p: nn.Parameter,
    gradients: Sequence[Any],
    rates: Sequence[Any],
    see: Callable[[Measure, torch.optim.Optimizer, int], None] = lambda measure, optimizer, k: measure.sample(
        optimizer
    ),
) -> Measured:
    """Steps along given gradients."""
    optimizer = torch.optim.SGD([p], lr=0.1)
    for k, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = torch.as_tensor(gradient, dtype=p.dtype).expand_as(p).clone()
        measure.set_origin(optimizer)
        see(measure, optimizer, k)
        with torch.no_grad():
            p.sub_(p.grad.nan_to_num(0.0) * rate)
    return result(measure, optimizer)


def doubles(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_parameters_without_a_gradient_and_sparse_ones_take_part_as_they_can() -> None:
    table, unused = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([table.weight, unused], lr=0.1)
    measure = Measure([0])
    for _ in range(3):
        optimizer.zero_grad()
        table(torch.tensor([1, 1, 2])).sum().backward()
        measure.set_origin(optimizer)
        measure.sample(optimizer)
        optimizer.step()
    found = result(measure, optimizer)  # a constant gradient: as far as the mean of 0, 1 and 2
    assert (found.estimated_rate, found.straightness) == (pytest.approx(0.1), pytest.approx(1.0))
    assert found.gradients == (2.0, 2.0, 2.0)


def test_groups_that_are_not_searched_do_not_count() -> None:
    mine, other = doubles(3.0, 4.0), doubles(100.0)
    optimizer = torch.optim.SGD([{"params": [other], "lr": 7.0}, {"params": [mine], "lr": 0.5}])
    measure = Measure([1])
    for _ in range(2):
        mine.grad, other.grad = torch.tensor([0.6, 0.8], dtype=torch.float64), torch.full_like(other, 1e9)
        measure.set_origin(optimizer)
        measure.sample(optimizer)
        optimizer.step()
    found = result(measure, optimizer)
    assert found.moved == pytest.approx(1 / 5)
    assert (found.rates, found.path_steps, found.gradients) == (1.0, 2, (0.8, 0.8))
    assert found.estimated_rate == pytest.approx(0.25)
    assert measure.searched(optimizer) == [mine]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_said(bad: float) -> None:
    """Sums that went through it are lost; its size is not hidden."""
    measure, p = Measure([0]), doubles(1.0, 1.0)
    found = descend(measure, p, [1.0, [bad, 1.0]], [0.1, 0.1])
    assert (found.is_broken, found.estimated_rate, found.straightness) == (True, 0.0, 0.0)
    assert found.gradients == (1.0, pytest.approx(bad, nan_ok=True))
    measure.begin_path()
    found = descend(measure, p, [1.0] * 3, [0.1] * 3)
    assert (found.estimated_rate, found.straightness, found.is_broken) == (
        pytest.approx(0.1),
        pytest.approx(1.0),
        False,
    )


def test_weights_that_are_no_numbers_are_infinitely_far() -> None:
    measure, p = Measure([0]), doubles(1.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    measure.set_origin(optimizer)
    measure.sample_sizes(optimizer)
    with torch.no_grad():
        p.fill_(math.nan)
    assert result(measure, optimizer).moved == math.inf


def test_a_way_from_zero_is_measured_as_it_is() -> None:
    found = descend(Measure([0]), doubles(0.0, 0.0), [1.0], [0.5])
    assert found.moved == pytest.approx(math.sqrt(0.5))


def test_a_rate_that_is_a_tensor_counts_as_the_number() -> None:
    found = []
    for make in (float, lambda rate: torch.tensor(rate, dtype=torch.float64)):
        rates = [make(rate) for rate in (0.1, 0.3, 0.2)]
        found.append(descend(Measure([0]), doubles(1.0, 1.0), [1.0] * 3, rates))
    assert found[0]._asdict() == {name: pytest.approx(value, rel=1e-12) for name, value in found[1]._asdict().items()}


def test_a_tensor_that_the_optimizer_writes_to_is_not_kept() -> None:
    """torch fills the rate's tensor in place."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    p = doubles(1.0)
    optimizer = torch.optim.SGD([p], lr=rate)
    measure = Measure([0])
    for value in (0.1, 0.2, 0.4):
        rate.fill_(value)
        p.grad = torch.ones_like(p)
        measure.set_origin(optimizer)
        measure.sample(optimizer)
        optimizer.step()
    found = result(measure, optimizer)
    assert found.rates == pytest.approx(0.7)
    assert found.straightness == pytest.approx(1.0)


def test_steps_that_are_not_sampled_count_with_their_rates_only() -> None:
    """A constant gradient, every third step sampled: sums of rates are over all steps: the path is straight."""

    def see(measure: Measure, optimizer: torch.optim.Optimizer, k: int) -> None:
        (measure.pass_by if k % 3 else measure.sample)(optimizer)

    found = descend(Measure([0]), doubles(0.0, 0.0, 0.0), [1.0] * 9, [0.1] * 9, see)
    assert (found.rates, found.path_steps) == (pytest.approx(0.9), 9)
    assert found.estimated_rate == pytest.approx((0.0 + 0.3 + 0.6) / 3)
    assert found.straightness == pytest.approx(1.0)
    assert found.gradients == (1.0,) * 3


def test_before_a_first_step_is_known_only_sizes_are_looked_at() -> None:
    found = descend(
        Measure([0]), doubles(1.0), [3.0, -4.0], [0.1, 0.1], lambda m, optimizer, k: m.sample_sizes(optimizer)
    )
    assert (found.estimated_rate, found.straightness, found.is_broken) == (0.0, 0.0, False)
    assert (found.gradients, found.rates, found.path_steps) == ((3.0, 4.0), pytest.approx(0.2), 2)


def test_what_is_maximised_is_turned() -> None:
    found = []
    for sign in (1.0, -1.0):
        p = doubles(1.0, 2.0)
        optimizer = torch.optim.SGD([p], lr=0.1, maximize=sign < 0)
        measure = Measure([0])
        for _ in range(3):
            p.grad = torch.full_like(p, sign)
            measure.set_origin(optimizer)
            measure.sample(optimizer)
            optimizer.step()
        found.append(result(measure, optimizer))
    assert found[0] == found[1]
    assert found[0].estimated_rate == pytest.approx(0.1)


def test_a_scaled_gradient_is_read_without_its_scale_and_a_step_left_out_counts_nothing() -> None:
    """As a GradScaler tells fused optimizers."""

    def see(measure: Measure, optimizer: torch.optim.Optimizer, k: int) -> None:
        optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
        optimizer.found_inf = torch.tensor(float(k == 1))  # type: ignore[attr-defined]
        measure.sample(optimizer)

    found = descend(Measure([0]), doubles(1.0), [1024.0, math.inf, 2048.0], [0.1] * 3, see)
    assert found.gradients == (1.0, 0.0, 2.0)
    assert not found.is_broken


def test_layers_that_are_frozen_or_thawed_are_noticed() -> None:
    a, b = doubles(1.0), doubles(2.0)
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    measure = Measure([0])
    assert measure.scalars(optimizer) == []
    measure.set_origin(optimizer)
    assert measure.scalars(optimizer) != []
    b.requires_grad_(False)
    assert measure.scalars(optimizer) == []
    assert result(measure, optimizer) == Measured()


def test_of_what_several_ranks_hold_one_counts() -> None:
    measure, p = Measure([0]), doubles(3.0, 4.0)
    alone = descend(measure, p, [1.0] * 3, [0.1] * 3)
    row = measure.row([float(value) for value in measure.scalars(torch.optim.SGD([p], lr=0.1))])
    assert measure.measured([row, row, row]) == alone


def test_the_balance_is_of_the_whole_path_in_rounds_or_not() -> None:
    """To and fro: <g, x_0 - x> is 0, 0.1, -0.2, -0.1 and 0, and the last rate makes earlier ones count a quarter."""
    gradients, rates = [1.0, 1.0, -1.0, -1.0, 1.0], [0.1, 0.1, 0.1, 0.1, 0.2]

    def see(measure: Measure, optimizer: torch.optim.Optimizer, k: int) -> None:
        if k == 3:
            result(measure, optimizer)
            measure.begin_round()
        measure.sample(optimizer)

    whole = descend(Measure([0]), doubles(1.0), gradients, rates)
    parts = descend(Measure([0]), doubles(1.0), gradients, rates, see)
    assert whole.balance == pytest.approx((0.25 * (0.1 - 0.2 - 0.1)) / (0.25 * (0.1 + 0.2 + 0.1)))
    assert (parts.balance, parts.estimated_rate) == pytest.approx((whole.balance, whole.estimated_rate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_was_saved_goes_on_as_it_was(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.SGD([p], lr=0.25)

    def step(*measures: Measure) -> None:
        p.grad = torch.ones_like(p)
        for measure in measures:
            measure.set_origin(optimizer)
            measure.sample(optimizer)
        optimizer.step()

    first = Measure([0])
    assert first.saved(optimizer) is None
    for _ in range(3):
        step(first)
    second = Measure.loaded(first.saved(optimizer), [0], optimizer)
    assert result(second, optimizer) == result(first, optimizer)
    for _ in range(3):
        step(first, second)
    assert result(second, optimizer) == result(first, optimizer)
    assert Measure.loaded(None, [0], optimizer).saved(optimizer) is None


def test_what_was_saved_of_other_shapes_is_refused() -> None:
    saved = None
    for size in (3, 4):
        p = nn.Parameter(torch.ones(size))
        optimizer = torch.optim.SGD([p], lr=0.1)
        if saved is not None:
            with pytest.raises(ValueError, match=r"shapes \[\(3,\)\] for parameters of shapes \[\(4,\)\]"):
                Measure.loaded(saved, [0], optimizer)
        measure = Measure([0])
        measure.set_origin(optimizer)
        saved = measure.saved(optimizer)


def test_rates_of_zero_that_are_tensors_forget_nothing() -> None:
    """A schedule may begin with several steps at 0."""
    found = []
    for make in (float, lambda rate: torch.tensor(rate, dtype=torch.float64)):
        rates = [make(rate) for rate in (0.0, 0.0, 0.1, 0.1)]
        found.append(descend(Measure([0]), doubles(1.0, 1.0), [1.0] * 4, rates))
    assert found[1].estimated_rate == pytest.approx(found[0].estimated_rate)
    assert found[0].estimated_rate > 0
    assert not found[1].is_broken


@pytest.mark.parametrize("kind", ["plain", "a large bias", "an unused table"])
def test_no_minority_of_the_numbers_decides_how_long_weights_are(kind: str) -> None:
    """The first step is measured against the typical norm, and so are later ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    if kind == "a large bias":
        nn.init.constant_(model[2].bias, 1e4)  # type: ignore[arg-type]
    unused = [nn.Parameter(torch.randn(1000, 100) * 10)] if kind == "an unused table" else []
    optimizer = torch.optim.Adam([*model.parameters(), *unused], lr=1e-3)
    measure, moved = Measure([0]), []
    for k in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        measure.set_origin(optimizer)
        measure.sample_sizes(optimizer) if k == 0 else measure.sample(optimizer)
        optimizer.step()
        moved.append(result(measure, optimizer).moved)
        measure.begin_path()
    weights = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()])  # type: ignore[arg-type]
    usual = 1e-3 / float(weights.square().mean().sqrt())
    assert moved == pytest.approx([usual, usual], rel=0.5)


@pytest.mark.parametrize(
    ("dtype", "half"), [(torch.float64, 2.0**-53), (torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)]
)
def test_it_knows_what_rounding_may_do(dtype: torch.dtype, half: float) -> None:
    model = nn.Linear(3, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure = Measure([0])
    measure.set_origin(optimizer)
    assert result(measure, optimizer).rounding == half
