"""torch.compile and DistributedDataParallel in either order: a probe never runs what communicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.ranks import run_ranks
from tests.setups.problems import Batch, batch_of, final_loss, loss_of, network, train, weights_of
from tests.setups.runs import searching

STEPS = 50


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPS: dict[str, Any] = {
    "compile-of-ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp-of-compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile-of-ddp-of-compile": lambda model: compiled(DistributedDataParallel(compiled(model))),
}


def _run(rank: int, wrap: str) -> tuple[float, Tensor, bool]:
    """Buffers, so that DDP's forward pass is a broadcast, and the ranks evaluate different weights."""
    model = network(nn.BatchNorm1d(32))
    wrapped = WRAPS[wrap](model)
    met_ddp = False

    def looks(inner: nn.Module, batch: Batch) -> Tensor:
        nonlocal met_ddp
        met_ddp = met_ddp or any(isinstance(m, DistributedDataParallel) for m in inner.modules())
        return loss_of(inner, batch)

    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-5)
    probe = probe_of(wrapped, looks)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS, probe=probe)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batch_of(t)).backward()
        optimizer.step()
        scheduler.step()
    return final_loss(model), weights_of(model), met_ddp


@pytest.mark.covers("frameworks", "plain loop, auto", "DDP", "fp32")
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_probe_never_runs_ddp(wrap: str) -> None:
    answers = run_ranks(_run, 2, wrap, timeout=60, group_timeout=10)
    assert not any(met_ddp for _, _, met_ddp in answers)
    assert torch.equal(answers[0][1], answers[1][1])
    assert answers[0][0] == pytest.approx(_plain(), rel=1e-2)


def _plain() -> float:
    """One process without wrappers; both ranks above see the same batches."""
    model = network(nn.BatchNorm1d(32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    train(model, optimizer, searching(model, optimizer, STEPS, "OneCycleLR", cycle_momentum=True), range(STEPS))
    return final_loss(model)


def test_a_compiled_model_is_probed_in_one_process() -> None:
    model = network(nn.BatchNorm1d(32))
    wrapped = compiled(model)
    modes: list[bool] = []

    def looks(inner: nn.Module, batch: Batch) -> Tensor:
        modes.extend(m.training for m in inner.modules() if isinstance(m, nn.Tanh))
        return loss_of(inner, batch)

    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-5)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batch_of(t)).backward()
        optimizer.step()
        scheduler.step()
    assert modes
    assert not any(modes)
    assert final_loss(model) == pytest.approx(_plain(), rel=1e-2)


@pytest.mark.parametrize(
    "middle", [(), (nn.Dropout(0.1),), (nn.BatchNorm1d(32),)], ids=["plain", "dropout", "batch-norm"]
)
def test_a_compiled_model_needs_one_further_graph_for_its_probe(middle: tuple[nn.Module, ...]) -> None:
    """Compiled once, however often weights are swapped: dropout off and without gradients is another graph."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = network(*middle)
    fast = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100)
    for t in range(100):
        optimizer.zero_grad()
        loss_of(fast, batch_of(t)).backward()
        optimizer.step()
        scheduler.step()
        if t == 0:
            assert len(graphs) == 2
    assert len(graphs) == 2
