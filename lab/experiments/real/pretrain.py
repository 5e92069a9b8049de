"""Train the GPT that `kjv-finetune` starts from: some hundred steps on Shakespeare, once, on one CPU core."""

from __future__ import annotations

import numpy as np
import torch

from real.data import FOLDER
from real.problems.texts import gpt

__all__ = ["pretrain"]

STEPS, RATE, SEED = 600, 4e-3, 0


def pretrain() -> None:
    """Write the weights, in half precision, unless they are there."""
    path = FOLDER / "shakespeare_gpt.npz"
    if path.exists():
        print("shakespeare_gpt: there")
        return
    task = gpt("shakespeare", "shakespeare-pretrain", synthetic=False)
    model = task.model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        task.loss(model, task.batch(SEED, step)).backward()
        optimizer.step()
        schedule.step()
    np.savez_compressed(path, **{key: weight.half().numpy() for key, weight in model.state_dict().items()})
    print(f"shakespeare_gpt: validation loss {task.evaluate(model)['loss']:.3f} after {STEPS} steps")
