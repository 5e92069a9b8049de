"""AutoLR in real Learners of fastai, on the CPU and with data made here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.integrations.loops import auto_on, train
from tests.setups.problems import Records, batch_of, final_loss, network

pytest.importorskip("fastai")

import fastai.callback.progress
import fastai.callback.schedule  # noqa: F401  # they add methods to Learner
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

from hdet.integrations.fastai import AutoLR

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
