"""hdet.Guard in Lightning, the Trainer and Accelerate: a ruined run ends where the plain loop with a guard ends."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import hdet
from hdet.ranks.shards import local
from tests.integrations.test_accelerate import accelerator_of, go_and_save, sharding_of
from tests.problems import Batch, batch_of, final_loss, loss_of, network
from tests.processes import run_ranks

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import lightning
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint

from hdet.integrations import accelerate as in_accelerate
from hdet.integrations import lightning as in_lightning
from hdet.integrations import transformers as in_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # roll backs, and the frameworks' advice

STEPS, SIZE, FAULT, EVERY, RATE = 120, 16, 67, 9, 3e-3
CUTS = (40, 80)
"""Inside a round, before the fault and after it."""


def batches() -> Iterator[Batch]:
    """In the middle one that has a NaN."""
    for t in range(STEPS):
        x, y = batch_of(t, SIZE)
        yield (torch.where(torch.arange(SIZE)[:, None] == 3, torch.nan, x) if t == FAULT else x), y


def data() -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches(), strict=True)
    return torch.cat(xs), torch.cat(ys)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = network()
    return net, torch.optim.Adam(net.parameters(), lr=RATE)


def weights(net: nn.Module) -> list[list[float]]:
    return [local(p.detach()).flatten().tolist() for p in net.parameters()]


@cache
def plain(accumulate: int = 1, *, guarded: bool = True) -> float:
    """The final loss of a loop without a framework."""
    net, optimizer = built()
    guard = hdet.Guard(optimizer, net, check_every=EVERY) if guarded else None
    losses: list[Tensor] = []
    for t, batch in enumerate(batches()):
        losses.append(loss_of(net, batch))
        (losses[-1] / accumulate).backward()
        if (t + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if guard is not None:
                guard.step(torch.stack(losses).detach().mean())
            losses = []
    assert guard is None or guard.rollbacks == 0, "a gradient that is not finite is not used, so nothing is rolled back"
    return final_loss(net)


def test_without_a_guard_the_run_is_lost() -> None:
    assert plain(guarded=False) != plain(guarded=False)  # NaN
    assert plain() < 0.5 * final_loss(network())


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.spoiled_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.spoiled_at == self.trainer.global_step:
            with torch.no_grad():
                next(self.net.parameters()).view(-1)[0] = torch.nan
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=RATE)


def in_a_lightning_trainer(*callbacks: Any, ckpt_path: Path | None = None, epochs: int = 1, **options: Any) -> Module:
    """In one epoch there is a batch with a NaN; in several, which have the first batches, a weight is spoiled."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {"devices": 1, "max_epochs": epochs, "enable_checkpointing": saves, **quiet, **options}
    trainer = lightning.Trainer(callbacks=list(callbacks), **options)
    module = Module()
    module.spoiled_at = FAULT if epochs > 1 else None
    samples = TensorDataset(*(part[: len(part) // epochs] for part in data()))
    trainer.fit(module, DataLoader(samples, batch_size=SIZE), ckpt_path=ckpt_path)
    return module


@pytest.mark.covers("frameworks", "Lightning, guard", "one process", "fp32")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_ends_where_the_plain_loop_ends(accumulate: int) -> None:
    guard = in_lightning.Guard(check_every=EVERY)
    module = in_a_lightning_trainer(guard, accumulate_grad_batches=accumulate)
    assert guard.guard is not None
    assert guard.guard.rollbacks == 0
    assert final_loss(module.net) == pytest.approx(plain(accumulate), rel=1e-5)


def goes_on(tmp_path: Path, **options: Any) -> list[list[float]]:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    whole = in_a_lightning_trainer(in_lightning.Guard(check_every=EVERY), saving, epochs=3, **options)
    for cut in CUTS:
        again = in_lightning.Guard(check_every=EVERY)
        resumed = in_a_lightning_trainer(again, epochs=3, ckpt_path=tmp_path / f"step={cut}.ckpt", **options)
        assert again.guard is not None
        assert again.guard.rollbacks == 1
        assert weights(resumed.net) == weights(whole.net), cut
    return weights(whole.net)


def test_lightning_goes_on_with_it(tmp_path: Path) -> None:
    goes_on(tmp_path)


@pytest.mark.covers("frameworks", "Lightning, guard", "DDP", "fp32")
def test_lightning_goes_on_with_it_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_in_ddp, 2, tmp_path)
    assert first == second


def _in_ddp(rank: int, folder: Path) -> list[list[float]]:
    warnings.simplefilter("ignore")
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    return goes_on(folder, devices=2, strategy="ddp", use_distributed_sampler=False)


def test_lightning_misses_it(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=90)
    in_a_lightning_trainer(in_lightning.Guard(check_every=EVERY), saving)
    with pytest.warns(UserWarning, match=r"following callbacks: .*hdet\.integrations\.lightning\.Guard"):
        in_a_lightning_trainer(ckpt_path=tmp_path / "step=90.ckpt")
    in_a_lightning_trainer(ModelCheckpoint(tmp_path, "none-{step}", every_n_train_steps=40))
    with pytest.warns(hdet.ResumeWarning, match=r"no hdet\.Guard .* starts again"):
        in_a_lightning_trainer(in_lightning.Guard(check_every=EVERY), ckpt_path=next(tmp_path.glob("none-*")))


def test_lightning_has_one_optimizer() -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=RATE) for p in list(self.parameters())[:2]]

    trainer = lightning.Trainer(callbacks=[in_lightning.Guard()], max_epochs=1, logger=False, accelerator="cpu")
    two = Two()
    two.automatic_optimization = False
    with pytest.raises(hdet.ArgumentError, match="configure_optimizers must be one optimizer"):
        trainer.fit(two, DataLoader(TensorDataset(*data()), batch_size=SIZE))


# -- the Trainer -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, (x, labels))}


class InOrder(transformers.Trainer):  # type: ignore[misc]  # an optional package
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def trainer_of(folder: Path, **more: Any) -> Any:
    model = Net()
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": SIZE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
    optimizers = (torch.optim.Adam(model.parameters(), lr=RATE), None)
    args = transformers.TrainingArguments(str(folder), **{**settings, **more})
    return InOrder(model, args, train_dataset=rows, optimizers=optimizers)


@pytest.mark.covers("frameworks", "Hugging Face Trainer, guard", "one process", "fp32")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_ends_where_the_plain_loop_ends(accumulate: int, tmp_path: Path) -> None:
    guard = in_trainer.Guard(check_every=EVERY)
    steps = STEPS // accumulate
    trainer = guard.attach(trainer_of(tmp_path, max_steps=steps, gradient_accumulation_steps=accumulate))
    trainer.train()
    assert guard.guard is not None
    assert guard.guard.rollbacks == 0
    assert final_loss(trainer.model.net) == pytest.approx(plain(accumulate), rel=1e-5)


def test_the_trainer_goes_on_with_it(tmp_path: Path) -> None:
    whole = in_trainer.Guard(check_every=EVERY).attach(trainer_of(tmp_path, save_strategy="steps", save_steps=40))
    whole.train()
    for cut in CUTS:
        guard = in_trainer.Guard(check_every=EVERY)
        resumed = guard.attach(trainer_of(tmp_path))
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{cut}"))
        assert guard.guard is not None
        assert weights(resumed.model) == weights(whole.model), cut


def test_mistakes_in_the_trainer_are_refused_with_a_cure(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.add_callback(in_trainer.Guard())
    with pytest.raises(hdet.ArgumentError, match=r"write Guard\(\.\.\.\)\.attach\(trainer\)"):
        trainer.train()
    trainer = in_trainer.Guard().attach(trainer_of(tmp_path))
    with pytest.raises(hdet.ArgumentError, match="can be attached once"):
        in_trainer.Guard().attach(trainer)
    with pytest.raises(hdet.ArgumentError, match=r"must be a transformers\.Trainer"):
        in_trainer.Guard().attach(object())


# -- Accelerate --------------------------------------------------------------------------------------------------------


class Loop:
    """A training script on Accelerate. Each rank has its part of a batch."""

    def __init__(self, accelerator: Any, batches: Callable[[], Iterator[Batch]] = batches) -> None:
        self.accelerator, self.batches = accelerator, batches
        self.net, self.optimizer = accelerator.prepare(*built())
        self.guard = in_accelerate.Guard(accelerator, self.optimizer, self.net, check_every=EVERY)

    def go(self, begin: int, end: int) -> None:
        own = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        for t, (x, y) in enumerate(self.batches()):
            if begin <= t < end:
                with self.accelerator.accumulate(self.net):
                    loss = loss_of(self.net, (x[own], y[own]))
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.guard.step(loss)
                    self.optimizer.zero_grad()


@pytest.mark.covers("frameworks", "Accelerate, guard", "one process", "fp32")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate_ends_where_the_plain_loop_ends(accumulate: int) -> None:
    loop = Loop(accelerator_of(accumulate=accumulate))
    loop.go(0, STEPS)
    assert loop.guard.rollbacks == 0
    assert 0 < loop.guard.factor <= 1
    assert final_loss(loop.net) == pytest.approx(plain(accumulate), rel=1e-5)


@pytest.mark.covers("frameworks", "Accelerate, guard", "DDP", "fp32")
@pytest.mark.covers("frameworks", "Accelerate, guard", "FSDP2", "fp32")
@pytest.mark.parametrize(("size", "joined"), [(1, accelerator_of), (2, accelerator_of), (2, sharding_of)])
def test_accelerate_goes_on_with_it(size: int, joined: Any, tmp_path: Path) -> None:
    found = run_ranks(_cut, size, size, joined, tmp_path)
    assert (
        found == [pytest.approx(plain(), rel=1e-3 if size == 1 else 0.05)] * size
    )  # ranks undo what one process withholds


def _cut(rank: int, size: int, joined: Any, folder: Path) -> float:
    warnings.simplefilter("ignore")
    whole = Loop(joined(rank, size))
    go_and_save(whole, CUTS, STEPS, folder)
    for cut in CUTS:
        again = Loop(joined(rank, size))
        again.accelerator.load_state(str(folder / str(cut)))
        again.go(cut, STEPS)
        assert weights(again.net) == weights(whole.net), cut
    return final_loss(whole.accelerator.unwrap_model(whole.net))


def test_a_copied_script_goes_on_with_a_guard_of_its_own() -> None:
    whole = Loop(accelerator_of())
    whole.go(0, CUTS[0])
    copied = copy.deepcopy(whole)
    copied.go(CUTS[0], STEPS)
    assert (copied.guard.held, whole.guard.held) == (1, 0), "each has its own optimizer, and has seen its own steps"
    whole.go(CUTS[0], STEPS)
    assert weights(copied.net) == weights(whole.net)


def test_what_is_no_accelerator_is_refused() -> None:
    net, optimizer = built()
    with pytest.raises(hdet.ArgumentError, match=r"accelerator must be an accelerate\.Accelerator"):
        in_accelerate.Guard(optimizer, optimizer, net)  # type: ignore[arg-type]
