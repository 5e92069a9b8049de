"""The reach of real training against the formula in plain letters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdet.algorithm.auto.reach import Tally, estimate, straightness
from hdet.engine.probed.gradients import Gradients
from hdet.engine.probed.origin import Origin
from hdet.engine.probed.witness import Measured, Witness


def reach_of(seen: Gradients, start: Origin, weights: list[Tensor]) -> Tally:
    return seen.tally([float(value) for value in seen.sums(start, weights)])


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
    asked = sum(r * r / unit * inner(g, less(start, x)) for r, g, x in zip(rates, gradients, places, strict=True))
    gained = sum(r * r / unit * inner(g, less(start, end)) for r, g in zip(rates, gradients, strict=True))
    return estimate(Tally(asked, gained, sum(rates)))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_it_is_the_formula_for_any_optimizer_and_any_unit_of_the_loss(make: type, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(5, 3).double()
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    parameters = list(model.parameters())
    optimizer = make(parameters, lr=1.0)
    seen, start = Gradients(), Origin(parameters)
    rates = [1e-4 * 1.7**k / (scale if make is torch.optim.SGD else 1.0) for k in range(9)]
    gradients, places = [], []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        x = torch.randn(16, 5, generator=generator, dtype=torch.float64)
        (scale * (model(x) - x[:, :3]).square().mean()).backward()
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        places.append([p.detach().clone() for p in parameters])
        seen.add(start, parameters, parameters, rate)
        optimizer.step()
    found = estimate(reach_of(seen, start, parameters))
    assert found > rates[-1] / 10
    assert found == pytest.approx(by_the_formula(gradients, places, rates, parameters), rel=1e-9)


def test_parameters_without_a_gradient_and_sparse_ones_take_part_as_they_can() -> None:
    table, unused = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(3))
    parameters = [table.weight, unused]
    seen, start = Gradients(), Origin(parameters)
    for _ in range(3):
        table.weight.grad = None
        table(torch.tensor([1, 1, 2])).sum().backward()
        seen.add(start, parameters, parameters, 0.1)
        with torch.no_grad():
            table.weight.sub_(0.1 * table.weight.grad.to_dense())
    tally = reach_of(seen, start, parameters)  # a constant gradient: as far as the mean of 0, 1 and 2
    assert estimate(tally) == pytest.approx(0.1)
    assert straightness(tally) == pytest.approx(1.0)


def test_a_gradient_that_is_not_finite_makes_the_way_begin_anew() -> None:
    """Also the origin: a way whose rates are not counted would look straighter than it was."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    witness = Witness({0: 0})

    def stepped(gradient: list[float]) -> None:
        p.grad = torch.tensor(gradient)
        witness.before_step(optimizer, hears_gradients=True)
        with torch.no_grad():
            p.sub_(0.1)

    def measured() -> Measured:
        return witness.measured([witness.shown([float(value) for value in witness.scalars(optimizer)])])

    stepped([1.0, 1.0])
    stepped([float("nan"), 1.0])
    assert measured()[1:3] == (0.0, 0.0)
    assert measured() == Measured(0.0, 0.0, 0.0)
    for _ in range(3):
        stepped([1.0, 1.0])
    found = measured()
    assert (found.reach, found.straightness) == pytest.approx((0.1, 1.0))
    assert found.displacement == pytest.approx(0.3 / 0.8)


def test_a_rate_that_is_a_tensor_counts_as_the_number() -> None:
    found = []
    for make in (float, torch.tensor):
        p = nn.Parameter(torch.ones(2, dtype=torch.float64))
        seen, start = Gradients(), Origin([torch.ones(2, dtype=torch.float64)])
        for rate in (0.1, 0.3, 0.2):
            p.grad = torch.ones_like(p)
            seen.add(start, [p], [p], make(rate, **({} if make is float else {"dtype": torch.float64})))  # type: ignore[operator]
            with torch.no_grad():
                p.sub_(rate)
        found.append(estimate(reach_of(seen, start, [p])))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_steps_that_are_not_heard_count_with_their_rates_only() -> None:
    """A constant gradient, every third step heard: sums of rates are over all steps, so the way is still straight."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    seen, start = Gradients(), Origin([p])
    for k in range(9):
        p.grad = torch.ones_like(p)
        if k % 3 == 0:
            seen.add(start, [p], [p], 0.1)
        else:
            seen.pass_by(0.1)
        with torch.no_grad():
            p.sub_(0.1)
    tally = reach_of(seen, start, [p])
    assert tally.rates == pytest.approx(0.9)
    assert estimate(tally) == pytest.approx((0.0 + 0.3 + 0.6) / 3)
    assert straightness(tally) == pytest.approx(1.0)
