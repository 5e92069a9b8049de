"""hdet.auto finds the learning rate on a schedule of your own: warm-up, stable, decay.

    python examples/any_schedule.py --lr 1e-6        # a guess, and far too low
    torchrun --standalone --nproc-per-node 4 examples/any_schedule.py --lr 1e-6

The schedule is torch's, made by a function of the optimizer; the optimizer's rate is a guess. The search steps the
schedule. It climbs in place of the warm-up. After the warm-up the rate is the schedule times the factor that was found.
Under torchrun ordinary DDP shares the gradients, and all processes find the same factor.

Needs scikit-learn, which has the digits.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, SequentialLR

import hdet

Split = tuple[Tensor, Tensor]


def digits() -> tuple[Split, Split]:
    """1400 images to train on, 397 to validate with."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order].long()
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def warm_up_stable_decay(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """A tenth of the run up, two tenths down, constant in between."""
    up, down = max(1, steps // 10), max(1, steps // 5)
    parts: list[LRScheduler] = [
        LinearLR(optimizer, start_factor=0.1, total_iters=up),
        ConstantLR(optimizer, factor=1.0),
        LinearLR(optimizer, start_factor=1.0, end_factor=0.01, total_iters=down),
    ]
    return SequentialLR(optimizer, parts, milestones=[up, steps - down])


def main(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    (images, labels), validation = digits()
    model = network(args.seed)
    replica = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = partial(warm_up_stable_decay, steps=args.steps)
    scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=args.steps, journal=args.journal)

    generator = torch.Generator().manual_seed(1_000_003 * args.seed + rank)
    for step in range(args.steps):
        batch = torch.randint(len(labels), (args.batch,), generator=generator)
        loss = cross_entropy(replica(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)  # this steps the schedule too

        if rank == 0 and ((step + 1) % (args.steps // 10 or 1) == 0 or step + 1 == args.steps):
            with torch.no_grad():
                output = model(validation[0])
            accuracy = (output.argmax(1) == validation[1]).double().mean().item()
            rate = scheduler.get_last_lr()[0]
            print(f"step {step + 1}: rate {rate:.3g}; validation accuracy {accuracy:.2%}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="length of the schedule")
    parser.add_argument("--batch", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="a guess of the rate at the schedule's top")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, help="write one JSON line per round to this file")
    torch.set_num_threads(1)
    main(parser.parse_args())
