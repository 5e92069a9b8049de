"""Probes: the same batch for all replicas, nothing disturbed, and the mean weights of a round."""

from __future__ import annotations

import itertools
import math
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.copies import put_back as kept
from hdet.copies import write_
from hdet.ensemble.controller import Update
from hdet.ensemble.signals import RoundMean, probed_loss, unwrapped
from hdet.ranks.group import Solo, connect
from tests.models import batch
from tests.processes import error_of, run_ranks

SOLO = Solo()
Pair = namedtuple("Pair", ["first", "second"])


def mean_of(model: nn.Module, x: Any) -> Tensor:
    """The simplest loss: shows the batch and the model at once."""
    return model(x).mean()


def scale_net(weight: float = 1.0) -> nn.Linear:
    """y = weight * x."""
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(weight)
    return net


def ones(value: float) -> Tensor:
    return torch.full((2, 1), value)


def losses(probe: hdet.ProbeBatch, rounds: int, group: Any = SOLO) -> list[float]:
    values = []
    for k in range(rounds):
        probe.prepare(k, group)
        values.append(probe().item())
    return values


# -- batches -----------------------------------------------------------------------------------------------------------


def test_one_new_batch_per_round_and_the_loader_is_begun_again_at_its_end() -> None:
    probe = hdet.ProbeBatch(scale_net(), mean_of, [ones(1.0), ones(2.0), ones(3.0)])
    assert losses(probe, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_round_keeps_its_batch() -> None:
    probe = hdet.ProbeBatch(scale_net(), mean_of, [ones(1.0), ones(2.0)])
    probe.prepare(0, SOLO)
    probe.prepare(0, SOLO)
    assert [probe().item(), probe().item()] == [1, 1]


def test_it_can_be_called_without_an_ensemble() -> None:
    assert hdet.ProbeBatch(scale_net(), mean_of, [ones(5.0)])().item() == 5


def test_batch_fn_gets_the_round() -> None:
    probe = hdet.ProbeBatch(scale_net(), mean_of, lambda k: ones(10.0 * k))
    assert losses(probe, 4) == [0, 10, 20, 30]
    probe.prepare(1, SOLO)  # as after a resume: the round decides, not how often it was asked
    assert probe().item() == 10


def test_a_torch_loader() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(6.0)[:, None], batch_size=2)
    assert losses(hdet.ProbeBatch(scale_net(), mean_of, loader), 4) == [0.5, 2.5, 4.5, 0.5]


@pytest.mark.parametrize("loader", [[], iter([])], ids=["list", "iterator"])
def test_an_empty_loader_is_an_error(loader: Any) -> None:
    with pytest.raises(hdet.ArgumentError, match="at least one"):
        hdet.ProbeBatch(scale_net(), mean_of, loader).prepare(0, SOLO)


def test_an_iterator_that_ends_leaves_its_last_batch_and_a_warning() -> None:
    probe = hdet.ProbeBatch(scale_net(), mean_of, (ones(value) for value in (1.0, 2.0)))
    assert losses(probe, 2) == [1.0, 2.0]
    with pytest.warns(hdet.ProbeWarning, match=r"loader, a generator, has ended.*; give .*list"):
        again = [losses(probe, rounds)[-1] for rounds in (3, 4)]
    assert again == [2.0, 2.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, r"loss_fn must return one real number, but .* returned None; end it with `return loss`"),
        (torch.ones(3), r"loss_fn must return one real number, but .* returned tensor\(\[1\., .*\]\); .*mean\(\)"),
        ("low", r"loss_fn must return one real number, but .* returned 'low'"),
        ((torch.tensor(1.0), None), r"loss_fn must return one real number, but .* returned \(tensor"),
    ],
)
def test_a_loss_function_that_returns_no_loss_is_named(returned: Any, words: str) -> None:
    probe = hdet.ProbeBatch(scale_net(), lambda m, x: returned, [ones(1.0)])
    with pytest.raises(hdet.ArgumentError, match=words):
        probe()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(hdet.ArgumentError, match="mode must be"):
        hdet.ProbeBatch(scale_net(), mean_of, [ones(1.0)], mode="train")  # type: ignore[arg-type]
    with pytest.raises(hdet.ArgumentError, match="loader must be"):
        hdet.ProbeBatch(scale_net(), mean_of, 3)  # type: ignore[arg-type]


def nested(value: float) -> dict[str, Any]:
    """A batch with everything that loaders give: containers, dtypes, shapes, and things that are no tensors."""
    return {
        "image": torch.full((2, 3), value).T,  # not contiguous
        "pair": Pair(torch.tensor([int(value)]), {"mask": torch.tensor([True, False, True])}),
        "list": [torch.full((1,), value, dtype=torch.bfloat16), "text", None],
        "tuple": (torch.tensor(value, dtype=torch.float64), 3),
        "empty": torch.empty(0, 4),
    }


def described(value: Any) -> Any:
    """The batch with tensors as (dtype, shape, numbers): comparable."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(item) for item in value]
    return value


def test_nested_batches_arrive_as_they_are() -> None:
    seen = []

    def loss_fn(model: nn.Module, found: Any) -> Tensor:
        seen.append(found)
        return torch.zeros(())

    hdet.ProbeBatch(scale_net(), loss_fn, [nested(7.0)])()
    assert described(seen[0]) == described(nested(7.0))


class Graph:
    """A batch of somebody else's class, which can be moved."""

    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(str(device))


def test_what_can_be_moved_is_moved_to_the_models_device() -> None:
    seen = []

    def loss_fn(model: nn.Module, found: Any) -> Tensor:
        seen.append(found["graph"].device)
        return torch.zeros(())

    probe = hdet.ProbeBatch(scale_net(), loss_fn, [{"graph": Graph("meta")}])
    losses(probe, 1)
    assert seen == ["cpu"]


@pytest.mark.slow
def test_ranks_see_the_first_ranks_batch_whatever_their_own_loader_holds() -> None:
    expected = [described(nested(0.0)), described(nested(1.0)), described(nested(0.0))]
    for seen, drawn in run_ranks(_shared_batches, 2):
        assert seen == expected
        assert drawn in (3, 0)  # one rank draws, the others' loaders are not touched


def _shared_batches(rank: int) -> tuple[list[Any], int]:
    drawn = 0

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            nonlocal drawn
            for i in range(2 + rank):
                drawn += 1
                yield nested(100.0 * rank + i)

    seen = []

    def loss_fn(model: nn.Module, found: Any) -> Tensor:
        seen.append(described(found))
        return torch.zeros(())

    losses(hdet.ProbeBatch(scale_net(), loss_fn, Loader()), 3, connect(None))
    return seen, drawn


def test_batch_fn_of_the_first_rank_counts() -> None:
    assert run_ranks(_batch_fn, 2) == [[0.0, 1.0, 2.0]] * 2


def _batch_fn(rank: int) -> list[float]:
    return losses(hdet.ProbeBatch(scale_net(), mean_of, lambda k: ones(100.0 * rank + k)), 3, connect(None))


# -- nothing is disturbed ----------------------------------------------------------------------------------------------


def rng_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()


def draw_from_all() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Draws(nn.Module):
    """Uses every global generator, in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = scale_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * draw_from_all()


def test_global_generators_are_as_before() -> None:
    def batches() -> Iterator[Tensor]:
        while True:
            yield ones(draw_from_all())

    probe = hdet.ProbeBatch(Draws(), mean_of, batches())
    before = rng_states()
    losses(probe, 3)
    assert rng_states() == before


def test_global_generators_are_as_before_after_an_exception() -> None:
    def failing(_: Any) -> Any:
        draw_from_all()
        raise OSError("disk")

    draws = hdet.ProbeBatch(scale_net(), mean_of, failing)
    probes = hdet.ProbeBatch(scale_net(), lambda m, x: failing(x), [ones(1.0)])
    before = rng_states()
    for call in (lambda: draws.prepare(0, SOLO), probes):
        with pytest.raises(OSError, match="disk"):
            call()
    assert rng_states() == before


def test_training_does_not_notice_a_shuffling_loader() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(20.0)[:, None], batch_size=4, shuffle=True)
    probe = hdet.ProbeBatch(scale_net(), mean_of, loader)
    before = rng_states()
    losses(probe, 12)
    assert rng_states() == before


def test_random_layers_are_the_same_for_all_replicas_and_new_in_each_round() -> None:
    first, second = run_ranks(_random_losses, 2)
    assert first == second
    assert len(set(first)) == 3


class Noisy(nn.Module):
    """Random in every mode, unlike dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = scale_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand_like(x)


def _random_losses(rank: int) -> list[float]:
    torch.manual_seed(rank)
    return losses(hdet.ProbeBatch(Noisy(), mean_of, lambda k: ones(1.0)), 3, connect(None))


def network() -> nn.Sequential:
    """Dropout and BatchNorm, with some modules frozen in eval mode as users do, and buffers that are not at rest."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    net.train()
    net[3].eval()
    net[4].eval()
    return net


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


def flags(model: nn.Module) -> list[bool]:
    return [m.training for m in model.modules()]


def buffers(model: nn.Module) -> list[Any]:
    return [b.tolist() for b in model.buffers()]


def expected_loss(mode: str) -> float:
    """The loss with every module set by hand."""
    net = network().eval()
    if mode == "probe":
        net[1].train()
    with torch.no_grad():
        return squares(net, X).item()


@pytest.mark.parametrize("mode", ["probe", "eval"])
def test_modes(mode: Any) -> None:
    net = network()
    before = flags(net), buffers(net)
    probe = hdet.ProbeBatch(net, squares, [X], mode=mode)
    assert probe().item() == probe().item() == pytest.approx(expected_loss(mode), rel=1e-6)
    assert (flags(net), buffers(net)) == before
    assert expected_loss("probe") != pytest.approx(expected_loss("eval"), rel=1e-3)


def test_flags_and_buffers_are_as_before_after_an_exception() -> None:
    net = network()
    before = flags(net), buffers(net)

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        squares(model, x)
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        hdet.ProbeBatch(net, failing, [X])()
    assert (flags(net), buffers(net)) == before


def test_no_gradients() -> None:
    net = network()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return squares(model, x)

    loss = hdet.ProbeBatch(net, loss_fn, [X])()
    assert not loss.requires_grad
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in net.parameters())


def test_ddp_is_unwrapped() -> None:
    assert run_ranks(_inside_ddp, 2) == [("Linear", 3.0), ("Linear", 4.0)]


def _inside_ddp(rank: int) -> tuple[str, float]:
    """A forward pass of DDP would broadcast the first rank's buffers, and hang where only one rank probes."""
    net = scale_net()
    ddp = DistributedDataParallel(net)
    with torch.no_grad():
        net.weight.fill_(3.0 + rank)
    seen = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(type(model).__name__)
        return mean_of(model, x)

    loss = hdet.ProbeBatch(ddp, loss_fn, [ones(1.0)])()
    return seen[0], loss.item()


# -- the signal --------------------------------------------------------------------------------------------------------


def test_a_probe_gives_a_number_without_a_graph() -> None:
    weight = nn.Parameter(torch.ones(()))
    assert probed_loss(lambda: 2 * weight) == 2.0
    assert probed_loss(lambda: 2.5) == 2.5


def test_round_mean_is_the_mean_of_the_snapshots() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator)] for _ in range(32)]
    mean, weights = RoundMean(), [torch.empty(3, 2), torch.empty(4)]
    assert mean.of(weights) is None
    for row in rows:
        write_(weights, row)
        mean.add(weights)
    found = mean.of(weights)
    assert found is not None
    for i, one in enumerate(found):
        torch.testing.assert_close(one, torch.stack([row[i] for row in rows]).mean(0))


def test_a_weight_that_joins_the_round_stood_still_until_then() -> None:
    mean, first, second = RoundMean(), torch.zeros(1), torch.full((1,), 6.0)
    mean.add([first])
    mean.add([second, first])  # thawed; and the order is the optimizer's
    write_([second, first], [torch.full((1,), 9.0), torch.full((1,), 3.0)])
    mean.add([second])  # and now the first is frozen
    assert mean.of([second]) == [torch.full((1,), 7.0)]


def test_bf16_weights_are_averaged_in_fp32() -> None:
    mean, weight = RoundMean(), torch.ones(1, dtype=torch.bfloat16)
    values = [1.0, 1.0 + 2**-7, 1.0, 1.0]  # their mean, 1 + 2**-9, is no bf16 number
    for value in values:
        mean.add([weight.fill_(value)])
    (found,) = mean.of([weight]) or ()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1 + 2**-9, abs=1e-7)
    wide, weight = RoundMean(), torch.ones(1, dtype=torch.float64)
    wide.add([weight])
    (found,) = wide.of([weight]) or ()
    assert found.dtype == torch.float64


def test_snapshots_are_evenly_spaced_at_most_32_and_the_last_is_one() -> None:
    for length in (*range(1, 200), 1000, 1001):
        taken = [step for step in range(1, length + 1) if RoundMean().is_due(step, length)]
        assert len(taken) == min(length, 32)
        assert taken[-1] == length
        gaps = {b - a for a, b in itertools.pairwise([0, *taken])}
        assert max(gaps) - min(gaps) <= 1


def test_weights_come_back_after_an_exception() -> None:
    weights = [torch.ones(2, dtype=torch.bfloat16), torch.ones(3)]
    before = [w.clone() for w in weights]
    with pytest.raises(ZeroDivisionError):
        with kept(weights):
            write_(weights, [torch.full((2,), 7.0), torch.full((3,), math.nan)])
            raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


# -- in an ensemble ----------------------------------------------------------------------------------------------------


class Nothing(NamedTuple):
    """A controller's state that holds nothing."""

    none: list[float]


class Listener:
    """A controller that keeps what it is shown and moves nothing."""

    def __init__(self) -> None:
        self.heard: list[list[float]] = []

    def init(self, knobs: int) -> Nothing:
        return Nothing([0.0] * knobs)

    def update(self, state: Nothing, signals: Any, offsets: Any) -> Update:
        self.heard.append(list(signals))
        return Update(state, [0.0] * len(offsets[0]), [1.0 / len(signals)] * len(signals), [0.0] * len(offsets[0]))


def walk(ensemble: hdet.Ensemble, weight: Tensor, steps: int, by: Callable[[int], float]) -> list[float]:
    """Moves a single weight as told instead of training; gives its value after each optimizer step."""
    path = []
    for t in range(1, steps + 1):
        with torch.no_grad():
            weight.add_(by(t))
        path.append(weight.item())
        ensemble.step(1.0)
    return path


def ensemble_on(net: nn.Module, signal: Any, **more: Any) -> hdet.Ensemble:
    return hdet.Ensemble(torch.optim.SGD(net.parameters(), lr=0.1), sync_every=4, signal=signal, **more)


@pytest.mark.parametrize(("at", "expected"), [("replica", [4.0, 8.0]), ("round_mean", [2.5, 6.5])])
def test_where_the_probe_is_taken(at: Any, expected: list[float], tmp_path: Path) -> None:
    """A weight that goes 1, 2, 3, 4 and 5, 6, 7, 8: the round's last value, or its mean; afterwards it is back."""
    net = scale_net(0.0)
    signal = hdet.ProbeLoss(hdet.ProbeBatch(net, mean_of, [ones(1.0)]), at=at)
    path = walk(ensemble_on(net, signal, journal=tmp_path / "run.jsonl"), net.weight, 8, lambda t: 1.0)
    assert path == [1, 2, 3, 4, 5, 6, 7, 8]
    rounds = hdet.read_journal(tmp_path / "run.jsonl").rounds
    assert [record["replicas"][0]["signal"] for record in rounds] == expected


def test_bf16_parameters_are_probed_near_their_fp32_mean_and_come_back_exactly() -> None:
    net = scale_net(1.0).bfloat16()
    seen = []

    def fn() -> float:
        seen.append(net.weight.item())
        return 0.0

    ensemble = hdet.Ensemble(
        torch.optim.SGD(net.parameters(), lr=0.1), sync_every=64, signal=hdet.ProbeLoss(fn, "round_mean")
    )
    up = 2.0**-7  # one bf16 step above 1: the second half of the round stands there
    path = walk(ensemble, net.weight, 64, lambda t: up if t == 17 else 0.0)
    assert seen == [1 + up]  # the mean, 1 + 0.75 * up, in the nearest bf16
    assert net.weight.item() == path[-1] == 1 + up


@pytest.mark.parametrize("at", ["replica", "round_mean"])
def test_weights_come_back_when_the_probe_raises(at: Any) -> None:
    net = scale_net(0.0)

    def failing() -> float:
        raise KeyError("label")

    ensemble = ensemble_on(net, hdet.ProbeLoss(failing, at=at))
    with pytest.raises(KeyError, match="label"):
        walk(ensemble, net.weight, 4, lambda t: 1.0)
    assert net.weight.item() == 4


def test_replicas_are_compared_on_one_batch() -> None:
    """Replica r's weight moves by 1 + r a step; its loader holds other numbers."""
    for heard, weight in run_ranks(_compared, 2):
        assert heard == [[2.5, 5.0], [10 * (6 + 2.5), 10 * (6 + 5.0)]]
        assert weight == 12.0  # the mean of both after two rounds


def _compared(rank: int) -> tuple[list[list[float]], float]:
    net, listener = scale_net(0.0), Listener()
    loader = [ones(1.0), ones(10.0)] if rank == 0 else [ones(-77.0)] * 5
    signal = hdet.ProbeLoss(hdet.ProbeBatch(net, mean_of, loader), at="round_mean")
    walk(ensemble_on(net, signal, controller=listener), net.weight, 8, lambda t: 1.0 + rank)
    return listener.heard, net.weight.item()


def test_a_probe_that_is_not_finite_counts_as_worst_and_its_replica_is_still_averaged(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for heard, weight in run_ranks(_not_finite, 3, str(path)):
        assert heard == [[1.0, 5.0, 3.0]]  # worse than the worst by the others' range
        assert weight == 2.0  # the mean of 1, 2 and 3
    [record] = hdet.read_journal(path).rounds
    assert record["excluded"] == []
    assert math.isnan(record["replicas"][1]["signal"])


def _not_finite(rank: int, path: str) -> tuple[list[list[float]], float]:
    net, listener = scale_net(1.0 + rank), Listener()
    signal = hdet.ProbeLoss(lambda: math.nan if rank == 1 else net.weight.item())
    ensemble = ensemble_on(net, signal, controller=listener, journal=path)
    walk(ensemble, net.weight, 4, lambda t: 0.0)
    return listener.heard, net.weight.item()


def test_two_replicas_of_which_one_probe_is_not_finite_move_nothing() -> None:
    assert run_ranks(_one_of_two, 2) == [([], 1.5)] * 2


def _one_of_two(rank: int) -> tuple[list[list[float]], float]:
    net, listener = scale_net(1.0 + rank), Listener()
    ensemble = ensemble_on(net, hdet.ProbeLoss(lambda: (math.inf, 1.0)[rank]), controller=listener)
    walk(ensemble, net.weight, 4, lambda t: 0.0)
    return listener.heard, net.weight.item()


def test_probing_changes_nothing_that_trains() -> None:
    """Dropout draws and BatchNorm statistics of a run with probes equal those of a run without, bit by bit."""
    for with_probe, without in run_ranks(_run_with_and_without, 2):
        assert with_probe == without


def _run_with_and_without(rank: int) -> list[list[Any]]:
    def run(signal_for: Callable[[nn.Module], Any]) -> list[Any]:
        torch.manual_seed(rank)
        net = network().train()
        net.append(nn.Linear(8, 1))
        with torch.no_grad():
            net[5].weight.fill_(0.1)
            net[5].bias.zero_()
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        ensemble = hdet.Ensemble(optimizer, sync_every=5, signal=signal_for(ddp), controller=False, model=ddp)
        for t in range(15):
            x, y = (tensor.float() for tensor in batch(t, rank))
            loss = mse_loss(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ensemble.step(loss)
        return [tensor.tolist() for tensor in net.state_dict().values()]

    def probe(model: nn.Module) -> hdet.ProbeLoss:
        loader = torch.utils.data.DataLoader(X, batch_size=4, shuffle=True)
        return hdet.ProbeLoss(hdet.ProbeBatch(model, squares, loader), at="round_mean")

    return [run(probe), run(lambda model: None)]


def test_an_empty_loader_of_the_rank_that_draws_stops_every_rank() -> None:
    first, second = run_ranks(_empty_loader, 2, group_timeout=5)
    assert isinstance(first, hdet.ArgumentError)
    assert "at least one" in str(first)
    assert isinstance(second, hdet.HdetError)


def _empty_loader(rank: int) -> Exception:
    net = scale_net()
    ensemble = ensemble_on(net, hdet.ProbeLoss(hdet.ProbeBatch(net, mean_of, [] if rank == 0 else [ones(1.0)])))
    return error_of(lambda: walk(ensemble, net.weight, 4, lambda t: 0.0))


def test_a_probe_that_returns_no_number_is_told_so() -> None:
    for value in (None, torch.ones(3), "low", torch.tensor(1j)):
        ensemble = ensemble_on(scale_net(0.0), hdet.ProbeLoss(lambda value=value: value))  # type: ignore[misc]
        with pytest.raises(hdet.ArgumentError, match="one real number"):
            for _ in range(10):
                ensemble.step(1.0)


def test_an_error_of_the_users_own_in_the_probe_stays_what_it_is() -> None:
    def failing() -> float:
        raise RuntimeError("size mismatch in my model")

    ensemble = ensemble_on(scale_net(0.0), hdet.ProbeLoss(failing))
    with pytest.raises(RuntimeError, match="size mismatch in my model") as caught:
        for _ in range(10):
            ensemble.step(1.0)
    assert not isinstance(caught.value, hdet.HdetError)


def test_a_loader_that_fails_on_rank_0_fails_everywhere_at_once() -> None:
    first, second = run_ranks(_failing_loader, 2)
    assert "KeyError('no such file')" in first
    assert "rank 0 could not draw" in second
    assert "no such file" in second


def _failing_loader(rank: int) -> str:
    def draw(k: int) -> Tensor:
        raise KeyError("no such file")

    net = scale_net(0.0)
    ensemble = ensemble_on(net, hdet.ProbeLoss(hdet.ProbeBatch(net, lambda m, x: x.mean(), draw)))

    def steps() -> None:
        for _ in range(10):
            ensemble.step(1.0)

    return repr(error_of(steps))


def test_a_buffer_that_forward_replaces_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.n = self.n + 1
            return x * self.weight

    net = Counting()
    buffer = net.n
    hdet.ProbeBatch(net, lambda m, x: m(x).mean(), [torch.ones(2)])()
    assert net.n is buffer
    assert net.n == 0


@pytest.mark.parametrize(
    ("autocast", "inside", "expected"),
    [
        ("inherit", False, torch.float32),
        ("inherit", True, torch.bfloat16),
        (torch.bfloat16, False, torch.bfloat16),
        (None, True, torch.float32),
    ],
)
def test_a_probe_is_cast_as_it_is_told(autocast: Any, inside: bool, expected: torch.dtype) -> None:
    model, seen = nn.Linear(3, 1), []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        seen.append(out.dtype)
        return out.float().mean()

    probe = hdet.ProbeBatch(model, loss, lambda k: torch.ones(2, 3), autocast=autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        probe()
    assert seen == [expected]


class Calls(nn.Module):
    """Counts its calls in a buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.weight * x


@pytest.mark.parametrize(("mode", "calls"), [("probe", 0), ("eval", 1)])
def test_plain_eval_leaves_buffers_to_the_model(mode: Any, calls: int) -> None:
    model = Calls()
    hdet.ProbeBatch(model, mean_of, [ones(1.0)], mode=mode)()
    assert model.calls == calls


def test_a_cast_that_is_none_is_refused() -> None:
    with pytest.raises(hdet.ArgumentError, match="autocast must be"):
        hdet.ProbeBatch(nn.Linear(1, 1), lambda m, b: m(b), [torch.ones(1, 1)], autocast="bf16")  # type: ignore[arg-type]


class _Forgotten(nn.Module):
    """Its forward is nn.Module's own, which raises."""


class _Constant(nn.Module):
    def forward(self) -> Tensor:
        return torch.ones(())


def test_a_module_without_a_forward_pass_is_no_probe() -> None:
    with pytest.raises(hdet.ArgumentError, match="a function without arguments that returns a loss"):
        hdet.ProbeLoss(_Forgotten())
    for probe in (_Constant(), torch.compile(_Constant(), backend="eager")):
        assert hdet.ProbeLoss(probe).fn is probe


def _inside_of_wrappers(rank: int) -> list[bool]:
    net = nn.Linear(2, 2)
    ddp, alone = DistributedDataParallel(net), nn.Sequential(nn.Linear(2, 2))
    compiled = [unwrapped(torch.compile(ddp, backend="eager")) is net, unwrapped(nn.Sequential(ddp, nn.ReLU())) is net]
    return [unwrapped(ddp) is net, *compiled, unwrapped(alone) is alone]


def test_only_the_wrapper_that_communicates_is_taken_off() -> None:
    assert run_ranks(_inside_of_wrappers, 1) == [[True, True, False, True]]
