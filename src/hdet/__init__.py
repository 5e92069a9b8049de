"""HDET: the learning rate is found in the run, and data-parallel replicas explore hyperparameters while they train."""

from hdet._version import __version__
from hdet.checkpoint.saving import exists, load, save
from hdet.ensemble import knobs
from hdet.ensemble.controller import AsPrinted, Controller, Corrected
from hdet.ensemble.knobs import Knob
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.probe import ProbeBatch
from hdet.ensemble.signals import ProbeLoss, TrainLoss
from hdet.ensemble.warm_start import perturb_
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
from hdet.ranks.arms import arms
from hdet.ranks.torchft import torchft
from hdet.report.page import show
from hdet.rollback.guard import Guard
from hdet.schedulers.ensemble import Ensemble
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.replay import schedule_from
from hdet.schedulers.several import auto

__all__ = [
    "ArgumentError",
    "AsPrinted",
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
