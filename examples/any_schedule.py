"""hdet.Ensemble on a schedule of your own: warm-up, stable, decay, with learning rate and weight decay explored.

    torchrun --standalone --nproc-per-node 4 examples/any_schedule.py
    python examples/any_schedule.py        # one process: nothing to explore, the plain schedule

The schedule is torch's and is built as ever. The ensemble steps it, spreads the replicas around its value, and learns a
factor on it. Weight decay has no schedule: its base value itself is learned. Both knobs act inside the optimizer step,
so ordinary DDP with shared gradients will do.

Needs scikit-learn, which brings the digits.
"""

import argparse
import os
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


def digits() -> tuple[Split, Split, Split]:
    """1000 images to train on, 400 to probe with, 397 to validate with."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order].long()
    return (images[:1000], labels[:1000]), (images[1000:1400], labels[1000:1400]), (images[1400:], labels[1400:])


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


def plain_loss(model: nn.Module, batch: Split) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def main(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    (images, labels), probe, validation = digits()
    model = network(args.seed)
    replica = DistributedDataParallel(model) if world > 1 else model
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.1, "name": "weights"},
            {"params": biases, "weight_decay": 0.0, "name": "biases"},
        ],
        lr=args.lr,
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*probe), batch_size=100, shuffle=True)
    ensemble = hdet.Ensemble(
        optimizer,
        schedule=warm_up_stable_decay(optimizer, args.steps),
        knobs=[
            hdet.knobs.lr(optimizer),  # one per parameter group
            hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3, groups=["weights"], bounds=(1e-4, 10.0)),
        ],
        sync_every=args.sync_every,
        total_steps=args.steps,
        signal=hdet.ProbeLoss(hdet.ProbeBatch(replica, plain_loss, loader), at="round_mean"),
        journal=args.journal,
    )

    generator = torch.Generator().manual_seed(1_000_003 * args.seed + rank)
    for step in range(args.steps):
        batch = torch.randint(len(labels), (args.batch,), generator=generator)
        loss = plain_loss(replica, (images[batch], labels[batch]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)  # the schedule's step() is inside

        if (step + 1) % (args.steps // 10 or 1) == 0 or step + 1 == args.steps:
            with ensemble.consensus():  # all ranks enter; inside, the weights are the mean over the replicas
                if rank == 0:
                    base = ", ".join(f"{name} {value:.4g}" for name, value in ensemble.base_values.items())
                    with torch.no_grad():
                        output = model(validation[0])
                    accuracy = (output.argmax(1) == validation[1]).double().mean().item()
                    print(f"step {step + 1}: {base}; validation accuracy {accuracy:.2%}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="length of the schedule")
    parser.add_argument("--sync-every", type=int, default=40, help="steps per round")
    parser.add_argument("--batch", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="at the schedule's top")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, help="write one JSON line per round to this file")
    torch.set_num_threads(1)
    main(parser.parse_args())
