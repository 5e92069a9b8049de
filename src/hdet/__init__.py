"""HDET: the learning rate is found in the run, and data-parallel replicas explore hyperparameters while they train."""

from importlib import import_module
from typing import TYPE_CHECKING

from hdet._version import __version__
from hdet.ensemble.controller import AsPrinted, Controller, Corrected
from hdet.ensemble.normalised import Normalised
from hdet.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointWarning,
    DisagreementError,
    DivergedError,
    HdetError,
    JournalError,
    LostReplicaError,
    ProbeWarning,
    ResumeWarning,
    RollbackWarning,
    SearchWarning,
    ShardedParametersError,
)
from hdet.journal import Journal, JournalData, read_journal

if TYPE_CHECKING:
    from hdet.checkpoint.saving import exists, load, save
    from hdet.ensemble import knobs
    from hdet.ensemble.knobs import Knob
    from hdet.ensemble.signals import ProbeBatch, ProbeLoss, TrainLoss
    from hdet.ensemble.warm_start import perturb_
    from hdet.ranks.arms import arms
    from hdet.ranks.torchft import torchft
    from hdet.report.page import show
    from hdet.rollback.guard import Guard
    from hdet.schedulers.auto_scheduler import AutoScheduler, auto
    from hdet.schedulers.ensemble import Ensemble
    from hdet.schedulers.onecycle import OneCycleLR
    from hdet.schedulers.replay import schedule_from

__all__ = [
    "ArgumentError",
    "AsPrinted",
    "AutoScheduler",
    "CheckpointError",
    "CheckpointWarning",
    "Controller",
    "Corrected",
    "DisagreementError",
    "DivergedError",
    "Ensemble",
    "Guard",
    "HdetError",
    "Journal",
    "JournalData",
    "JournalError",
    "Knob",
    "LostReplicaError",
    "Normalised",
    "OneCycleLR",
    "ProbeBatch",
    "ProbeLoss",
    "ProbeWarning",
    "ResumeWarning",
    "RollbackWarning",
    "SearchWarning",
    "ShardedParametersError",
    "TrainLoss",
    "__version__",
    "arms",
    "auto",
    "exists",
    "knobs",
    "load",
    "perturb_",
    "read_journal",
    "save",
    "schedule_from",
    "show",
    "torchft",
]

_NEED_TORCH = {
    "hdet.checkpoint.saving": ("exists", "load", "save"),
    "hdet.ensemble.knobs": ("Knob", "knobs"),
    "hdet.ensemble.signals": ("ProbeBatch", "ProbeLoss", "TrainLoss"),
    "hdet.ensemble.warm_start": ("perturb_",),
    "hdet.ranks.arms": ("arms",),
    "hdet.ranks.torchft": ("torchft",),
    "hdet.report.page": ("show",),
    "hdet.rollback.guard": ("Guard",),
    "hdet.schedulers.auto_scheduler": ("AutoScheduler", "auto"),
    "hdet.schedulers.ensemble": ("Ensemble",),
    "hdet.schedulers.onecycle": ("OneCycleLR",),
    "hdet.schedulers.replay": ("schedule_from",),
}
"""Modules that are imported when one of their names is first used: hdet.jax and the command line need no torch."""


def __getattr__(name: str) -> object:
    for module, names in _NEED_TORCH.items():
        if name in names:
            found = import_module(module)
            globals()[name] = found if name == "knobs" else getattr(found, name)  # not asked for a second time
            return globals()[name]
    raise AttributeError(f"module 'hdet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
