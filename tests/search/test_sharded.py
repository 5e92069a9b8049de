"""``auto`` on sharded models: the same run as on a whole one, in float64, on every mesh."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import hdet
from hdet.rollback.snapshots import Snapshots
from tests.processes import error_of, run_ranks
from tests.sharded_nets import Net, Ran, batch_of, found, loss_of, mesh_of, part_of, sharded, train

LOW, HIGH = 1e-7, 1e3
SHORT = 60
DECIDED = ("step", "event", "rolled_back_to", "why")


class Case(NamedTuple):
    guess: float
    steps: int
    shape: tuple[int, ...]
    by_arms: bool = False


CASES = [Case(HIGH, 60, (4,)), Case(LOW, 60, (2, 2), by_arms=True), Case(LOW, 40, (4,)), Case(HIGH, 40, (2, 2))]


def _all_meshes(rank: int, folder: Path) -> list[Ran]:
    runs = []
    for number, case in enumerate(CASES):
        mesh = mesh_of(*case.shape)
        group = {"group": hdet.arms(mesh, "replicate")} if case.by_arms else {}
        journal = folder / f"{number}.jsonl"
        runs.append(found(sharded(Net(), mesh), case.guess, case.steps, journal, rank, 4, **group))
    return runs


def _agree(ran: Ran, plain: Ran) -> None:
    for ours, theirs in zip(ran.weights, plain.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert ran.rates == pytest.approx(plain.rates, rel=1e-9)
    for now, then in zip(ran.rounds, plain.rounds, strict=bool(ran.rounds)):  # on the rank that writes the journal
        assert [now[name] for name in DECIDED] == [then[name] for name in DECIDED]
        for name in ("learned", "estimated_rate", "base"):
            assert now[name] == pytest.approx(then[name], rel=1e-9, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.covers("frameworks", "plain loop, search", "FSDP2", "fp64")
@pytest.mark.covers("frameworks", "plain loop, search", "HSDP", "fp64")
def test_a_sharded_run_is_the_run_of_one_process(tmp_path: Path) -> None:
    plain = [found(Net(), case.guess, case.steps, tmp_path / f"plain {k}.jsonl") for k, case in enumerate(CASES)]
    assert any(r["event"] == "restarted" for r in plain[0].rounds)  # going back: test_going_back.py
    for runs in run_ranks(_all_meshes, 4, tmp_path):
        for ran, whole_run in zip(runs, plain, strict=True):
            _agree(ran, whole_run)


def _tensor_parallel(rank: int, folder: Path) -> list[Ran]:
    """Layers split over all ranks; then split over two, and what each rank has of them sharded over ``dp``."""
    from torch.distributed.fsdp import fully_shard

    alone = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _split(Block(), both["tp"])
    fully_shard(model, mesh=both["dp"])
    return [
        found(_split(Block(), alone), HIGH, 40, folder / "tp.jsonl"),
        found(model, HIGH, 40, folder / "both.jsonl", both["dp"].get_local_rank(), 2),
    ]


def _split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor import parallel as tp

    split = {
        "enter": tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
        "norm": tp.SequenceParallel(sequence_dim=0),
        "up": tp.ColwiseParallel(input_layouts=Shard(0)),
        "down": tp.RowwiseParallel(),
    }
    return tp.parallelize_module(model, mesh, split)


class Block(nn.Module):
    """A norm whose weights are whole on every rank, though each rank sees a part of its gradients, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 1)
        self.enter = nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(self.norm(self.enter(x)))))
        return made * 1.0  # FSDP warns of views


@pytest.mark.slow
@pytest.mark.covers("frameworks", "plain loop, search", "tensor parallel", "fp64")
def test_tensor_parallel_weights(tmp_path: Path) -> None:
    plain = found(Block(), HIGH, 40, tmp_path / "plain.jsonl")
    for runs in run_ranks(_tensor_parallel, 4, tmp_path):
        for ran in runs:
            _agree(ran, plain)


def _copies(rank: int, mesh_size: int) -> int:
    """Bytes that the scheduler holds on this rank: what is freed with it."""
    model = Net(width=160)
    model = sharded(model, mesh_of(mesh_size)) if mesh_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.auto(optimizer, total_steps=100)
    train(model, optimizer, scheduler, range(14), rank, mesh_size)
    with_it = _living()
    del scheduler
    return with_it - _living()


def _living() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _edges(rank: int) -> dict[str, Any]:
    lowered = _lowered(rank, param_dtype=torch.bfloat16)
    return {"bytes": _copies(rank, 4), "errors": _refused(rank), "bfloat16": lowered, "put back": _put_back()}


def _put_back() -> bool:
    """What the optimizer has forgotten meanwhile comes back in shards."""
    model, snapshots = sharded(Net(), mesh_of(4)), Snapshots()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of(model, batch_of(0)).backward()
    optimizer.step()
    snapshots.keep(0, optimizer, model)
    before = [optimizer.state[p]["exp_avg"] for p in model.body.parameters() if p.requires_grad]
    optimizer.state.clear()
    snapshots.roll_back_(0, optimizer, model)
    after = [optimizer.state[p]["exp_avg"] for p in model.body.parameters() if p.requires_grad]
    return all(torch.equal(now.full_tensor(), then.full_tensor()) for now, then in zip(after, before, strict=True))


def _refused(rank: int) -> dict[str, str]:
    """What is said where a set-up cannot work."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    mesh = mesh_of(4)
    model = sharded(Net(), mesh)

    def step(parameters: Any, make: Callable[..., Any], **more: Any) -> None:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        scheduler = make(optimizer, total_steps=100, **more)
        optimizer.step()
        scheduler.step()

    def trained(**more: Any) -> Callable[[], None]:
        return lambda: step(model.parameters(), hdet.OneCycleLR, max_lr=0.1, **more)

    def search(parameters: Any, **more: Any) -> Callable[[], None]:
        return lambda: step(parameters, hdet.auto, **more)

    def apart() -> None:
        """Two shard groups that share no gradients are two models."""
        lonely = sharded(Net(), both["shard"])
        optimizer = torch.optim.SGD(lonely.parameters(), lr=0.1)
        scheduler = hdet.auto(optimizer, total_steps=100)
        train(lonely, optimizer, scheduler, range(4), rank, 4)

    both = mesh_of(2, 2)
    flat = FullyShardedDataParallel(Net().body, device_id=torch.device("cpu"), use_orig_params=True)
    attempts: dict[str, Callable[[], object]] = {
        "trained": trained(model=model),
        "unknown model": trained(),
        "arms of whole models": search(Net().parameters(), group=hdet.arms(2)),
        "flat": search(flat.parameters()),
        "apart": apart,
    }
    return {name: str(error_of(attempt)) for name, attempt in attempts.items()}


def _lowered(rank: int, **precision: Any) -> float:
    """The loss after a short run, on a part of the batch."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded(Net(), mesh_of(4), mp_policy=MixedPrecisionPolicy(**precision, output_dtype=torch.float64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = hdet.auto(optimizer, total_steps=SHORT, group=hdet.arms(1))
    train(model, optimizer, scheduler, range(SHORT), rank, 4)
    with torch.no_grad():
        return float(loss_of(model, part_of(batch_of(100_000), rank, 4)))


def _as_high() -> float:
    """The same in one process and in float64."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    train(model, optimizer, hdet.auto(optimizer, total_steps=SHORT), range(SHORT))
    return float(loss_of(model, batch_of(100_000)).detach())


@pytest.mark.slow
@pytest.mark.covers("frameworks", "plain loop, search", "FSDP2", "bf16 MixedPrecisionPolicy")
def test_what_is_kept_is_sharded_and_what_cannot_work_is_said() -> None:
    whole_bytes = _copies(0, 1)
    answers = run_ranks(_edges, 4)
    for answer in answers:
        assert 0.2 < answer["bytes"] / whole_bytes < 0.3
        assert answer["put back"]
        errors = answer["errors"]
        assert 'hdet.arms(mesh, "replicate")' in errors["trained"]
        assert "by hdet.auto" in errors["trained"]
        assert "model=model" in errors["unknown model"]
        assert "shared gradients" in errors["arms of whole models"]
        assert "FullyShardedDataParallel" in errors["flat"]
        assert "fully_shard" in errors["flat"]
        assert "different weights" in errors["apart"]
    assert sum(answer["bfloat16"] for answer in answers) / 4 == pytest.approx(_as_high(), rel=0.1)
