"""DeepSpeed's engine on two gloo ranks: `auto` on every stage, and replicas that train apart refused where they must be.

DeepSpeed is imported in the ranks only: it changes the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hdet
from tests.ranks import error_of, run_ranks
from tests.setups.problems import Records, batch_of, loss_of, network

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.timeout(300),
]

RANKS = 2
Factory = Callable[[torch.optim.Optimizer], Any]


def deepspeed_on(rank: int) -> Any:
    """DeepSpeed on the process group that is there, on the CPU, with gloo alone: nothing is compiled."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "DS_ACCELERATOR": "cpu"}
    os.environ.update({name: str(value) for name, value in place.items()})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


def engine_of(deepspeed: Any, stage: int, scheduler: Factory | None = None, built: Any = None, **config: Any) -> Any:
    """The engine of a small network in two parameter groups, as most scripts have them."""
    model, optimizer = built if built is not None else model_and_optimizer()
    settings = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        **config,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings)[0]


def model_and_optimizer(lr: float = 1e-2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network()
    decayed = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-2}
    plain = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    return model, torch.optim.AdamW([decayed, plain], lr=lr)


def step(engine: Any, k: int, rank: int) -> torch.Tensor:
    """One step of the loop that users of DeepSpeed have; each rank on a batch of its own."""
    loss = loss_of(engine, batch_of(RANKS * k + rank, 16))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def trained(optimizer: torch.optim.Optimizer) -> hdet.OneCycleLR:
    return hdet.OneCycleLR(optimizer, max_lr=1e-2, total_steps=50)


# -- replicas that train apart ------------------------------------------------------------------------------------------


def refused(rank: int, stage: int) -> tuple[str, str, str]:
    """What is said of a scheduler that DeepSpeed builds, that was built before, and of ``auto`` without the engine."""
    deepspeed = deepspeed_on(rank)
    by_callable = error_of(lambda: engine_of(deepspeed, stage, trained))
    model, optimizer = model_and_optimizer()
    engine = engine_of(deepspeed, stage, trained(optimizer), (model, optimizer))
    by_step = error_of(lambda: step(engine, 0, rank))
    searching = error_of(
        lambda: engine_of(deepspeed, stage, lambda opt: hdet.OneCycleLR(opt, "auto", total_steps=50, probe=lambda: 0.0))
    )
    return tuple(f"{type(error).__name__}: {error}" for error in (by_callable, by_step, searching))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trained_replicas_are_refused_on_partitions(stage: int) -> None:
    for by_callable, by_step, searching in run_ranks(refused, RANKS, stage, timeout=120):
        for message in (by_callable, by_step, searching):
            assert message.startswith("ShardedParametersError")
            assert "ZeRO" in message
            assert "hdet.integrations.deepspeed.auto(engine" in message
        assert "stage 0" in by_callable
        assert "stage 0" in by_step
        assert "averag" not in searching


def trains_apart(rank: int) -> list[float]:
    deepspeed = deepspeed_on(rank)
    engine = engine_of(deepspeed, 0, lambda opt: hdet.OneCycleLR(opt, max_lr=1e-2, total_steps=6, sync_every=3))
    rates = []
    for k in range(6):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        step(engine, k, rank)
    return [*rates, *(float(p.detach().sum()) for p in engine.module.parameters())]


def test_trained_replicas_run_on_stage_0() -> None:
    first, second = run_ranks(trains_apart, RANKS, timeout=120)
    assert first[:6] != second[:6]
    assert first[6:] == second[6:]


# -- auto ---------------------------------------------------------------------------------------------------------------

STEPS = 120
GUESS = 1e-4  # a hundredth of what does well


def searched(rank: int, stage: int, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A run with ``auto``: the rate of each step, the events and the final loss."""
    deepspeed = deepspeed_on(rank)
    from hdet.integrations.deepspeed import auto

    records = Records()
    engine = engine_of(deepspeed, stage, built=model_and_optimizer(GUESS), **config)
    probe = hdet.ProbeBatch(engine, loss_of, lambda k: batch_of(100_000 + k, 32))
    auto(engine, total_steps=STEPS, probe=probe, journal=records if rank == 0 else None)
    rates = []
    for k in range(STEPS):
        rates.append(engine.get_lr()[0])
        step(engine, k, rank)
    with torch.no_grad():
        loss = float(loss_of(engine, batch_of(999_999, 2000)))
    return rates, [r["event"] for r in records.rounds], loss
