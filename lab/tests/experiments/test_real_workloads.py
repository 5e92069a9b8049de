"""lab/experiments/real: every workload is a task that trains as a row of a stack. No data are needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from real import data
from real.bench import Validator
from real.data import MissingDataError
from real.optimizers import CUSTOMARY, update_of
from real.workloads import SPLITS, TEST_SMALL, WORKLOADS
from stacked import Stack, Supply, TrainStep

from lab.tasks import Task
from lab.tests.experiments.small_tasks import CPU

PROBLEMS = {repr(workload.build): name for name, workload in WORKLOADS.items()}
EVERY = pytest.mark.parametrize("name", PROBLEMS.values())
"""One workload of every problem: others have the same one with another optimizer or length."""
TEST = [name for name, workload in WORKLOADS.items() if workload.split == "test"]
FETCHED = [name for name, w in WORKLOADS.items() if w.split in ("seen", "test") and w not in TEST_SMALL]
ALONE = ("blocks-graph", "shakespeare-gpt-batch256")
"""There are not enough samples for a second replica."""


@cache
def task(name: str) -> Task:
    return WORKLOADS[name].task(synthetic=True)


def test_the_table_is_that_of_the_decision() -> None:
    splits = [workload.split for workload in WORKLOADS.values()]
    assert {split: splits.count(split) for split in SPLITS} == {"dev": 6, "kin": 20, "seen": 21, "test": 16}
    assert len(splits) == 63
    assert {workload.optimizer for workload in WORKLOADS.values()} <= CUSTOMARY.keys()
    assert WORKLOADS["shakespeare-gru"].customary == 1e-4


def test_test_has_no_problem_of_other_splits() -> None:
    used = {split: {repr(w.build) for w in WORKLOADS.values() if w.split == split} for split in SPLITS}
    assert not used["test"] & (used["dev"] | used["kin"] | used["seen"])


def test_small_workloads_are_small_and_need_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    for workload in TEST_SMALL:
        one = workload.task()
        assert sum(p.numel() for p in one.model(0).parameters()) < 1e5
        assert 100 <= workload.steps <= 600
        assert all(map(torch.equal, one.batch(0, 0), task(workload.name).batch(0, 0)))


@EVERY
def test_gradients_of_a_stack_are_those_of_the_model(name: str) -> None:
    one = task(name)
    batches = [one.batch(seed, 0) for seed in (0, 1)]
    stack = Stack(one, [0, 1], 2, CPU)
    stack.theta[:, 1] *= 1.01
    gradients, losses = stack.gradients(stack.theta, tuple(torch.stack(part) for part in zip(*batches, strict=True)))
    model = one.model(1)
    loss = one.loss(model, batches[1])
    loss.backward()
    expected = torch.cat([p.grad.flatten() for group in one.groups(model) for p in group["params"]])
    torch.testing.assert_close(losses[1, 0], loss.detach())
    torch.testing.assert_close(gradients[1, 0], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert losses.isfinite().all()
    assert not torch.equal(gradients[1, 0], gradients[1, 1])


@EVERY
def test_batches_depend_on_their_arguments_alone(name: str) -> None:
    one, state = task(name), torch.random.get_rng_state()
    first = one.batch(3, 2)
    weights = torch.nn.utils.parameters_to_vector(one.model(3).parameters())
    again = WORKLOADS[name].task(synthetic=True)
    again.batch(4, 0)
    assert all(map(torch.equal, first, again.batch(3, 2)))
    assert torch.equal(weights, torch.nn.utils.parameters_to_vector(again.model(3).parameters()))
    assert torch.equal(state, torch.random.get_rng_state())
    for other in (one.batch(3, 3), one.batch(4, 2)):
        assert not torch.equal(first[0], other[0])


@EVERY
def test_replicas_share_no_batch(name: str) -> None:
    one = task(name)
    assert len(one.batch(0, 0)[0]) == one.batch_size
    if name not in ALONE:
        halves = [one.batch(0, 0, replica, 2) for replica in (0, 1)]
        assert not torch.equal(halves[0][0], halves[1][0])


@EVERY
def test_validation_is_the_same_for_a_stack(name: str) -> None:
    one = task(name)
    parts = one.validation()
    assert len({part[0].shape for part in parts}) == 1
    assert [p.dtype for p in parts[0]] == [p.dtype for p in one.batch(0, 0)]
    stack = Stack(one, [0], 1, CPU)
    # A stack normalises by the batch, as a model in training does; other models do not care.
    model = one.model(0)
    with torch.no_grad():
        losses = [float(one.loss(model, part)) for part in parts]
    assert float(stack.validation(stack.theta)) == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert one.evaluate(model).keys() == {"loss"}


@EVERY
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = task(name).model(0)
    grouped = [id(p) for group in task(name).groups(model) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@EVERY
def test_a_stand_in_can_be_learnt(name: str) -> None:
    one = task(name)
    model = one.model(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = one.batch(0, 0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = one.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("name", TEST)
def test_runs_of_the_test_learn_as_rows_of_a_stack(name: str) -> None:
    """With their own optimizers, on one batch again and again."""
    one, workload = task(name), WORKLOADS[name]
    stack = Stack(one, [0, 1], 2, CPU)
    batches = tuple(part.expand(8, *part.shape[1:]) for part in Supply(one, [0, 1], 1, CPU).batches)
    rates = torch.tensor([0.5, 1.0])[:, None] * workload.customary * torch.ones(8, 2, 2, len(stack.sizes))
    step = TrainStep(stack, update_of(workload.optimizer, stack), batches, rates, graph=False)
    step()
    first = step.losses.clone()
    for _ in range(7):
        step()
    assert (step.losses < first).all()


@pytest.mark.parametrize("name", FETCHED)
def test_batches_of_the_tests_come_from_the_data(name: str) -> None:
    """Where they have been fetched."""
    try:
        real = WORKLOADS[name].task()
    except MissingDataError as missing:
        pytest.skip(str(missing))
    synthetic = task(name)
    for one, other in ((real.batch(0, 0), synthetic.batch(0, 0)), (real.validation()[0], synthetic.validation()[0])):
        assert [(part.dtype, part.shape[1:]) for part in one] == [(part.dtype, part.shape[1:]) for part in other]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@EVERY
def test_steps_and_validation_can_be_captured(name: str) -> None:
    one, device, found = task(name), torch.device("cuda"), []
    supply = Supply(one, [0, 1], 3, device)
    for graph in (False, True):
        stack = Stack(one, [0, 1], 2, device)
        rates = torch.full((3, 2, 2, len(stack.sizes)), WORKLOADS[name].customary / 10, device=device)
        step = TrainStep(stack, update_of(WORKLOADS[name].optimizer, stack), supply.batches, rates, graph=graph)
        for _ in range(3):
            step()
        found.append(torch.stack([step.losses.double(), Validator(stack, stack.theta, graph)(stack.theta)]).cpu())
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)
