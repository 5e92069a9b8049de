"""What several replicas do, on real gloo processes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import hdet
from hdet.ensemble.design import Rounds, assign
from tests.ensemble.rho import multipliers
from tests.models import batch, come_apart_, groups_of, make_optimizer, two_layer
from tests.processes import error_of, run_ranks


def train(
    scheduler: Any, model: nn.Module, steps: int, rank: int, start: int = 0, dtype: torch.dtype = torch.float64
) -> None:
    """Train with gradients averaged in a fixed order, so that runs can be compared bit for bit."""
    optimizer = scheduler.optimizer
    for t in range(start, start + steps):
        x, y = batch(t, rank)
        loss = mse_loss(model(x.to(dtype)).double(), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                share_gradient(p.grad)
        optimizer.step()
        scheduler.step(loss) if isinstance(scheduler, hdet.OneCycleLR) else scheduler.step()


def share_gradient(grad: torch.Tensor) -> None:
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad)
    grad.copy_(torch.stack(parts).mean(0))


def build(kind: str = "adam", total_steps: int = 40, **more: Any) -> tuple[nn.Sequential, Any]:
    model = two_layer()
    optimizer = make_optimizer(kind, groups_of(model))
    return model, hdet.OneCycleLR(optimizer, **{"max_lr": [0.02, 0.01, 0.03], "total_steps": total_steps, **more})


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- fan-out --------------------------------------------------------------


@pytest.mark.parametrize("three_phase", [False, True])
def test_every_replica_trains_at_its_multiple_of_the_schedule(three_phase: bool) -> None:
    rows = run_ranks(_rates, 3, three_phase)
    plain = make_optimizer("sgd", groups_of(two_layer()))
    schedule = lr_scheduler.OneCycleLR(plain, [0.02, 0.01, 0.03], 40, three_phase=three_phase)
    rho, rounds = multipliers(3, 0.25), Rounds(10, 40)
    for t in range(41):
        assigned = assign(rho, seed=9, k=rounds.index(t), knobs=3)
        expected = [group["lr"] for group in plain.param_groups]
        for rank in range(3):
            lrs, momenta = rows[rank][t]
            assert lrs == [value * m for value, m in zip(expected, assigned[rank], strict=True)], (t, rank)
            assert momenta == [group["momentum"] for group in plain.param_groups]
        if t < 40:
            plain.step()
            schedule.step()


def _rates(rank: int, three_phase: bool) -> list[Any]:
    _, scheduler = build("sgd", spread=0.25, sync_every=10, seed=9, three_phase=three_phase, auto_lr=False)
    rows = []
    for t in range(41):
        groups = scheduler.optimizer.param_groups
        rows.append(([group["lr"] for group in groups], [group["momentum"] for group in groups]))
        assert scheduler.get_last_lr() == rows[-1][0]
        if t < 40:
            scheduler.optimizer.step()
            scheduler.step()
    return rows


def test_tensor_rates_stay_the_tensors_they_were() -> None:
    assert run_ranks(_tensor_rates, 2) == [True, True]


def _tensor_rates(rank: int) -> bool:
    model = two_layer()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    lr = optimizer.param_groups[0]["lr"]
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 20, sync_every=5, decay="exponential")
    train(scheduler, model, 20, rank)
    assert isinstance(scheduler.state_dict()["_last_lr"][0], torch.Tensor)
    return optimizer.param_groups[0]["lr"] is lr


# -- spread 0 --------------------------------------------------------------


def test_without_spread_the_replicas_are_plain_ddp_bit_for_bit() -> None:
    for ours, theirs, untouched in run_ranks(_no_spread, 3):
        assert same(ours, theirs)
        assert untouched


def _no_spread(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    model, scheduler = build(spread=0.0, sync_every=4)
    train(scheduler, model, 40, rank)
    plain = two_layer()
    optimizer = make_optimizer("adam", groups_of(plain))
    train(lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01, 0.03], 40), plain, 40, rank)
    versions = [p._version for p in model.parameters()]
    scheduler.converge()
    return weights_of(model), weights_of(plain), versions == [p._version for p in model.parameters()]


def test_without_spread_replicas_that_differ_are_still_averaged() -> None:
    weights = run_ranks(_no_spread_but_different, 3)
    assert same(weights[0], weights[1])
    assert same(weights[0], weights[2])


def _no_spread_but_different(rank: int) -> list[torch.Tensor]:
    model, scheduler = build(spread=0.0, sync_every=4, auto_lr=False)
    come_apart_(model, rank)
    train(scheduler, model, 4, rank)
    return weights_of(model)


# -- converge --------------------------------------------------------------


@pytest.mark.parametrize("auto_lr", [False, True])
def test_replicas_are_equal_exactly_where_a_round_has_ended(auto_lr: bool) -> None:
    rows = run_ranks(_weights_per_step, 2, auto_lr)
    equal = [t + 1 for t, (a, b) in enumerate(zip(*rows, strict=True)) if same(a, b)]
    assert equal == [8, 16, 24, 29, 30]


def _weights_per_step(rank: int, auto_lr: bool) -> list[list[torch.Tensor]]:
    model, scheduler = build(total_steps=30, sync_every=8, auto_lr=auto_lr)
    rows = []
    for t in range(30):
        train(scheduler, model, 1, rank, start=t)
        rows.append(weights_of(model))
    return rows


def test_buffers_frozen_half_and_empty_groups() -> None:
    answers = run_ranks(_awkward_model, 3)
    for key in answers[0]:
        assert all(torch.equal(answers[0][key], answer[key]) for answer in answers[1:]), key
    assert answers[0]["mean"] == pytest.approx([2.0] * 3)
    assert answers[0]["frozen"].tolist() == [0.1] * 3  # 0.1 + 0.1 + 0.1 over 3 would not be 0.1 in every precision
    assert answers[0]["frozen_bf16"].dtype is torch.bfloat16
    assert answers[0]["fp16"].dtype is torch.float16


def _awkward_model(rank: int) -> dict[str, torch.Tensor]:
    model = nn.Module()
    model.norm = nn.BatchNorm1d(3)
    model.fp16 = nn.Parameter(torch.full((5,), 1.0 + rank).half())
    model.scalar = nn.Parameter(torch.tensor(float(rank)))
    model.strided = nn.Parameter(torch.full((4, 6), float(rank)).t())
    model.frozen = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64), requires_grad=False)
    model.frozen_bf16 = nn.Parameter(torch.full((3,), 0.1).bfloat16(), requires_grad=False)
    model.norm.running_mean.fill_(1.0 + rank)
    model.norm.num_batches_tracked.fill_(rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": trained}, {"params": [model.frozen]}, {"params": []}], lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 20, sync_every=1, model=model)
    optimizer.step()
    scheduler.step(1.0)
    assert int(model.norm.num_batches_tracked) == rank  # integers are left alone
    assert [p.item() for p in (model.scalar,)] == [1.0]
    out = {name: value.detach() for name, value in model.named_parameters()}
    return {**out, "mean": model.norm.running_mean, "var": model.norm.running_var}


def test_converge_averages_and_nothing_else() -> None:
    weights, facts = zip(*run_ranks(_converge_mid_round, 2), strict=True)
    assert same(*weights)
    assert all(fact for fact in facts)


def _converge_mid_round(rank: int) -> tuple[list[torch.Tensor], bool]:
    model, scheduler = build(sync_every=10)
    train(scheduler, model, 4, rank)
    before = scheduler.state_dict(), scheduler.multipliers, scheduler._run.losses.count, scheduler.get_last_lr()
    scheduler.converge()
    after = scheduler.state_dict(), scheduler.multipliers, scheduler._run.losses.count, scheduler.get_last_lr()
    return weights_of(model), before == after and scheduler._run.losses.count == 4


def test_consensus_lends_the_mean_and_gives_back_each_replicas_own() -> None:
    inside, facts = zip(*run_ranks(_consensus, 2), strict=True)
    assert same(*inside)
    assert facts == ([True] * 6, [True] * 6)


def _consensus(rank: int) -> tuple[list[torch.Tensor], list[bool]]:
    model, scheduler = build(sync_every=10)
    train(scheduler, model, 4, rank)
    own = weights_of(model)
    with scheduler.consensus():
        inside = weights_of(model)
        stepping = error_of(scheduler.step)
        nesting = error_of(lambda: scheduler.consensus().__enter__())
    back = same(weights_of(model), own)
    try:
        with scheduler.consensus():
            raise KeyError("from the evaluation")
    except KeyError as error:
        let_through = "from the evaluation" in str(error)
    facts = [
        back,
        not same(inside, own),
        same(weights_of(model), own),
        let_through,
        isinstance(stepping, ValueError) and "inside consensus()" in str(stepping),
        isinstance(nesting, ValueError) and "already" in str(nesting),
    ]
    return inside, facts


def test_collectives_of_a_round() -> None:
    plain, with_journal = run_ranks(_count_collectives, 2)[0]
    assert plain == {"all_gather": 1, "all_reduce": 1}
    assert with_journal == {"all_gather": 2, "all_reduce": 1}


def _count_collectives(rank: int) -> list[dict[str, int]]:
    counts: dict[str, int] = {}

    def counting(name: str) -> None:
        original = getattr(dist, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        setattr(dist, name, wrapper)

    answers = []
    records: list[Any] = []

    class Sink:
        def write(self, record: Any) -> None:
            records.append(record)

    for name in ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_object", "new_group", "reduce"):
        counting(name)
    for sink in (None, Sink() if rank == 1 else None):
        _, scheduler = build(sync_every=5, journal=sink)
        scheduler.optimizer.step()
        scheduler.step(1.0)  # meets the others
        counts.clear()
        for _ in range(4):
            assert not counts
            scheduler.optimizer.step()
            scheduler.step(torch.tensor(1.0))
        answers.append(dict(counts))
        counts.clear()
        scheduler.state_dict()
        assert not counts
    assert len(records) == (2 if rank == 1 else 0)
    return answers


# -- faults --------------------------------------------------------------


def test_a_replica_that_is_not_finite_is_left_out_and_gets_the_consensus(tmp_path: Path) -> None:
    for kind in ("loss", "weights"):
        path = tmp_path / f"{kind}.jsonl"
        weights = run_ranks(_one_fails, 3, kind, str(path))
        assert same(weights[0], weights[1])
        assert same(weights[0], weights[2])
        assert all(bool(w.isfinite().all()) for w in weights[0])
        first = hdet.read_journal(path).rounds[0]
        assert first["excluded"] == [1]
        assert first["weights"][1] == 0.0


def _one_fails(rank: int, kind: str, path: str) -> list[torch.Tensor]:
    model, scheduler = build(sync_every=4, auto_lr_start=0, journal=path)
    come_apart_(model, rank)
    for t in range(4):
        scheduler.optimizer.step()
        failing = rank == 1 and t == 2
        if failing and kind == "weights":
            with torch.no_grad():
                next(model.parameters())[0, 0] = math.inf
        scheduler.step(math.nan if failing and kind == "loss" else 1.0 + rank)
    return weights_of(model)


def test_all_not_finite_is_an_error_that_lists_every_replica_and_changes_nothing() -> None:
    for message, untouched, epoch in run_ranks(_all_fail, 2):
        assert "DivergedError" in message
        assert "replica 0: loss nan" in message
        assert "replica 1: loss inf" in message
        assert untouched
        assert epoch == 3


def _all_fail(rank: int) -> tuple[str, bool, int]:
    model, scheduler = build(sync_every=4)
    come_apart_(model, rank)
    before = weights_of(model)
    for _ in range(3):
        scheduler.step(math.nan if rank == 0 else math.inf)
    error = error_of(lambda: scheduler.step(0.0))
    return repr(error), same(weights_of(model), before), scheduler.last_epoch


DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "T": ({"sync_every": 5}, {"sync_every": 7}, ["sync_every = 5", "sync_every = 7"]),
    "total steps": ({"total_steps": 40}, {"total_steps": 50}, ["total_steps = 40", "total_steps = 50"]),
    "spread": ({"spread": 0.25}, {"spread": 0.5}, ["spread = 0.25", "spread = 0.5"]),
    "seed": ({"seed": 1}, {"seed": 2}, ["seed = 1", "seed = 2"]),
    "sigma": ({"auto_lr": hdet.Corrected(0.25)}, {"auto_lr": hdet.Corrected(0.5)}, ["sigma=0.25", "sigma=0.5"]),
    "auto_lr": ({"auto_lr": True}, {"auto_lr": False}, ["auto_lr"]),
    "decay": ({"decay": "schedule"}, {"decay": "exponential"}, ["decay"]),
    "max_lr": ({"max_lr": 0.1}, {"max_lr": 0.2}, ["disagree on max_lr,", "max_lr = 0.1", "max_lr = 0.2"]),
    "of a group": ({}, {"max_lr": [0.02, 0.01, 0.04]}, ["max_lr = [0.02, 0.01, 0.03]", "max_lr = [0.02, 0.01, 0.04]"]),
    "pct_start": ({"pct_start": 0.3}, {"pct_start": 0.31}, ["disagree on pct_start,", "pct_start = 0.31"]),
    "div_factor": ({"div_factor": 25}, {"div_factor": 20.0}, ["div_factor = 25.0", "div_factor = 20.0"]),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_replicas_that_are_set_up_differently(case: str) -> None:
    first, second, words = DISAGREEMENTS[case]
    messages = run_ranks(_first_step_error, 2, first, second)
    for message in messages:
        assert "DisagreementError" in message
        assert "rank 0" in message
        assert "rank 1" in message
        assert all(word in message for word in words), message


def _first_step_error(rank: int, first: dict[str, Any], second: dict[str, Any]) -> str:
    arguments = {"total_steps": 40, "sync_every": 5, **(first if rank == 0 else second)}
    _, scheduler = build(**arguments)
    return repr(error_of(lambda: scheduler.step(1.0)))


def test_replicas_with_a_checkpoint_are_set_up_alike_by_it() -> None:
    assert run_ranks(_other_rates_and_a_checkpoint, 2) == [6, 6]


def _other_rates_and_a_checkpoint(rank: int) -> int:
    _, saved = build(sync_every=5, div_factor=25 if rank else 25.0)  # equal numbers
    for _ in range(5):
        saved.step(1.0)
    state, optimizer = saved.state_dict(), saved.optimizer.state_dict()
    _, scheduler = build(sync_every=5, pct_start=0.3 + 0.01 * rank)
    scheduler.load_state_dict(state)
    scheduler.optimizer.load_state_dict(optimizer)
    scheduler.step(1.0)
    return int(scheduler.last_epoch)


def test_replicas_with_other_parameters() -> None:
    for message in run_ranks(_other_shapes, 2):
        assert "rank 0: tensor 0 of the model = parameter (3, 4)" in message
        assert "rank 1: tensor 0 of the model = parameter (4, 3)" in message


def _other_shapes(rank: int) -> str:
    model = nn.Linear(4, 3) if rank == 0 else nn.Linear(3, 4)
    scheduler = hdet.OneCycleLR(torch.optim.Adam(model.parameters()), 0.1, 20)
    return str(error_of(lambda: scheduler.step(1.0)))


def test_a_loss_that_some_replica_does_not_give() -> None:
    for message in run_ranks(_missing_loss, 2):
        assert "rank 0: loss = given" in message
        assert "rank 1: loss = missing" in message


def _missing_loss(rank: int) -> str:
    _, scheduler = build(sync_every=3)
    losses = [1.0] if rank == 0 else []
    scheduler.step(*losses)
    scheduler.step(*losses)
    return str(error_of(lambda: scheduler.step(*losses)))


def test_replicas_at_another_step_or_in_another_call() -> None:
    for message in run_ranks(_out_of_step, 2):
        assert "rank 0: call = step(), at the end of a round" in message
        assert "rank 1: call = converge()" in message


def _out_of_step(rank: int) -> str:
    _, scheduler = build(sync_every=3)
    scheduler.step(1.0)
    if rank == 1:
        return str(error_of(scheduler.converge))
    scheduler.step(1.0)
    return str(error_of(lambda: scheduler.step(1.0)))


@pytest.mark.slow
def test_a_replica_that_never_arrives_is_bounded_by_the_time_out() -> None:
    messages = run_ranks(_absent, 2, group_timeout=3.0)
    assert "LostReplicaError" in messages[0]
    assert "round 1, at step 6" in messages[0]


def _absent(rank: int) -> str:
    _, scheduler = build(sync_every=3)
    for _ in range(5):
        scheduler.step(1.0)
    if rank == 1:
        torch.distributed.distributed_c10d._get_default_store().wait(["timed out"])
        return ""
    message = repr(error_of(lambda: scheduler.step(1.0)))
    torch.distributed.distributed_c10d._get_default_store().set("timed out", "1")
    return message


def test_losses_may_be_missing_everywhere() -> None:
    for factors, velocity in run_ranks(_no_losses, 2):
        assert factors == [1.0] * 3
        assert velocity == [0.0] * 3


def _no_losses(rank: int) -> tuple[list[float], list[float]]:
    _, scheduler = build(sync_every=3, auto_lr_start=0)
    for _ in range(40):
        scheduler.optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()["hdet"]
    return state["learned"], state["controller_state"][0][1]


def test_sharded_parameters_are_refused() -> None:
    for message in run_ranks(_sharded, 2):
        assert "ShardedParametersError" in message
        assert "DTensor" in message


def _sharded(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    scheduler = hdet.OneCycleLR(torch.optim.SGD([weight], lr=0.1, momentum=0.9), 0.1, 20)
    return repr(error_of(lambda: scheduler.step(1.0)))


# -- other people's loops --------------------------------------------------------------


def test_built_before_the_process_group_exists() -> None:
    rates = run_ranks(_built_early, 2)
    assert rates[0] < rates[1]


def _built_early(rank: int) -> float:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    _, scheduler = build(sync_every=4, spread=0.5)
    assert scheduler.multipliers == [1.0] * 3
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    scheduler.optimizer.step()
    scheduler.step(1.0)
    return float(scheduler.get_last_lr()[0])


def test_a_state_has_the_base_rate_and_is_equal_on_all_ranks() -> None:
    states, bases, own = zip(*run_ranks(_saved_in_a_round, 2), strict=True)
    assert states[0] == states[1] == bases[0] == bases[1]
    assert own[0] != own[1]


def _saved_in_a_round(rank: int) -> tuple[list[float], list[float], list[float]]:
    _, scheduler = build(sync_every=4, spread=0.5)
    scheduler.optimizer.step()
    scheduler.step(1.0)
    rows = scheduler.state_dict()["_last_lr"], scheduler.base_lrs_now, scheduler.get_last_lr()
    return tuple([float(rate) for rate in row] for row in rows)  # type: ignore[return-value]


def test_stepped_several_times_per_optimizer_step_with_the_same_loss() -> None:
    """As Accelerate does: rounds are counted by scheduler steps."""
    assert run_ranks(_accelerate_like, 2) == [[2, 4, 6, 8, 10]] * 2


def _accelerate_like(rank: int) -> list[int]:
    model, scheduler = build(total_steps=20, sync_every=4)
    equal = []
    for t in range(10):
        scheduler.optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * rank)
        for _ in range(2):
            scheduler.step(loss=1.0 + rank)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, weights_of(model))
        if same(*gathered):
            equal.append(t + 1)
    return equal


def test_inside_sequential_lr() -> None:
    assert run_ranks(_sequential, 2) == [[True] * 3, [True] * 3]


def _sequential(rank: int) -> list[bool]:
    model = two_layer()
    optimizer = make_optimizer("sgd", groups_of(model))
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    one_cycle = hdet.OneCycleLR(optimizer, 0.02, 20, sync_every=6, spread=0.5)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm_up, one_cycle], milestones=[5])
    spread, equal = [], []
    for t in range(20):
        lrs: list[Any] = [None, None]
        dist.all_gather_object(lrs, optimizer.param_groups[0]["lr"])
        spread.append(lrs[0] != lrs[1])
        x, y = batch(t, rank)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            share_gradient(p.grad)  # type: ignore[arg-type]
        optimizer.step()
        one_cycle.observe(loss)
        scheduler.step()
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, weights_of(model))
        equal.append(same(*gathered))
    return [not any(spread[:5]), all(spread[5:]), equal[10] and not equal[9] and not equal[8]]


@pytest.mark.covers("frameworks", "plain loop, replicas", "DDP", "fp32")
def test_ddp_with_gradient_accumulation_and_batch_norm() -> None:
    weights = run_ranks(_accumulation, 2)
    assert all(same(weights[0][key], weights[1][key]) for key in ("parameters", "buffers"))


def _accumulation(rank: int) -> dict[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hdet.OneCycleLR(optimizer, 0.01, epochs=2, steps_per_epoch=5, sync_every=3, model=ddp)
    for t in range(10):
        for micro in range(2):
            x, y = batch(2 * t + micro, rank)
            loss = mse_loss(ddp(x.float()), y.float())
            (loss / 2).backward()
            scheduler.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    floats = [b.clone() for b in model.buffers() if b.is_floating_point()]
    return {"parameters": weights_of(model), "buffers": floats}


# -- state --------------------------------------------------------------


def test_state_is_the_same_on_every_rank_and_needs_no_other_rank() -> None:
    states = run_ranks(_state_mid_round, 3)
    assert states[0] == states[1] == states[2]


def _state_mid_round(rank: int) -> Any:
    model, scheduler = build(sync_every=5, auto_lr_start=5)
    train(scheduler, model, 13, rank)
    return scheduler.state_dict() if rank != 1 else copy.deepcopy(scheduler.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["scheduler first", "optimizer first"])
@pytest.mark.parametrize("decay", ["schedule", "exponential"])
def test_resume_at_a_round_boundary_is_bit_for_bit(tmp_path: Path, order: str, decay: str) -> None:
    whole = run_ranks(_train_through, 3, decay)
    run_ranks(_train_and_save, 3, decay, 20, str(tmp_path))
    resumed = run_ranks(_load_and_train, 3, decay, 20, str(tmp_path), order)
    for a, b in zip(whole, resumed, strict=True):
        assert same(a[0], b[0])
        assert a[1] == b[1]


def _train_through(rank: int, decay: str) -> tuple[list[torch.Tensor], Any]:
    model, scheduler = build(sync_every=5, auto_lr_start=5, decay=decay, spread=0.3)
    train(scheduler, model, 40, rank)
    return weights_of(model), scheduler.state_dict()


def _train_and_save(rank: int, decay: str, steps: int, folder: str) -> None:
    model, scheduler = build(sync_every=5, auto_lr_start=5, decay=decay, spread=0.3)
    train(scheduler, model, steps, rank)
    if rank == 0:
        saved = {"model": model.state_dict(), "optimizer": scheduler.optimizer.state_dict()}
        torch.save({**saved, "scheduler": scheduler.state_dict()}, Path(folder) / "rank0.pt")


def _load_and_train(rank: int, decay: str, at: int, folder: str, order: str) -> tuple[list[torch.Tensor], Any]:
    model, scheduler = build()  # the constructor's values are overridden
    saved = torch.load(Path(folder) / "rank0.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    loads = [(scheduler, saved["scheduler"]), (scheduler.optimizer, saved["optimizer"])]
    for target, state in loads if order == "scheduler first" else loads[::-1]:
        target.load_state_dict(state)
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    assert rates == scheduler.get_last_lr()
    base = scheduler.base_lrs_now
    assert rates == [b * m for b, m in zip(base, scheduler.multipliers, strict=True)]
    train(scheduler, model, 40 - at, rank, start=at)
    return weights_of(model), scheduler.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1)])
def test_resume_at_another_number_of_replicas(tmp_path: Path, before: int, after: int) -> None:
    run_ranks(_train_and_save, before, "schedule", 20, str(tmp_path))
    answers = run_ranks(_load_and_train, after, "schedule", 20, str(tmp_path), "optimizer first")
    assert all(same(answers[0][0], answer[0]) for answer in answers)
    assert all(answers[0][1] == answer[1] for answer in answers)


def test_resume_inside_a_round_keeps_the_round_and_says_so(tmp_path: Path) -> None:
    run_ranks(_train_and_save, 2, "schedule", 13, str(tmp_path))
    answers = run_ranks(_resume_inside, 2, str(tmp_path))
    assert [len(answer[0]) for answer in answers] == [1, 0], "said once"
    assert "resumed inside round 2, at step 13" in answers[0][0][0]
    for _, multipliers_, ends, count, resume in answers:
        assert multipliers_
        assert ends == [15, 20]
        assert count == 0
        assert resume in (None, (13, True))


def _resume_inside(rank: int, folder: str) -> tuple[list[str], bool, list[int], int, Any]:
    import warnings

    path = Path(folder) / f"journal-{rank}.jsonl"
    model, scheduler = build(journal=path)
    saved = torch.load(Path(folder) / "rank0.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    scheduler.optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    expected = assign(multipliers(2, 0.3), seed=0, k=2, knobs=3)[rank]
    kept, count = scheduler.multipliers == expected, scheduler._run.losses.count
    equal = []
    said: list[str] = []
    for t in range(13, 22):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(scheduler, model, 1, rank, start=t)
        said += [str(w.message) for w in caught if w.category is hdet.ResumeWarning]
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, weights_of(model))
        if same(*gathered):
            equal.append(t + 1)
    resumes = hdet.read_journal(path).resumes if rank == 0 else []
    return said, kept, equal, count, (resumes[0]["step"], resumes[0]["mid_round"]) if resumes else None


# -- found by trying frameworks ------------------------------------------------------------------------------------


def test_masks_with_infinities_are_no_divergence(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for mask, broken in run_ranks(_causal_mask, 2, str(path)):
        assert mask == [[0.0, -math.inf], [0.0, 0.0]]
        assert "DivergedError" in broken  # a buffer that becomes infinite later does count
    assert all(math.isfinite(row["divergence"]) for row in hdet.read_journal(path).rounds[0]["replicas"])


def _causal_mask(rank: int, path: str) -> tuple[list[list[float]], str]:
    model = two_layer()
    model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    model.register_buffer("running", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleLR(optimizer, 0.02, 40, sync_every=2, model=model, journal=path)
    train(scheduler, model, 2, rank)
    model.mask = torch.full((2, 2), -math.inf).triu(1)  # made anew, as some models do at every forward
    train(scheduler, model, 2, rank, start=2)
    model.running.fill_(math.inf)
    scheduler.step(1.0)
    return model.mask.tolist(), repr(error_of(lambda: scheduler.step(1.0)))


def test_an_optimizer_that_swaps_its_parameters_for_partitions_is_refused() -> None:
    for message in run_ranks(_partitioned, 2):
        assert "ShardedParametersError" in message
        assert "partitions, of which each rank has its own" in message  # tests/test_frameworks.py: whose they are


def _partitioned(rank: int) -> str:
    model, scheduler = build()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    scheduler.optimizer.param_groups[0]["params"] = [flat.chunk(2)[rank].clone()]
    return repr(error_of(lambda: scheduler.step(1.0)))


def test_torchs_zero_optimizer_is_told_that_there_is_no_ensemble() -> None:
    for text in run_ranks(_zero_redundancy, 2):
        assert "there is no ensemble" in text


def _zero_redundancy(rank: int) -> str:
    import warnings

    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(two_layer().parameters(), torch.optim.Adam, lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.02, 40, cycle_momentum=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step(1.0)
    return " ".join(str(w.message) for w in caught)


def test_a_journal_that_cannot_be_written_does_not_stop_one_rank_alone() -> None:
    assert run_ranks(_unwritable_journal, 2) == [6, 6]


def _unwritable_journal(rank: int) -> int:
    class Full:
        def write(self, record: Any) -> None:
            raise OSError("no space left")

    model, scheduler = build(sync_every=2, journal=Full())
    train(scheduler, model, 6, rank)
    return scheduler.last_epoch  # type: ignore[no-any-return]


def test_groups_that_share_one_rate_tensor_are_spread_alike() -> None:
    rows = run_ranks(_shared_tensor, 2)
    assert rows[0] != rows[1]
    for first, second, rate in rows:
        assert first == second
        assert rate == pytest.approx(1.0)


def _shared_tensor(rank: int) -> tuple[float, float, float]:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1), momentum=0.9)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 40, sync_every=1, spread=0.5)
    for _ in range(3):
        scheduler.step(1.0)
    first, second = scheduler.multipliers
    return first, second, float(optimizer.param_groups[0]["lr"]) / (float(scheduler.base_lrs_now[0]) * first)


@pytest.mark.slow
def test_checkpoint_through_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """Its keys are the flattened state's: they must not depend on progress or on the constructor."""
    run_ranks(_save_distributed, 2, str(tmp_path))
    for loaded, saved in run_ranks(_load_distributed, 2, str(tmp_path)):
        assert loaded == saved


def _save_distributed(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model, scheduler = build(sync_every=5, auto_lr_start=5, auto_lr=hdet.Corrected(sigma=0.05))
    train(scheduler, model, 10, rank)
    dcp.save({"scheduler": scheduler.state_dict()}, checkpoint_id=f"{folder}/dcp")
    torch.save(scheduler.state_dict(), f"{folder}/rank{rank}.pt")


def _load_distributed(rank: int, folder: str) -> tuple[Any, Any]:
    import torch.distributed.checkpoint as dcp

    _, scheduler = build(auto_lr=False)
    state = {"scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    scheduler.load_state_dict(state["scheduler"])
    return scheduler.state_dict(), torch.load(f"{folder}/rank{rank}.pt", weights_only=True)


def test_moments_that_are_not_finite_are_forgotten_with_the_replica_that_was_left_out() -> None:
    assert run_ranks(_moments, 2) == [(3, True), (0, True)]


def _moments(rank: int) -> tuple[int, bool]:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p], lr=0.1)
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 40, sync_every=2)
    for _ in range(2):
        p.grad = torch.full_like(p, math.inf if rank == 1 else 1.0)
        optimizer.step()
        scheduler.step(1.0)
    return len(optimizer.state[p]), bool(p.isfinite().all())
