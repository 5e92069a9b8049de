"""The losses of a round: kept, cut into blocks, and put together from all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdet.errors import ArgumentError
from hdet.rollback.losses import Losses
from hdet.rule.constants import BLOCKS
from hdet.rule.judge import Block, merged, table_of

pytestmark = pytest.mark.quick

lengths = st.integers(1, 200)


@given(lengths)
def test_blocks_hold_as_many_steps_as_they_say_in_order(length: int) -> None:
    """The loss of a step is its number: the mean of a block is its middle."""
    blocks = merged([table_of([(step, float(step)) for step in range(length)], length)], length)
    assert len(blocks) == min(length, BLOCKS)
    assert sum(block.steps for block in blocks) == length
    assert max(block.steps for block in blocks) - min(block.steps for block in blocks) <= 1
    begin = 0
    for block in blocks:
        assert block.mean == pytest.approx(begin + (block.steps - 1) / 2)
        begin += block.steps


@given(lengths, st.data())
def test_the_same_numbers_on_every_rank_whatever_was_given(length: int, data: st.DataObject) -> None:
    losses = data.draw(st.lists(st.tuples(st.integers(0, length + 3), st.floats()), max_size=20))
    *table, _ = table_of(losses, length)
    assert len(table) == 2 * BLOCKS
    assert all(given in (0.0, 1.0) for given in table[::2])
    assert not any(map(math.isinf, table[1::2]))
    assert sum(table[::2]) <= min(length, BLOCKS)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_ranks_count_alike(rows: list[list[float]]) -> None:
    found = merged([table_of(enumerate(row), 4) for row in rows], 4)
    assert [block.mean for block in found] == pytest.approx(
        [sum(column) / len(rows) for column in zip(*rows, strict=True)], abs=1e-9
    )
    assert [block.steps for block in found] == [1] * 4


def test_only_ranks_with_a_finite_loss_count() -> None:
    rank0 = table_of([(0, 4.0), (1, 2.0), (2, math.nan)], 4)
    rank1 = table_of([(0, 2.0), (2, math.inf)], 4)
    empty = table_of([], 4)
    found = merged([rank0, rank1, empty], 4)
    assert found[:2] == (Block(3.0, 1), Block(2.0, 1))
    assert math.isnan(found[2].mean)
    assert len(found) == 3  # of the fourth step no rank has given a loss
    assert merged([empty, empty], 4) == ()


def test_several_losses_of_one_step_are_its_mean() -> None:
    """As where gradients are accumulated."""
    assert merged([table_of([(0, 1.0), (0, 3.0), (1, 5.0), (1, math.nan)], 2)], 2) == (Block(2.0, 1), Block(5.0, 1))


def test_losses_before_the_first_step_are_a_block_of_none() -> None:
    assert merged([table_of([(0, 1.0), (3, 3.0)], 0)], 0) == (Block(2.0, 0),)


@pytest.mark.parametrize("huge", [[1.5e308, 1.5e308], [1.7e308, -1.7e308, 1.7e308]])
def test_losses_near_the_largest_float_have_a_mean(huge: list[float]) -> None:
    (block,) = merged([table_of([(0, loss) for loss in huge], 1)], 1)
    assert block.mean == pytest.approx(huge[0] / (1 if len(huge) == 2 else 3))


def test_an_infinite_loss_beside_some_near_the_largest_float_has_an_infinite_mean() -> None:
    losses = Losses()
    for step, loss in enumerate([1.7e308, 1.7e308, math.inf]):
        losses.add(loss, step)
    assert losses.mean() == math.inf


def test_a_round_is_remembered_until_it_is_reset() -> None:
    losses = Losses()
    assert (losses.count, losses.ever, losses.read()) == (0, False, [])
    assert math.isnan(losses.mean())
    losses.add(1.0, 0)
    losses.add(torch.tensor([3.0]), 1)
    losses.add(2, 2)
    assert (losses.count, losses.ever, losses.mean()) == (3, True, 2.0)
    assert losses.read() == [(0, 1.0), (1, 3.0), (2, 2.0)]
    losses.reset()
    assert (losses.count, losses.ever, losses.read()) == (0, True, [])


@pytest.mark.parametrize("infinite", [[math.inf, 1.0], [-math.inf, math.inf], [math.nan]])
def test_a_mean_of_what_has_none_is_no_number(infinite: list[float]) -> None:
    losses = Losses()
    for loss in infinite:
        losses.add(loss)
    assert not math.isfinite(losses.mean())


def test_a_tensor_may_be_written_to_at_once() -> None:
    losses, loss = Losses(), torch.tensor(1.0)
    losses.add(loss)
    loss.fill_(9.0)
    assert losses.read() == [(0, 1.0)]


class Elsewhere(torch.Tensor):
    """Stands for a tensor of another device."""

    is_cpu = False


def elsewhere(loss: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(loss, dtype=dtype).as_subclass(Elsewhere)


def test_losses_on_a_device_stay_there_until_they_are_read() -> None:
    losses, numbers = Losses(), [float(k) for k in range(150)]
    for k, number in enumerate(numbers):
        losses.add(elsewhere(number, torch.bfloat16 if k < 100 else torch.float32), k)
    held = losses.on_device()
    assert torch.stack(held).tolist() == numbers
    assert {loss.dtype for loss in held} == {torch.float32}
    assert losses.read(numbers) == list(enumerate(numbers))
    assert losses.on_device() == []
    assert losses.count == 150


def test_a_tensor_of_a_device_may_be_written_to_at_once() -> None:
    losses, loss = Losses(), elsewhere(1.0)
    losses.add(loss)
    loss.fill_(9.0)
    assert losses.read() == [(0, 1.0)]


def test_losses_of_host_and_device_keep_their_steps() -> None:
    losses = Losses()
    for step, loss in enumerate([elsewhere(1.0), 2.0, elsewhere(3.0), 4.0]):
        losses.add(loss, step)
    assert losses.count == 4
    assert losses.saved() == [[0, 1.0], [1, 2.0], [2, 3.0], [3, 4.0]]
    assert losses.read() == Losses.loaded(losses.saved()).read()
    losses.reset()
    assert (losses.count, losses.ever) == (0, True)


@pytest.mark.parametrize(
    "bad", [torch.ones(2), torch.ones(0), torch.ones(1, dtype=torch.complex64), "low", None, True, 10**400]
)
def test_what_is_no_loss_is_refused(bad: object) -> None:
    losses = Losses()
    with pytest.raises(ArgumentError, match="a loss must be"):
        losses.add(bad)  # type: ignore[arg-type]
    assert losses.count == 0
