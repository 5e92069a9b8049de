"""DeepSpeed's engine on two gloo ranks: ``auto`` on every stage, and replicas that train apart where they can.

DeepSpeed is imported in the ranks only: it changes the environment.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import hdet
from hdet.integrations.deepspeed import auto
from tests.code_blocks import blocks
from tests.ranks import error_of, run_ranks
from tests.setups.problems import Records, batch_of, loss_of, network

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
pytestmark = pytest.mark.timeout(300)

RANKS = 2
STEPS = 120
GUESS = 1e-4
"""A hundredth of what does well."""
BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
Factory = Callable[[torch.optim.Optimizer], Any]


def deepspeed_on(rank: int) -> Any:
    """DeepSpeed on the process group that is there, on the CPU, with gloo alone: nothing is compiled."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "DS_ACCELERATOR": "cpu"}
    os.environ.update({name: str(value) for name, value in place.items()})
    warnings.simplefilter("ignore")  # in this process: DeepSpeed's own calls of torch
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
        "gradient_clipping": 1.0,
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


# -- auto ------------------------------------------------------------------------------------------------------------


class Searched:
    """A run with ``auto``: the engine, and the rate of each step."""

    def __init__(self, rank: int, deepspeed: Any, stage: int, **config: Any) -> None:
        self.rank, self.records, self.rates = rank, Records(), []
        self.engine = engine_of(deepspeed, stage, built=model_and_optimizer(GUESS), **config)
        probe = hdet.ProbeBatch(self.engine, loss_of, probe_batch)
        auto(self.engine, total_steps=STEPS, probe=probe, journal=self.records)

    def train(self, steps: range) -> None:
        for k in steps:
            self.rates.append(self.engine.get_lr()[0])
            step(self.engine, k, self.rank)

    @property
    def loss(self) -> float:
        with torch.no_grad():
            return float(loss_of(self.engine, batch_of(999_999, 2000)))


class Story(NamedTuple):
    """What a run has measured and done; the journal is the first rank's."""

    rates: list[float]
    events: list[str | None]
    heard: list[float]
    """Of each round: the rate that the gradients ask for, and the loss of the weights of a round ago."""
    loss: float


def story_of(rates: list[float], records: Records, loss: float) -> Story:
    rounds = records.rounds
    heard = [record[name] for name in ("reach", "loss_before") for record in rounds]
    return Story(rates, [record["event"] for record in rounds], heard, loss)


def probe_batch(k: int) -> Any:
    return batch_of(100_000 + k, 32)


def in_one_process() -> Story:
    """The same run without DeepSpeed, on the batches of all ranks."""
    model, optimizer = model_and_optimizer(GUESS)
    records, rates = Records(), []
    probe = hdet.ProbeBatch(model, loss_of, probe_batch)
    scheduler = hdet.auto(optimizer, total_steps=STEPS, probe=probe, journal=records)
    for k in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        torch.stack([loss_of(model, batch_of(RANKS * k + rank, 16)) for rank in range(RANKS)]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return story_of(rates, records, float(loss_of(model, batch_of(999_999, 2000)).detach()))


def searched(rank: int, cases: list[tuple[int, dict[str, Any]]]) -> list[tuple[str, Story]]:
    deepspeed = deepspeed_on(rank)
    found = []
    for stage, config in cases:
        run = Searched(rank, deepspeed, stage, **config)
        run.train(range(STEPS))
        found.append((type(run.engine.optimizer).__name__, story_of(run.rates, run.records, run.loss)))
    return found


@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-0", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-1", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-2", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-3", "fp32")
@needs_deepspeed
def test_every_stage_decides_as_one_process() -> None:
    """Sums over partitions, weights of a round ago, going back: all of it happens in this run."""
    alone = in_one_process()
    assert any(event and event.startswith("too hot") for event in alone.events)
    assert max(alone.rates) > 100 * GUESS
    cases = [*((stage, {}) for stage in range(4)), (2, OFFLOADED)]
    mine, others = run_ranks(searched, RANKS, cases, timeout=240)
    partitions = "DeepSpeedZeroOptimizer"
    assert [kind for kind, _ in mine] == ["AdamW", partitions, partitions, f"{partitions}_Stage3", partitions]
    for (_, found), (_, on_other) in zip(mine, others, strict=True):
        assert found.rates == on_other.rates
        assert found.rates == pytest.approx(alone.rates, rel=1e-5)
        assert found.events == alone.events
        assert found.heard == pytest.approx(alone.heard, rel=1e-3, nan_ok=True)
        assert found.loss == pytest.approx(alone.loss, rel=1e-3)


@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-0", "bf16")
@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-1", "bf16")
@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-2", "fp16")
@pytest.mark.covers("frameworks", "DeepSpeed, probed", "ZeRO-3", "bf16")
@needs_deepspeed
def test_half_precision_has_masters() -> None:
    """The search is on fp32 masters, and the probe reads the model's own weights in half precision."""
    accumulated = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    scaled = {"fp16": {"enabled": True, "loss_scale": 128.0}}
    cases = [(0, BF16), (1, accumulated), (2, scaled), (3, BF16)]
    alone = in_one_process()
    mine, others = run_ranks(searched, RANKS, cases, timeout=240)
    kinds = [kind for kind, *_ in mine]
    assert kinds == [
        "FP16_UnfusedOptimizer",
        "BF16_Optimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    ]
    for (_, found), (_, on_other) in zip(mine, others, strict=True):
        assert found.rates == on_other.rates
        assert found.loss < 1.5 * alone.loss
    for _, found in mine[1:]:  # stage 0 adds up gradients in bf16, and may decide otherwise
        assert found.events == alone.events
        assert found.rates == pytest.approx(alone.rates, rel=1e-2)


def resumed(rank: int, folder: str) -> tuple[bool, list[Any]]:
    """Half a run, saved and loaded, with accumulation."""
    deepspeed = deepspeed_on(rank)
    first, second = (Searched(rank, deepspeed, 2, gradient_accumulation_steps=2) for _ in range(2))
    first.train(range(80))
    first.engine.save_checkpoint(folder)
    second.engine.load_checkpoint(folder)
    schedulers = [run.engine.lr_scheduler for run in (first, second)]
    alike = schedulers[0].state_dict() == schedulers[1].state_dict() and schedulers[1].last_epoch == 40
    alike &= first.engine.get_lr() == second.engine.get_lr() and first.loss == second.loss
    second.train(range(80, 2 * STEPS))
    return alike, [schedulers[1].last_epoch, second.loss]


@needs_deepspeed
def test_checkpoints_hold_the_search(tmp_path: Path) -> None:
    for alike, (last, loss) in run_ranks(resumed, RANKS, str(tmp_path), timeout=240):
        assert alike
        assert last == STEPS
        assert loss < 0.25


def documented(rank: int, source: str) -> float:
    deepspeed_on(rank)
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["engine"].lr_scheduler.last_epoch == 200
    return float(names["loss"].detach())


@needs_deepspeed
def test_the_documented_script_runs() -> None:
    (block,) = blocks(Path(__file__).parents[2] / "docs" / "frameworks.md", "py")
    assert max(run_ranks(documented, RANKS, block.source, timeout=240)) < 2.0


def test_what_is_no_engine_is_refused() -> None:
    def step_() -> None: ...

    def refused_with(words: str, **attributes: Any) -> None:
        engine = SimpleNamespace(**{"optimizer": None, "lr_scheduler": None, "step": step_, **attributes})
        with pytest.raises(hdet.errors.ArgumentError, match=words):
            auto(engine, total_steps=100, probe=lambda: 0.0)

    with pytest.raises(hdet.errors.ArgumentError, match=r"what deepspeed\.initialize returns first"):
        auto(torch.nn.Linear(1, 1), total_steps=100, probe=lambda: 0.0)
    refused_with("a scheduler already, object", lr_scheduler=object())
    refused_with("pipeline parallelism", pipeline_parallelism=True)
    refused_with("NVMe", optimizer=SimpleNamespace(swap_optimizer=True))
    refused_with("how SimpleNamespace keeps", optimizer=SimpleNamespace(optimizer=None))


# -- replicas that train apart ---------------------------------------------------------------------------------------


def refused(rank: int) -> list[list[str]]:
    """On each stage, what is said of a scheduler that DeepSpeed builds, one built before, and ``auto`` by itself."""
    deepspeed = deepspeed_on(rank)
    return [[f"{type(error).__name__}: {error}" for error in errors_on(deepspeed, stage, rank)] for stage in (1, 2, 3)]


def errors_on(deepspeed: Any, stage: int, rank: int) -> list[Exception]:
    model, optimizer = model_and_optimizer()
    engine = engine_of(deepspeed, stage, trained(optimizer), (model, optimizer))
    return [
        error_of(lambda: engine_of(deepspeed, stage, trained)),
        error_of(lambda: step(engine, 0, rank)),
        error_of(lambda: engine_of(deepspeed, stage, searching)),
    ]


def trained(optimizer: torch.optim.Optimizer) -> hdet.OneCycleLR:
    return hdet.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6, sync_every=3)


def searching(optimizer: torch.optim.Optimizer) -> hdet.OneCycleLR:
    return hdet.OneCycleLR(optimizer, "auto", total_steps=50, probe=lambda: 0.0)


@pytest.mark.covers("frameworks", "DeepSpeed, trained", "ZeRO-1", "refused")
@pytest.mark.covers("frameworks", "DeepSpeed, trained", "ZeRO-2", "refused")
@pytest.mark.covers("frameworks", "DeepSpeed, trained", "ZeRO-3", "refused")
@needs_deepspeed
def test_replicas_are_refused_on_partitions() -> None:
    for rows in run_ranks(refused, RANKS, timeout=240):
        for by_callable, by_step, by_auto in rows:
            for message in (by_callable, by_step, by_auto):
                assert message.startswith("ShardedParametersError")
                assert "ZeRO stages 1, 2 and 3" in message
                assert "hdet.integrations.deepspeed.auto(engine" in message
            assert "stage 0" in by_callable
            assert "stage 0" in by_step
            assert "averag" not in by_auto


def trains_apart(rank: int) -> tuple[list[float], list[float]]:
    engine = engine_of(deepspeed_on(rank), 0, trained)
    rates = []
    for k in range(6):
        rates.append(engine.get_lr()[0])
        step(engine, k, rank)
    return rates, [float(p.detach().sum()) for p in engine.module.parameters()]


@pytest.mark.covers("frameworks", "DeepSpeed, trained", "ZeRO-0", "fp32")
@needs_deepspeed
def test_replicas_train_apart_on_stage_0() -> None:
    (rates, weights), (other_rates, other_weights) = run_ranks(trains_apart, RANKS, timeout=120)
    assert rates != other_rates
    assert weights == other_weights
