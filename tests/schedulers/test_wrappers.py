"""torch.compile and DistributedDataParallel in either order: the run is that of the plain model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.problems import final_loss, network, quiet, train, weights_of
from tests.processes import run_ranks
from tests.setup_runs import searching

STEPS = 50


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPS: dict[str, Any] = {
    "compile-of-ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp-of-compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile-of-ddp-of-compile": lambda model: compiled(DistributedDataParallel(compiled(model))),
}


def _run(rank: int, wrap: str) -> tuple[float, Tensor]:
    """With buffers, so that DDP's forward pass is a broadcast."""
    model = network(nn.BatchNorm1d(32))
    wrapped = WRAPS[wrap](model)
    return _trained(model, wrapped), weights_of(model)


def _trained(model: nn.Module, called: nn.Module) -> float:
    optimizer = torch.optim.Adam(called.parameters(), lr=1e-5)
    train(called, optimizer, searching(called, optimizer, STEPS, known=True), range(STEPS))
    return final_loss(model)


@pytest.mark.slow
@pytest.mark.covers("frameworks", "plain loop, search", "DDP", "fp32")
@pytest.mark.parametrize("wrap", WRAPS)
def test_ddp_and_compile_in_any_order(wrap: str) -> None:
    answers = run_ranks(_run, 2, wrap)
    assert torch.equal(answers[0][1], answers[1][1])
    assert answers[0][0] == pytest.approx(_plain(), rel=1e-2)


@cache
def _plain() -> float:
    """One process without wrappers; both ranks above see the same batches."""
    model = network(nn.BatchNorm1d(32))
    return _trained(model, model)


def test_a_compiled_model_in_one_process() -> None:
    model = network(nn.BatchNorm1d(32))
    assert _trained(model, compiled(model)) == pytest.approx(_plain(), rel=1e-2)


@pytest.mark.parametrize(
    "middle", [(), (nn.Dropout(0.1),), (nn.BatchNorm1d(32),)], ids=["plain", "dropout", "batch-norm"]
)
def test_a_compiled_model_needs_no_further_graph(middle: tuple[nn.Module, ...]) -> None:
    """The user's own, however often rounds end, also where training goes back."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = network(*middle)
    fast = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    scheduler = searching(fast, optimizer, 100, known=True)
    with quiet():
        for t in range(100):
            train(fast, optimizer, scheduler, range(t, t + 1))
            if t == 50:
                with torch.no_grad():
                    next(model.parameters()).mul_(float("nan"))
    assert len(graphs) == 1
    assert final_loss(model) < 0.5 * final_loss(network(*middle))
