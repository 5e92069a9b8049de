"""hdet.integrations.accelerate: one scheduler step per optimizer step, checkpoints, consensus; on 1 and 2 processes."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.accelerate import prepare
from tests.ranks import run_ranks
from tests.setups.problems import batch_of, final_loss, loss_of, network, quiet
from tests.setups.runs import searching

accelerate = pytest.importorskip("accelerate")

STEPS = 100
GUESS = 1e-4
"""A hundredth of what does well."""
SAMPLES, SIZE = 4096, 8


def accelerator_of(rank: int = 0, size: int = 1, accumulate: int = 1, split_batches: bool = False) -> Any:
    """On the process group that is there; Accelerate reads its own place from the environment."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if size > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    loading = accelerate.DataLoaderConfiguration(split_batches=split_batches)
    made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=loading)
    assert made.num_processes == size
    return made


class Loop:
    """A training script on Accelerate. ``built``: whether the scheduler is, before or after ``accelerator.prepare``."""

    def __init__(self, accelerator: Any, steps: int = STEPS, built: str = "before", **options: Any) -> None:
        self.accelerator = accelerator
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=GUESS)
        loader = DataLoader(TensorDataset(*batch_of(0, SAMPLES)), batch_size=SIZE)

        def scheduler_of(model: Any, optimizer: Any) -> Any:
            if "max_lr" in options:
                return hdet.OneCycleLR(optimizer, total_steps=steps, **options)
            return searching(model, optimizer, steps, "OneCycleLR", **options)

        scheduler = scheduler_of(model, optimizer) if built == "before" else None
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.scheduler = prepare(accelerator, scheduler or scheduler_of(self.model, self.optimizer))

    def train(self, batches: int) -> list[int]:
        """The scheduler's step after each batch."""
        counts = []
        for _, batch in zip(range(batches), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step(loss)
                self.optimizer.zero_grad()
            counts.append(self.scheduler.last_epoch)
        return counts

    @property
    def weights(self) -> list[list[float]]:
        return [p.detach().flatten().tolist() for p in self.model.parameters()]


@cache
def in_a_plain_loop(batches: int) -> float:
    """The final loss without Accelerate, in one process; ``batches`` of them make a step."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=GUESS)
    scheduler = searching(model, optimizer, STEPS, "OneCycleLR")
    x, y = batch_of(0, SAMPLES)
    for t in range(STEPS):
        part = slice(t * batches * SIZE, (t + 1) * batches * SIZE)
        optimizer.zero_grad()
        loss = loss_of(model, (x[part], y[part]))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
    return final_loss(model)


@pytest.mark.covers("frameworks", "Accelerate, probed", "one process", "fp32")
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_process_ends_where_the_plain_loop_ends(accumulate: int, built: str) -> None:
    loop = Loop(accelerator_of(accumulate=accumulate), built=built)
    loop.train(STEPS * accumulate)
    assert final_loss(loop.model) == pytest.approx(in_a_plain_loop(accumulate), rel=1e-3)


@pytest.mark.covers("frameworks", "Accelerate, probed", "DDP", "fp32")
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("split_batches", [False, True])
def test_two_processes_end_where_the_plain_loop_ends(split_batches: bool, built: str) -> None:
    losses = run_ranks(_trained, 2, split_batches, built)
    assert losses[0] == losses[1] == pytest.approx(in_a_plain_loop(1 if split_batches else 2), rel=1e-3)


def _trained(rank: int, split_batches: bool, built: str) -> float:
    with quiet():
        loop = Loop(accelerator_of(rank, 2, split_batches=split_batches), built=built)
        loop.train(STEPS)
        return final_loss(loop.accelerator.unwrap_model(loop.model))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_process_steps_with_the_optimizer(accumulate: int) -> None:
    with quiet():
        loop = Loop(accelerator_of(accumulate=accumulate))
        assert loop.train(12) == [n // accumulate for n in range(1, 13)]


@pytest.mark.parametrize(("accumulate", "split_batches"), [(1, False), (1, True), (4, False)])
def test_two_processes_step_once_per_optimizer_step(accumulate: int, split_batches: bool) -> None:
    rows = run_ranks(_two, 2, accumulate, split_batches)
    assert [counts for counts, _ in rows] == [[n // accumulate for n in range(1, 13)]] * 2
    assert rows[0][1] == rows[1][1]  # a probed run: one model


def _two(rank: int, accumulate: int, split_batches: bool) -> tuple[list[int], list[list[float]]]:
    with quiet():
        loop = Loop(accelerator_of(rank, 2, accumulate, split_batches))
        return loop.train(12), loop.weights


def test_losses_of_all_batches_count() -> None:
    with quiet():
        loop = Loop(accelerator_of(accumulate=4))
        loop.train(3)
    assert loop.scheduler.scheduler._run.meter.count == 3


@pytest.mark.parametrize("size", [1, 2])
def test_a_saved_state_holds_the_search(size: int, tmp_path: Path) -> None:
    rows = [_resumed(0, 1, tmp_path)] if size == 1 else run_ranks(_resumed, 2, 2, tmp_path)
    for before, after, saved, loaded in rows:
        assert saved == loaded
        assert after == before + 4


def _resumed(rank: int, size: int, folder: Path) -> tuple[int, int, Any, Any]:
    with quiet():
        first = Loop(accelerator_of(rank, size))
        first.train(20)
        first.accelerator.save_state(str(folder / "state"))
        again = Loop(accelerator_of(rank, size))
        again.accelerator.load_state(str(folder / "state"))
        before, found = again.scheduler.last_epoch, again.scheduler.state_dict()
        again.train(4)
        return before, again.scheduler.last_epoch, first.scheduler.state_dict()["hdet"], found["hdet"]


@pytest.mark.covers("frameworks", "Accelerate, trained", "DDP", "fp32")
def test_consensus_shows_the_mean_of_replicas_that_train() -> None:
    rows = run_ranks(_consensus, 2)
    (own, shown, rate), (other, shown_there, other_rate) = rows
    assert own != other  # inside a round
    assert shown == shown_there
    assert rate != other_rate


def _consensus(rank: int) -> tuple[Any, Any, float]:
    with quiet():
        loop = Loop(accelerator_of(rank, 2), max_lr=1e-2, sync_every=10)
        loop.train(13)
        with loop.scheduler.consensus():
            shown = loop.weights
        return loop.weights, shown, loop.scheduler.get_last_lr()[0]


def test_an_ensemble_is_taken_as_well() -> None:
    with quiet():
        accelerator = accelerator_of(accumulate=2)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = prepare(accelerator, hdet.Ensemble(optimizer, sync_every=2))
        model, optimizer = accelerator.prepare(model, optimizer)
        for t in range(6):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch_of(t))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step(loss)
                optimizer.zero_grad()
        assert scheduler.state_dict()["step"] == 3
        assert list(scheduler.base_values) == ["lr[0]"]


def test_it_is_prepared_once() -> None:
    with quiet():
        loop = Loop(accelerator_of())
        assert prepare(loop.accelerator, loop.scheduler) is loop.scheduler
        assert loop.accelerator.prepare(loop.scheduler) is loop.scheduler
        assert loop.accelerator._schedulers == [loop.scheduler]


def test_bad_input_is_refused() -> None:
    accelerator = accelerator_of()
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    ours = hdet.OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.raises(hdet.ArgumentError, match=r"accelerate\.Accelerator"):
        prepare(ours, accelerator)
    with pytest.raises(hdet.ArgumentError, match="give other schedulers"):
        prepare(accelerator, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    with pytest.raises(hdet.ArgumentError, match="leave the scheduler out there"):
        prepare(accelerator, accelerator.prepare(ours))


def test_engines_that_step_the_scheduler_are_refused() -> None:
    class Engine:
        sync_gradients = True
        distributed_type = accelerate.DistributedType.DEEPSPEED

        def prepare_scheduler(self, scheduler: Any) -> Any:
            raise AssertionError

    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(hdet.ArgumentError, match="DEEPSPEED"):
        prepare(Engine(), hdet.OneCycleLR(optimizer, 0.1, total_steps=10))
