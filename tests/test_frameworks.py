"""What the core does for frameworks, which one of its files names."""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import hdet
from hdet.frameworks import DEEPSPEED

pytestmark = pytest.mark.quick
CALLER = "def advance(scheduler, config):\n    scheduler.step(1.0)\n"


def test_one_core_file_names_frameworks() -> None:
    source = Path(hdet.__file__).parent
    lists = source / "cli" / "doctor.py"  # says which packages are installed, and imports none
    core = [path for path in source.rglob("*.py") if "integrations" not in path.parts and path != lists]
    named = re.compile("lightning|deepspeed|accelerate", re.IGNORECASE)
    assert [path.name for path in core if named.search(path.read_text(encoding="utf-8"))] == ["frameworks.py"]


@pytest.mark.parametrize("kind", ["auto", "replicas"])
@pytest.mark.parametrize(
    ("package", "interval", "warned"), [("lightning", "epoch", 1), ("lightning", "step", 0), ("mine", "epoch", 0)]
)
def test_a_framework_that_steps_by_epochs_is_told_of(kind: str, package: str, interval: str, warned: int) -> None:
    caller = types.ModuleType(f"{package}.loops")
    exec(CALLER, caller.__dict__)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    peak = {"total_steps": 100}
    scheduler = hdet.auto(optimizer, **peak) if kind == "auto" else hdet.OneCycleLR(optimizer, 0.1, **peak)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
        caller.advance(scheduler, types.SimpleNamespace(interval=interval, frequency=1))
    assert len([one for one in told if "hdet counts optimizer steps" in str(one.message)]) == warned


def test_partitions_are_refused_with_the_cure_of_their_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.ones(2, requires_grad=True)
    monkeypatch.delitem(sys.modules, DEEPSPEED.package, raising=False)  # another test may have imported it
    hdet.Guard(torch.optim.SGD([weights], lr=0.1), torch.nn.Linear(1, 1))  # a plain tensor, no partition
    monkeypatch.setitem(sys.modules, DEEPSPEED.package, types.ModuleType(DEEPSPEED.package))
    with pytest.raises(hdet.ShardedParametersError, match=re.escape(DEEPSPEED.cures["guard"])):
        hdet.Guard(torch.optim.SGD([weights], lr=0.1), torch.nn.Linear(1, 1))
    with pytest.raises(hdet.ShardedParametersError, match=re.escape(DEEPSPEED.cures["search"])):
        hdet.auto(torch.optim.SGD([weights], lr=0.1), total_steps=10)
    with pytest.raises(hdet.ShardedParametersError, match=re.escape(DEEPSPEED.cures["replicas"])):
        hdet.OneCycleLR(torch.optim.SGD([weights], lr=0.1), 0.1, total_steps=10)
