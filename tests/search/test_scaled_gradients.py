"""A GradScaler and an optimizer that unscales by itself, as fused ones do: gradients are read as it reads them.

torch hands such an optimizer the scale and whether a gradient is not finite, and leaves both steps to it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from tests.problems import Records, batch_of, final_loss, is_finite, loss_of, network
from tests.setup_runs import plain_loss, searching

STEPS = 200
GUESS = 1e-6
MAKES = {"Adam": Adam, "AdamW": AdamW, "SGD": SGD}


class Unscaling(Adam):
    """What fused optimizers do on a GPU, where this torch has none for the host."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def step(self, closure: Any = None) -> Any:
        scale, left_out = self.grad_scale, self.found_inf is not None and self.found_inf.item()
        self.grad_scale = self.found_inf = None
        if left_out:
            return None
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if scale is not None:
                p.grad.div_(scale)
        return super().step(closure)


def run(make: Any, unscales: bool = False, overflows: tuple[int, ...] = (), **more: Any) -> tuple[float, Records]:
    """``overflows``: steps whose scaled loss is not finite, so that they are left out."""
    model, journal = network(), Records()
    optimizer = make(model.parameters(), lr=GUESS, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=8)  # the scale moves, as in a long run
    scheduler = searching(model, optimizer, STEPS, journal=journal)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        scaler.scale(loss * float("inf") if t in overflows else loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(loss.detach())
    assert is_finite(model)
    return final_loss(model), journal


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_a_fused_optimizer_ends_where_the_plain_loop_ends(name: str, unscales: bool) -> None:
    loss, _ = run(MAKES[name], unscales, fused=True)
    assert loss == pytest.approx(plain_loss(MAKES[name], GUESS, STEPS), rel=1e-2)


def test_an_optimizer_that_unscales_by_itself_ends_where_the_plain_loop_ends() -> None:
    loss, _ = run(Unscaling)
    assert loss == pytest.approx(plain_loss(Adam, GUESS, STEPS), rel=1e-4)


@pytest.mark.parametrize("make", [Unscaling, lambda p, lr: Adam(p, lr=lr, fused=True)], ids=["stand-in", "fused"])
def test_steps_that_are_left_out_say_nothing(make: Any) -> None:
    """At first, where nothing is known yet, and in the search: as with an optimizer that is not called then.

    Nobody can know of them without waiting for the device, so they count as steps, and rounds end a little earlier.
    """
    overflows = (0, 1, 2, 20, 21, 60)
    (loss, journal), (expected, others) = run(make, overflows=overflows), run(Adam, overflows=overflows)
    assert loss == pytest.approx(expected, rel=0.2)
    assert [r["event"] for r in journal.rounds if r["event"]] == [r["event"] for r in others.rounds if r["event"]]
