"""lab/benchmarks/cost_model.py and cost_fit.py: the formulas by hand, on simple numbers."""

from __future__ import annotations

import doctest
from typing import Any

import cost_fit
import cost_model
import pytest
import torch
from cost_fit import Row, errors, fit, line
from cost_model import added, fan_out, looks, rounds

import hdet
from lab.tests.benchmarks.made_up import BANDWIDTH, LAUNCH, document, machine, measured, passes

GIGA = 10**9


@pytest.mark.parametrize("module", [cost_model, cost_fit], ids=lambda module: module.__name__)
def test_its_examples_are_true(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


def test_a_step_is_counted_in_flop() -> None:
    """1 B parameters, 1000 tokens: 6e12 FLOP at 5e14 a second."""
    assert machine().step(GIGA) == pytest.approx(0.012)


def test_rounds_are_those_of_a_search() -> None:
    """Counted in a run."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=1.0)  # long enough a first step to be measured at once
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100)
    search, sampled = scheduler._run, []
    seen = search._sampler.measure.sample
    search._sampler.measure.sample = lambda *given: (sampled.append(1), seen(*given))  # type: ignore[method-assign, assignment]
    for _ in range(100):
        p.grad = 0.1 * p.detach()
        optimizer.step()
        scheduler.step(float(p.detach().square().sum()))
    assert search.memory.rounds == rounds(100)
    assert len(sampled) + 1 == looks(100)  # the first step is only looked at


def test_the_end_of_a_round_on_one_gpu_by_hand() -> None:
    """1 B parameters: keep 24 ms at 1e12 bytes/s or 240 ms at 50e9, measure 20 ms, nobody to talk to."""
    cost = added(machine(), GIGA, 1, 100, sharded=False)
    assert cost.per_round == pytest.approx((0.024 + 0.240) / 2 + 0.020)
    assert cost.seconds == pytest.approx(looks(100) * 0.020 + rounds(100) * cost.per_round)
    assert cost.percent == pytest.approx(100 * cost.seconds / (100 * 0.012))


def test_the_end_of_a_round_on_eight_gpus_by_hand() -> None:
    """A check of 88 bytes per parameter, and two messages of 3 hops."""
    cost = added(machine(), GIGA, 8, 100, sharded=False)
    assert cost.per_round == pytest.approx(0.152 + 0.088 + 2 * 3e-3)


def test_one_rank_has_no_all_reduce() -> None:
    assert fan_out(machine(), GIGA, 1, 10_000, sharded=False) == (0.0,) * 6
    assert fan_out(machine(), GIGA, 8, 10_000, sharded=True).seconds == 0  # one node shards the only replica


def test_a_fan_out_by_hand() -> None:
    """4 GB over 8 GPUs: 7 GB travel at 100 GB/s, 3 hops, and 20 GB pass through memory. Ten rounds."""
    cost = fan_out(machine(), GIGA, 8, 10_000, sharded=False)
    assert cost.per_round == pytest.approx(0.070 + 3e-3 + 0.020)
    assert cost.seconds == pytest.approx(10 * cost.per_round)
    assert cost.searching == 64 * 2**20


def test_a_sharded_fan_out_is_between_nodes() -> None:
    """64 GPUs: 8 replicas, each sharded over 8; half a GB over the slow link."""
    cost = fan_out(machine(), GIGA, 64, 1000, sharded=True)
    assert cost.per_round == pytest.approx(2 * 7 / 8 * 0.5 / 10 + 3e-3 + 0.0025)


def test_the_last_round_of_a_fan_out_counts_too() -> None:
    costs = [fan_out(machine(), GIGA, 8, steps, sharded=False).seconds for steps in (1000, 1001)]
    assert costs[1] == 2 * costs[0]


def test_twice_the_bandwidth_halves_copies() -> None:
    fast = machine(passes=passes(launch=0.0, bandwidth=2e12), pinned=100e9)
    slow_end, fast_end = (added(m, GIGA, 1, 100, sharded=False).per_round for m in (machine(), fast))
    assert fast_end == pytest.approx(slow_end / 2)


def test_sharding_divides_memory_and_copies() -> None:
    whole, sharded = (added(machine(), GIGA, 8, 100, sharded=flag) for flag in (False, True))
    assert whole[3:] == (8 * GIGA, 12 * GIGA, 12 * GIGA)
    assert sharded[3:] == tuple(size / 8 for size in whole[3:])
    talk = 2 * 3e-3
    assert sharded.per_round - talk == pytest.approx((whole.per_round - talk) / 8)


def test_two_snapshots_in_host_memory_go_over_the_bus() -> None:
    """12 bytes of each parameter at 50 GB/s, instead of a copy of 24 ms in every other round."""
    device, host = (added(machine(keep=where), GIGA, 1, 100, sharded=False) for where in ("device", "host"))
    assert host.per_round - device.per_round == pytest.approx((12 / 50 - 0.024) / 2)
    assert (host.kept, host.on_host) == (0, 24 * GIGA)


def test_a_cap_on_looks_makes_long_runs_cheap() -> None:
    assert looks(100_000, sampled=None) == pytest.approx(0.44 * 100_000, rel=0.2)
    assert looks(100_000, sampled=16) <= 16 * rounds(100_000)
    assert looks(100_000, sampled=10**9) == looks(100_000, sampled=None)


def test_the_fit_finds_what_the_rows_were_made_of() -> None:
    rows = [Row.read(row) for row in document()["rows"]]
    found = fit(rows)
    for one in found:
        assert one == pytest.approx((LAUNCH, BANDWIDTH))
    assert errors(rows, found) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)


def test_an_end_that_the_parts_do_not_explain_is_an_error() -> None:
    """One row of three takes twice as long."""
    rows = [Row.read(measured(str(size), size)) for size in (10**6, 10**7, 10**8)]
    rows[1] = rows[1]._replace(end=2 * rows[1].end, ratio=1.5)
    error = errors(rows, fit(rows))
    assert error.look == pytest.approx(0.0, abs=1e-9)
    assert error.end > 0.2
    assert error.ratio > 0.1


def test_rows_of_one_size_cannot_be_fitted() -> None:
    rows = [Row.read(measured("a", 10**6)), Row.read(measured("b", 10**6))]
    with pytest.raises(ValueError, match="at least two sizes"):
        fit(rows)


def test_looks_that_do_not_grow_cannot_be_fitted() -> None:
    rows = [Row.read(measured(str(size), size))._replace(look=1e-4) for size in (10**6, 10**8)]
    with pytest.raises(ValueError, match="do not grow with the model"):
        fit(rows)


def test_copies_that_do_not_grow_take_the_bandwidth_of_a_look() -> None:
    rows = [Row.read(measured(str(size), size))._replace(keep=1e-4) for size in (10**6, 10**8)]
    assert fit(rows).keep == pytest.approx((1e-4, BANDWIDTH))


def test_a_part_that_took_no_time_is_refused() -> None:
    row = measured("tiny", 10**6)
    row["parts_ms"]["keep"] = 0.0
    with pytest.raises(ValueError, match="tiny: keep must have taken time, but got 0 ms"):
        Row.read(row)


def test_a_line_through_zero() -> None:
    """The best line would begin below zero."""
    assert line([1.0, 2.0], [1.0, 3.0], [1.0, 1.0]) == pytest.approx((0.0, 1.4))
