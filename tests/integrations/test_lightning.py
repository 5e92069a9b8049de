"""AutoLR in real Lightning trainers: on one process, and on two that share a gloo group."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet.ranks.shards import local
from tests.integrations.loops import auto_on, loss_of_plain_loop, train
from tests.problems import Records, batch_of, final_loss, loss_of, network
from tests.processes import error_of, run_ranks
from tests.setup_runs import HELD

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

from hdet.integrations.lightning import AutoLR
from tests.patience import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers, intervals and modes

GUESS = 1e-5


class Module(lightning.LightningModule):
    """The problem of the other tests, with all that a training_step may do beside computing a loss."""

    def __init__(self, lr: float = GUESS, scheduler: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net = network()
        self.lr = lr
        self.scheduler = scheduler
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.seen: list[float] = []
        self.validated: list[Tensor] = []
        self.types: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        loss = nn.functional.mse_loss(output.float(), batch[1])
        self.types.add(output.dtype)
        self.log("loss", loss)
        self.losses.append(loss.item())
        self.seen.append(float(batch[0][0, 0]))
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(flat(self))
        self.log("val_loss", loss_of(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}


def flat(module: nn.Module) -> Tensor:
    return torch.cat([local(p.detach()).reshape(-1).clone() for p in module.parameters()])


def loader_of(first: int, batches: int, **options: Any) -> DataLoader[Any]:
    xs, ys = zip(*(batch_of(first + k) for k in range(batches)), strict=True)
    return DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=64, **options)


def trainer_of(*callbacks: Any, **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plain = {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(**{**quiet, **plain, **options}, callbacks=list(callbacks))


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.covers("frameworks", "Lightning, search", "one process", "fp32")
def test_one_line_finds_the_rate() -> None:
    torch.manual_seed(0)
    module, auto = Module(), AutoLR()
    trainer_of(auto, max_epochs=4).fit(module, loader_of(0, 50, shuffle=True))
    assert final_loss(module.net) < 1.5 * loss_of_plain_loop(steps=200)  # on other batches
    assert len(module.rates) == 200
    assert "the guess was 1e-05" in str(auto.summary)


class ByEpochs(Module):
    """Returns a scheduler as one does for torch's: Lightning steps it once an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        assert self.scheduler is not None
        return [optimizer], [self.scheduler(optimizer)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


def replicas(optimizer: Any, steps: int) -> Any:
    return hdet.OneCycleLR(optimizer, 1e-3, total_steps=steps)


@pytest.mark.parametrize("make", ["own", "cosine", "replicas"])
def test_a_scheduler_that_is_stepped_by_epochs_is_told_of(make: str) -> None:
    module = ByEpochs(scheduler=lambda optimizer: globals()[make](optimizer, 100))
    words = "hdet counts optimizer steps, but Lightning steps the scheduler by interval='epoch'"
    with pytest.warns(UserWarning, match=words) as told:
        trainer_of(max_epochs=5).fit(module, loader_of(0, 20))
    assert len([one for one in told if words in str(one.message)]) == 1
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        stepped = Own(scheduler=lambda optimizer: globals()[make](optimizer, 100))
        trainer_of(max_epochs=5).fit(stepped, loader_of(0, 20))
    assert not [one for one in others if "hdet counts" in str(one.message)]


def test_a_checkpoint_that_is_resumed_without_the_callback_asks_for_it(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=20, save_top_k=-1)
    trainer_of(AutoLR(), saving, max_epochs=2, enable_checkpointing=True).fit(Module(), loader_of(0, 20))
    with pytest.warns(
        UserWarning, match=r"add the following callbacks: .*hdet\.integrations\.lightning\.AutoLR \(without"
    ):
        trainer_of(max_epochs=2).fit(Module(), loader_of(0, 20), ckpt_path=tmp_path / "step=20.ckpt")
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        trainer_of(AutoLR(), max_epochs=2).fit(Module(), loader_of(0, 20), ckpt_path=tmp_path / "step=20.ckpt")
    assert not [one for one in others if "AutoLR" in str(one.message)]


class Thaws(BaseFinetuning):
    """The first layer joins the optimizer half-way, at a tenth of the rate that the others have then."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, train_bn=True)


class Head(Module):
    """Only what trains is in the optimizer, as Lightning's fine-tuning asks for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.net.parameters() if p.requires_grad], lr=self.lr)


def test_lightnings_fine_tuning_adds_a_layer_at_a_part_of_the_rate_that_was_found() -> None:
    torch.manual_seed(0)
    module, frozen = Head(), Head()
    frozen.net[0].requires_grad_(False)
    trainer_of(Thaws(), AutoLR(), max_epochs=4).fit(module, loader_of(0, 50, shuffle=True))
    trainer_of(AutoLR(), max_epochs=4).fit(frozen, loader_of(0, 50, shuffle=True))
    first, added = (group["lr"] for group in module.trainer.optimizers[0].param_groups)
    assert added == pytest.approx(first / 10)
    assert final_loss(module.net) < 1.1 * final_loss(frozen.net)


class Groups(Module):
    """The first layer is not trained, the others have rates of their own."""

    def configure_optimizers(self) -> Any:
        first, *rest = [layer.parameters() for layer in self.net.children() if list(layer.parameters())]
        rates = (0.0, self.lr, 0.1 * self.lr)
        return torch.optim.Adam([{"params": own, "lr": lr} for own, lr in zip((first, *rest), rates, strict=False)])


def test_what_is_said_of_several_groups_is_true_for_each(tmp_path: Path) -> None:
    module, auto = Groups(), AutoLR()
    trainer = trainer_of(auto, max_epochs=1, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(module, loader_of(0, 50))
    found = auto.scheduler.found
    words = f"[{', '.join(f'{rate:.2g}' for rate in found.rates)}]"
    assert auto.summary.startswith(f"found {words} within a factor {found.within:.2g}, {found.status}")
    assert auto.summary.endswith("never rolled back; the guess was [0, 1e-05]")
    assert found.rates[0] == 0 < found.rates[1]
    assert 0 < trainer.logged_metrics["hdet/lr"] < found.rate


def own(optimizer: Any, steps: int) -> Any:
    return auto_on(optimizer, steps)


def shape(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def cosine(optimizer: Any, steps: int) -> Any:
    return hdet.auto(optimizer, schedule=shape, total_steps=steps)


class Own(Module):
    """With a scheduler that is none of torch's: Lightning wants to be told how to step it."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@pytest.mark.covers("frameworks", "Lightning, search", "one process", "fp32")
@pytest.mark.parametrize("way", ["callback", "scheduler with callback", "scheduler alone"])
def test_it_ends_where_the_plain_loop_ends(way: str) -> None:
    """With the loss, by the callback, and without: Lightning gives a scheduler none."""
    module = Module(scheduler=None if way == "callback" else lambda optimizer: own(optimizer, 100))
    trainer_of(*([] if way == "scheduler alone" else [AutoLR()]), max_epochs=1).fit(module, loader_of(0, 100))
    plain = loss_of_plain_loop(steps=100, gives_loss=way != "scheduler alone")
    assert final_loss(module.net) / plain == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("way", ["callback", "scheduler with callback", "scheduler alone"])
def test_a_schedule_of_the_users_own(way: str) -> None:
    auto = AutoLR(schedule=shape) if way == "callback" else AutoLR()
    module = Own(scheduler=None if way == "callback" else lambda optimizer: cosine(optimizer, 100))
    trainer_of(*([] if way == "scheduler alone" else [auto]), max_epochs=1).fit(module, loader_of(0, 100))
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=GUESS)
    batches = (batch_of(t) for t in range(100))
    plain = train(net, optimizer, cosine(optimizer, 100), batches, gives_loss=way != "scheduler alone")
    assert final_loss(module.net) / plain == pytest.approx(1, rel=1e-3)
    assert (auto.summary is None) == (way != "callback")
    if auto.summary is not None:
        assert "the guess was 1e-05" in auto.summary


class Epochs(Module):
    """A schedule as Lightning's users have it: a scheduler of torch, stepped once an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_of_torch_in_configure_optimizers_is_the_schedule(interval: str) -> None:
    module, auto = (Module(scheduler=shape) if interval == "step" else Epochs()), AutoLR()
    trainer_of(auto, max_epochs=5).fit(module, loader_of(0, 20))
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=GUESS)
    every = {} if interval == "step" else {"schedule_every": 20}
    own_shape = shape(optimizer) if interval == "step" else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    plain_search = hdet.auto(optimizer, schedule=own_shape, total_steps=100, **every)
    plain = train(net, optimizer, plain_search, (batch_of(t % 20) for t in range(100)))
    assert final_loss(module.net) / plain == pytest.approx(1, rel=1e-3)


def test_without_the_callback_the_log_says_that_the_loss_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(max_epochs=1)
    with caplog.at_level("INFO", logger="hdet"):
        trainer.fit(Module(scheduler=lambda optimizer: own(optimizer, 60)), loader_of(0, 60))
    assert caplog.text.count("no loss was given") == 1


@pytest.mark.parametrize(
    "precision",
    [
        "32-true",
        pytest.param("bf16-mixed", marks=pytest.mark.covers("frameworks", "Lightning, search", "one process", "bf16")),
    ],
)
def test_accumulation_and_clipping(tmp_path: Path, precision: Any) -> None:
    """Accumulation divides the losses; the journal has those of training_step."""
    module, path = Module(), tmp_path / "run.jsonl"
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0, "precision": precision}
    trainer = trainer_of(AutoLR(path), max_epochs=2, **options)
    trainer.fit(module, loader_of(0, 150))
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 100
    rounds = hdet.read_journal(path).rounds
    assert rounds[-1]["step"] == 100
    assert rounds[0]["replicas"][0]["loss"] == pytest.approx(sum(module.losses[:3]) / 3, rel=1e-2)
    assert module.types == {torch.float32 if precision == "32-true" else torch.bfloat16}
    assert final_loss(module.net) < 1.3 * loss_of_plain_loop(steps=100, size=192, clip=1.0)


@pytest.mark.covers("frameworks", "Lightning, search", "one process", "fp16")
@pytest.mark.parametrize("looked_after", [True, False])
def test_a_grad_scaler(tmp_path: Path, looked_after: bool) -> None:
    """It does not scale the observed loss."""
    path = tmp_path / "run.jsonl"
    module = Module(scheduler=None if looked_after else lambda optimizer: own(optimizer, 100))
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    callbacks = [AutoLR(path)] if looked_after else []
    options = {"plugins": [plugin], "accumulate_grad_batches": 2}
    trainer_of(*callbacks, max_epochs=1, **options).fit(module, loader_of(0, 200))
    assert final_loss(module.net) < 1.3 * loss_of_plain_loop(steps=100, size=128, gives_loss=looked_after)
    if looked_after:
        first = hdet.read_journal(path).rounds[0]["replicas"][0]["loss"]
        assert first == pytest.approx(sum(module.losses[:2]) / 2, rel=1e-2)


def test_an_ensemble_is_looked_after() -> None:
    def scheduler(optimizer: Any) -> hdet.Ensemble:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return hdet.Ensemble(optimizer, schedule, sync_every=5, total_steps=20, journal=records)

    records = Records()
    module, auto = Own(1e-3, scheduler=scheduler), AutoLR()
    trainer_of(auto, max_epochs=1).fit(module, loader_of(0, 20))
    assert isinstance(auto.scheduler, hdet.Ensemble)
    assert auto.summary is None
    assert all(record["replicas"][0]["loss"] > 0 for record in records.rounds)


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    """Training sees the same batches in the same order; the loggers get the search beside what they got before."""

    class Logger(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            names.update(metrics)

        def save(self) -> None: ...

    def fit(*callbacks: Any) -> tuple[Module, Tensor]:
        torch.manual_seed(3)
        module = Module()
        loader = loader_of(0, 20, shuffle=True)
        trainer_of(*callbacks, max_epochs=3, logger=Logger(tmp_path), log_every_n_steps=1).fit(module, loader)
        return module, torch.rand(())

    names: set[str] = set()
    plain, after = fit()
    found, after_too = fit(AutoLR())
    assert plain.seen == found.seen
    assert after == after_too
    assert names >= {"hdet/lr", "hdet/found", "hdet/base/lr.0", "hdet/loss", "loss"}


def test_buffers_go_back_with_the_weights() -> None:
    """The module is given as the model."""
    auto = AutoLR()
    module = Module()
    trainer_of(auto, max_epochs=1).fit(module, loader_of(0, 50))
    assert isinstance(auto.scheduler, hdet.AutoScheduler)
    assert auto.scheduler.search.model is module


def test_a_run_that_was_stopped_goes_on_with_its_search(tmp_path: Path) -> None:
    def trainer(steps: int, *callbacks: Any) -> lightning.Trainer:
        monitor = LearningRateMonitor("step")
        logger = CSVLogger(tmp_path)
        auto = AutoLR(tmp_path / f"{steps}.jsonl", total_steps=80)
        return trainer_of(
            auto,
            monitor,
            *callbacks,
            max_steps=steps,
            max_epochs=4,
            logger=logger,
            enable_checkpointing=bool(callbacks),
        )

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=30, save_top_k=-1)
    whole, first, second = Module(), Module(), Module(lr=1.0)
    trainer(80).fit(whole, loader_of(0, 20))
    trainer(40, saving).fit(first, loader_of(0, 20))
    last = trainer(80, ModelCheckpoint(tmp_path))
    last.fit(second, loader_of(0, 20), ckpt_path=tmp_path / "step=30.ckpt")
    auto = next(callback for callback in last.callbacks if isinstance(callback, AutoLR))
    assert first.rates == whole.rates[:40]
    assert second.rates[0] == whole.rates[30]  # not that of the new guess
    assert len(second.rates) == 50
    assert final_loss(second.net) < 1.3 * final_loss(whole.net)
    logged = next(tmp_path.glob("lightning_logs/*/metrics.csv")).read_text()
    assert "lr-Adam" in logged  # the monitor's
    assert "hdet/base/lr.0" in logged
    assert "the guess was 1e-05" in str(auto.summary)
    journal = hdet.read_journal(tmp_path / "80.jsonl")
    assert [r["step"] for r in journal.resumes] == [30]
    assert journal.rounds[-1]["step"] == 80


class ByStep(Own):
    """Its batches are those of the step: the same ones whether a run was cut or not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch_of(self.trainer.world_size * self.trainer.global_step + self.global_rank))
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        return loss


CUTS = (3, 12, 18, 80)
"""After the first steps, inside a round, at the end of one, and in the descent."""


class Saves(lightning.Callback):
    """The trainer's own checkpoints, at each of the cuts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in CUTS:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def cut_and_resumed(folder: Path, fit: Callable[..., ByStep]) -> ByStep:
    """Every cut of a run ends with the same bits as the run without one. Gives that."""
    whole = fit(Saves(folder))
    for cut in CUTS:
        with warnings.catch_warnings():
            warnings.simplefilter("error", hdet.ResumeWarning)
            resumed = fit(ckpt_path=folder / f"{cut}.ckpt")
        assert resumed.rates == whole.rates[cut:], cut
        assert torch.equal(flat(resumed), flat(whole)), cut
    return whole


@pytest.mark.parametrize("way", ["callback", "schedule", "scheduler"])
def test_a_run_that_was_cut_is_the_one_that_was_not_bit_by_bit(way: str, tmp_path: Path) -> None:
    def fit(*callbacks: Any, **more: Any) -> ByStep:
        module = ByStep(scheduler=(lambda optimizer: own(optimizer, 100)) if way == "scheduler" else None)
        auto = AutoLR(schedule=shape) if way == "schedule" else AutoLR()
        trainer_of(auto, *callbacks, max_epochs=1).fit(module, loader_of(0, 100), **more)
        return module

    cut_and_resumed(tmp_path, fit)


def test_without_the_callback_the_warning_says_what_keeps_the_search(tmp_path: Path) -> None:
    def fit(*callbacks: Any, **more: Any) -> None:
        module = ByStep(scheduler=lambda optimizer: own(optimizer, 100))
        trainer_of(*callbacks, max_epochs=1).fit(module, loader_of(0, 100), **more)

    fit(Saves(tmp_path))
    with pytest.warns(hdet.ResumeWarning, match="In a framework, use AutoLR"):
        fit(ckpt_path=tmp_path / "12.ckpt")


def test_an_exception_leaves_trainer_and_scheduler_usable(tmp_path: Path) -> None:
    class Falls(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("no more")

    saving = ModelCheckpoint(tmp_path, "fallen", save_on_exception=True)
    auto, module = AutoLR(), Falls()
    trainer = trainer_of(auto, saving, max_epochs=2, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(module, loader_of(0, 10), loader_of(50, 2))
    assert "save_checkpoint" not in vars(trainer)
    assert not vars(auto._consensus)["_exit_callbacks"]  # it was left
    again = Module()
    trainer_of(auto, max_epochs=2).fit(again, loader_of(0, 10), loader_of(50, 2), ckpt_path=tmp_path / "fallen.ckpt")
    assert len(again.rates) == 10


# -- two processes -----------------------------------------------------------------------------------------------------


def in_ddp(rank: int, folder: str, scenario: str) -> Any:
    """Lightning takes the group of the tests for one that torchrun has made."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    scenarios = {"callback": searched, "alone": searched_alone, "trained": trained, "cut": cut, "sharded": sharded}
    return {**scenarios, "finished": finished}[scenario](rank, Path(folder))


def ddp(*callbacks: Any, **options: Any) -> lightning.Trainer:
    strategy = DDPStrategy(process_group_backend="gloo")
    return trainer_of(*callbacks, devices=2, strategy=strategy, **options)


def searched(rank: int, folder: Path) -> Any:
    module, auto = Module(), AutoLR(folder / "run.jsonl")
    trainer = ddp(auto, max_epochs=3, accumulate_grad_batches=2, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(module, loader_of(0, 160, shuffle=True), loader_of(500, 4))
    return flat(module), module.rates, final_loss(module.net)


def searched_alone(rank: int, folder: Path) -> Any:
    module = Module(scheduler=lambda optimizer: own(optimizer, 120))
    ddp(max_epochs=3, accumulate_grad_batches=2).fit(module, loader_of(0, 160, shuffle=True))
    return flat(module), module.rates, final_loss(module.net)


def trained(rank: int, folder: Path) -> Any:
    def scheduler(optimizer: Any) -> Any:
        return hdet.OneCycleLR(optimizer, 0.02, total_steps=60, sync_every=25, spread=0.5)

    class Stops(EarlyStopping):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            own.append(flat(pl_module))  # after AutoLR's: the replica's own again
            trainer.should_stop = trainer.global_step >= 30

    own: list[Tensor] = []
    module = Module(0.02, scheduler)
    saving = ModelCheckpoint(folder, "{step}", save_weights_only=True, save_top_k=-1)
    trainer = ddp(AutoLR(), Stops("val_loss"), saving, max_epochs=6, enable_checkpointing=True)
    trainer.fit(module, loader_of(0, 20), loader_of(500, 2))
    saved = torch.load(folder / "step=10.ckpt", weights_only=False)["state_dict"]
    return {
        "steps": trainer.global_step,
        "validated": module.validated[0],
        "own": own[0],
        "saved": torch.cat([value.reshape(-1) for value in saved.values()]),
        "last": flat(module),
    }


def cut(rank: int, folder: Path) -> None:
    def fit(*callbacks: Any, **more: Any) -> ByStep:
        module = ByStep()
        ddp(AutoLR(), *callbacks, max_epochs=1).fit(module, loader_of(0, 200), **more)
        return module

    warnings.simplefilter("ignore")
    cut_and_resumed(folder, fit)


def test_in_ddp_a_run_that_was_cut_is_the_one_that_was_not(tmp_path: Path) -> None:
    """Each rank has losses of its own."""
    run_ranks(in_ddp, 2, str(tmp_path), "cut")


class Sharded(ByStep):
    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def sharded(rank: int, folder: Path) -> Any:
    def fit(*callbacks: Any, **more: Any) -> ByStep:
        module = Sharded()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        trainer = trainer_of(AutoLR(), *callbacks, max_epochs=1, devices=2, strategy=strategy)
        trainer.fit(module, loader_of(0, 200), **more)
        return module

    warnings.simplefilter("ignore")
    whole = cut_and_resumed(folder, fit)
    return type(next(whole.parameters())).__name__, final_loss(whole.net)


@pytest.mark.covers("frameworks", "Lightning, search", "FSDP2", "fp32")
def test_fsdp2_and_a_run_of_it_that_was_cut(tmp_path: Path) -> None:
    """Each rank saves the part of the search that it holds."""
    (kind, loss), (_, other) = run_ranks(in_ddp, 2, str(tmp_path), "sharded")
    assert kind == "DTensor"
    assert loss == other
    assert loss < 1.2 * loss_of_plain_loop(steps=100, size=128)
    assert (tmp_path / "12.ckpt" / "hdet_search_1_of_2.pt").exists()


@pytest.mark.covers("frameworks", "Lightning, search", "DDP", "fp32")
@pytest.mark.parametrize("scenario", ["callback", "alone"])
def test_ddp_searches_the_rate_of_one_model(tmp_path: Path, scenario: str) -> None:
    (weights, rates, loss), (weights_too, rates_too, _) = run_ranks(in_ddp, 2, str(tmp_path), scenario)
    assert torch.equal(weights, weights_too)
    assert rates == rates_too
    assert loss < 1.5 * loss_of_plain_loop(steps=120, size=256, gives_loss=scenario == "callback")
    if scenario == "callback":
        journal = hdet.read_journal(tmp_path / "run.jsonl")
        assert journal.rounds[-1]["step"] == 120
        assert journal.rounds[-1]["replicas"][0]["loss"] > 0


@pytest.mark.covers("frameworks", "Lightning, replicas", "DDP", "fp32")
def test_replicas_that_train_apart_are_validated_and_saved_as_one(tmp_path: Path) -> None:
    first, second = run_ranks(in_ddp, 2, str(tmp_path), "trained")
    assert not torch.equal(first["own"], second["own"])
    for name in ("validated", "saved", "last"):
        assert torch.equal(first[name], second[name]), name
    torch.testing.assert_close(first["validated"], (first["own"] + second["own"]) / 2)
    assert torch.equal(first["validated"], first["saved"])
    assert first["steps"] == 30  # stopped inside a round


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Manual(Module):
    automatic_optimization = False


class Nothing(Module):
    def configure_optimizers(self) -> None:
        return None


def plain(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


def ours(optimizer: Any) -> Any:
    return hdet.OneCycleLR(optimizer, 0.1, total_steps=20)


class ByEpoch(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [ours(optimizer)]


class Engine(SingleDeviceStrategy):
    """As Lightning's DeepSpeedStrategy, which needs GPUs."""

    deepspeed_engine = None


class Two(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [plain(optimizer), plain(optimizer)]


MISTAKES: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], list[str]]] = {
    "manual": (Manual, AutoLR, {}, ["automatic_optimization=False", "scheduler.step(loss)"]),
    "no optimizer": (Nothing, AutoLR, {}, ["one optimizer", "AdamW"]),
    "two schedulers": (Two, AutoLR, {}, ["StepLR, StepLR", "return only the optimizer"]),
    "two schedules": (lambda: Module(scheduler=plain), lambda: AutoLR(schedule=shape), {}, ["options=['schedule']"]),
    "by epoch": (ByEpoch, AutoLR, {}, ["interval='epoch'", '"interval": "step"']),
    "not used": (
        lambda: Module(scheduler=ours),
        lambda: AutoLR("run.jsonl", highest=0.1),
        {},
        ["'journal', 'highest'", "give"],
    ),
    "DeepSpeed": (Module, AutoLR, {"strategy": Engine("cpu")}, ["strategy='Engine'", "ModelParallelStrategy"]),
    "endless": (
        Module,
        lambda: AutoLR(schedule=shape),
        {"max_epochs": -1},
        ["estimated_stepping_batches is inf", "max_steps"],
    ),
}


@pytest.mark.covers("frameworks", "Lightning, search", "ZeRO-1", "refused")
@pytest.mark.covers("frameworks", "Lightning, search", "ZeRO-2", "refused")
@pytest.mark.covers("frameworks", "Lightning, search", "ZeRO-3", "refused")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_with_a_cure(name: str) -> None:
    module, auto, options, words = MISTAKES[name]
    trainer = trainer_of(auto(), **{"max_epochs": 2, **options})
    error = error_of(lambda: trainer.fit(module(), loader_of(0, 10)))
    assert isinstance(error, hdet.ArgumentError)
    assert all(word in str(error) for word in words), error


class Stream(torch.utils.data.IterableDataset[Any]):
    """It has an end, and nobody knows where."""

    def __iter__(self) -> Any:
        return (batch_of(k) for k in range(10))


def test_data_of_unknown_length_are_no_run_without_an_end() -> None:
    trainer = trainer_of(AutoLR(), max_epochs=2)
    error = error_of(lambda: trainer.fit(Module(), DataLoader(Stream(), batch_size=None)))
    assert isinstance(error, hdet.ArgumentError)
    assert "the schedule needs the run's length" in str(error)


def test_wrong_arguments() -> None:
    assert "journal" in str(error_of(lambda: AutoLR(journal=3)))  # type: ignore[arg-type]


def test_a_run_that_falls_cannot_be_made_longer(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    trainer_of(AutoLR(), saving, max_epochs=1, enable_checkpointing=True).fit(Module(), loader_of(0, 50))
    trainer = trainer_of(AutoLR(), max_epochs=2)
    error = error_of(lambda: trainer.fit(Module(), loader_of(0, 50), ckpt_path=tmp_path / "step=50.ckpt"))
    assert isinstance(error, hdet.ArgumentError)
    words = str(error)
    assert words.startswith("total_steps must be 50 as in the run that")
    assert "but got total_steps=100; give that, or begin a new run from the weights" in words
    assert "Here total_steps is given by max_steps and max_epochs of the trainer." in words
    assert words.endswith("A run that is to be extended, or shortened, at any step needs AutoLR(finish=...)")
    for made in (AutoLR(total_steps=120), AutoLR(finish=20), AutoLR(schedule=shape)):
        trainer = trainer_of(made, max_epochs=2)
        error = error_of(lambda own=trainer: own.fit(Module(), loader_of(0, 50), ckpt_path=tmp_path / "step=50.ckpt"))
        assert isinstance(error, hdet.ArgumentError)
        assert ("total_steps of AutoLR" in str(error)) == ("total_steps" in made.options)
    auto = AutoLR()
    trainer_of(auto, max_epochs=2).fit(Module(), loader_of(0, 50), ckpt_path=tmp_path / "step=10.ckpt")
    assert auto.scheduler is not None
    assert (auto.scheduler.last_epoch, auto.scheduler.total_steps) == (100, 100)  # type: ignore[union-attr]


# -- the end -----------------------------------------------------------------------------------------------------------


def finished(rank: int, folder: Path) -> Any:
    module = Module()
    ddp(AutoLR(finish=20), Stops(60), max_epochs=-1).fit(module, loader_of(0, 50))
    return flat(module), module.rates


def test_in_ddp_all_ranks_let_the_rate_fall(tmp_path: Path) -> None:
    (weights, rates), (weights_too, rates_too) = run_ranks(in_ddp, 2, str(tmp_path), "finished")
    assert torch.equal(weights, weights_too)
    assert rates == rates_too
    assert len(rates) == 80
    assert rates[-1] < 1e-3 * max(rates)


class Stops(lightning.Callback):
    """Asks for a stop after a batch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.at


class Finishes(lightning.Callback):
    """Lets the rate fall after a batch, and asks for a stop when it has fallen."""

    def __init__(self, at: int, steps: int) -> None:
        self.at, self.steps = at, steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        if trainer.global_step == self.at:
            scheduler.finish(self.steps)
        trainer.should_stop = trainer.global_step >= scheduler.total_steps


class Itself(Module):
    """Asks for it by itself, after all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.should_stop or self.trainer.global_step == 130


@pytest.mark.parametrize("who", ["before", "after", "module"])
@pytest.mark.parametrize("length", [{"max_epochs": -1}, {"max_epochs": 100}])
def test_the_rate_falls_before_a_stop(who: str, length: dict[str, Any]) -> None:
    auto, stops = AutoLR(finish=70), Stops(130)
    callbacks = {"before": [stops, auto], "after": [auto, stops], "module": [auto]}[who]
    module = Itself() if who == "module" else Module()
    trainer = trainer_of(*callbacks, **length)
    trainer.fit(module, loader_of(0, 50))
    assert len(module.rates) == trainer.global_step == 200
    assert module.rates[-1] < 1e-3 * module.rates[129]
    assert module.rates[129] > HELD * max(module.rates)
    assert trainer.fit_loop.min_steps is None
    assert final_loss(module.net) < 1.5 * loss_of_plain_loop(steps=200)  # on other batches


def test_a_trainer_without_an_end_holds_the_rate_until_it_is_finished() -> None:
    module, auto = Module(), AutoLR()
    trainer_of(auto, Stops(130), max_epochs=-1).fit(module, loader_of(0, 50))
    assert len(module.rates) == 130
    assert module.rates[-1] > HELD * max(module.rates)
    assert isinstance(auto.scheduler, hdet.AutoScheduler)
    assert auto.scheduler.total_steps == float("inf")
    module = Module()
    trainer_of(AutoLR(), Finishes(130, 70), max_epochs=-1).fit(module, loader_of(0, 50))
    assert len(module.rates) == 200
    assert module.rates[129] > HELD * max(module.rates)
    assert module.rates[-1] < 1e-3 * module.rates[129]


@pytest.mark.parametrize("first", [True, False])
def test_early_stopping_lets_the_rate_fall(first: bool, tmp_path: Path) -> None:
    """The final weights are validated and saved."""
    auto, stopping = AutoLR(finish=20), EarlyStopping("val_loss", min_delta=1e9, patience=1)  # in the third epoch
    callbacks = [auto, stopping] if first else [stopping, auto]
    module, saving = Module(), ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", save_top_k=-1)
    trainer = trainer_of(*callbacks, saving, max_epochs=-1, enable_checkpointing=True)
    trainer.fit(module, loader_of(0, 30), loader_of(900, 1))
    assert {path.stem for path in tmp_path.iterdir()} == {"step=30", "step=60", "step=80"}
    assert len(module.rates) == 60 + 20
    assert module.rates[-1] < 1e-3 * max(module.rates)


def test_the_rate_falls_before_the_trainers_own_end() -> None:
    module = Module()
    trainer_of(AutoLR(finish=60), max_epochs=4).fit(module, loader_of(0, 50))
    assert len(module.rates) == 200
    assert module.rates[139] > max(module.rates[141], HELD * max(module.rates))
    assert module.rates[-1] < 1e-3 * max(module.rates)
    assert final_loss(module.net) < 1.5 * loss_of_plain_loop(steps=200)


def test_min_steps_are_made() -> None:
    module = Module()
    trainer_of(AutoLR(finish=10), Stops(20), max_epochs=-1, min_steps=60).fit(module, loader_of(0, 50))
    assert len(module.rates) == 60 + 10


def test_a_run_that_is_cut_while_the_rate_falls(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=20, save_top_k=-1)
    whole, resumed = ByStep(), ByStep()
    trainer_of(AutoLR(finish=30), Stops(50), saving, max_epochs=-1, enable_checkpointing=True).fit(
        whole, loader_of(0, 50)
    )
    trainer = trainer_of(AutoLR(finish=30), max_epochs=-1)
    trainer.fit(resumed, loader_of(0, 50), ckpt_path=tmp_path / "step=60.ckpt")
    assert trainer.global_step == 80
    assert resumed.rates == whole.rates[60:]
    assert torch.equal(flat(resumed), flat(whole))
    trainer = trainer_of(AutoLR(), max_epochs=-1)
    error = error_of(lambda: trainer.fit(Module(), loader_of(0, 50), ckpt_path=tmp_path / "step=60.ckpt"))
    assert "is to make inf steps, but the restored schedule ends at step 80; resume with" in str(error)


def test_what_falls_by_itself_has_no_finish() -> None:
    module = Module(scheduler=lambda optimizer: hdet.OneCycleLR(optimizer, 0.1, total_steps=20))
    error = error_of(lambda: trainer_of(AutoLR(finish=10), max_epochs=1).fit(module, loader_of(0, 20)))
    assert "finish= needs the scheduler of hdet.auto without schedule=, but this OneCycleLR" in str(error)
    assert "finish must be an integer, at least 1, but got finish=0" in str(error_of(lambda: AutoLR(finish=0)))


def test_a_checkpoint_without_a_scheduler_is_refused(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "plain")
    trainer_of(saving, max_epochs=1, enable_checkpointing=True).fit(Module(), loader_of(0, 4))
    trainer = trainer_of(AutoLR(), max_epochs=2)
    error = error_of(lambda: trainer.fit(Module(), loader_of(0, 4), ckpt_path=tmp_path / "plain.ckpt"))
    assert "has no scheduler" in str(error)


# -- packages ----------------------------------------------------------------------------------------------------------


def test_hdet_does_not_import_lightning() -> None:
    _python("import sys, hdet, hdet.integrations; assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)")


def test_the_package_pytorch_lightning() -> None:
    pytest.importorskip("pytorch_lightning")
    _python(
        """
import sys, warnings
warnings.simplefilter("ignore")
from hdet.integrations.lightning import AutoLR
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel

class Module(BoringModel):
    def configure_optimizers(self):
        return super().configure_optimizers()[0][0]

trainer = pl.Trainer(max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, callbacks=[AutoLR()])
trainer.fit(Module())
assert trainer.global_step == 20
"""
    )


def _python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
