"""examples/timm_schedule.py: TimmSchedule with stand-ins, and with timm itself if it is installed.

``Cosine`` and ``Plateau`` keep timm's interface: the caller counts, ``step_update`` acts where ``t_in_epochs`` is
False and ``step`` where it is True, values replace what the param groups held, ``lr_scale`` is respected, and the state
is the instance's attributes without the optimizer.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

import hdet
from examples import timm_schedule
from examples.timm_schedule import TimmSchedule
from tests.integrations import operators  # noqa: F401  # torchvision, which timm needs, can be imported from here on
from tests.integrations.loops import train
from tests.models import groups_of, make_optimizer, two_layer
from tests.problems import batch_of, network, quiet
from tests.processes import run_ranks


class Cosine:
    """Stand-in for timm's CosineLRScheduler with a linear warm-up."""

    def __init__(self, optimizer: Optimizer, t_initial: int, warmup_t: int = 0, t_in_epochs: bool = True) -> None:
        self.optimizer = optimizer
        self.param_group_field = "lr"
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_values = [group["initial_lr"] for group in optimizer.param_groups]
        self.metric = None
        self.t_in_epochs = t_in_epochs
        self.t_initial, self.warmup_t = t_initial, warmup_t
        self.update_groups([0.0] * len(self.base_values) if warmup_t else self.base_values)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.t_in_epochs:
            self.update_groups(self._get_lr(epoch))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.t_in_epochs:
            self.update_groups(self._get_lr(num_updates))

    def _get_lr(self, t: int) -> list[Any]:
        if t < self.warmup_t:
            return [t * v / self.warmup_t for v in self.base_values]
        return [0.5 * v * (1 + math.cos(math.pi * t / self.t_initial)) for v in self.base_values]

    def update_groups(self, values: list[Any]) -> None:
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            group[self.param_group_field] = value * group["lr_scale"] if "lr_scale" in group else value


class Plateau(Cosine):
    """Stand-in for timm's PlateauLRScheduler, which holds torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, 10)
        self.lr_scheduler = ReduceLROnPlateau(optimizer)


def sgd() -> Optimizer:
    return make_optimizer("sgd", groups_of(two_layer()))


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def by_hand(t_in_epochs: bool, updates: int, per_epoch: int) -> list[list[float]]:
    """The loop of timm's training script."""
    optimizer = sgd()
    optimizer.param_groups[1]["lr_scale"] = 0.5
    scheduler = Cosine(optimizer, 6 if t_in_epochs else 18, warmup_t=2, t_in_epochs=t_in_epochs)
    rows = [rates(optimizer)]
    for n in range(1, updates + 1):
        scheduler.step_update(num_updates=n)
        if n % per_epoch == 0:
            scheduler.step(n // per_epoch)
        rows.append(rates(optimizer))
    return rows


def ensemble_on(t_in_epochs: bool, per_epoch: int | None, **more: Any) -> hdet.Ensemble:
    optimizer = sgd()
    optimizer.param_groups[1]["lr_scale"] = 0.5
    scheduler = Cosine(optimizer, 6 if t_in_epochs else 18, warmup_t=2, t_in_epochs=t_in_epochs)
    return hdet.Ensemble(optimizer, TimmSchedule(scheduler, per_epoch), sync_every=4, **more)


def history(ensemble: hdet.Ensemble, steps: int) -> list[list[float]]:
    rows = [rates(ensemble.optimizer)]
    for _ in range(steps):
        ensemble.optimizer.step()
        ensemble.step(0.5)
        rows.append(rates(ensemble.optimizer))
    return rows


@pytest.mark.parametrize(("t_in_epochs", "per_epoch"), [(False, None), (False, 3), (True, 3)])
def test_one_replica_gets_the_rates_of_timms_own_loop(t_in_epochs: bool, per_epoch: int | None) -> None:
    assert history(ensemble_on(t_in_epochs, per_epoch), 18) == by_hand(t_in_epochs, 18, per_epoch or 3)


@pytest.mark.parametrize("t_in_epochs", [False, True])
def test_replicas_spread_around_timms_rates(t_in_epochs: bool) -> None:
    first, second = run_ranks(_spread, 2, t_in_epochs)
    for a, b, base in zip(first, second, by_hand(t_in_epochs, 12, 3), strict=True):
        assert [(x + y) / 2 for x, y in zip(a, b, strict=True)] == pytest.approx(base)
        assert all(abs(x - y) == pytest.approx(2 / 9 * value) for x, y, value in zip(a, b, base, strict=True))


def _spread(rank: int, t_in_epochs: bool) -> list[list[float]]:
    return history(ensemble_on(t_in_epochs, 3, controller=False), 12)


@pytest.mark.parametrize("t_in_epochs", [False, True])
def test_resume_goes_on_as_if_never_stopped(t_in_epochs: bool) -> None:
    first = ensemble_on(t_in_epochs, 3)
    history(first, 7)  # inside an epoch and inside a round
    saved = copy.deepcopy((first.optimizer.state_dict(), first.state_dict()))
    again = ensemble_on(t_in_epochs, 3)
    again.optimizer.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert history(again, 11) == by_hand(t_in_epochs, 18, 3)[7:]


def test_rates_in_tensors_stay_the_same_tensors() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1), capturable=False, foreach=False)
    schedule = TimmSchedule(Cosine(optimizer, 10, t_in_epochs=False))
    rate = optimizer.param_groups[0]["lr"]
    values = []
    for _ in range(5):
        schedule.step()
        values.append(float(rate))
    assert optimizer.param_groups[0]["lr"] is rate
    assert values == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 10)) for t in range(1, 6)])


EPOCHS, PER_EPOCH, WARM = 30, 5, 6
STEPS = EPOCHS * PER_EPOCH


def stand_in(optimizer: Optimizer) -> TimmSchedule:
    return TimmSchedule(Cosine(optimizer, EPOCHS, warmup_t=WARM), PER_EPOCH)


def by_updates(optimizer: Optimizer) -> TimmSchedule:
    return TimmSchedule(Cosine(optimizer, STEPS, warmup_t=WARM * PER_EPOCH, t_in_epochs=False))


def of_timm(optimizer: Optimizer) -> TimmSchedule:
    scheduler = pytest.importorskip("timm.scheduler")
    more = {"warmup_epochs": WARM, "warmup_lr": 0.0, "min_lr": 0.0}
    cosine, epochs = scheduler.create_scheduler_v2(optimizer, num_epochs=EPOCHS, **more)
    assert epochs == EPOCHS
    return TimmSchedule(cosine, PER_EPOCH)


def of_torch(optimizer: Optimizer) -> LambdaLR:
    """The same by epochs, without timm."""
    return LambdaLR(optimizer, lambda update: shape(update // PER_EPOCH))


def of_torch_by_updates(optimizer: Optimizer) -> LambdaLR:
    """Between the steps of the other: a search on it is another run."""
    return LambdaLR(optimizer, lambda update: shape(update / PER_EPOCH))


def shape(epoch: float) -> float:
    return epoch / WARM if epoch < WARM else 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))


def searched(make: Any, gives_loss: bool = True) -> float:
    """The final loss of a search on a schedule."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    scheduler = hdet.auto(optimizer, schedule=make, total_steps=STEPS)
    batches = (batch_of(t) for t in range(STEPS))
    with quiet():
        return train(net, optimizer, scheduler, batches, gives_loss=gives_loss)


@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize(
    ("make", "same"),
    [
        (stand_in, of_torch),
        (by_updates, of_torch_by_updates),
        pytest.param(of_timm, of_torch, marks=pytest.mark.covers("frameworks", "timm, search", "one process", "fp32")),
    ],
)
def test_a_search_on_timms_schedule_ends_where_one_on_torchs_ends(make: Any, same: Any, gives_loss: bool) -> None:
    assert searched(make, gives_loss) / searched(same, gives_loss) == pytest.approx(1, abs=0.05)


def test_a_search_on_timms_schedule_resumes() -> None:
    def run(net: Any, optimizer: Optimizer, scheduler: Any, steps: range) -> float:
        return train(net, optimizer, scheduler, (batch_of(t) for t in steps))

    def made() -> Any:
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
        return net, optimizer, hdet.auto(optimizer, schedule=stand_in, total_steps=STEPS)

    first, again = made(), made()
    run(*first, range(52))  # inside an epoch
    saved = copy.deepcopy([part.state_dict() for part in first])
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    assert rates(again[1]) == rates(first[1])
    with quiet():
        assert run(*again, range(52, STEPS)) / searched(of_torch) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: TimmSchedule(Cosine(o, 10)), "updates_per_epoch=len"),
        (lambda o: TimmSchedule(Plateau(o), 3), "metric"),
        (lambda o: TimmSchedule(ExponentialLR(o, 0.9)), "as it is"),
        (lambda o: hdet.Ensemble(sgd(), TimmSchedule(Cosine(o, 10), 3)), "another optimizer"),
    ],
)
def test_bad_input_is_refused(make: Any, words: str) -> None:
    with pytest.raises(hdet.ArgumentError, match=words):
        make(sgd())


def test_the_script_leaves_a_low_guess_behind(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm.scheduler")
    timm_schedule.main()
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert float(last.split()[1].rstrip(",")) > 1e-4, last
