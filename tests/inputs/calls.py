"""Every public callable with arguments that are right, so that a test can spoil one of them."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hdet
from hdet.ensemble.knob import KnobSpec
from hdet.integrations.accelerate import prepare
from hdet.optimizer import parts_of
from tests.elastic.standin import Lighthouse, StandIn

__all__ = ["CALLS", "NOT_CALLED", "Call"]

NOT_CALLED = {"AutoScheduler", "Controller", "JournalData", "TrainLoss", "__version__", "knobs"}
"""Public names that check nothing: a protocol, what a reader fills in, what hdet.auto makes, and a module."""


@dataclass(frozen=True)
class Call:
    """One callable.

    Attributes:
        name: as users write it.
        function: what is called.
        right: makes arguments that are accepted, anew for every call; gets a folder.
        torchs: arguments that torch itself checks, and refuses in its own words.
        use: what users do with the result: it must not fail either.
        words: other names under which messages speak of an argument.
    """

    name: str
    function: Callable[..., Any]
    right: Callable[[Path], dict[str, Any]]
    torchs: frozenset[str] = frozenset()
    use: Callable[[Any, dict[str, Any]], object] = lambda result, given: None
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """Their names."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [name for name, one in inspect.signature(self.function).parameters.items() if one.kind not in kinds]

    def __call__(self, given: dict[str, Any]) -> Any:
        """Call it; arguments that have no name for callers stand in their place."""
        parameters = inspect.signature(self.function).parameters.values()
        in_place = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in given]
        named = {name: value for name, value in given.items() if name not in in_place}
        return self.function(*(given[name] for name in in_place), **named)


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 1))


def optimizer_of(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or model_of()).parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 2)).square().mean()  # whatever the batch is
    return loss


def batches(_: int) -> torch.Tensor:
    return torch.ones(2, 2)


def _onecycle(_: Path) -> dict[str, Any]:
    return {"optimizer": optimizer_of(), "max_lr": 0.1, "total_steps": 50, "cycle_momentum": False}


def _cycling(_: Path) -> dict[str, Any]:
    return {"optimizer": optimizer_of(), "max_lr": [0.1], "epochs": 5, "steps_per_epoch": 10, "three_phase": True}


def _auto(_: Path) -> dict[str, Any]:
    return {"optimizers": optimizer_of(), "total_steps": 50}


def _endless(_: Path) -> dict[str, Any]:
    return {"optimizers": [optimizer_of(), optimizer_of()]}


def _finish(steps: Any) -> Any:
    """Of a run without an end."""
    scheduler = hdet.auto(optimizer_of())
    scheduler.finish(steps)
    return scheduler


def _scheduled(_: Path) -> dict[str, Any]:
    optimizer = optimizer_of()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"optimizers": optimizer, "schedule": schedule, "schedule_every": 1, "total_steps": 50}


def _ensemble(_: Path) -> dict[str, Any]:
    return {"optimizer": optimizer_of()}


def _guard(_: Path) -> dict[str, Any]:
    model = model_of()
    return {"optimizer": optimizer_of(model), "model": model, "check_every": 8}


def _probe(_: Path) -> dict[str, Any]:
    return {"model": model_of(), "loss_fn": loss_fn, "loader": batches}


def _knob(_: Path) -> dict[str, Any]:
    spec = KnobSpec("a", "linear", 0.1)
    return {"spec": spec, "read": lambda: 0.5, "write": lambda value: None, "acts": "loss"}


def _journal(folder: Path) -> Path:
    path = folder / "run.jsonl"
    replica = {"loss": 1.0, "signal": 1.0, "values": [0.1], "multipliers": [1.0], "divergence": 0.0}
    bases = {"base_before": [0.1], "base": [0.1]}
    record = {"kind": "round", "round": 0, "step": 5, "replicas": [replica], "excluded": [], **bases}
    records = ({"kind": "header", "schema": 1, "knobs": ["lr[0]"], "replicas": 1, "arguments": {}}, record)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def _checkpoint(folder: Path) -> Path:
    path = folder / "saved.pt"
    if not path.exists():
        hdet.save(path, model=model_of(), epoch=3)
    return path


def _scalar(_: Path) -> dict[str, Any]:
    return {"name": "smoothing", "value": 0.1, "spread": 0.05}


def _custom(_: Path) -> dict[str, Any]:
    return {"name": "mine", "read": lambda: 0.1, "write": lambda value: None, "spread": 0.05}


class _Accelerator:
    """An accelerate.Accelerator, as far as it is called."""

    distributed_type = "NO"
    sync_gradients = True
    step_scheduler_with_optimizer = True

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return scheduler

    def register_save_state_pre_hook(self, hook: Any) -> None: ...
    def register_load_state_pre_hook(self, hook: Any) -> None: ...


def _train(scheduler: Any, given: dict[str, Any]) -> None:
    """Two steps; where there is no gradient, the optimizer moves nothing."""
    for _ in range(2):
        for optimizer in parts_of(scheduler.optimizer):
            for row in optimizer.param_groups:
                for p in row["params"]:
                    p.grad = torch.ones_like(p)
            optimizer.step()
        scheduler.step(0.5)


def _guarded(guard: Any, given: dict[str, Any]) -> None:
    """Two rounds."""
    for _ in range(16):
        given["optimizer"].step()
        guard.step(0.5)


def _evaluate(probe: Any, given: dict[str, Any]) -> None:
    """What a scheduler does with a probe at the end of a round."""
    from hdet.ranks.group import Solo

    probe.prepare(0, Solo())
    probe()


SCHEDULE = frozenset(inspect.signature(torch.optim.lr_scheduler.OneCycleLR).parameters) - {"verbose"}
"""Arguments of torch's OneCycleLR, which checks them; ``verbose`` of torch 2.6 has no effect there."""
_WORDS = {"optimizer": ("Optimizer",), "total_steps": ("total steps",)}

CALLS = [
    Call("OneCycleLR", hdet.OneCycleLR, _onecycle, SCHEDULE, _train, _WORDS),
    Call("OneCycleLR, momentum", hdet.OneCycleLR, _cycling, SCHEDULE, _train, _WORDS),
    Call("finish", _finish, lambda _: {"steps": 10}, frozenset(), _train),
    Call("auto", hdet.auto, _auto, use=_train, words=_WORDS),
    Call(
        "auto, no end",
        hdet.auto,
        _endless,
        use=_train,
        words={**_WORDS, "schedule": ("total_steps",)},  # a schedule needs one
    ),
    Call("auto, any schedule", hdet.auto, _scheduled, use=_train, words=_WORDS),
    Call("Ensemble", hdet.Ensemble, _ensemble, frozenset(), _train),
    Call("Guard", hdet.Guard, _guard, frozenset(), _guarded),
    Call("ProbeBatch", hdet.ProbeBatch, _probe, frozenset(), _evaluate),
    Call("ProbeLoss", hdet.ProbeLoss, lambda _: {"fn": lambda: 1.0}),
    Call("AsPrinted", hdet.AsPrinted, lambda _: {}),
    Call("Corrected", hdet.Corrected, lambda _: {}),
    Call("Normalised", hdet.Normalised, lambda _: {}),
    Call("Journal", hdet.Journal, lambda folder: {"path": folder / "new.jsonl"}),
    Call("Knob", hdet.Knob, _knob),
    Call("arms", hdet.arms, lambda _: {"n": 1}),
    Call("torchft", hdet.torchft, lambda _: {"manager": StandIn(Lighthouse(), "r0:1"), "name": "r0", "timeout": 1.0}),
    Call("perturb_", hdet.perturb_, lambda _: {"model": model_of()}),
    Call("read_journal", hdet.read_journal, lambda folder: {"path": _journal(folder)}),
    Call("show", hdet.show, lambda folder: {"journal": _journal(folder)}, use=lambda shown, given: repr(shown)),
    Call(
        "schedule_from",
        hdet.schedule_from,
        lambda folder: {"journal": _journal(folder), "optimizer": optimizer_of()},
        words={"journal": ("path",)},
    ),
    Call("knobs.lr", hdet.knobs.lr, lambda _: {"optimizer": optimizer_of()}),
    Call(
        "knobs.optimizer",
        hdet.knobs.optimizer,
        lambda _: {"optimizer": optimizer_of(), "field": "weight_decay", "spread": 0.1},
        words={"optimizer": ("weight_decay",)},  # another one may have no such field to explore
    ),
    Call(
        "knobs.module",
        hdet.knobs.module,
        lambda _: {"model": model_of(), "which": nn.Dropout, "attribute": "p", "spread": 0.05},
    ),
    Call("knobs.scalar", hdet.knobs.scalar, _scalar),
    Call("knobs.custom", hdet.knobs.custom, _custom),
    Call(
        "accelerate.prepare",
        prepare,
        lambda folder: {"accelerator": _Accelerator(), "scheduler": hdet.OneCycleLR(**_onecycle(folder))},
    ),
]
if hasattr(hdet, "save"):
    CALLS.append(Call("save", hdet.save, lambda folder: {"path": folder / "run.pt", "model": model_of(), "epoch": 3}))
    CALLS.append(Call("load", hdet.load, lambda folder: {"path": _checkpoint(folder), "model": model_of()}))
if hasattr(hdet, "exists"):
    CALLS.append(Call("exists", hdet.exists, lambda folder: {"path": folder / "run.pt"}))
if "HDET_INPUTS" in os.environ:  # their packages take seconds to import; those that are not installed are left out
    if find_spec("lightning") or find_spec("pytorch_lightning"):
        from hdet.integrations import lightning

        CALLS.append(Call("lightning.AutoLR", lightning.AutoLR, lambda _: {}))
    if find_spec("transformers"):
        from hdet.integrations import transformers

        CALLS.append(Call("transformers.AutoLR", transformers.AutoLR, lambda _: {}))
