"""A tensor rate is written in place, so a compiled optimizer step is compiled once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdet


@pytest.mark.timeout(300)
def test_no_recompilation_with_a_tensor_rate() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 50, sync_every=5, cycle_momentum=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch._dynamo.reset()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, backend=count)
    compiled = []
    for _ in range(12):
        step()
        scheduler.step(0.5)
        compiled.append(len(graphs))
    assert compiled[0] > 0
    assert compiled[-1] == compiled[1]  # the second step may see the optimizer's new state
    torch._dynamo.reset()
