"""lab/experiments/zoo_stack.py: a row of the stack is the zoo's problem, trained by the zoo's optimizer."""

from __future__ import annotations

import pytest
import torch
from stacked import Stack, Supply, TrainStep
from zoo_problems import OPTIMIZERS, PROBLEMS, model_of
from zoo_stack import UPDATES, ZooTask

from lab.tests.experiments.small_tasks import CPU

STEPS, RATE = 5, 1e-2


def check(problem: str, optimizer: str) -> None:
    task = ZooTask(problem)
    stack = Stack(task, [0, 3], 2, CPU)
    rates = torch.full((STEPS, 2, 2, 1), RATE)
    step = TrainStep(stack, UPDATES[optimizer](stack.theta), Supply(task, [0, 3], STEPS, CPU).batches, rates)
    for _ in range(STEPS):
        step()
    model = model_of(PROBLEMS[problem], 3)
    plain = OPTIMIZERS[optimizer](model.parameters(), lr=RATE)
    for t in range(STEPS):
        loss = PROBLEMS[problem].loss(model, task.batch(3, t))
        plain.zero_grad()
        loss.backward()
        plain.step()
    torch.testing.assert_close(step.losses[1, 0], loss.detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    check("softmax", optimizer)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problems(problem: str) -> None:
    check(problem, "momentum")


def test_the_written_out_gru_is_torchs() -> None:
    model = model_of(PROBLEMS["recurrent"], 0)
    gru = torch.nn.GRU(24, 32, batch_first=True)
    parts = (model.gru.inputs, model.gru.memory)
    weights = [value for name in ("weight", "bias") for part in parts for value in (getattr(part, name),)]
    gru.load_state_dict(dict(zip(gru.state_dict(), weights, strict=True)))
    inputs = model.table(torch.randint(128, (5, 16)))
    torch.testing.assert_close(model.gru(inputs), gru(inputs)[0])
