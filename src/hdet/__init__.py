"""HDET: data-parallel replicas that explore hyperparameters while they train."""

from hdet._version import __version__
from hdet.algorithm.controllers import Controller, Published, Update
from hdet.algorithm.linesearch import LineSearch
from hdet.algorithm.normalised import Normalised
from hdet.comm.arms import Arms, arms
from hdet.engine import knobs
from hdet.engine.ensemble import Ensemble, Inner
from hdet.engine.knobs import Knob
from hdet.engine.onecycle import OneCycleLR
from hdet.engine.outer import Elastic, Outer
from hdet.engine.probes import ProbeBatch
from hdet.engine.replay import schedule_from
from hdet.engine.signals import Probe, TrainLoss
from hdet.engine.warm_start import perturb_
from hdet.errors import (
    ArgumentError,
    DisagreementError,
    DivergedError,
    HdetError,
    JournalError,
    LostReplicaError,
    ResumeWarning,
    ShardedParametersError,
)
from hdet.journal import Journal, JournalData, Sink, read_journal

__all__ = [
    "ArgumentError",
    "Arms",
    "Controller",
    "DisagreementError",
    "DivergedError",
    "Elastic",
    "Ensemble",
    "HdetError",
    "Inner",
    "Journal",
    "JournalData",
    "JournalError",
    "Knob",
    "LineSearch",
    "LostReplicaError",
    "Normalised",
    "OneCycleLR",
    "Outer",
    "Probe",
    "ProbeBatch",
    "Published",
    "ResumeWarning",
    "ShardedParametersError",
    "Sink",
    "TrainLoss",
    "Update",
    "__version__",
    "arms",
    "knobs",
    "perturb_",
    "read_journal",
    "schedule_from",
]
