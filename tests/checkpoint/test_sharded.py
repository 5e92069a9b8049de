"""Sharded weights: ``hdet.save`` refuses whatever holds one rank's part, and the way that it names works."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import SequentialLR

import hdet
from tests.checkpoint.files import names
from tests.problems import recorded
from tests.processes import error_of, run_ranks
from tests.sharded_nets import Net, mesh_of, sharded, train, whole

EVERY, CUT, STEPS = 10, 45, 60
DIVERGED = 52
"""After the cut: the run that was resumed must roll back to what was saved."""


class Run(NamedTuple):
    model: Net
    optimizer: torch.optim.Optimizer
    watched: Any
    """A guard or a scheduler that searches: both have ``step(loss)``."""

    @classmethod
    def of(cls, kind: str) -> Run:
        model = sharded(Net(), mesh_of(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        if kind == "guard":
            return cls(model, optimizer, hdet.Guard(optimizer, model, check_every=EVERY))
        return cls(model, optimizer, hdet.auto(optimizer, total_steps=STEPS, model=model))

    def go(self, rank: int, steps: range) -> None:
        for t in steps:
            if t == DIVERGED:
                _spoil(self.model)
            train(self.model, self.optimizer, self.watched, range(t, t + 1), rank, 2)


@torch.no_grad()
def _spoil(model: Net) -> None:
    weight: Any = model.body[0].weight
    weight.to_local().view(-1)[0] = math.nan


# -- what is refused --------------------------------------------------------------------------------------------------


def _refused(rank: int, folder: Path) -> list[str]:
    guarded, searching = Run.of("guard"), Run.of("search")
    for run in (guarded, searching):
        run.go(rank, range(15))
    path = folder / "run.pt"
    plain = torch.optim.lr_scheduler.ConstantLR(searching.optimizer)
    inside = SequentialLR(searching.optimizer, [plain, searching.watched], [1])
    parts: list[dict[str, Any]] = [
        {"model": guarded.model},
        {"optimizer": guarded.optimizer},
        {"guard": guarded.watched},
        {"scheduler": searching.watched},
        {"several": inside},
    ]
    said = [str(error_of(lambda given=given: hdet.save(path, **given))) for given in parts]
    assert names(folder) == []
    hdet.save(path, scheduler=searching.watched, search=False)  # plain numbers, equal on all ranks
    hdet.load(path, scheduler=searching.watched)
    return said


def test_whatever_holds_shards_is_refused_and_led_to_what_works(tmp_path: Path) -> None:
    for said in run_ranks(_refused, 2, tmp_path):
        for name, words in zip(("model", "optimizer", "guard", "scheduler", "several[1]"), said, strict=True):
            assert f"the part {name!r} is sharded over the ranks" in words
            for way in ("torch.distributed.checkpoint", "scheduler.search_state_dict()", "guard.state_dict()"):
                assert way in words


def _loading(rank: int, path: Path) -> str:
    guarded = Run.of("guard")
    before = copy.deepcopy(whole(guarded.model))
    said = str(error_of(lambda: hdet.load(path, guard=guarded.watched)))
    assert all(map(torch.equal, before, whole(guarded.model)))
    return said


def test_a_file_with_the_shards_of_one_rank_is_not_loaded(tmp_path: Path) -> None:
    """Earlier versions wrote them; here it is a file of a whole model."""
    model = Net()
    guard = hdet.Guard(torch.optim.Adam(model.parameters()), model, check_every=EVERY)
    hdet.save(tmp_path / "run.pt", guard=guard)
    for said in run_ranks(_loading, 2, tmp_path / "run.pt"):
        assert "the part 'guard' is sharded over the ranks" in said


# -- what works -------------------------------------------------------------------------------------------------------


def _save(run: Run, rank: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, memory = get_state_dict(run.model, run.optimizer)
    state = {"model": weights, "optimizer": memory}
    if isinstance(run.watched, hdet.Guard):
        own = run.watched.state_dict()
    else:
        own, state["scheduler"] = run.watched.search_state_dict(), run.watched
    dcp.save(state, checkpoint_id=folder / "state")
    torch.save(own, folder / f"own-{rank}.pt")


def _load(run: Run, rank: int, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, memory = get_state_dict(run.model, run.optimizer)
    searches = not isinstance(run.watched, hdet.Guard)
    state = {"model": weights, "optimizer": memory, **({"scheduler": run.watched} if searches else {})}
    dcp.load(state, checkpoint_id=folder / "state")
    set_state_dict(run.model, run.optimizer, model_state_dict=weights, optim_state_dict=memory)
    own = torch.load(folder / f"own-{rank}.pt", weights_only=True)
    if searches:
        run.watched.load_search_state_dict(own)
    else:
        run.watched.load_state_dict(own)


def _resumed(rank: int, kind: str, folder: Path) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """The weights of a run in one piece and of a resumed one, and what the second told of."""
    run = Run.of(kind)
    with recorded():
        run.go(rank, range(CUT))
        _save(run, rank, folder)
        run.go(rank, range(CUT, STEPS))
        again = Run.of(kind)
        _load(again, rank, folder)
    with recorded() as caught:
        again.go(rank, range(CUT, STEPS))
    return whole(run.model), whole(again.model), [str(one.message) for one in caught]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["guard", "search"])
def test_each_rank_saves_its_own_beside_torchs_checkpoint(kind: str, tmp_path: Path) -> None:
    """Inside a round; then training is ruined, and the weights of the snapshots that were saved are put back."""
    found = run_ranks(_resumed, 2, kind, tmp_path)
    assert any("rolled back to" in words for words in found[0][2])
    for pieces, resumed, _ in found:
        assert all(map(torch.equal, pieces, resumed))
        assert all(weight.isfinite().all() for weight in resumed)
