"""torch.distributed.checkpoint: sharded runs that go on in worlds of other sizes, and saving inside a round."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hdet
from tests.processes import run_ranks
from tests.sharded_nets import Net, mesh_of, sharded, train, whole

STEPS = 60
STRETCHES = [(4, range(20)), (2, range(20, 40)), (4, range(40, STEPS))]
"""Ranks and steps."""


def _built(model: Net, journal: Path | None = None) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    return optimizer, hdet.auto(optimizer, total_steps=STEPS, journal=journal)


def _stretch(rank: int, folder: Path, world: int, steps: range) -> tuple[list[Tensor], list[float]]:
    """Some steps of a run that begins from what the stretch before it has saved, and saves."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(Net(), mesh_of(world))
    optimizer, scheduler = _built(model)

    def saved() -> dict[str, Any]:
        weights, memory = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": memory, "scheduler": scheduler}

    if steps.start:
        state = saved()
        dcp.load(state, checkpoint_id=folder / str(steps.start))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    rates = train(model, optimizer, scheduler, steps, rank, world)
    dcp.save(saved(), checkpoint_id=folder / str(steps.stop))
    return whole(model), rates


def _in_one_process() -> tuple[list[Tensor], list[float]]:
    """The same with torch's state_dict and without shards."""
    rates: list[float] = []
    states: list[Any] = []
    for _, steps in STRETCHES:
        model = Net()
        optimizer, scheduler = _built(model)
        for part, state in zip((model, optimizer, scheduler), states, strict=False):
            part.load_state_dict(state)
        rates += train(model, optimizer, scheduler, steps)
        states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, scheduler)]
    return whole(model), rates


@pytest.mark.slow
@pytest.mark.covers("frameworks", "torch.distributed.checkpoint, search", "FSDP2", "fp64")
def test_a_sharded_run_goes_on_in_worlds_of_other_sizes(tmp_path: Path) -> None:
    rates: list[float] = []
    for world, steps in STRETCHES:
        answers = run_ranks(_stretch, world, tmp_path, world, steps)
        rates += answers[0][1]
    weights, expected = _in_one_process()
    assert rates == pytest.approx(expected, rel=1e-9)
    for ours, theirs in zip(answers[0][0], weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def _saved_inside_a_round(rank: int, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The consensus, the replica's own weights afterwards, and what was written while training went on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    mesh = mesh_of(2, 2)
    model, arms = sharded(Net(), mesh["shard"]), hdet.arms(mesh, "replicate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = hdet.OneCycleLR(optimizer, 1e-2, 20, sync_every=10, spread=0.5, group=arms, model=model)
    train(model, optimizer, scheduler, range(5), rank, 4, arms.gradients)
    beside = dist.new_group(backend="gloo")  # the thread that saves must not meet those that train
    with scheduler.consensus():
        consensus = whole(model)
        state = {"model": get_model_state_dict(model)}
        written = dcp.async_save(state, checkpoint_id=folder / "inside", process_group=beside)
    own = whole(model)
    train(model, optimizer, scheduler, range(5, 8), rank, 4, arms.gradients)
    written.result()
    loaded = {"model": get_model_state_dict(model)}
    dcp.load(loaded, checkpoint_id=folder / "inside")
    set_model_state_dict(model, loaded["model"])
    return consensus, own, whole(model)


@pytest.mark.slow
@pytest.mark.covers("frameworks", "torch.distributed.checkpoint, replicas", "HSDP", "fp64")
@pytest.mark.skipif(torch.__version__ < "2.7", reason="async_save of this torch does not copy what the host holds")
def test_an_async_save_inside_a_round_stores_the_consensus(tmp_path: Path) -> None:
    for consensus, own, stored in run_ranks(_saved_inside_a_round, 4, tmp_path):
        assert all(map(torch.equal, consensus, stored))
        assert not torch.equal(consensus[0], own[0])


def test_a_step_that_torch_makes_before_it_loads_is_none(tmp_path: Path) -> None:
    """To know the optimizer's state, ``get_state_dict`` makes a step at rate 0; the weights are loaded after it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = Net()
    optimizer, scheduler = _built(model)
    train(model, optimizer, scheduler, range(12))
    weights, memory = copy.deepcopy(get_state_dict(model, optimizer))
    saved = scheduler.state_dict()
    found = []
    for first in (True, False):
        model = Net()
        optimizer, scheduler = _built(model, tmp_path / f"{first}.jsonl")
        if first:
            scheduler.load_state_dict(saved)
        get_state_dict(model, optimizer)
        own = copy.deepcopy(memory)  # torch's optimizer takes the tensors themselves
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=own)
        if not first:
            scheduler.load_state_dict(saved)
        rates = train(model, optimizer, scheduler, range(12, STEPS))
        found.append(
            (rates, [(r["step"], r["learned"]) for r in hdet.read_journal(tmp_path / f"{first}.jsonl").rounds])
        )
    assert found[0] == found[1]
