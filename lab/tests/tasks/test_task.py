"""One contract, all tasks."""

from __future__ import annotations

import random
from itertools import islice

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, stack_module_state, vmap

from lab.tasks import Batch, Task, batches, task_named
from lab.tasks.task import evaluating
from lab.tests.tasks.conftest import SMALL


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(task: Task, steps: int, device: str = "cpu", lr: float = 3e-3) -> nn.Module:
    model = task.model(0).to(device)
    optimizer = torch.optim.Adam(task.groups(model), lr=lr)
    for batch in islice(batches(task, 0, device=device), steps):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return model


def test_a_batch_depends_on_its_arguments_alone(task: Task) -> None:
    first = task.batch(1, 7, 2, 3)
    task.batch(5, 900)
    again = task_named(task.name, **SMALL[task.name])
    assert equal(first, again.batch(1, 7, 2, 3))
    assert all(tensor.device.type == "cpu" and len(tensor) == task.batch_size for tensor in first)
    for other in (task.batch(2, 7, 2, 3), task.batch(1, 8, 2, 3), task.batch(1, 7, 1, 3), task.batch(1, 7)):
        assert not equal(first, other)


def test_global_generators_are_neither_read_nor_seeded(task: Task) -> None:
    torch.manual_seed(12)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    fresh = task_named(task.name, **SMALL[task.name])
    model = fresh.model(0)
    fresh.loss(model, fresh.batch(0, 0)).backward()
    fresh.evaluate(model)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_the_seed_decides_the_weights(task: Task) -> None:
    one, same, other = (list(task.model(seed).parameters()) for seed in (3, 3, 4))
    assert equal(tuple(one), tuple(same))
    assert not equal(tuple(one), tuple(other))


def test_each_parameter_is_in_one_group(task: Task) -> None:
    model = task.model(0)
    groups = task.groups(model)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert all(group["params"] for group in groups)
    assert len({group["name"] for group in groups}) == len(groups)
    for group in groups:
        flat = {parameter.ndim < 2 for parameter in group["params"]}
        assert flat == {group["name"] == "no_decay"}


def test_validation_is_fixed_and_in_equal_batches(task: Task) -> None:
    held_out = task.validation()
    assert all(equal(a, b) for a, b in zip(held_out, task.validation(), strict=True))
    assert len({tuple(tensor.shape for tensor in batch) for batch in held_out}) == 1


def test_evaluation_is_the_mean_loss_and_leaves_the_model_as_it_was(task: Task) -> None:
    model = task.model(0)
    next(model.children()).eval()  # one part is frozen by the user
    modes = [module.training for module in model.modules()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    result = task.evaluate(model)
    assert [module.training for module in model.modules()] == modes
    assert equal(tuple(buffers), tuple(model.buffers()))
    with evaluating(model):
        losses = [task.loss(model, batch).item() for batch in task.validation()]
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert all(isinstance(value, float) for value in result.values())


def test_a_stack_of_models_runs_under_vmap(task: Task) -> None:
    models = [replace_all_batch_norm_modules_(task.model(seed)) for seed in range(3)]
    stacked, buffers = stack_module_state(models)
    batch = task.batch(0, 0)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return task.loss(lambda *inputs: functional_call(models[0], (parameters, buffers), inputs), batch)

    losses = [task.loss(model, batch) for model in models]
    for alone in losses:
        assert alone.shape == ()
        alone.backward()
    torch.testing.assert_close(vmap(loss)(stacked, buffers), torch.stack(losses))
    slopes = vmap(grad(loss))(stacked, buffers)
    for name, slope in slopes.items():
        alone = torch.stack([model.get_parameter(name).grad for model in models])
        torch.testing.assert_close(slope, alone, rtol=1e-3, atol=1e-5)


def test_training_is_repeatable_and_learns(task: Task) -> None:
    model = trained(task, 60)
    assert task.evaluate(model)["loss"] < 0.98 * task.evaluate(task.model(0))["loss"]
    again = trained(task, 60)
    assert equal(tuple(model.state_dict().values()), tuple(again.state_dict().values()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_is_repeatable(task: Task) -> None:
    torch.backends.cudnn.deterministic = True
    try:
        model, again = trained(task, 20, "cuda"), trained(task, 20, "cuda")
        assert task.evaluate(model) == task.evaluate(again)
    finally:
        torch.backends.cudnn.deterministic = False
    assert equal(tuple(model.state_dict().values()), tuple(again.state_dict().values()))
