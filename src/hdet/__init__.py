"""HDET: data-parallel replicas that explore hyperparameters while they train."""

from hdet._version import __version__
from hdet.algorithm.controllers import Controller, Published, Update
from hdet.engine.onecycle import OneCycleLR
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
    "Controller",
    "DisagreementError",
    "DivergedError",
    "HdetError",
    "Journal",
    "JournalData",
    "JournalError",
    "LostReplicaError",
    "OneCycleLR",
    "Published",
    "ResumeWarning",
    "ShardedParametersError",
    "Sink",
    "Update",
    "__version__",
    "perturb_",
    "read_journal",
]
