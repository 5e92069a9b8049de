"""examples/fastai_autolr.py: AutoLR in real Learners of fastai, on the CPU and with data made here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from tests.integrations.loops import auto_on, train
from tests.problems import Records, batch_of, final_loss, network

pytest.importorskip("fastai")

import fastai.callback.progress
import fastai.callback.schedule  # noqa: F401  # they add methods to Learner
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

from examples.fastai_autolr import AutoLR

GUESS, STEPS = 1e-5, 100
ADAM = partial(OptimWrapper, opt=torch.optim.Adam)


def learner(opt_func: Any = ADAM) -> Learner:
    batches = [batch_of(t) for t in range(STEPS)]
    return Learner(DataLoaders(batches, batches[:2]), network(), loss_func=nn.MSELoss(), opt_func=opt_func, lr=GUESS)


def by_hand(make: Any) -> float:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=GUESS)
    return train(net, optimizer, make(optimizer), (batch_of(t) for t in range(STEPS)))


def shape(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


@pytest.mark.covers("frameworks", "fastai, search", "one process", "fp32")
@pytest.mark.parametrize("fit", ["fit", "fit_one_cycle", "fit_flat_cos"])
def test_it_ends_where_the_plain_loop_ends(fit: str) -> None:
    learn, records = learner(), Records()
    with learn.no_bar(), learn.no_logging():
        getattr(learn, fit)(1, cbs=AutoLR(journal=records))
    plain = by_hand(lambda optimizer: auto_on(optimizer, STEPS, cycle_momentum=False))
    assert final_loss(learn.model) / plain == pytest.approx(1, abs=0.02)
    assert records.rounds[-1]["step"] == STEPS
    assert records.rounds[-1]["replicas"][0]["loss"] > 0


def test_any_schedule() -> None:
    learn = learner()
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, cbs=AutoLR(schedule=shape))
    plain = by_hand(lambda optimizer: hdet.auto(optimizer, schedule=shape, total_steps=STEPS))
    assert final_loss(learn.model) / plain == pytest.approx(1, abs=0.02)


def test_mistakes_are_refused_with_a_cure() -> None:
    from fastai.optimizer import Adam

    with pytest.raises(hdet.ArgumentError, match=r"OptimWrapper, opt=torch\.optim\.AdamW"):
        learner(Adam).fit(1, cbs=AutoLR())
    with pytest.raises(hdet.ArgumentError, match="leave start_epoch out"):
        learner().fit(2, cbs=AutoLR(), start_epoch=1)


class Rates(Callback):
    """The rates of the optimizer's steps."""

    order, run_valid = -20, False

    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self) -> None:
        self.found.append(self.learn.opt.opt.param_groups[0]["lr"])


@pytest.mark.parametrize(("samples", "drop_last"), [(64 * STEPS, False), (64 * STEPS - 40, False), (64 * STEPS, True)])
def test_accumulation_counts_optimizer_steps(samples: int, drop_last: bool) -> None:
    """Batches of 64, four or five to a step; counting goes on over the end of an epoch."""
    xs, ys = (torch.cat(parts)[:samples] for parts in zip(*(batch_of(t) for t in range(STEPS)), strict=True))
    loader = DataLoader(TensorDataset(xs, ys), batch_size=64, shuffle=False, drop_last=drop_last)
    learn = Learner(DataLoaders(loader, loader), network(), loss_func=nn.MSELoss(), opt_func=ADAM, lr=GUESS)
    journal, seen = Records(), Rates()
    auto = AutoLR(journal=journal)
    with learn.no_bar(), learn.no_logging():
        learn.fit(3, cbs=[auto, GradientAccumulation(250), seen])
    rates = seen.found
    assert auto.scheduler is not None
    assert len(rates) == auto.scheduler.last_epoch == auto.scheduler.total_steps == journal.rounds[-1]["step"]
    assert 3 * samples / 320 <= len(rates) <= 3 * samples / 250
    assert rates[-1] < 1e-3 * max(rates)


def test_accumulation_without_a_batch_size_is_refused() -> None:
    with pytest.raises(hdet.ArgumentError, match=r"give AutoLR\(total_steps=\.\.\.\)"):
        learner().fit(1, cbs=[AutoLR(), GradientAccumulation(250)])
    learn = learner()
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, cbs=[auto := AutoLR(total_steps=25), GradientAccumulation(250)])
    assert auto.scheduler is not None
    assert auto.scheduler.last_epoch == 25
