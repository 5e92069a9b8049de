"""torchtitan's containers on the CPU: one search for several optimizers, steps without a loss, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.integrations.torchtitan import AutoLR
from tests.setups.problems import Records, batch_of, final_loss, loss_of, network, probe_of, weights_of
from tests.setups.runs import searching

optimizers_of_titan = pytest.importorskip("torchtitan.components.optimizer")

STEPS = 60
GUESS = 1e-5


def groups(*names: str) -> Any:
    """torchtitan's config: matrices in one optimizer, the rest in another, or all in one."""
    patterns = [r"weight$", r"bias$"] if len(names) == 2 else [r".*"]
    rows = [
        optimizers_of_titan.ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": GUESS})
        for pattern, name in zip(patterns, names, strict=True)
    ]
    return optimizers_of_titan.OptimizersContainer.Config(param_groups=rows, implementation="for-loop")


class Loop:
    """What torchtitan's trainer does with model parts, optimizers and schedulers."""

    def __init__(self, *names: str, journal: Any = None, **config: Any) -> None:
        self.model = network()
        self.optimizers = groups(*names).build(model_parts=[self.model])
        settings = AutoLR.Config(probe=lambda parts: probe_of(parts[0]), onecycle={"journal": journal}, **config)
        self.schedulers = settings.build(optimizers=self.optimizers, training_steps=STEPS)

    def train(self, steps: range) -> list[dict[str, float]]:
        seen = []
        for t in steps:
            self.optimizers.zero_grad()
            loss_of(self.model, batch_of(t)).backward()
            seen.append(self.schedulers.get_metrics())
            self.optimizers.step()
            self.schedulers.step()
        return seen

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "lr_scheduler": self.schedulers}


@pytest.mark.covers("frameworks", "torchtitan, probed", "one process", "fp32")
def test_one_optimizer_as_without_torchtitan() -> None:
    loop, model = Loop("AdamW"), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=GUESS, foreach=False)
    scheduler = hdet.auto(optimizer, total_steps=STEPS, probe=probe_of(model))
    rates = []
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(t)).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert loop.train(range(STEPS)) == [{"lr/AdamW": rate} for rate in rates]
    assert torch.equal(weights_of(loop.model), weights_of(model))
    assert max(rates) > 10 * GUESS


def test_several_optimizers_have_one_factor() -> None:
    journal = Records()
    loop = Loop("AdamW", "Adam", journal=journal)
    seen = loop.train(range(STEPS))
    assert all(row["lr/AdamW"] == row["lr/Adam"] for row in seen)
    assert seen[-1].keys() == {"lr/AdamW", "lr/Adam"}
    assert final_loss(loop.model) == pytest.approx(_two_by_hand(), rel=1e-3)
    assert len(journal.rounds) > 3
    assert len(loop.schedulers) == 1


def _two_by_hand() -> float:
    """The same without torchtitan."""
    model = network()
    kinds = {torch.optim.AdamW: [p for p in model.parameters() if p.ndim == 2]}
    kinds[torch.optim.Adam] = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [kind(own, lr=GUESS, foreach=False) for kind, own in kinds.items()]
    scheduler = searching(model, optimizers, STEPS)
    for t in range(STEPS):
        model.zero_grad()
        loss_of(model, batch_of(t)).backward()
        for part in (*optimizers, scheduler):
            part.step()
    return final_loss(model)


def test_total_steps_of_the_config_come_first() -> None:
    loop = Loop("AdamW", total_steps=50)
    assert [scheduler.total_steps for scheduler in loop.schedulers] == [50]


def test_a_checkpoint_holds_the_search(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole, first, second = Loop("AdamW", "Adam"), Loop("AdamW", "Adam"), Loop("AdamW", "Adam")
    whole.train(range(20))
    first.train(range(20))
    dcp.save(first.states, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(second.states, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(weights_of(second.model), weights_of(first.model))
    assert second.schedulers.get_metrics() == first.schedulers.get_metrics()
    assert second.schedulers.state_dict()["last_epoch"] == 20
    assert second.schedulers.state_dict()["hdet"] == first.schedulers.state_dict()["hdet"]
    seen = second.train(range(20, STEPS))
    assert final_loss(second.model) < 0.5
    assert seen[-1]["lr/Adam"] < max(row["lr/Adam"] for row in seen)


@pytest.mark.parametrize("names", [("AdamW",), ("AdamW", "Adam")])
def test_loading_without_the_scheduler_searches_from_the_loaded_weights(tmp_path: Path, names: tuple[str, ...]) -> None:
    """torchtitan makes a step at rate 0 to have the optimizers' memory there, before weights are loaded."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    first, second = Loop(*names), Loop(*names)
    first.train(range(STEPS))
    kept = ("model", "optimizer")
    dcp.save({name: first.states[name] for name in kept}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({name: second.states[name] for name in kept}, checkpoint_id=tmp_path, no_dist=True)
    loaded = final_loss(second.model)
    second.train(range(3))
    assert final_loss(second.model) < 1.1 * loaded


def test_state_of_torchtitans_own_scheduler_is_refused() -> None:
    with pytest.raises(hdet.errors.ArgumentError, match="exclude_from_loading"):
        Loop("AdamW").schedulers.load_state_dict({"last_epoch": 7})
