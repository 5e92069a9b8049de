"""Accelerate on 1 and 2 processes: its own ``prepare``, which steps a scheduler once for each process, and hdet's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.integrations.accelerate import keep_search, prepare
from hdet.ranks.shards import local
from tests.integrations.fsdp2 import sharding
from tests.integrations.loops import slices, train
from tests.problems import batch_of, final_loss, loss_of, network, quiet
from tests.processes import run_ranks
from tests.setup_runs import HELD

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
    """A training script on Accelerate.

    Args:
        accelerator: of the script.
        steps: of the optimizer.
        how: "theirs", which is ``accelerator.prepare``, or "ours", which is hdet's.
        built: whether the scheduler is, before or after ``accelerator.prepare``; in "theirs" it is before.
        gives_loss: whether the scheduler's step gets it.
    """

    def __init__(
        self,
        accelerator: Any,
        steps: int = STEPS,
        how: str = "ours",
        built: str = "before",
        gives_loss: bool = True,
        **options: Any,
    ) -> None:
        self.accelerator, self.gives_loss = accelerator, gives_loss
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=GUESS)
        loader = DataLoader(TensorDataset(*batch_of(0, SAMPLES)), batch_size=SIZE)
        calls = accelerator.num_processes if how == "theirs" and not accelerator.split_batches else 1

        def scheduler_of(optimizer: Any) -> Any:
            make = hdet.OneCycleLR if "max_lr" in options else hdet.auto
            return make(optimizer, **{"total_steps": calls * steps, **options})

        scheduler = scheduler_of(optimizer) if built == "before" else None
        if how == "theirs":
            prepared = accelerator.prepare(model, optimizer, loader, scheduler)
            self.model, self.optimizer, self.loader, self.scheduler = prepared
            return
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)
        self.scheduler = prepare(accelerator, scheduler or scheduler_of(self.optimizer))

    def train(self, batches: int) -> list[int]:
        """The scheduler's step after each batch."""
        counts = []
        for _, batch in zip(range(batches), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step(*([loss] if self.gives_loss else []))
                self.optimizer.zero_grad()
            counts.append(self.scheduler.scheduler.last_epoch)
        return counts

    def go(self, begin: int, end: int) -> None:
        """The batches of some steps, one each: the same ones whether a run was cut or not."""
        for t in range(begin, end):
            loss = loss_of(self.model, batch_of(self.accelerator.num_processes * t + self.accelerator.process_index))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step(loss)
            self.optimizer.zero_grad()

    @property
    def final_loss(self) -> float:
        return final_loss(self.accelerator.unwrap_model(self.model))

    @property
    def weights(self) -> list[list[float]]:
        return [local(p.detach()).flatten().tolist() for p in self.model.parameters()]


@cache
def in_a_plain_loop(batches: int, gives_loss: bool = True, again_from: int = STEPS, keeps_path: bool = True) -> float:
    """The final loss without Accelerate, in one process.

    Args:
        batches: so many of them make a step.
        gives_loss: whether the scheduler's step gets it.
        again_from: the step at which the data begin again.
        keeps_path: whether the search goes on there; if not, a new path begins.
    """
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=GUESS)
    begun, again = (slices(SAMPLES, batches * SIZE, steps) for steps in (again_from, STEPS - again_from))
    with quiet():
        scheduler = hdet.auto(optimizer, STEPS)
        if keeps_path:
            return train(model, optimizer, scheduler, chain(begun, again), gives_loss=gives_loss)
        train(model, optimizer, scheduler, begun, gives_loss=gives_loss)
        scheduler.load_state_dict(scheduler.state_dict())
        return train(model, optimizer, scheduler, again, gives_loss=gives_loss)


@pytest.mark.covers("frameworks", "Accelerate, search", "one process", "fp32")
@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize(("how", "built"), [("theirs", "before"), ("ours", "before"), ("ours", "after")])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_process_ends_where_the_plain_loop_ends(accumulate: int, how: str, built: str, gives_loss: bool) -> None:
    with quiet():
        loop = Loop(accelerator_of(accumulate=accumulate), how=how, built=built, gives_loss=gives_loss)
        loop.train(STEPS * accumulate)
        assert loop.final_loss / in_a_plain_loop(accumulate, gives_loss) == pytest.approx(1, abs=0.02)


@pytest.mark.covers("frameworks", "Accelerate, search", "DDP", "fp32")
@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize("split_batches", [False, True])
def test_two_processes_end_where_the_plain_loop_ends(split_batches: bool, gives_loss: bool) -> None:
    """By Accelerate's own ``prepare``: without ``split_batches`` two steps of the schedule for one of the optimizer."""
    (loss, counts), (other, _) = run_ranks(_trained, 2, "theirs", "before", split_batches, gives_loss)
    assert counts[:3] == ([1, 2, 3] if split_batches else [2, 4, 6])
    assert loss == other
    assert loss / in_a_plain_loop(1 if split_batches else 2, gives_loss) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("split_batches", "built"), [(False, "before"), (True, "after")])
def test_prepared_by_hdet_there_is_one_step_for_one_of_the_optimizer(split_batches: bool, built: str) -> None:
    (loss, counts), (other, _) = run_ranks(_trained, 2, "ours", built, split_batches, True)
    assert counts[:3] == [1, 2, 3]
    assert loss == other
    assert loss / in_a_plain_loop(1 if split_batches else 2) == pytest.approx(1, abs=0.02)


def _trained(rank: int, how: str, built: str, split_batches: bool, gives_loss: bool) -> tuple[float, list[int]]:
    with quiet():
        accelerator = accelerator_of(rank, 2, split_batches=split_batches)
        loop = Loop(accelerator, how=how, built=built, gives_loss=gives_loss)
        counts = loop.train(STEPS)
        return loop.final_loss, counts


@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_process_steps_with_the_optimizer(accumulate: int) -> None:
    with quiet():
        loop = Loop(accelerator_of(accumulate=accumulate))
        assert loop.train(12) == [n // accumulate for n in range(1, 13)]


@pytest.mark.parametrize(("accumulate", "split_batches"), [(1, False), (1, True), (4, False)])
def test_two_processes_step_once_per_optimizer_step(accumulate: int, split_batches: bool) -> None:
    rows = run_ranks(_two, 2, accumulate, split_batches)
    assert [counts for counts, _ in rows] == [[n // accumulate for n in range(1, 13)]] * 2
    assert rows[0][1] == rows[1][1]  # a search: one model


def _two(rank: int, accumulate: int, split_batches: bool) -> tuple[list[int], list[list[float]]]:
    with quiet():
        loop = Loop(accelerator_of(rank, 2, accumulate, split_batches))
        return loop.train(12), loop.weights


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_without_an_end_is_finished(size: int) -> None:
    """Prepared by hdet, ``finish`` counts steps of the optimizer, whatever the number of processes."""
    found = run_ranks(_finished, size, size) if size > 1 else [_finished(0, 1)]
    for loss, rates, total in found:
        assert total == 100
        assert rates[79] > HELD * max(rates)
        assert rates[-1] < 1e-3 * max(rates)
        assert loss < 2 * in_a_plain_loop(size)
    assert len({tuple(rates) for _, rates, _ in found}) == 1


def _finished(rank: int, size: int) -> tuple[float, list[float], Any]:
    with quiet():
        loop = Loop(accelerator_of(rank, size), total_steps=None)
        rates: list[float] = []
        for t in range(100):
            if t == 80:
                loop.scheduler.finish(20)
            rates.append(float(loop.optimizer.param_groups[0]["lr"]))
            loop.go(t, t + 1)
        return loop.final_loss, rates, loop.scheduler.total_steps


def test_losses_of_all_batches_count() -> None:
    with quiet():
        loop = Loop(accelerator_of(accumulate=4))
        loop.train(3)
    assert loop.scheduler.scheduler.search.losses.count == 3


@pytest.mark.parametrize("how", ["theirs", "ours"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_saved_state_holds_the_search(size: int, how: str, tmp_path: Path) -> None:
    rows = [_resumed(0, 1, how, tmp_path)] if size == 1 else run_ranks(_resumed, 2, 2, how, tmp_path)
    for steps, saved, loaded, loss in rows:
        assert repr(saved) == repr(loaded)  # NaN is not equal to itself
        assert steps == [24 * (size if how == "theirs" else 1)] * 2
        expected = in_a_plain_loop(size, again_from=24, keeps_path=how == "ours")
        assert loss / expected == pytest.approx(1, abs=0.25 if how == "theirs" and size == 2 else 0.1)


def _resumed(rank: int, size: int, how: str, folder: Path) -> tuple[list[int], Any, Any, float]:
    with quiet():
        first = Loop(accelerator_of(rank, size), how=how)
        first.train(24)
        first.accelerator.save_state(str(folder / "state"))
        again = Loop(accelerator_of(rank, size), how=how)
        again.accelerator.load_state(str(folder / "state"))
        steps = [loop.scheduler.scheduler.last_epoch for loop in (first, again)]
        found = [loop.scheduler.state_dict()["hdet"] for loop in (first, again)]
        again.train(STEPS - 24)
        return steps, found[0], found[1], again.final_loss


CUTS = (1, 12, 18, 80)
"""After the first step, inside a round, at the end of one, and in the descent."""


@pytest.mark.parametrize("how", ["theirs", "ours"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_was_cut_is_the_one_that_was_not_bit_by_bit(size: int, how: str, tmp_path: Path) -> None:
    if size == 1:
        _cut(0, 1, how, tmp_path)
    else:
        run_ranks(_cut, 2, 2, how, tmp_path)


def go_and_save(loop: Any, cuts: Sequence[int], steps: int, folder: Path) -> None:
    """To the end, with a checkpoint at each cut."""
    done = 0
    for cut in cuts:
        loop.go(done, cut)
        loop.accelerator.save_state(str(folder / str(cut)))
        done = cut
    loop.go(done, steps)


def _cut(rank: int, size: int, how: str, folder: Path, joined: Any = accelerator_of) -> None:
    whole = Loop(joined(rank, size), how=how)
    if how == "theirs":
        keep_search(whole.accelerator, whole.scheduler)
    go_and_save(whole, CUTS, STEPS, folder)
    for cut in CUTS:
        again = Loop(joined(rank, size), how=how)
        if how == "theirs":
            keep_search(again.accelerator, again.scheduler)
        again.accelerator.load_state(str(folder / str(cut)))
        with warnings.catch_warnings():
            warnings.simplefilter("error", hdet.ResumeWarning)
            again.go(cut, STEPS)
        assert again.weights == whole.weights, cut


def sharding_of(rank: int, size: int) -> Any:
    return sharding(accelerator_of(rank, size))


@pytest.mark.covers("frameworks", "Accelerate, search", "FSDP2", "fp32")
@pytest.mark.parametrize("how", ["theirs", "ours"])
def test_fsdp2_ends_where_the_plain_loop_ends(how: str) -> None:
    (loss, kind), (other, _) = run_ranks(_sharded, 2, how)
    assert kind == "DTensor"
    assert loss == other
    assert loss / in_a_plain_loop(2) == pytest.approx(1, abs=0.1)


def _sharded(rank: int, how: str) -> tuple[float, str]:
    with quiet():
        loop = Loop(sharding_of(rank, 2), how=how)
        loop.train(STEPS)
        kind = type(next(loop.model.parameters())).__name__  # a forward pass alone leaves gathered weights
        return loop.final_loss, kind


@pytest.mark.parametrize("how", ["theirs", "ours"])
def test_in_fsdp2_a_run_that_was_cut_is_the_one_that_was_not(how: str, tmp_path: Path) -> None:
    """Each rank saves the part of the search that it holds."""
    run_ranks(_cut, 2, 2, how, tmp_path, sharding_of)
    assert sorted(path.name for path in (tmp_path / "12").glob("hdet*")) == [
        "hdet_search_0_of_2.pt",
        "hdet_search_1_of_2.pt",
    ]


def test_a_search_of_other_ranks_is_left_out_with_a_warning(tmp_path: Path) -> None:
    (told,), _ = run_ranks(_without_a_part, 2, tmp_path)
    assert "resumed at step 12" in told


def _without_a_part(rank: int, folder: Path) -> list[str]:
    first, again = (Loop(sharding_of(rank, 2)) for _ in range(2))
    first.go(0, 12)
    first.accelerator.save_state(str(folder))
    (folder / f"hdet_search_{rank}_of_2.pt").rename(folder / f"hdet_search_{rank}_of_3.pt")
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.accelerator.load_state(str(folder))
        again.go(12, 14)
    return [str(one.message) for one in caught if one.category is hdet.ResumeWarning]


def test_where_the_search_was_not_kept_the_warning_says_what_keeps_it(tmp_path: Path) -> None:
    first = Loop(accelerator_of(), how="theirs")
    first.go(0, 12)
    first.accelerator.save_state(str(tmp_path))
    again = Loop(accelerator_of(), how="theirs")
    again.accelerator.load_state(str(tmp_path))
    with pytest.warns(hdet.ResumeWarning, match="In a framework, .*keep_search"):
        again.go(12, 14)


@pytest.mark.covers("frameworks", "Accelerate, replicas", "DDP", "fp32")
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


def test_a_search_on_another_schedule_is_taken_as_well() -> None:
    def cosine(optimizer: Any) -> Any:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return hdet.auto(optimizer, schedule=schedule, total_steps=STEPS)

    with quiet():
        accelerator = accelerator_of()
        model, net = network(), network()
        optimizer, own = (torch.optim.Adam(one.parameters(), lr=GUESS) for one in (model, net))
        scheduler = prepare(accelerator, cosine(optimizer))
        model, optimizer = accelerator.prepare(model, optimizer)
        for t in range(STEPS):
            loss = loss_of(model, batch_of(t))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step(loss)
            optimizer.zero_grad()
        assert scheduler.state_dict()["last_epoch"] == STEPS
        plain = train(net, own, cosine(own), (batch_of(t) for t in range(STEPS)))
        assert final_loss(model) / plain == pytest.approx(1, abs=0.02)


def test_it_is_prepared_once() -> None:
    with quiet():
        loop = Loop(accelerator_of())
        assert loop.accelerator.prepare(loop.scheduler) is loop.scheduler
        assert loop.accelerator._schedulers == [loop.scheduler]


def test_bad_input_is_refused() -> None:
    accelerator = accelerator_of()
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    ours = hdet.OneCycleLR(optimizer, 0.1, total_steps=10)
    with pytest.raises(hdet.ArgumentError, match=r"accelerate\.Accelerator"):
        prepare(ours, accelerator)
    with pytest.raises(hdet.ArgumentError, match="which takes other schedulers"):
        prepare(accelerator, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    with pytest.raises(hdet.ArgumentError, match=r"do not give it to accelerator\.prepare"):
        prepare(accelerator, accelerator.prepare(ours))
    with pytest.raises(hdet.ArgumentError, match="call it after"):
        keep_search(accelerator, ours)


@pytest.mark.covers("frameworks", "Accelerate, search", "ZeRO-1", "refused")
@pytest.mark.covers("frameworks", "Accelerate, search", "ZeRO-2", "refused")
@pytest.mark.covers("frameworks", "Accelerate, search", "ZeRO-3", "refused")
def test_engines_that_step_the_scheduler_are_refused() -> None:
    class Engine:
        sync_gradients = True
        distributed_type = accelerate.DistributedType.DEEPSPEED

        def prepare_scheduler(self, scheduler: Any) -> Any:
            raise AssertionError

    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(hdet.ArgumentError, match="DEEPSPEED"):
        prepare(Engine(), hdet.OneCycleLR(optimizer, 0.1, total_steps=10))


@pytest.mark.parametrize("how", ["theirs", "ours"])
def test_another_length_is_refused(how: str, tmp_path: Path) -> None:
    loops = [Loop(accelerator_of(), steps, how) for steps in (STEPS, 2 * STEPS)]
    if how == "theirs":
        for loop in loops:
            keep_search(loop.accelerator, loop.scheduler)
    first, other = loops
    first.go(0, 60)
    first.accelerator.save_state(str(tmp_path))
    words = rf"total_steps must be {STEPS} as in the run that was saved"
    with pytest.raises(hdet.ArgumentError, match=words):
        other.accelerator.load_state(str(tmp_path))
