"""hdet as a submission to AlgoPerf's self-tuning ruleset: NAdamW, whose learning rate `hdet.auto` finds in the run.

Averages of the weights are evaluated; `training.py` has them, the optimizer and the schedule. The functions have the
names and arguments of the benchmark's interface (its algoperf/spec.py). Nothing here depends on the workload but
the number of steps that its rules give to every submission (`workload.step_hint`), and the batch sizes, which the rules
let a submission choose. The same file runs on one device, under the benchmark's DataParallel and under DDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.nn
from algoperf import spec
from algoperf.pytorch_utils import pytorch_setup

import hdet
from lab.algoperf.training import BETAS, GUESS, WEIGHT_DECAY, Average, NAdamW, share_of

USE_DDP = pytorch_setup()[0]
BATCH_SIZES = {
    "cifar": 128,
    "criteo1tb": 262_144,
    "fastmri": 32,
    "finewebedu_lm": 64,
    "imagenet_resnet": 1024,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 64,
    "ogbg": 512,
    "wmt": 128,
}


class SearchTensors:
    """The tensors of the search, as the benchmark's checkpoints take them: an object with ``state_dict``."""

    def __init__(self, scheduler: hdet.AutoScheduler) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return self._scheduler.search_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scheduler.load_search_state_dict(state)


def init_optimizer_state(
    workload: spec.Workload,
    model_params: torch.nn.Module,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    rng: spec.RandomState,
) -> dict[str, Any]:
    """The parts of training, in the order in which a checkpoint has to be loaded."""
    del model_state, hyperparameters, rng
    steps = workload.step_hint
    optimizer = NAdamW(model_params.parameters(), lr=GUESS, betas=BETAS, weight_decay=WEIGHT_DECAY)
    scheduler = hdet.auto(optimizer, schedule=lambda step: share_of(step, steps), total_steps=steps)
    average = Average(model_params, steps)
    return {"optimizer": optimizer, "scheduler": scheduler, "search": SearchTensors(scheduler), "average": average}


def update_params(
    workload: spec.Workload,
    current_param_container: torch.nn.Module,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    batch: dict[str, torch.Tensor],
    loss_type: spec.LossType,
    optimizer_state: dict[str, Any],
    eval_results: list[tuple[int, dict[str, float]]],
    global_step: int,
    rng: spec.RandomState,
    train_state: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], torch.nn.Module, spec.ModelAuxiliaryState]:
    """One step of training: its loss is the mean over the examples of all devices, as in the benchmark's baselines."""
    del current_params_types, hyperparameters, loss_type, eval_results, train_state
    if global_step >= workload.step_hint:
        raise spec.TrainingCompleteError  # the schedule has ended at a rate of 0
    optimizer, scheduler, average = (optimizer_state[name] for name in ("optimizer", "scheduler", "average"))
    average.hide()
    model = current_param_container
    model.train()
    optimizer.zero_grad()
    outputs, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
    )
    losses = workload.loss_fn(label_batch=batch["targets"], logits_batch=outputs, mask_batch=batch.get("weights"))
    total, examples = losses["summed"], losses["n_valid_examples"]
    if USE_DDP:  # this all_reduce also scales the gradients, which DDP averages, back to those of the sum
        total, examples = torch.distributed.nn.all_reduce(total), torch.distributed.nn.all_reduce(examples)
    loss = total / examples
    loss.backward()
    optimizer.step()
    scheduler.step(loss.detach())
    if global_step % average.every == 0:
        average.look(scheduler.found.rolled_back)
    return optimizer_state, model, model_state


def prepare_for_eval(
    workload: spec.Workload,
    current_param_container: torch.nn.Module,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    loss_type: spec.LossType,
    optimizer_state: dict[str, Any],
    eval_results: list[tuple[int, dict[str, float]]],
    global_step: int,
    rng: spec.RandomState,
) -> tuple[dict[str, Any], torch.nn.Module, spec.ModelAuxiliaryState]:
    """The averages are evaluated; the next step goes on from the weights that are trained."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    optimizer_state["average"].show()
    return optimizer_state, current_param_container, model_state


def get_batch_size(workload_name: str) -> int:
    """The batch sizes of the benchmark's own baselines."""
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"workload_name must be one of {', '.join(BATCH_SIZES)}, but got {workload_name!r}")
    return BATCH_SIZES[workload_name]


def data_selection(
    workload: spec.Workload,
    input_queue: Iterator[dict[str, torch.Tensor]],
    optimizer_state: dict[str, Any],
    current_param_container: torch.nn.Module,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    global_step: int,
    rng: spec.RandomState,
) -> dict[str, torch.Tensor]:
    """The next batch of the queue."""
    return next(input_queue)
