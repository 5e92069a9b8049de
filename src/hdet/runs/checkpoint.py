"""A checkpoint: everything that a run needs to go on. Batches are functions of the step, so no generator is in it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hdet.errors import ArgumentError

__all__ = ["Checkpoint", "load_checkpoint", "load_weights", "save_checkpoint"]


class Stateful(Protocol):
    """A model, an optimizer, a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """What was saved."""
        ...


class Checkpoint(NamedTuple):
    """Besides the states of a run's parts."""

    step: int
    """Steps that were made."""
    seconds: float
    """Time that they took."""


def save_checkpoint(path: Path, at: Checkpoint, parts: dict[str, Stateful]) -> None:
    """Write atomically: a kill leaves the checkpoint before or this one, never half of it."""
    states = {name: part.state_dict() for name, part in parts.items()}
    draft = path.with_name(f".{path.name}.part")
    torch.save({"at": at._asdict(), "parts": states}, draft)
    os.replace(draft, path)


def load_checkpoint(path: Path, parts: dict[str, Stateful], device: torch.device) -> Checkpoint:
    """Put every part back to where it was."""
    found = _read(path, device)
    for name, part in parts.items():
        part.load_state_dict(found["parts"][name])
    return Checkpoint(**found["at"])


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Only the model's part."""
    states = _read(path, torch.device("cpu"))["parts"]["model"]
    try:
        model.load_state_dict(states)
    except RuntimeError as error:
        raise ArgumentError(
            f"the weights in {path} belong to another model; give a checkpoint of the same task and sizes"
        ) from error


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        if set(found) == {"at", "parts"}:
            return found  # type: ignore[no-any-return]
        reason = "it was not written by hdet"
    except FileNotFoundError:
        reason = "there is no such file"
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, TypeError) as error:
        reason = str(error).splitlines()[0]
    raise ArgumentError(f"{path} is no checkpoint of a run: {reason}; start anew with --force")
