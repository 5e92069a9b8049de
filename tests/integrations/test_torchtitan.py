"""torchtitan's containers on the CPU: one search for several optimizers, with and without the loss, checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.ranks.shards import local
from tests.integrations.loops import train
from tests.problems import Records, batch_of, final_loss, loss_of, network, weights_of
from tests.processes import run_ranks

pytest.importorskip("torchtitan")

from torchtitan.components import optimizer as optimizers_of_titan

from hdet.integrations.torchtitan import AutoLR, Guard

pytestmark = pytest.mark.filterwarnings("ignore::hdet.SearchWarning")  # that no loss was given

STEPS = 100
GUESS = 1e-5


def groups(*names: str) -> Any:
    """torchtitan's config: matrices in one optimizer, the rest in another, or all in one."""
    patterns = [r"weight$", r"bias$"] if len(names) == 2 else [r".*"]
    rows = [
        optimizers_of_titan.ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": GUESS})
        for pattern, name in zip(patterns, names, strict=True)
    ]
    return optimizers_of_titan.OptimizersContainer.Config(param_groups=rows, implementation="for-loop")


class Loop:
    """What torchtitan's trainer does with model parts, optimizers and schedulers."""

    def __init__(
        self, *names: str, gives_loss: bool = False, journal: Any = None, shards: bool = False, **config: Any
    ) -> None:
        self.model, self.gives_loss = network(), gives_loss
        if shards:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizers = groups(*names).build(model_parts=[self.model])
        settings = AutoLR.Config(auto={"journal": journal}, **config)
        self.schedulers = settings.build(optimizers=self.optimizers, training_steps=STEPS)

    def train(self, steps: range) -> list[dict[str, float]]:
        seen = []
        for t in steps:
            self.optimizers.zero_grad()
            loss = loss_of(self.model, batch_of(t))
            loss.backward()
            seen.append(self.schedulers.get_metrics())
            if self.gives_loss:
                self.schedulers.observe(loss)
            self.optimizers.step()
            self.schedulers.step()
        return seen

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "lr_scheduler": self.schedulers}


@pytest.mark.covers("frameworks", "torchtitan, search", "one process", "fp32")
@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize("names", [("AdamW",), ("AdamW", "Adam")])
def test_it_ends_where_the_plain_loop_ends(names: tuple[str, ...], gives_loss: bool) -> None:
    loop = Loop(*names, gives_loss=gives_loss)
    seen = loop.train(range(STEPS))
    assert final_loss(loop.model) / by_hand(*names, gives_loss=gives_loss) == pytest.approx(1, abs=0.02)
    assert seen[-1].keys() == {f"lr/{name}" for name in names}
    assert loop.schedulers.scheduler.search.model is loop.model


def by_hand(*names: str, gives_loss: bool = True) -> float:
    """The final loss without torchtitan: matrices in one optimizer, the rest in another, or all in one."""
    model = network()
    parts = [list(model.parameters())]
    if len(names) == 2:
        parts = [[p for p in model.parameters() if (p.ndim == 2) == matrices] for matrices in (True, False)]
    optimizers = [getattr(torch.optim, name)(own, lr=GUESS) for name, own in zip(names, parts, strict=True)]
    scheduler = hdet.auto(optimizers, total_steps=STEPS)
    return train(model, optimizers, scheduler, (batch_of(t) for t in range(STEPS)), gives_loss=gives_loss)


def test_several_optimizers_have_one_factor() -> None:
    journal = Records()
    loop = Loop("AdamW", "Adam", journal=journal)
    assert all(row["lr/AdamW"] == row["lr/Adam"] for row in loop.train(range(STEPS)))
    assert len(journal.rounds) > 3
    assert len(loop.schedulers) == 1


def test_total_steps_of_the_config_come_first() -> None:
    loop = Loop("AdamW", total_steps=50)
    assert [scheduler.total_steps for scheduler in loop.schedulers] == [50]


def test_a_checkpoint_holds_the_search(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole, first, second = Loop("AdamW", "Adam"), Loop("AdamW", "Adam"), Loop("AdamW", "Adam")
    whole.train(range(20))
    first.train(range(20))
    dcp.save(first.states, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(second.states, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(weights_of(second.model), weights_of(first.model))
    assert second.schedulers.get_metrics() == first.schedulers.get_metrics()
    assert second.schedulers.state_dict()["last_epoch"] == 20
    states = [repr(loop.schedulers.state_dict()["hdet"]) for loop in (first, second)]  # NaN is not equal to itself
    assert states[0] == states[1]
    seen = second.train(range(20, STEPS))
    assert final_loss(second.model) / by_hand("AdamW", "Adam", gives_loss=False) == pytest.approx(1, abs=0.2)
    assert seen[-1]["lr/Adam"] < max(row["lr/Adam"] for row in seen)


@pytest.mark.parametrize("cut", [3, 12, 18, 80])
def test_a_run_that_was_cut_is_the_one_that_was_not_bit_by_bit(cut: int, tmp_path: Path) -> None:
    """After the first step, inside a round, at the end of one, and in the descent."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole, again = (Loop("AdamW", "Adam", gives_loss=True) for _ in range(2))
    whole.train(range(cut))
    dcp.save(whole.states, checkpoint_id=tmp_path, no_dist=True)
    whole.train(range(cut, STEPS))
    dcp.load(again.states, checkpoint_id=tmp_path, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hdet.ResumeWarning)
        again.train(range(cut, STEPS))
    assert torch.equal(weights_of(again.model), weights_of(whole.model))


@pytest.mark.covers("frameworks", "torchtitan, search", "FSDP2", "fp32")
def test_in_fsdp2_a_run_that_was_cut_is_the_one_that_was_not(tmp_path: Path) -> None:
    (kind, loss), (_, other) = run_ranks(_sharded, 2, tmp_path)
    assert kind == "DTensor"
    assert loss == other
    assert loss / by_hand("AdamW") == pytest.approx(1, abs=0.02)


def _sharded(rank: int, folder: Path) -> tuple[str, float]:
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("error", hdet.ResumeWarning)
    whole, again = (Loop("AdamW", gives_loss=True, shards=True) for _ in range(2))
    whole.train(range(12))
    dcp.save(whole.states, checkpoint_id=folder)
    whole.train(range(12, STEPS))
    dcp.load(again.states, checkpoint_id=folder)
    again.train(range(12, STEPS))
    pairs = zip(again.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(local(p), local(q)) for p, q in pairs)
    kind = type(next(whole.model.parameters())).__name__
    return kind, final_loss(whole.model)


def test_without_keep_search_it_begins_anew_and_says_so(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    first, again = (Loop("AdamW", gives_loss=True, keep_search=False) for _ in range(2))
    first.train(range(12))
    dcp.save(first.states, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(again.states, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(hdet.ResumeWarning, match="resumed at step 12"):
        again.train(range(12, 14))


@pytest.mark.parametrize("names", [("AdamW",), ("AdamW", "Adam")])
def test_loading_without_the_scheduler_searches_from_the_loaded_weights(tmp_path: Path, names: tuple[str, ...]) -> None:
    """torchtitan makes a step at rate 0 to have the optimizers' memory there, before weights are loaded."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    first, second = Loop(*names), Loop(*names)
    first.train(range(STEPS))
    kept = ("model", "optimizer")
    dcp.save({name: first.states[name] for name in kept}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({name: second.states[name] for name in kept}, checkpoint_id=tmp_path, no_dist=True)
    loaded = final_loss(second.model)
    second.train(range(3))
    assert final_loss(second.model) < 1.1 * loaded


def test_state_of_torchtitans_own_scheduler_is_refused() -> None:
    with pytest.raises(hdet.errors.ArgumentError, match="exclude_from_loading"):
        Loop("AdamW").schedulers.load_state_dict({"last_epoch": 7})


# -- a guard ----------------------------------------------------------------------------------------------------------

LAST, BAD, SPOILED = 70, 40, 55
NAMES = [("AdamW",), ("AdamW", "Adam")]


class Guarded:
    """A run under a guard, at a constant rate. A batch has a NaN, or is left out, and later on a weight has one."""

    def __init__(self, *names: str, leaves_out: bool = False, shards: bool = False, gives_loss: bool = True) -> None:
        self.model, self.leaves_out, self.gives_loss = network(), leaves_out, gives_loss
        if shards:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizers = groups(*names).build(model_parts=[self.model])
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = 3e-3
        settings = Guard.Config(warmup_steps=0, decay_ratio=0.0, guard={"check_every": 10})
        self.schedulers = settings.build(optimizers=self.optimizers, training_steps=LAST)

    def train(self, steps: range, rank: int = 0, spoiled: int | None = None) -> None:
        for t in steps:
            x, y = batch_of(2 * t + rank)
            if t == BAD and rank == 0:
                x = torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, x)
            if t == spoiled:
                with torch.no_grad():
                    local(next(self.model.parameters())).view(-1)[0] = torch.nan
            if t != BAD or not self.leaves_out:
                self.optimizers.zero_grad()
                loss = loss_of(self.model, (x, y))
                loss.backward()
                if self.gives_loss:
                    self.schedulers.observe(loss)
                self.optimizers.step()
            self.schedulers.step()

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "lr_scheduler": self.schedulers}

    @property
    def held(self) -> list[torch.Tensor]:
        """What this rank trains, and what the optimizers remember of it, step counts and all."""
        memory = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        tensors = [*self.model.parameters(), *(value for state in memory for value in state.values())]
        return [local(tensor.detach()) for tensor in tensors]


def assert_equal(one: Guarded, other: Guarded) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.held, other.held, strict=True))


@pytest.mark.covers("frameworks", "torchtitan, guard", "one process", "fp32")
@pytest.mark.filterwarnings("ignore::hdet.RollbackWarning")
@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize("names", NAMES)
def test_a_guard_leaves_a_bad_batch_out_and_rolls_back_a_bad_weight(names: tuple[str, ...], gives_loss: bool) -> None:
    with_it, without = (Guarded(*names, leaves_out=one, gives_loss=gives_loss) for one in (False, True))
    for run in (with_it, without):
        run.train(range(SPOILED - 1))
    assert_equal(with_it, without)
    assert [run.schedulers.guard.held for run in (with_it, without)] == [1, 0]
    for run in (with_it, without):
        run.train(range(SPOILED - 1, LAST), spoiled=SPOILED)
    assert with_it.schedulers.guard.rollbacks == 1
    assert all(tensor.isfinite().all() for tensor in with_it.held)
    assert final_loss(with_it.model) == pytest.approx(final_loss(without.model), rel=0.05)
    assert with_it.schedulers.get_metrics().keys() == {f"lr/{name}" for name in names}


@pytest.mark.filterwarnings("ignore::hdet.RollbackWarning")
@pytest.mark.parametrize("cut", [3, 30, 41, 58])
@pytest.mark.parametrize("names", NAMES)
def test_a_guarded_run_that_was_cut_is_the_one_that_was_not(names: tuple[str, ...], cut: int, tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole, again = (Guarded(*names) for _ in range(2))
    whole.train(range(cut), spoiled=SPOILED)
    dcp.save(whole.states, checkpoint_id=tmp_path, no_dist=True)
    whole.train(range(cut, LAST), spoiled=SPOILED)
    dcp.load(again.states, checkpoint_id=tmp_path, no_dist=True)
    again.train(range(cut, LAST), spoiled=SPOILED)
    assert whole.schedulers.guard.rollbacks == again.schedulers.guard.rollbacks == 1
    assert_equal(again, whole)


@pytest.mark.covers("frameworks", "torchtitan, guard", "FSDP2", "fp32")
@pytest.mark.parametrize("names", NAMES)
def test_a_guard_in_fsdp2(names: tuple[str, ...], tmp_path: Path) -> None:
    losses = run_ranks(_guarded_shards, 2, names, tmp_path)
    assert losses[0] == losses[1] < 0.5 * final_loss(network())


def _guarded_shards(rank: int, names: tuple[str, ...], folder: Path) -> float:
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore", hdet.RollbackWarning)
    whole, without, again = (Guarded(*names, leaves_out=one, shards=True) for one in (False, True, False))
    for run in (whole, without):
        run.train(range(48), rank)
    assert_equal(whole, without)
    dcp.save(whole.states, checkpoint_id=folder)
    dcp.load(again.states, checkpoint_id=folder)
    for run in (whole, again):
        run.train(range(48, LAST), rank, SPOILED if rank == 1 else None)
        assert run.schedulers.guard.rollbacks == 1
    assert_equal(again, whole)
    return final_loss(whole.model)


def test_a_checkpoint_without_a_guard_says_so() -> None:
    with pytest.warns(hdet.ResumeWarning, match=r"no hdet\.Guard .* starts again"):
        Guarded("AdamW").schedulers.load_state_dict({"last_epoch": 7})
