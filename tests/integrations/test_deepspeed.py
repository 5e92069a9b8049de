"""DeepSpeed's engine on two gloo ranks: ``auto`` on every stage, and replicas that train apart where they can.

DeepSpeed is imported in the ranks only: it changes the environment.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hdet
from hdet.integrations.deepspeed import Guard, auto, optimizer_of
from tests.code_blocks import blocks
from tests.problems import Records, batch_of, loss_of, network, quiet
from tests.processes import error_of, run_ranks

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

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
    """A run that finds its rate. ``scheduler``: given to ``initialize``; else ``auto`` is called with the engine."""

    def __init__(
        self,
        rank: int,
        deepspeed: Any,
        stage: int,
        gives_loss: bool = True,
        scheduler: Factory | None = None,
        **config: Any,
    ) -> None:
        self.rank, self.gives_loss = rank, gives_loss
        self.engine = engine_of(deepspeed, stage, scheduler, model_and_optimizer(GUESS), **config)
        self.scheduler = self.engine.lr_scheduler if scheduler else auto(self.engine, total_steps=STEPS)

    def train(self, steps: range) -> None:
        """The loop of the documentation: one line beside DeepSpeed's own."""
        for k in steps:
            loss = loss_of(self.engine, batch_of(RANKS * k + self.rank, 16))
            if self.gives_loss:
                self.scheduler.observe(loss)
            self.engine.backward(loss)
            self.engine.step()

    @property
    def loss(self) -> float:
        with torch.no_grad():
            return float(loss_of(self.engine, batch_of(999_999, 2000)))


@cache
def in_one_process(gives_loss: bool = True) -> float:
    """The final loss of the same run without DeepSpeed, on the batches of all ranks."""
    model, optimizer = model_and_optimizer(GUESS)
    scheduler = hdet.auto(optimizer, total_steps=STEPS)
    for k in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, batch_of(RANKS * k + rank, 16)) for rank in range(RANKS)]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with quiet():  # without a loss it is told of
            scheduler.step(*([loss] if gives_loss else []))
    return float(loss_of(model, batch_of(999_999, 2000)).detach())


def searched(rank: int, cases: list[tuple[int, bool, dict[str, Any]]]) -> list[tuple[str, float, float]]:
    """For each case: the kind of optimizer, the highest rate, the final loss."""
    deepspeed = deepspeed_on(rank)
    found = []
    for stage, gives_loss, config in cases:
        run = Searched(rank, deepspeed, stage, gives_loss, **config)
        run.train(range(STEPS // 3 + 1))
        highest = run.engine.get_lr()[0]
        run.train(range(STEPS // 3 + 1, STEPS))
        found.append((type(run.engine.optimizer).__name__, highest, run.loss))
    return found


@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-0", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-1", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-2", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-3", "fp32")
@needs_deepspeed
@pytest.mark.parametrize("gives_loss", [True, False])
def test_every_stage_ends_where_one_process_ends(gives_loss: bool) -> None:
    cases = [*((stage, gives_loss, {}) for stage in range(4)), (2, gives_loss, OFFLOADED)]
    mine, others = run_ranks(searched, RANKS, cases)
    partitions = "DeepSpeedZeroOptimizer"
    assert [kind for kind, *_ in mine] == ["AdamW", partitions, partitions, f"{partitions}_Stage3", partitions]
    for (_, rate, loss), (_, other_rate, _) in zip(mine, others, strict=True):
        assert rate == other_rate
        assert loss / in_one_process(gives_loss) == pytest.approx(1, abs=0.02)


@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-0", "bf16")
@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-1", "bf16")
@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-2", "bf16")
@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-3", "bf16")
@needs_deepspeed
def test_half_precision_has_masters() -> None:
    """The search is on fp32 masters."""
    accumulated = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    cases = [(0, True, BF16), (1, False, accumulated), (2, True, BF16), (3, True, BF16)]
    mine, others = run_ranks(searched, RANKS, cases)
    assert [kind for kind, *_ in mine] == [
        "FP16_UnfusedOptimizer",
        "BF16_Optimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    ]
    for (_, gives_loss, _), (_, rate, loss), (_, other_rate, _) in zip(cases, mine, others, strict=True):
        assert rate == other_rate
        assert loss < 1.5 * in_one_process(gives_loss)


def searched_in_fp16(rank: int) -> list[tuple[str, float, float]]:
    deepspeed = deepspeed_on(rank)
    scaled = {"fp16": {"enabled": True, "loss_scale": 128.0}}
    return searched(rank, [(2, True, scaled)] if deepspeed.accelerator.get_accelerator().is_fp16_supported() else [])


@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-2", "fp16")
@needs_deepspeed
def test_fp16_has_masters_and_a_scale() -> None:
    mine, _ = run_ranks(searched_in_fp16, RANKS)
    if not mine:
        pytest.skip("DeepSpeed has no fp16 on this processor")
    assert mine[0][2] < 1.5 * in_one_process()


def given_to_initialize(rank: int) -> list[float]:
    """The scheduler as it is: built before, and built by DeepSpeed from a function; with the loss and without."""
    deepspeed, found = deepspeed_on(rank), []
    for gives_loss in (True, False):
        run = Searched(rank, deepspeed, 0, gives_loss, lambda optimizer: hdet.auto(optimizer, total_steps=STEPS))
        run.train(range(STEPS))
        found.append(run.loss)
    model, optimizer = model_and_optimizer(GUESS)
    engine = engine_of(deepspeed, 0, hdet.auto(optimizer, total_steps=STEPS), (model, optimizer))
    for k in range(STEPS):
        loss = loss_of(engine, batch_of(RANKS * k + rank, 16))
        engine.backward(loss)
        engine.step({"loss": loss})  # what it hands on to the scheduler
    with torch.no_grad():
        return [*found, float(loss_of(engine, batch_of(999_999, 2000)))]


@pytest.mark.covers("frameworks", "DeepSpeed, search", "ZeRO-0", "fp32")
@needs_deepspeed
def test_on_stage_0_initialize_takes_the_scheduler_as_it_is() -> None:
    for losses in run_ranks(given_to_initialize, RANKS):
        plain = [in_one_process(gives_loss) for gives_loss in (True, False, True)]
        assert losses == pytest.approx(plain, rel=0.02)


def ruined(rank: int) -> list[tuple[list[int], float]]:
    """Losses of steps 60 to 79 explode: on each stage, where training went back to, and the final loss."""
    deepspeed, found = deepspeed_on(rank), []
    for stage in range(4):
        journal = Records()
        engine = engine_of(deepspeed, stage, None, model_and_optimizer(GUESS))
        scheduler = auto(engine, total_steps=STEPS, journal=journal)
        for k in range(STEPS):
            loss = loss_of(engine, batch_of(RANKS * k + rank, 16))
            scheduler.observe(loss.detach() * (1e6 if 60 <= k < 80 else 1.0))
            engine.backward(loss)
            engine.step()
        with torch.no_grad():
            loss = loss_of(engine, batch_of(999_999, 2000))
        found.append(([r["rolled_back_to"] for r in journal.rounds if r["rolled_back_to"] is not None], float(loss)))
    return found


@needs_deepspeed
def test_every_stage_goes_back() -> None:
    """Masters, what the optimizer remembers, and what the model's forward pass reads."""
    mine, others = run_ranks(ruined, RANKS)
    assert [loss for _, loss in mine] == [loss for _, loss in others]
    assert mine[0][0]
    for back, loss in mine:
        assert back == mine[0][0]
        assert loss / mine[0][1] == pytest.approx(1, abs=0.02)
        assert loss < 4 * in_one_process()


def resumed(rank: int, folder: str) -> tuple[bool, list[Any]]:
    """Half a run, saved and loaded, with accumulation."""
    deepspeed = deepspeed_on(rank)
    first, second = (Searched(rank, deepspeed, 2, gradient_accumulation_steps=2) for _ in range(2))
    first.train(range(80))
    first.engine.save_checkpoint(folder)
    second.engine.load_checkpoint(folder)
    schedulers = [run.engine.lr_scheduler for run in (first, second)]
    alike = repr(schedulers[0].state_dict()) == repr(schedulers[1].state_dict()) and schedulers[1].last_epoch == 40
    alike &= first.engine.get_lr() == second.engine.get_lr() and first.loss == second.loss
    second.train(range(80, 2 * STEPS))
    return alike, [schedulers[1].last_epoch, second.loss]


@needs_deepspeed
def test_checkpoints_hold_the_search(tmp_path: Path) -> None:
    for alike, (last, loss) in run_ranks(resumed, RANKS, str(tmp_path)):
        assert alike
        assert last == STEPS
        assert loss < 1.2 * in_one_process()


CUTS = (1, 12, 18, 100)
"""After the first step, inside a round, at the end of one, and in the descent."""


def cut(rank: int, folder: str, cases: list[tuple[int, dict[str, Any]]]) -> None:
    deepspeed = deepspeed_on(rank)
    for number, (stage, config) in enumerate(cases):
        whole, done = Searched(rank, deepspeed, stage, **config), 0
        for at in CUTS:
            whole.train(range(done, at))
            whole.engine.save_checkpoint(folder, f"{number}-{at}")
            done = at
        whole.train(range(done, STEPS))
        for at in CUTS:
            again = Searched(rank, deepspeed, stage, **config)
            again.engine.load_checkpoint(folder, f"{number}-{at}")
            with warnings.catch_warnings():
                warnings.simplefilter("error", hdet.ResumeWarning)
                again.train(range(at, STEPS))
            assert again.loss == whole.loss, (stage, config, at)


@needs_deepspeed
def test_a_run_that_was_cut_is_the_one_that_was_not_bit_by_bit(tmp_path: Path) -> None:
    run_ranks(cut, RANKS, str(tmp_path), [*((stage, {}) for stage in range(4)), (1, BF16)])


DOCS = Path(__file__).parents[2] / "docs"


def documented(rank: int, sources: list[str]) -> list[float]:
    """The loss at the end of each script."""
    deepspeed_on(rank)
    losses = []
    for source in sources:
        names: dict[str, Any] = {}
        exec(source, names)
        losses.append(float(names["loss"].detach()))
        assert "total_steps=200" not in source or names["engine"].lr_scheduler.last_epoch == 200
    return losses


@needs_deepspeed
@pytest.mark.parametrize("page", ["frameworks.md", "questions/deepspeed.md", "reference.md"])
def test_the_documented_scripts_run(page: str) -> None:
    scripts = [block.source for block in blocks(DOCS / page, "py")]
    assert scripts
    for losses in run_ranks(documented, RANKS, scripts):
        assert max(losses) < 2.0


def test_what_is_no_engine_is_refused() -> None:
    def step_() -> None: ...

    def refused_with(words: str, **attributes: Any) -> None:
        engine = SimpleNamespace(**{"optimizer": None, "lr_scheduler": None, "step": step_, **attributes})
        with pytest.raises(hdet.errors.ArgumentError, match=words):
            auto(engine, total_steps=100)

    with pytest.raises(hdet.errors.ArgumentError, match=r"what deepspeed\.initialize returns first"):
        auto(torch.nn.Linear(1, 1), total_steps=100)
    refused_with("lr_scheduler must be None", lr_scheduler=object())
    refused_with("pipeline parallelism", pipeline_parallelism=True)
    refused_with("NVMe", optimizer=SimpleNamespace(swap_optimizer=True))
    refused_with("how SimpleNamespace keeps", optimizer=SimpleNamespace(optimizer=None))


def test_a_guard_of_an_engine_is_not_copied() -> None:
    model = network()
    made = {"optimizer": torch.optim.Adam(model.parameters()), "module": model, "global_steps": 0, "lr_scheduler": None}
    engine = SimpleNamespace(step=None, save_checkpoint=None, load_checkpoint=None, **made)
    with pytest.raises(hdet.ArgumentError, match="cannot be copied, as the engine cannot"):
        copy.deepcopy(Guard(engine))


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


def searching(optimizer: torch.optim.Optimizer) -> hdet.AutoScheduler:
    return hdet.auto(optimizer, total_steps=50)


@pytest.mark.covers("frameworks", "DeepSpeed, replicas", "ZeRO-1", "refused")
@pytest.mark.covers("frameworks", "DeepSpeed, replicas", "ZeRO-2", "refused")
@pytest.mark.covers("frameworks", "DeepSpeed, replicas", "ZeRO-3", "refused")
@needs_deepspeed
def test_replicas_are_refused_on_partitions() -> None:
    for rows in run_ranks(refused, RANKS):
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


@pytest.mark.covers("frameworks", "DeepSpeed, replicas", "ZeRO-0", "fp32")
@needs_deepspeed
def test_replicas_train_apart_on_stage_0() -> None:
    (rates, weights), (other_rates, other_weights) = run_ranks(trains_apart, RANKS)
    assert rates != other_rates
    assert weights == other_weights


# -- a guard ----------------------------------------------------------------------------------------------------------

LAST, BAD = 40, 25
SMALL_PARTS = {"zero_optimization": {"stage": 3, "sub_group_size": 64, "stage3_max_live_parameters": 1}}
"""Stage 3 in several parts for each parameter group."""
ENGINES: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in range(4)),
    (3, SMALL_PARTS),
    (2, OFFLOADED),
    (1, BF16),
    (3, BF16),
    (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
]


class Guarded:
    """A run under a guard. ``bad``: what the loss of step ``BAD`` is multiplied by, on one rank; None: left out."""

    def __init__(self, rank: int, deepspeed: Any, stage: int, bad: float | None = 1.0, **config: Any) -> None:
        self.rank, self.bad = rank, bad
        self.engine = engine_of(deepspeed, stage, **config)
        self.guard = Guard(self.engine, check_every=10)

    def train(self, steps: range) -> None:
        for k in steps:
            if k == BAD and self.bad is None:
                continue
            x, y = batch_of(RANKS * k + self.rank, 16)
            loss = loss_of(self.engine, (x.to(next(self.engine.module.parameters()).dtype), y))
            loss = loss * self.bad if k == BAD and self.bad is not None and self.rank == 1 else loss
            self.engine.backward(loss)
            self.engine.step()
            self.guard.step(loss)

    @property
    def held(self) -> list[torch.Tensor]:
        """What this rank trains, and what its optimizer remembers of it, step counts and all."""
        optimizer = optimizer_of(self.engine)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        states = [optimizer.state[p] for p in own]
        return [*own, *(value.clone() for state in states for _, value in sorted(state.items()))]

    @property
    def loss(self) -> float:
        x, y = batch_of(999_999, 2000)
        with torch.no_grad():
            return float(loss_of(self.engine, (x.to(next(self.engine.module.parameters()).dtype), y)))


def left_out(rank: int, bad: float) -> None:
    deepspeed = deepspeed_on(rank)
    for stage, config in ENGINES if bad != bad else ENGINES[1:]:  # stage 0 has clipped it, as a plain loop does
        runs = [Guarded(rank, deepspeed, stage, one, **config) for one in (bad, None)]
        for run in runs:
            run.train(range(LAST))
        mine, other = runs
        assert mine.guard.rollbacks == other.guard.rollbacks == 0
        assert mine.guard.held - other.guard.held in (0, 1), (stage, config)  # 0: DeepSpeed has left it out itself
        for one, two in zip(mine.held, other.held, strict=True):
            assert torch.equal(one, two), (stage, config)
        assert mine.loss == other.loss


@pytest.mark.covers("frameworks", "DeepSpeed, guard", "ZeRO-0", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, guard", "ZeRO-1", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, guard", "ZeRO-2", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, guard", "ZeRO-3", "fp32")
@pytest.mark.covers("frameworks", "DeepSpeed, guard", "ZeRO-1", "bf16")
@pytest.mark.covers("frameworks", "DeepSpeed, guard", "ZeRO-3", "bf16")
@needs_deepspeed
@pytest.mark.parametrize("bad", [float("nan"), 1e4])
def test_a_bad_batch_of_one_rank_is_left_out_by_all(bad: float) -> None:
    run_ranks(left_out, RANKS, bad)


CUT, SPOILED = 22, 29


def rolled_back(rank: int, folder: str) -> list[float]:
    """A weight of one rank becomes NaN. Half the run is saved, and resumed."""
    deepspeed, found = deepspeed_on(rank), []
    for stage in range(4):
        whole, again = (Guarded(rank, deepspeed, stage, gradient_accumulation_steps=2) for _ in range(2))
        if stage > 0:
            plain = error_of(lambda run=whole: hdet.Guard(run.engine.optimizer, run.engine.module))
            assert "give hdet.integrations.deepspeed.Guard the engine" in str(plain)
        whole.train(range(2 * CUT + 2))
        whole.engine.save_checkpoint(folder, str(stage))
        again.engine.load_checkpoint(folder, str(stage))
        for run in (whole, again):
            run.train(range(2 * CUT + 2, 2 * SPOILED))
            if rank == 1:
                optimizer_of(run.engine).param_groups[0]["params"][0].data.view(-1)[0] = float("nan")
            run.train(range(2 * SPOILED, 2 * LAST))
            assert run.guard.rollbacks == 1, stage
        for one, two in zip(again.held, whole.held, strict=True):
            assert torch.equal(one, two), stage
        assert again.loss == whole.loss
        found.append(whole.loss)
    return found


@needs_deepspeed
def test_on_every_stage_a_guard_rolls_back_and_is_kept_in_checkpoints(tmp_path: Path) -> None:
    mine, others = run_ranks(rolled_back, RANKS, str(tmp_path))
    start = float(loss_of(model_and_optimizer()[0], batch_of(999_999, 2000)).detach())
    assert mine == others
    assert max(mine) < 0.7 * start
