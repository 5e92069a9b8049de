"""hdet.OneCycleLR in an ordinary DDP loop: a small BatchNorm network learns handwritten digits.

    torchrun --standalone --nproc-per-node 4 examples/ddp.py --journal runs/ddp.jsonl
    python examples/ddp.py        # one process: torch's OneCycleLR, number for number

To stop and resume, on any number of processes; to resume a run that was killed, repeat its command:

    torchrun --standalone --nproc-per-node 4 examples/ddp.py --save runs/ddp.pt --resume runs/ddp.pt --stop-at 250
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --resume runs/ddp.pt

Needs scikit-learn, which has the digits. Uses GPUs and nccl if there are GPUs, otherwise CPUs and gloo.
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

import hdet


def network(seed: int) -> nn.Module:
    """A BatchNorm CNN of 6 000 parameters, drawn from ``seed`` without disturbing the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1347 images to train on and 450 to validate on, the same split every time."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float().view(-1, 1, 8, 8) / 16, labels[order].long()
    return images[:1347], labels[:1347], images[1347:], labels[1347:]


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Validation loss, and the share that is right."""
    model.eval()
    output = model(images)
    model.train()
    return cross_entropy(output, labels).item(), (output.argmax(1) == labels).double().mean().item()


def main(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if cuda else "gloo")

    images, labels, val_images, val_labels = (tensor.to(device) for tensor in digits())
    model = network(args.seed).to(device)
    replica = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.max_lr, momentum=0.9)
    scheduler = hdet.OneCycleLR(optimizer, args.max_lr, args.steps, model=model, journal=args.journal)

    if args.resume and hdet.exists(args.resume):
        # rank 0's file serves every rank: the scheduler puts each replica's own rate back
        hdet.load(args.resume, model=model, optimizer=optimizer, scheduler=scheduler)

    end = min(scheduler.total_steps, args.stop_at or scheduler.total_steps)
    for step in range(scheduler.last_epoch, end):
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + step)  # the batches of all ranks ...
        batch = torch.randint(len(labels), (world, args.batch), generator=generator)[rank].to(device)  # ... and ours
        loss = cross_entropy(replica(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)

        if (step + 1) % args.evaluate_every == 0 or step + 1 == end:
            with scheduler.consensus():  # all ranks enter; inside, the weights are the mean over the replicas
                if rank == 0:
                    val_loss, accuracy = evaluate(model, val_images, val_labels)
                    print(f"step {step + 1}: validation loss {val_loss:.4f}, accuracy {accuracy:.2%}", flush=True)
            if args.save:
                hdet.save(args.save, model=model, optimizer=optimizer, scheduler=scheduler)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="length of the schedule")
    parser.add_argument("--batch", type=int, default=16, help="images per process and step")
    parser.add_argument("--max-lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the batches")
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--stop-at", type=int, help="stop at this step, to go on with --resume")
    parser.add_argument("--journal", type=Path, help="write one JSON line per round to this file")
    parser.add_argument("--save", type=Path, help="write a checkpoint here after every evaluation")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint, if it is there")
    torch.set_num_threads(1)
    main(parser.parse_args())
