"""What SECURITY.md says of files that somebody else made: reading them runs no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.checkpoint.file import _Hashed
from hdet.integrations import checkpoints


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def forged(path: Path, content: Any) -> None:
    """A checkpoint with a checksum that fits."""
    with path.open("wb") as file:
        hashed = _Hashed(file)
        torch.save(content, hashed)
        hashed.finish()


def test_a_forged_checkpoint_runs_no_code(tmp_path: Path) -> None:
    trace, model = tmp_path / "trace", nn.Linear(2, 1)
    before = model.weight.clone()
    forged(tmp_path / "run.pt", {"states": {"model": Evil(trace)}, "values": {"epoch": Evil(trace)}})
    with pytest.raises(hdet.CheckpointError, match=r"holds objects that are not allowed \(.+\)") as refused:
        hdet.load(tmp_path / "run.pt", model=model)
    assert "weights_only" not in str(refused.value)  # nothing recommends to run what is in it
    assert not trace.exists()
    assert model.weight.equal(before)
    torch.load(tmp_path / "run.pt", weights_only=False)  # it would have
    assert trace.exists()


def test_a_forged_state_beside_a_frameworks_checkpoint_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    torch.save({"search": Evil(trace)}, tmp_path / "forged.pt")
    with pytest.raises(Exception, match="weights_only"):
        checkpoints._read(tmp_path, "forged", optimizer)
    assert not trace.exists()
