"""What raises leaves everything as it was: loading a state that does not fit, and a schedule that fails."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as torchs

import hdet


def sequence(optimizer: Optimizer, parts: int) -> torchs.SequentialLR:
    constant = [torchs.ConstantLR(optimizer, 0.5, 10) for _ in range(parts)]
    return torchs.SequentialLR(optimizer, constant, [20 * (i + 1) for i in range(parts - 1)])


def stepped(scheduler: Any, optimizers: list[Optimizer], steps: int) -> Any:
    for _ in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = p.detach().clone()
            optimizer.step()
        scheduler.step()
    return scheduler


def adam(size: int = 3) -> Adam:
    return Adam([nn.Parameter(torch.ones(size))], lr=1e-3)


def refused(scheduler: hdet.AutoScheduler, state: dict[str, Any]) -> None:
    before = repr(scheduler.state_dict())
    for load in (scheduler.check_state_dict, scheduler.load_state_dict):
        with pytest.raises(hdet.ArgumentError, match="build the scheduler with the schedule"):
            load(copy.deepcopy(state))
        assert repr(scheduler.state_dict()) == before


def test_a_sequence_of_other_parts_is_refused_before_anything_changes() -> None:
    saved, other = (adam() for _ in range(2))
    first = hdet.auto(saved, total_steps=100, schedule=lambda o: sequence(o, 3))
    second = hdet.auto(other, total_steps=100, schedule=lambda o: sequence(o, 2))
    refused(stepped(second, [other], 5), stepped(first, [saved], 40).state_dict())


def test_a_schedule_that_is_missing_for_one_of_several_optimizers_is_refused() -> None:
    several = [adam(), adam(2)]
    scheduler = hdet.auto(several, total_steps=100, schedule=lambda o: torchs.CosineAnnealingLR(o, 100))
    state = copy.deepcopy(stepped(scheduler, [*several], 7).state_dict())
    del state["schedule"]["schedule"]["schedules"][1]
    refused(scheduler, state)


def test_an_optimizer_keeps_its_rates_if_the_schedule_raises() -> None:
    class Breaks(torchs.LRScheduler):
        def get_lr(self) -> list[float]:  # type: ignore[override]
            if self.last_epoch == 3 and self.optimizer is optimizer:
                raise RuntimeError("no rate")
            return [0.1 * (1 - self.last_epoch / 10) for _ in self.base_lrs]

    optimizer = adam()
    scheduler = stepped(hdet.auto(optimizer, total_steps=10, schedule=Breaks), [optimizer], 2)
    before = scheduler.get_last_lr()
    with pytest.raises(RuntimeError, match="no rate"):
        stepped(scheduler, [optimizer], 1)
    assert [group["lr"] for group in optimizer.param_groups] == before


def test_a_scheduler_that_is_gone_leaves_no_hook() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    hooks = optimizer._optimizer_load_state_dict_post_hooks
    for _ in range(3):
        scheduler = hdet.Ensemble(optimizer, knobs=hdet.knobs.lr(optimizer), total_steps=10)
        scheduler.load_state_dict(scheduler.state_dict())
        assert len(hooks) == 1
        del scheduler
        gc.collect()
        assert not hooks
