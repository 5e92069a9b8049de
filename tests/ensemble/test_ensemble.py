"""Any schedule, any knob: one process, then real replicas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler

import hdet
from hdet.ensemble.converge import converge
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import Solo
from hdet.ranks.weights import NO_WEIGHTS
from tests.models import batch, groups_of, make_optimizer, two_layer
from tests.processes import error_of, run_ranks

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=25),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "step": lambda o: lr_scheduler.MultiStepLR(o, [5, 9]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 20),
    "warm-up, stable, decay": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, 0.1, total_iters=4),
            lr_scheduler.ConstantLR(o, 1.0),
            lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=8),
        ],
        [4, 12],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.95), lr_scheduler.LinearLR(o, 0.5, total_iters=6)], o
    ),
    "torch's one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, 25, cycle_momentum=False),
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def plain_history(name: str, steps: int) -> list[list[float]]:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    schedule = SCHEDULES[name](optimizer)
    rows = [rates(optimizer)]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        rows.append(rates(optimizer))
    return rows


@every_schedule
def test_one_replica_follows_the_schedule_exactly(name: str) -> None:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    ensemble = hdet.Ensemble(optimizer, SCHEDULES[name](optimizer), sync_every=4)
    rows = [rates(optimizer)]
    for _ in range(20):
        optimizer.step()
        ensemble.step(0.5)
        rows.append(rates(optimizer))
    assert rows == plain_history(name, 20)


@every_schedule
def test_replicas_spread_around_the_schedule(name: str) -> None:
    first, second = run_ranks(_spread_history, 2, name)
    expected = plain_history(name, 16)
    for a, b, base in zip(first, second, expected, strict=True):
        assert [(x + y) / 2 for x, y in zip(a, b, strict=True)] == pytest.approx(base)
        assert all(abs(x - y) == pytest.approx(0.5 * value) for x, y, value in zip(a, b, base, strict=True))


def _spread_history(rank: int, name: str) -> list[list[float]]:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    schedule = SCHEDULES[name](optimizer)
    knobs = [hdet.knobs.lr(optimizer, spread=0.25)]
    ensemble = hdet.Ensemble(optimizer, schedule, knobs, sync_every=4, controller=False)
    rows = [rates(optimizer)]
    for _ in range(16):
        optimizer.step()
        ensemble.step()
        rows.append(rates(optimizer))
    return rows


@every_schedule
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_resume_goes_on_as_if_never_stopped(name: str, optimizer_first: bool) -> None:
    def fresh() -> tuple[Optimizer, hdet.Ensemble]:
        optimizer = make_optimizer("sgd", groups_of(two_layer()))
        return optimizer, hdet.Ensemble(optimizer, SCHEDULES[name](optimizer), sync_every=4)

    optimizer, ensemble = fresh()
    for _ in range(9):
        optimizer.step()
        ensemble.step(0.5)
    saved = copy.deepcopy((optimizer.state_dict(), ensemble.state_dict()))
    optimizer, ensemble = fresh()
    loads = [(optimizer, saved[0]), (ensemble, saved[1])]
    for target, state in loads if optimizer_first else loads[::-1]:
        target.load_state_dict(state)  # type: ignore[attr-defined]
    rows = [rates(optimizer)]
    for _ in range(11):
        optimizer.step()
        ensemble.step(0.5)
        rows.append(rates(optimizer))
    assert rows == plain_history(name, 20)[9:]


def test_plateau_steps_on_a_metric_that_all_replicas_share() -> None:
    for message, after in run_ranks(_plateau, 2):
        assert "rank 0: metrics = 1\n" in message
        assert "rank 1: metrics = 2\n" in message
        assert after == pytest.approx(0.05)


def _plateau(rank: int) -> tuple[str, float]:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    ensemble = hdet.Ensemble(optimizer, schedule, sync_every=4, controller=False)
    for metric in (1.0, None, 1.0, None):
        ensemble.step(0.5, metrics=metric)
    after = ensemble.base_values["lr[0]"]
    return str(error_of(lambda: ensemble.step(0.5, metrics=1.0 + rank))), after


def test_a_run_on_a_plateau_resumes_as_if_never_stopped() -> None:
    def made(rate: float) -> tuple[lr_scheduler.ReduceLROnPlateau, hdet.Ensemble]:
        optimizer = make_optimizer("sgd", groups_of(two_layer()))
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=rate, patience=1)
        return schedule, hdet.Ensemble(optimizer, schedule, sync_every=4)

    metrics = [1.0, 1.0, None, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    (_, plain), (_, first), (schedule, second) = made(0.5), made(0.5), made(0.9)
    for metric in metrics:
        plain.step(0.5, metrics=metric)
    for metric in metrics[:3]:
        first.step(0.5, metrics=metric)
    second.load_state_dict(first.state_dict())
    for metric in metrics[3:]:
        second.step(0.5, metrics=metric)
    assert schedule.num_bad_epochs == 0
    assert second.base_values == plain.base_values
    assert plain.base_values["lr[0]"] == pytest.approx(0.1 * 0.5**3)


def test_metrics_are_for_a_plateau() -> None:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    ensemble = hdet.Ensemble(optimizer, lr_scheduler.StepLR(optimizer, 3))
    with pytest.raises(hdet.ArgumentError, match=r"ReduceLROnPlateau, but got metrics=1.0; it is a StepLR"):
        ensemble.step(0.5, metrics=1.0)


def test_hugging_face_style_lambda_and_a_schedule_without_state() -> None:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    with pytest.raises(hdet.ArgumentError, match="step"):
        hdet.Ensemble(optimizer, 7)  # type: ignore[arg-type]
    for made in (hdet.OneCycleLR(optimizer, 0.1, 20), hdet.auto(optimizer, 100)):
        with pytest.raises(hdet.ArgumentError, match=rf"{type(made).__name__}, which .*spreads the rates already"):
            hdet.Ensemble(optimizer, made)
    momentum = hdet.knobs.optimizer(optimizer, "momentum", spread=0.1, scale="logit")
    with pytest.raises(hdet.ArgumentError, match="cycle_momentum=False"):
        hdet.Ensemble(optimizer, lr_scheduler.OneCycleLR(optimizer, 0.1, 20), [momentum])
    other = make_optimizer("sgd", groups_of(two_layer()))
    with pytest.raises(hdet.ArgumentError, match="another optimizer"):
        hdet.Ensemble(optimizer, lr_scheduler.ExponentialLR(other, 0.9))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"total_steps": 0}, "total_steps"),
        ({"start": -1}, "start"),
        ({"seed": 0.5}, "seed"),
        ({"controller": "yes"}, "controller"),
        ({"signal": "loss"}, "signal"),
        ({"group": 3}, "group"),
        ({"model": 3}, "model"),
        ({"optimizer_state": "burn"}, "optimizer_state"),
        ({"knobs": []}, "at least one"),
        ({"journal": 3}, "journal"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(arguments: dict[str, Any], words: str) -> None:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    before = rates(optimizer)
    with pytest.raises(ValueError, match=words):
        hdet.Ensemble(optimizer, **arguments)
    assert rates(optimizer) == before


def test_bad_parts_are_refused() -> None:
    for make in (
        lambda: hdet.ProbeLoss(3),  # type: ignore[arg-type]
        lambda: hdet.ProbeLoss(lambda: 1.0, at="moon"),  # type: ignore[arg-type]
        lambda: hdet.Normalised(step=9.0),
        lambda: hdet.Normalised(caution=-1.0),
        lambda: hdet.Normalised(ridge=0.0),
    ):
        with pytest.raises(hdet.ArgumentError, match="must"):
            make()


def test_loss_knobs_need_isolated_gradients_and_regularisers_a_probe() -> None:
    for shared, allowed, regulariser, names in run_ranks(_refusals, 2):
        assert "share gradients" in shared
        assert "hdet.arms(n)" in shared
        assert allowed
        assert "always go to zero" in regulariser
        assert "each with a name" in names


def _refusals(rank: int) -> tuple[str, bool, str, str]:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    weight = hdet.knobs.scalar("loss_weight", 1.0, spread=0.1)
    smoothing = hdet.knobs.scalar("label_smoothing", 0.1, spread=0.05)
    shared = str(error_of(lambda: hdet.Ensemble(optimizer, knobs=[weight])))
    allowed = hdet.Ensemble(optimizer, knobs=[weight], allow_uninformative=True)["loss_weight"] != 1.0
    regulariser = str(error_of(lambda: hdet.Ensemble(optimizer, knobs=[smoothing], group=hdet.arms(2))))
    twice = str(error_of(lambda: hdet.Ensemble(optimizer, knobs=[weight, weight], allow_uninformative=True)))
    return shared, allowed, regulariser, twice


# -- the contract: every combination keeps every guarantee -----------------------------------------------------------


def make_knobs(kind: str, optimizer: Optimizer, model: nn.Module) -> list[Any]:
    if kind == "lr":
        return [hdet.knobs.lr(optimizer)]
    if kind == "update":
        return [
            hdet.knobs.lr(optimizer, scale="log"),
            hdet.knobs.optimizer(optimizer, "momentum", spread=0.2, scale="logit"),
        ]
    scalar = hdet.knobs.scalar("loss_weight", 1.0, spread=0.2, scale="log")
    return [hdet.knobs.lr(optimizer), scalar, hdet.knobs.module(model, [model[1]], "slope", spread=0.1, scale="linear")]


def make_signal(kind: str, model: nn.Module) -> Any:
    def loss_fn(m: Any, xy: Any) -> torch.Tensor:
        return mse_loss(m(xy[0]), xy[1])

    if kind == "train loss":
        return hdet.TrainLoss()
    probe = hdet.ProbeBatch(model, loss_fn, lambda k: batch(10_000 + k, 0))
    return hdet.ProbeLoss(probe, at="round_mean" if kind == "round mean" else "replica")


class Slope(nn.Tanh):
    slope = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.slope * x)


def build(case: dict[str, str], **more: Any) -> tuple[nn.Module, nn.Module, hdet.Ensemble]:
    model = two_layer()
    model[1] = Slope()
    optimizer = torch.optim.SGD([{"params": group} for group in groups_of(model)], lr=0.02, momentum=0.9)
    shared = case["gradients"] == "shared"
    group = None if shared else hdet.arms({"isolated": dist.get_world_size(), "arms of two": 2}[case["gradients"]])
    ddp = DistributedDataParallel(model, process_group=None if group is None else group.gradients)
    ensemble = hdet.Ensemble(
        optimizer,
        lr_scheduler.CosineAnnealingLR(optimizer, 40),
        make_knobs(case["knobs"], optimizer, model),
        sync_every=5,
        signal=make_signal(case["signal"], ddp),
        group=group,
        model=ddp,
        **more,
    )
    return model, ddp, ensemble


def train(ddp: nn.Module, ensemble: hdet.Ensemble, steps: int, rank: int, start: int = 0) -> None:
    for t in range(start, start + steps):
        x, y = batch(t, rank)
        loss = mse_loss(ddp(x), y)
        ensemble.optimizer.zero_grad()
        loss.backward()
        ensemble.optimizer.step()
        ensemble.step(loss)


CASES = [
    {"gradients": "shared", "knobs": "lr", "signal": "train loss"},
    {"gradients": "shared", "knobs": "update", "signal": "round mean"},
    {"gradients": "shared", "knobs": "update", "signal": "probe"},
    {"gradients": "shared", "knobs": "lr", "signal": "probe"},
    {"gradients": "isolated", "knobs": "loss", "signal": "train loss"},
    {"gradients": "isolated", "knobs": "loss", "signal": "round mean"},
    {"gradients": "isolated", "knobs": "update", "signal": "probe"},
    {"gradients": "arms of two", "knobs": "loss", "signal": "round mean"},
    {"gradients": "arms of two", "knobs": "lr", "signal": "probe"},
]
every_case = pytest.mark.parametrize("case", CASES, ids=["-".join(case.values()).replace(" ", "_") for case in CASES])


@every_case
def test_contract(case: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    answers = run_ranks(_contract, 4, case, str(path), str(tmp_path))
    for other in answers[1:]:
        assert other["state"] == answers[0]["state"], "the state is the same on every rank"
        assert other["after_failure"] == answers[0]["after_failure"]
    assert all(answer["finite"] for answer in answers), "a replica that was not finite was left out and came back"
    assert all(answer["resumed"] for answer in answers), "a resumed run goes on as if never stopped"
    assert all(answer["arm_agrees"] for answer in answers), "ranks of one arm always have the same values"
    rounds = hdet.read_journal(path).rounds
    assert [record["step"] for record in rounds] == [5, 10, 15]
    bad = {"shared": 3, "isolated": 3, "arms of two": 1}[case["gradients"]]
    assert rounds[-1]["excluded"] == [bad]
    assert all(answer["equal"] for answer in answers), "replicas are equal where a round has ended"


def _contract(rank: int, case: dict[str, str], path: str, folder: str) -> dict[str, Any]:
    model, ddp, ensemble = build(case, journal=path)
    train(ddp, ensemble, 10, rank)
    with ensemble.consensus():
        equal_inside = _equal_everywhere(model)
    own = [p.detach().clone() for p in model.parameters()]
    saved = copy.deepcopy((model.state_dict(), ensemble.optimizer.state_dict(), ensemble.state_dict()))
    values = _values(ensemble)
    arm = rank // 2 if case["gradients"] == "arms of two" else rank
    seen: list[Any] = [None] * 4
    dist.all_gather_object(seen, (arm, values))
    agrees = all(v == values for a, v in seen if a == arm)

    train(ddp, ensemble, 4, rank, start=10)
    if rank == 3:  # a weight becomes infinite on the last replica just before the round ends
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.inf
    ensemble.step(1.0)
    after_failure = ensemble.state_dict()["hdet"]
    finite = all(bool(p.isfinite().all()) for p in model.parameters())

    again_model, again_ddp, again = build(case)
    again_model.load_state_dict(saved[0])
    first = [saved[1:]]
    dist.broadcast_object_list(first, src=0)  # everybody loads rank 0's file
    loads = [(again.optimizer, first[0][0]), (again, first[0][1])]
    for target, state in loads if case["signal"] == "probe" else loads[::-1]:
        target.load_state_dict(state)
    resumed = _values(again) == pytest.approx(values)
    train(again_ddp, again, 5, rank, start=10)
    return {
        "state": _plain(saved[2]),
        "after_failure": after_failure,
        "finite": finite,
        "resumed": resumed,
        "arm_agrees": agrees,
        "equal": equal_inside and _equal_everywhere(model) and len(own) == 4,
    }


def _values(ensemble: hdet.Ensemble) -> list[float]:
    return [ensemble[knob.spec.name] for knob in ensemble._knobs]


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _equal_everywhere(model: nn.Module) -> bool:
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, [p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_parts_that_differ_between_replicas_are_seen() -> None:
    for messages in run_ranks(_different_parts, 2):
        assert all("DisagreementError" in message for message in messages), messages


def _different_parts(rank: int) -> list[str]:
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"controller": hdet.Normalised(step=0.3)}, {"controller": hdet.Normalised()}),
        ({"optimizer_state": "keep"}, {"optimizer_state": "average"}),
        ({"signal": hdet.ProbeLoss(lambda: 1.0)}, {"signal": hdet.TrainLoss()}),
    ]
    messages = []
    for variant in variants:
        optimizer = make_optimizer("sgd", groups_of(two_layer()))
        ensemble = hdet.Ensemble(optimizer, sync_every=5, **variant[rank])
        messages.append(repr(error_of(lambda ensemble=ensemble: ensemble.step(1.0))))  # type: ignore[misc]
    return messages


@pytest.mark.parametrize("what", ["lr", "weight_decay"])
def test_values_that_differ_between_replicas_are_named(what: str) -> None:
    for rank, message in enumerate(run_ranks(_different_values, 2, what)):
        assert "DisagreementError" in message
        assert f"rank {rank}: {what} = " in message


def _different_values(rank: int, what: str) -> str:
    optimizer = torch.optim.SGD(two_layer().parameters(), **{"lr": 0.1, "weight_decay": 0.1, what: 0.1 + 0.1 * rank})
    knobs = [hdet.knobs.lr(optimizer), hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)]
    ensemble = hdet.Ensemble(optimizer, knobs=knobs, sync_every=5)
    return repr(error_of(lambda: ensemble.step(1.0)))


def test_metrics_on_one_rank_alone_are_an_error_and_no_crash() -> None:
    for message in run_ranks(_metrics_alone, 2):
        assert "rank 0: call = step(metrics=...)" in message
        assert "rank 1: call = step(), at the end of a round" in message


def _metrics_alone(rank: int) -> str:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    ensemble = hdet.Ensemble(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer), sync_every=2)
    ensemble.step(1.0)
    return str(error_of(lambda: ensemble.step(1.0, metrics=0.5 if rank == 0 else None)))


def test_a_probe_called_by_hand_disturbs_no_round() -> None:
    assert run_ranks(_probe_by_hand, 2) == [[0.0, 0.0]] * 2


def _probe_by_hand(rank: int) -> list[float]:
    net = nn.Linear(1, 1, bias=False)
    seen: list[float] = []

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.mean().item())
        return x.mean()

    probe = hdet.ProbeBatch(net, loss_fn, [torch.full((2, 1), float(rank))])
    if rank == 0:
        probe()
    ensemble = hdet.Ensemble(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=1, signal=hdet.ProbeLoss(probe))
    ensemble.step(1.0)
    ensemble.step(1.0)
    return seen[-2:]


def test_groups_that_share_one_rate_tensor_are_spread_alike() -> None:
    for values in run_ranks(_shared_rate, 2):
        assert values[0] == values[1]


def _shared_rate(rank: int) -> list[float]:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1))
    ensemble = hdet.Ensemble(optimizer, sync_every=3)
    return [float(ensemble._run.multipliers(0)[g]) for g in range(2)]


# -- arms and bytes ----------------------------------------------------------------------------------------------------


def test_local_sgd_sends_one_all_reduce_per_round() -> None:
    counted = run_ranks(_count_bytes, 4)
    for local, shared_gradients in counted:
        assert local["all_reduce"] * 10 <= shared_gradients * 1.001
        assert local["all_gather"] <= 3 * 8 * 40 * 4


def _count_bytes(rank: int) -> tuple[dict[str, float], float]:
    """Bytes that one rank puts into our collectives in two rounds of ten steps, and those of DDP's gradients."""
    sent = {"all_reduce": 0.0, "all_gather": 0.0}
    reduce, gather = dist.all_reduce, dist.all_gather

    def counting_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["all_reduce"] += tensor.numel() * tensor.element_size()
        return reduce(tensor, *args, **kwargs)

    def counting_gather(tensors: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["all_gather"] += tensor.numel() * tensor.element_size()
        return gather(tensors, tensor, *args, **kwargs)

    dist.all_reduce, dist.all_gather = counting_reduce, counting_gather  # type: ignore[assignment]
    arms = hdet.arms(4)
    model = two_layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model, process_group=arms.gradients)
    ensemble = hdet.Ensemble(optimizer, sync_every=10, group=arms)
    train(ddp, ensemble, 20, rank)
    gradients = 20 * sum(p.numel() * p.element_size() for p in model.parameters())
    return sent, gradients


def test_arms() -> None:
    for index, members, gradients_world, errors in run_ranks(_arms, 4):
        assert members == [[0, 1], [2, 3]]
        assert index in (0, 1)
        assert gradients_world == 2
        assert "divides the 4 ranks" in errors[0]
        assert "add up to the 4 ranks" in errors[1]
        assert "hdet.arms(n)" in errors[2]
        assert "mesh of all 4 ranks" in errors[3]
        assert "('replicate', 'shard')" in errors[4]


def _arms(rank: int) -> tuple[int, list[list[int]], int, list[str]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    arms = hdet.arms(2)
    assert arms.members == hdet.arms([2, 2]).members == hdet.arms(mesh, "replicate").members
    assert hdet.arms(mesh, "shard").members == [[0, 2], [1, 3]]
    assert hdet.arms(mesh, ("replicate", "shard")).members == hdet.arms(4).members
    assert hdet.arms([1, 3]).members == [[0], [1, 2, 3]]
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    subgroup = error_of(lambda: hdet.Ensemble(optimizer, group=half[rank // 2]))
    part = error_of(lambda: hdet.arms(mesh["shard"], "shard"))
    unknown = error_of(lambda: hdet.arms(mesh, ("replicate", "tp")))
    errors = [str(error_of(lambda: hdet.arms(3))), str(error_of(lambda: hdet.arms([1, 1]))), str(subgroup)]
    errors += [str(part), str(unknown)]
    return arms.index, arms.members, dist.get_world_size(arms.gradients), errors


def test_arms_of_unequal_size_count_once() -> None:
    assert run_ranks(_unequal_arms, 4) == [1.5] * 4


def _unequal_arms(rank: int) -> float:
    arms = hdet.arms([1, 3])
    weight = nn.Parameter(torch.tensor([1.0 if rank == 0 else 2.0]))
    ensemble = hdet.Ensemble(torch.optim.SGD([weight], lr=0.1), sync_every=1, group=arms)
    ensemble.step(1.0)
    return weight.item()


@pytest.mark.parametrize("policy", ["average", "keep", "reset"])
def test_optimizer_state_policies(policy: str) -> None:
    states = run_ranks(_optimizer_state, 2, policy)
    if policy == "average":
        assert torch.equal(*states)
    elif policy == "keep":
        assert not torch.equal(*states)
    else:
        assert states == [None, None]


def _optimizer_state(rank: int, policy: str) -> torch.Tensor | None:
    arms = hdet.arms(2)
    model = two_layer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(optimizer, sync_every=3, group=arms, optimizer_state=policy)  # type: ignore[arg-type]
    train(model, ensemble, 3, rank)
    state = optimizer.state.get(next(model.parameters()))
    return state["exp_avg"].clone() if state else None


@pytest.mark.parametrize("freezes", [False, True])
def test_a_layer_that_is_thawed_inside_a_round_joins(freezes: bool) -> None:
    """``freezes``: another one is frozen at the same step."""
    first, second = run_ranks(_thawed, 2, freezes)
    assert first == second
    joined, other = first
    assert joined == pytest.approx([-1.5, -4.5])
    assert other == pytest.approx([-1.5, -1.5])  # the mean of what they had


def _thawed(rank: int, freezes: bool) -> tuple[list[float], list[float]]:
    layer, other = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    layer.requires_grad_(False)
    ensemble = hdet.Ensemble(
        torch.optim.SGD([layer, other], lr=0.1),
        sync_every=2,
        signal=hdet.ProbeLoss(lambda: 1.0, at="round_mean"),
        group=hdet.arms(2),
    )
    rows = []
    for t in range(4):
        if t == 1:
            layer.requires_grad_(True)
            other.requires_grad_(not freezes)
        with torch.no_grad():
            (layer if t else other).sub_(rank + 1.0)
        ensemble.step(1.0)
        rows.append((layer.item(), other.item()))
    return [row[0] for row in rows[1::2]], [row[1] for row in rows[1::2]]


def test_equal_replicas_are_nowhere_apart() -> None:
    roll = replace(Agreement.alone(), moving_equal=True)
    assert converge(Solo(), Solo(), NO_WEIGHTS, roll, measure=True) == [0.0]


def test_replicas_whose_mean_is_zero_are_nowhere_apart() -> None:
    weights = NO_WEIGHTS._replace(parameters=[torch.zeros(3)])
    roll = replace(Agreement.alone(), moving_equal=False)
    assert converge(Solo(), Solo(), weights, roll, measure=True) == [0.0]
