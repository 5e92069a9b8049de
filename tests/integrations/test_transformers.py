"""hdet.integrations.transformers: the stock Trainer with one line more, on 1 and 2 processes; TRL and PEFT."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.ranks.shards import local
from tests.integrations.fsdp2 import sharding
from tests.patience import PATIENCE
from tests.problems import quiet
from tests.processes import error_of, run_ranks
from tests.setup_runs import HELD

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from hdet.integrations.transformers import AutoLR

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

STEPS = 60
WORDS = 16
Samples = list[dict[str, Tensor]]


def samples(n: int, first: int = 0) -> Samples:
    """Sequences that count up from a random word: easy to learn, but for every fifth word, which is a random one."""
    rows = []
    for i in range(first, first + n):
        g = torch.Generator().manual_seed(i)
        row = (torch.randint(WORDS, (1,), generator=g) + torch.arange(8)) % WORDS
        noise = torch.randint(WORDS, (8,), generator=g)
        rows.append(torch.where(torch.rand(8, generator=g) < 0.2, noise, row))
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


TRAIN, OTHER = samples(256), samples(64, 1000)


def language_model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, attention_dropout=dropout, **size)
    return transformers.LlamaForCausalLM(config)


def arguments(folder: Path, **more: Any) -> Any:
    common: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-8,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 5,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **{**common, **more})


def trainer_of(folder: Path, kind: Any = None, model: Any = None, **more: Any) -> Any:
    given = {name: more.pop(name) for name in ("callbacks", "optimizers", "compute_loss_func") if name in more}
    return (kind or transformers.Trainer)(
        model or language_model(), arguments(folder, **more), train_dataset=TRAIN, eval_dataset=OTHER, **given
    )


def auto_on(optimizer: Any, steps: int = STEPS, **more: Any) -> Any:
    return hdet.auto(optimizer, total_steps=steps, **more)


def by_hand(trainer: Any, make: Any = auto_on, gives_loss: bool = True) -> float:
    """The evaluation loss after a plain loop, with the model, the batches and the optimizer of a Trainer."""
    steps, model = trainer.args.max_steps, trainer.model
    trainer.create_optimizer()
    scheduler = make(trainer.optimizer, steps)
    loader, done = trainer.get_train_dataloader(), 0
    model.train()
    while done < steps:
        for batch in loader:
            if done < steps:
                trainer.optimizer.zero_grad()
                loss = model(**batch).loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
                trainer.optimizer.step()
                scheduler.step(*([loss.detach()] if gives_loss else []))
                done += 1
    return loss_after(trainer)


def loss_after(trainer: Any) -> float:
    found: float = trainer.evaluate()["eval_loss"]
    return found


def logged(trainer: Any, key: str) -> list[Any]:
    return [row[key] for row in trainer.state.log_history if key in row]


def test_importing_hdet_imports_neither() -> None:
    code = "import sys, hdet; sys.exit(any(name in sys.modules for name in ('transformers', 'accelerate')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


# -- finding the rate --------------------------------------------------------------------------------------------------


@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "one process", "fp32")
def test_a_guess_that_is_far_too_low_is_left_behind(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=100)
    AutoLR().attach(trainer)
    trainer.train()
    assert isinstance(trainer.lr_scheduler, hdet.AutoScheduler)
    assert trainer.lr_scheduler.last_epoch == 100
    assert trainer.lr_scheduler.search.model is trainer.model
    assert loss_after(trainer) / by_hand(trainer_of(tmp_path, max_steps=100)) == pytest.approx(1, abs=0.1)
    assert logged(trainer, "hdet/found")[-1] == trainer.lr_scheduler.found.rate
    assert logged(trainer, "hdet/status")[-1] == trainer.lr_scheduler.found.status == "settled"
    assert logged(trainer, "hdet/found")[-1] > 100 * logged(trainer, "learning_rate")[-1]
    assert not logged(trainer, "hdet/rate")  # which would be the learning_rate
    assert logged(trainer, "hdet/event")[0].startswith("first step")


def test_the_rates_of_all_groups_are_logged(tmp_path: Path) -> None:
    model = language_model()
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.0}, {"params": rest, "lr": 1e-6}])
    trainer = trainer_of(tmp_path, model=model, optimizers=(optimizer, None))
    AutoLR().attach(trainer)
    trainer.train()
    found = trainer.lr_scheduler.found
    assert [logged(trainer, f"hdet/found/{g}")[-1] for g in range(2)] == list(found.rates)
    assert logged(trainer, "hdet/found")[-1] == found.rate == found.rates[1] > 0


def shape(optimizer: Any) -> Any:
    return transformers.get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)


def cosine(optimizer: Any, steps: int = STEPS) -> Any:
    return hdet.auto(optimizer, schedule=shape, total_steps=steps)


def test_a_schedule_of_the_users_own(tmp_path: Path) -> None:
    trainer = AutoLR(schedule=shape).attach(trainer_of(tmp_path))
    trainer.train()
    assert loss_after(trainer) / by_hand(trainer_of(tmp_path), cosine) == pytest.approx(1, abs=0.1)
    assert logged(trainer, "hdet/event")[0].startswith("first step")


def wsd(optimizer: Any) -> Any:
    return transformers.get_wsd_schedule(optimizer, STEPS // 10, STEPS // 2, num_training_steps=STEPS)


@pytest.mark.parametrize("given", [shape, wsd])
def test_a_scheduler_of_transformers_in_optimizers_is_the_schedule(given: Any, tmp_path: Path) -> None:
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8, weight_decay=0.0)
    trainer = trainer_of(tmp_path, model=model, optimizers=(optimizer, given(optimizer)))
    AutoLR().attach(trainer)
    trainer.train()
    plain = by_hand(
        trainer_of(tmp_path), lambda optimizer, steps: hdet.auto(optimizer, schedule=given, total_steps=steps)
    )
    assert loss_after(trainer) / plain == pytest.approx(1, abs=0.1)


@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "one process", "fp32")
@pytest.mark.parametrize("make", [auto_on, cosine])
@pytest.mark.parametrize("looked_after", [True, False])
def test_a_scheduler_of_the_users_own_ends_where_the_plain_loop_ends(
    make: Any, looked_after: bool, tmp_path: Path
) -> None:
    """With the loss, which AutoLR gives, and without: the Trainer gives a scheduler none."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8, weight_decay=0.0)
    trainer = trainer_of(tmp_path, model=model, optimizers=(optimizer, make(optimizer)))
    if looked_after:
        AutoLR().attach(trainer)
    with quiet():
        trainer.train()
        plain = by_hand(trainer_of(tmp_path), make, gives_loss=looked_after)
    assert loss_after(trainer) / plain == pytest.approx(1, abs=0.1)
    assert bool(logged(trainer, "hdet/found")) == looked_after


@pytest.mark.parametrize("given", [True, False])
def test_it_may_be_in_the_list_of_callbacks_too(given: bool, tmp_path: Path) -> None:
    auto = AutoLR()
    trainer = trainer_of(tmp_path, callbacks=[auto] if given else None, max_steps=45)
    assert auto.attach(trainer) is trainer
    assert trainer.callback_handler.callbacks.count(auto) == 1
    trainer.train()
    assert logged(trainer, "hdet/found")


def test_accumulation_clipping_and_its_own_optimizer(tmp_path: Path) -> None:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    journal = tmp_path / "journal.jsonl"
    more = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.1, "optimizers": (optimizer, None)}
    trainer = trainer_of(tmp_path, model=model, **more)
    AutoLR(journal=journal).attach(trainer)
    trainer.train()
    rounds = hdet.read_journal(journal).rounds
    assert rounds[-1]["step"] == STEPS == trainer.lr_scheduler.last_epoch
    assert rounds[0]["replicas"][0]["loss"] == pytest.approx(2.8, abs=0.3)  # log 16: not a fourth of it
    assert optimizer.defaults["momentum"] == optimizer.param_groups[0]["momentum"] == 0  # not cycled


@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "one process", "bf16")
def test_a_loss_of_its_own_and_bf16(tmp_path: Path) -> None:
    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        count = num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].numel()
        flat = outputs.logits[:, :-1].float().flatten(0, 1)
        return nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / count

    seen: set[tuple[bool, torch.dtype]] = set()
    trainer = trainer_of(tmp_path, compute_loss_func=loss_func, bf16=True)
    AutoLR().attach(trainer)
    trainer.model.lm_head.register_forward_hook(lambda head, _, logits: seen.add((head.training, logits.dtype)))
    trainer.train()
    assert seen == {(True, torch.bfloat16)}  # nothing but steps
    assert loss_after(trainer) / by_hand(trainer_of(tmp_path)) == pytest.approx(1, abs=0.1)


def test_evaluation_saving_and_the_best_model(tmp_path: Path) -> None:
    regular = {"eval_strategy": "steps", "eval_steps": 20, "save_strategy": "steps", "save_steps": 20}
    trainer = trainer_of(tmp_path, load_best_model_at_end=True, **regular)
    AutoLR().attach(trainer)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(logged(trainer, "eval_loss")), rel=1e-5)


def test_resume_goes_on_with_the_search(tmp_path: Path) -> None:
    regular = {"save_strategy": "steps", "save_steps": 30}
    first = AutoLR().attach(trainer_of(tmp_path, **regular))
    first.train()
    again = AutoLR().attach(trainer_of(tmp_path, **regular))
    loaded: list[Any] = []
    again.add_callback(_AtBegin(lambda: loaded.append(again.lr_scheduler.state_dict())))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    saved = torch.load(tmp_path / "checkpoint-30" / "scheduler.pt", weights_only=True)
    assert loaded[0]["last_epoch"] == 30
    assert repr(loaded[0]["hdet"]) == repr(saved["hdet"])  # NaN is not equal to itself
    assert again.lr_scheduler.last_epoch == STEPS
    assert loss_after(again) / loss_after(first) == pytest.approx(1, abs=0.1)


def test_a_callback_that_is_attached_too_resumes(tmp_path: Path) -> None:
    AutoLR().attach(trainer_of(tmp_path, save_strategy="steps", save_steps=30)).train()
    given = AutoLR()
    whole = given.attach(trainer_of(tmp_path, callbacks=[given]))
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert whole.lr_scheduler.last_epoch == STEPS


def test_an_event_of_two_rounds_is_logged_once(tmp_path: Path) -> None:
    """At such a rate the first step is lost in rounding, and is made again."""
    trainer = AutoLR().attach(trainer_of(tmp_path, learning_rate=1e-9, logging_steps=STEPS // 2))
    trainer.train()
    assert logged(trainer, "hdet/event")[0].split("; ").count("first step") == 1


CUTS = (1, 12, 15, 50)
"""After the first step, inside a round, at the end of one, and in the descent."""


class _SaveAt(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in CUTS


def cut_and_resumed(folder: Path, make: Any, *, by_loss: bool = False) -> Any:
    """Every cut of a run ends with the same bits as the run without one, which is given back.

    Args:
        folder: of the trainer.
        make: a trainer.
        by_loss: whether to compare losses, where no rank has the weights.
    """
    whole = make()
    whole.add_callback(_SaveAt())
    whole.train()
    for cut in CUTS:
        resumed = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error", hdet.ResumeWarning)
            resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{cut}"))
        assert resumed.state.global_step == STEPS
        if by_loss:
            assert loss_after(resumed) == loss_after(whole), cut
        else:
            assert torch.equal(weights_of(resumed.model), weights_of(whole.model)), cut
    return whole


@pytest.mark.parametrize("way", ["onecycle", "schedule", "accumulated"])
def test_a_run_that_was_cut_is_the_one_that_was_not_bit_by_bit(way: str, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 2} if way == "accumulated" else {}
    options = {"schedule": shape} if way == "schedule" else {}
    cut_and_resumed(tmp_path, lambda: AutoLR(**options).attach(trainer_of(tmp_path, **more)))


def test_in_ddp_a_run_that_was_cut_is_the_one_that_was_not(tmp_path: Path) -> None:
    """Each rank has losses of its own."""
    run_ranks(_cut, 2, tmp_path)


def _cut(rank: int, folder: Path) -> None:
    joined(rank)
    warnings.simplefilter("ignore")
    cut_and_resumed(folder, lambda: AutoLR().attach(trainer_of(folder, ddp_backend="gloo")))


def sharding_trainer(folder: Path, version: int = 2) -> Any:
    trainer = trainer_of(folder, ddp_backend="gloo")
    sharding(trainer.accelerator)
    trainer.accelerator.state.fsdp_plugin.fsdp_version = version
    trainer.is_fsdp_enabled = True
    return trainer


@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "FSDP2", "fp32")
def test_fsdp2_and_a_run_of_it_that_was_cut(tmp_path: Path) -> None:
    """Each rank saves the part of the search that it holds."""
    (kind, loss), (_, other) = run_ranks(_sharded, 2, tmp_path)
    assert kind == "DTensor"
    assert loss == other
    assert loss / by_hand(trainer_of(tmp_path, per_device_train_batch_size=16)) == pytest.approx(1, abs=0.1)
    assert (tmp_path / "checkpoint-12" / "hdet_search_1_of_2.pt").exists()


def _sharded(rank: int, folder: Path) -> tuple[str, float]:
    joined(rank)
    warnings.simplefilter("ignore")
    whole = cut_and_resumed(folder, lambda: AutoLR().attach(sharding_trainer(folder)))
    return type(next(whole.model.parameters())).__name__, loss_after(whole)


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(_flattened, 2, tmp_path):
        assert 'fsdp_config={"fsdp_version": 2}' in message


def _flattened(rank: int, folder: Path) -> str:
    joined(rank)
    return str(error_of(lambda: AutoLR().attach(sharding_trainer(folder, 1)).create_scheduler(STEPS)))


def deepspeed_trainer(folder: Path, stage: int, **config: Any) -> Any:
    known = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    settings = {**known, "zero_optimization": {"stage": stage}, "steps_per_print": 10**9, **config}
    return trainer_of(folder, ddp_backend="gloo", deepspeed=settings)


@needs_deepspeed
@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "ZeRO-1", "fp32")
@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "ZeRO-2", "fp32")
@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "ZeRO-3", "fp32")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_and_a_run_of_it_that_was_cut(stage: int, tmp_path: Path) -> None:
    """Each rank saves the part of the search that it holds."""
    (kind, loss), (_, other) = run_ranks(_in_an_engine, 2, tmp_path, stage)
    assert kind == "DeepSpeedEngine"
    assert loss == other
    assert loss / by_hand(trainer_of(tmp_path, per_device_train_batch_size=16)) == pytest.approx(1, abs=0.1)
    assert (tmp_path / "checkpoint-12" / "hdet_search_1_of_2.pt").exists()


def with_deepspeed(rank: int) -> None:
    """On the CPU, with gloo alone: nothing is compiled."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    joined(rank)
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _in_an_engine(rank: int, folder: Path, stage: int) -> tuple[str, float]:
    with_deepspeed(rank)
    whole = cut_and_resumed(folder, lambda: AutoLR().attach(deepspeed_trainer(folder, stage)), by_loss=True)
    return type(whole.model_wrapped).__name__, loss_after(whole)


@needs_deepspeed
def test_an_optimizer_in_the_config_of_deepspeed_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(_with_its_optimizer, 2, tmp_path):
        assert 'has an "optimizer"; leave that and the "scheduler" out' in message


def _with_its_optimizer(rank: int, folder: Path) -> str:
    with_deepspeed(rank)
    adam = {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}}
    return str(error_of(lambda: AutoLR().attach(deepspeed_trainer(folder, 2, optimizer=adam)).train()))


def test_another_length_than_the_checkpoints(tmp_path: Path) -> None:
    """Until the rate falls a run goes on by the new one; after that it is refused, before the first step."""
    AutoLR().attach(trainer_of(tmp_path, max_steps=50, save_strategy="steps", save_steps=10)).train()
    seen: list[int] = []
    words = (
        "total_steps must be 50 as in the run .* but got total_steps={steps}; give that, or begin a new run .* given "
        r"by max_steps and num_train_epochs of the TrainingArguments.* AutoLR\(finish=\.\.\.\)"
    )
    for steps in (70, 40):
        again = AutoLR().attach(trainer_of(tmp_path, max_steps=steps))
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
        assert (again.lr_scheduler.last_epoch, again.lr_scheduler.total_steps) == (steps, steps)
        again = AutoLR().attach(trainer_of(tmp_path, max_steps=steps))
        seen.clear()
        again.add_callback(_AtStep(lambda: seen.append(1)))
        with pytest.raises(hdet.ArgumentError, match=words.format(steps=steps)):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
        assert not seen
    again = AutoLR().attach(trainer_of(tmp_path, max_steps=15))
    shorter = r"must be such that .* after step 10, .* but got total_steps=15, .*AutoLR\(finish="
    with quiet(), pytest.raises(hdet.ArgumentError, match=shorter):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


class _Asks(transformers.TrainerCallback):
    """Asks for a stop."""

    def __init__(self, event: str, at: int) -> None:
        self.at = at
        setattr(self, event, self.ask)

    def ask(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.at


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_log"])
@pytest.mark.parametrize("first", [True, False])
def test_the_rate_falls_before_a_stop(event: str, first: bool, tmp_path: Path) -> None:
    """Epochs have 32 steps."""
    auto, asks = AutoLR(finish=24), _Asks(event, 64)
    trainer = trainer_of(tmp_path, callbacks=[auto, asks] if first else [asks, auto], max_steps=1000, logging_steps=1)
    auto.attach(trainer).train()
    rates = logged(trainer, "learning_rate")
    assert len(rates) == trainer.lr_scheduler.last_epoch == 64 + 24
    assert rates[63] > HELD * max(rates)
    assert rates[-1] < 1e-3 * max(rates)
    ordinary = AutoLR().attach(trainer_of(tmp_path, max_steps=88))
    ordinary.train()
    assert loss_after(trainer) < 1.1 * loss_after(ordinary)


def test_early_stopping_lets_the_rate_fall(tmp_path: Path) -> None:
    saving = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 15, "save_steps": 15}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **saving}
    stopping = transformers.EarlyStoppingCallback(1, 1e9)  # at the second evaluation
    trainer = trainer_of(tmp_path, callbacks=[stopping], max_steps=1000, logging_steps=1, **best)
    AutoLR(finish=12).attach(trainer).train()
    rates = logged(trainer, "learning_rate")
    assert len(rates) == 30 + 12
    assert rates[-1] < 1e-3 * max(rates)
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [15, 30, 42]
    assert (tmp_path / "checkpoint-42").exists()


def test_the_rate_falls_before_the_trainers_own_end(tmp_path: Path) -> None:
    trainer = AutoLR(finish=20).attach(trainer_of(tmp_path, logging_steps=1))
    trainer.train()
    rates = logged(trainer, "learning_rate")
    assert len(rates) == STEPS
    assert rates[39] > HELD * max(rates)
    assert rates[50] < 0.6 * max(rates)
    assert rates[-1] < 1e-3 * max(rates)


def test_a_run_that_is_cut_while_the_rate_falls(tmp_path: Path) -> None:
    def trainer(**more: Any) -> Any:
        return AutoLR(finish=20).attach(trainer_of(tmp_path, max_steps=50, logging_steps=1, **more))

    whole, resumed = trainer(save_strategy="steps", save_steps=40), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-40"))
    assert resumed.state.global_step == 50
    assert logged(resumed, "hdet/found") == logged(whole, "hdet/found")  # the log goes on too


def test_a_schedule_of_the_users_own_that_is_too_short_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    trainer = AutoLR().attach(trainer_of(tmp_path, model=model, optimizers=(optimizer, scheduler), max_steps=30))
    words = "make 30 steps, but the schedule ends at step 20; build the scheduler with total_steps=30"
    with pytest.raises(hdet.ArgumentError, match=words):
        trainer.train()
    assert scheduler.last_epoch == 0


class _AtStep(transformers.TrainerCallback):
    def __init__(self, call: Any) -> None:
        self.call = call

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.call()


class _AtBegin(transformers.TrainerCallback):
    def __init__(self, call: Any) -> None:
        self.call = call

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.call()


def test_training_twice_and_model_init(tmp_path: Path) -> None:
    trainer = AutoLR().attach(trainer_of(tmp_path, max_steps=45))
    trainer.train()
    first = trainer.lr_scheduler
    trainer.train()
    assert trainer.lr_scheduler is not first
    assert trainer.lr_scheduler.last_epoch == 45
    settings = arguments(tmp_path, max_steps=45)
    made = transformers.Trainer(args=settings, train_dataset=TRAIN, model_init=lambda: language_model())
    AutoLR().attach(made)
    made.train()
    made.eval_dataset = OTHER
    assert loss_after(made) / by_hand(trainer_of(tmp_path, max_steps=45)) == pytest.approx(1, abs=0.1)


# -- two processes -----------------------------------------------------------------------------------------------------


def joined(rank: int) -> None:
    """Accelerate reads its place from the environment, and takes the process group that is there."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([local(p.detach()).flatten() for p in model.parameters()]).clone()


@pytest.mark.covers("frameworks", "Hugging Face Trainer, search", "DDP", "fp32")
@pytest.mark.parametrize("attached", [True, False])
def test_two_processes_find_one_rate(tmp_path: Path, attached: bool) -> None:
    first, second = run_ranks(_searched, 2, tmp_path, attached)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == STEPS
    whole = trainer_of(tmp_path, per_device_train_batch_size=16)  # what both processes see
    assert first[2] == second[2]
    with quiet():
        plain = by_hand(whole, gives_loss=attached)
    assert first[2] / plain == pytest.approx(1, abs=0.1)
    assert bool(first[3]) == attached


def _searched(rank: int, folder: Path, attached: bool) -> tuple[Tensor, int, float, list[str]]:
    joined(rank)
    with quiet():
        regular = {"eval_strategy": "steps", "eval_steps": 25, "save_strategy": "steps", "save_steps": 25}
        given: dict[str, Any] = {}
        if not attached:
            model = language_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8, weight_decay=0.0)
            given = {"model": model, "optimizers": (optimizer, auto_on(optimizer))}
        trainer = trainer_of(folder, _Gathering, ddp_backend="gloo", **given, **regular)
        if attached:
            AutoLR().attach(trainer)
        trainer.train()
        events = logged(trainer, "hdet/event")
        return weights_of(trainer.model), trainer.lr_scheduler.last_epoch, loss_after(trainer), events


class _Gathering(transformers.Trainer):
    """As TRL's trainers: a collective in ``compute_loss``, and metrics by mode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, list[float]] = {"train": [], "eval": []}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode].append(float(self.accelerator.gather_for_metrics(loss.detach()).mean()))
        return (loss, outputs) if return_outputs else loss


def test_compute_loss_is_called_for_steps_alone(tmp_path: Path) -> None:
    trainer = AutoLR().attach(trainer_of(tmp_path, _Gathering))
    trainer.train()
    assert (len(trainer._metrics["train"]), len(trainer._metrics["eval"])) == (STEPS, 0)


@pytest.mark.covers("frameworks", "Hugging Face Trainer, replicas", "DDP", "fp32")
def test_replicas_that_train_are_evaluated_and_saved_as_their_mean(tmp_path: Path) -> None:
    first, second = run_ranks(_trained, 2, tmp_path)
    assert not torch.equal(first["inside"], second["inside"])  # inside a round each has its own
    assert first["eval_loss"] == pytest.approx(first["loss_of_the_saved"], abs=1e-5)
    assert torch.allclose(first["saved"], (first["inside"] + second["inside"]) / 2, atol=1e-7)
    assert torch.equal(first["end"], second["end"])  # training stopped inside a round
    assert first["observed"] == pytest.approx(2.8, abs=0.3)  # undivided
    assert first["log"]["learning_rate"] > 0


def _trained(rank: int, folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    joined(rank)
    seen: dict[str, Any] = {}

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                seen["observed"] = trainer.lr_scheduler._run.losses.mean()
            if state.global_step == 7:
                seen["inside"] = weights_of(trainer.model)
                control.should_evaluate = control.should_save = control.should_log = True
            control.should_training_stop = state.global_step == 8

    with quiet():
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS, sync_every=5)
        more = {"ddp_backend": "gloo", "gradient_accumulation_steps": 2, "callbacks": [Stop()]}
        trainer = trainer_of(folder, model=model, optimizers=(optimizer, scheduler), **more)
        trainer.eval_dataset = {"other": OTHER}  # evaluate() calls itself for each
        AutoLR().attach(trainer)
        trainer.train()
        torch.distributed.barrier()
        saved = language_model()
        saved.load_state_dict(load_file(folder / "checkpoint-7" / "model.safetensors"), strict=False)
        row = next(row for row in trainer.state.log_history if "learning_rate" in row)
        rows = {name: torch.stack([sample[name] for sample in OTHER]) for name in OTHER[0]}
        seen["loss_of_the_saved"] = float(saved.eval()(**rows).loss.detach())
        seen["eval_loss"] = logged(trainer, "eval_other_loss")[0]
        return {**seen, "end": weights_of(trainer.model), "saved": weights_of(saved), "log": row}


def test_replicas_that_train_resume(tmp_path: Path) -> None:
    first, second = run_ranks(_resumed, 2, tmp_path)
    assert first["steps"] == second["steps"] == 20
    assert first["learned"] == second["learned"]
    assert first["rates"] == second["rates"][::-1]
    assert first["rates"][0] != first["rates"][1]
    assert torch.equal(first["end"], second["end"])


def _resumed(rank: int, folder: Path) -> dict[str, Any]:
    joined(rank)

    def once(**resume: Any) -> Any:
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = hdet.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20, sync_every=5)
        more = {"ddp_backend": "gloo", "max_steps": 20, "save_strategy": "steps", "save_steps": 7}
        trainer = trainer_of(folder, model=model, optimizers=(optimizer, scheduler), **more)
        AutoLR().attach(trainer)
        trainer.add_callback(_AtBegin(lambda: rates.append(scheduler.get_last_lr()[0])))
        trainer.train(**resume)
        return trainer

    rates: list[float] = []
    with quiet():
        once()
        trainer = once(resume_from_checkpoint=str(folder / "checkpoint-7"))
    own = rates[1]
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, own)
    learned = trainer.lr_scheduler.state_dict()["hdet"]["learned"]
    seen = {"steps": trainer.lr_scheduler.last_epoch, "learned": learned, "end": weights_of(trainer.model)}
    return {**seen, "rates": [own, both[1 - rank]]}


# -- made from it ------------------------------------------------------------------------------------------------------


@pytest.mark.covers("frameworks", "Hugging Face Trainer with PEFT, search", "one process", "fp32")
def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    regular = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 30, "eval_steps": 30}

    def adapted() -> Any:
        return peft.get_peft_model(language_model(), config)

    trainer = trainer_of(tmp_path, model=adapted(), load_best_model_at_end=True, **regular)
    AutoLR().attach(trainer)
    trainer.train()
    assert loss_after(trainer) / by_hand(trainer_of(tmp_path, model=adapted())) == pytest.approx(1, abs=0.1)


@pytest.mark.covers("frameworks", "TRL SFTTrainer, search", "one process", "fp32")
def test_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, **{str(i): i + 2 for i in range(WORDS - 2)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    table = datasets.Dataset.from_list([{"text": " ".join(str((i + k) % 14) for k in range(6))} for i in range(128)])
    common = {"max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 1e-8, "use_cpu": True}
    config = trl.SFTConfig(str(tmp_path), report_to=[], save_strategy="no", logging_steps=5, bf16=False, **common)

    def made() -> Any:
        given = {"train_dataset": table, "eval_dataset": table, "processing_class": tokenizer}
        return trl.SFTTrainer(language_model(), config, **given)

    trainer, other = made(), made()
    AutoLR().attach(trainer)
    trainer.train()
    other.eval_dataset = list(other.eval_dataset)
    assert loss_after(trainer) / by_hand(other) == pytest.approx(1, abs=0.1)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_without_attach_it_says_which_line_is_missing(tmp_path: Path) -> None:
    with pytest.raises(hdet.ArgumentError, match=r"\.attach\(trainer\) before"):
        trainer_of(tmp_path, callbacks=[AutoLR()]).train()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: AutoLR().attach("trainer"), r"must be a transformers\.Trainer"),
        (lambda t: AutoLR().attach(AutoLR().attach(t)), "attached once"),
    ],
)
def test_bad_input_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(hdet.ArgumentError, match=words):
        make(trainer_of(tmp_path))


def test_a_trainer_with_another_scheduler_is_refused(tmp_path: Path) -> None:
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(hdet.ArgumentError, match="known in advance, but got lr_scheduler="):
        AutoLR().attach(trainer_of(tmp_path, model=model, optimizers=(optimizer, scheduler)))
    trainer = trainer_of(tmp_path, model=model, optimizers=(optimizer, auto_on(optimizer)))
    with pytest.raises(hdet.ArgumentError, match=r"options must be empty.*highest"):
        AutoLR(highest=0.1).attach(trainer)
