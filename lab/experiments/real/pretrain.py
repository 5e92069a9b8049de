"""Train what is fine-tuned later: a GPT on Shakespeare and an encoder on source code; once, on one CPU core."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from real.data import FOLDER
from real.problems.texts import gpt, hidden_code
from real.task import RealTask

SEED = 0


def pretrain() -> None:
    """Write the weights of both, in half precision, unless they are there."""
    _pretrain("shakespeare_gpt", lambda: gpt("shakespeare", "shakespeare-pretrain", synthetic=False), 600, 4e-3)
    _pretrain("code_encoder", lambda: hidden_code("code-pretrain", synthetic=False), 2000, 4e-3)


def _pretrain(name: str, build: Callable[[], RealTask], steps: int, rate: float) -> None:
    path = FOLDER / f"{name}.npz"
    if path.exists():
        print(f"{name}: there")
        return
    task = build()
    model = task.model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(SEED, step)).backward()
        optimizer.step()
        schedule.step()
    np.savez_compressed(path, **{key: weight.half().numpy() for key, weight in model.state_dict().items()})
    print(f"{name}: validation loss {task.evaluate(model)['loss']:.3f} after {steps} steps")
