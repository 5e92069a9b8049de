"""What is read of FSDP2 where the model is not known."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import hdet
from hdet.ranks.shards import reshard_all

STATES = "torch.distributed._composable_state"


def fully_sharded() -> type:
    """A class as ``fully_shard`` makes one."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    kind: type = type("FSDPLinear", (fsdp.FSDPModule, nn.Linear), {})
    return kind


def test_without_torchs_list_of_modules_a_roll_back_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = fully_sharded()
    reshard_all()
    monkeypatch.setitem(sys.modules, STATES, ModuleType(STATES))  # as if it were called otherwise
    with pytest.raises(
        hdet.ShardedParametersError, match=rf"in torch {re.escape(torch.__version__)}, .* give .* model="
    ):
        reshard_all()
    monkeypatch.delitem(sys.modules, STATES)
    with pytest.raises(hdet.ShardedParametersError, match="model="):
        reshard_all()
    assert kind.__name__ == "FSDPLinear"


def test_without_fsdp_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, STATES, ModuleType(STATES))
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    reshard_all()
