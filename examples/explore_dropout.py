"""A dropout that was guessed far too high comes down while a small network learns digits, 30 % with random labels.

    torchrun --standalone --nproc-per-node 2 examples/explore_dropout.py
    torchrun --standalone --nproc-per-node 4 examples/explore_dropout.py --arms 2 --journal runs/dropout.jsonl

Both knobs, dropout and label smoothing, act in the loss. So they need two things:

- Replicas that share gradients all get the same update. Whatever dropout each of them uses, their weights stay equal
  and nothing can be learned about it. `hdet.arms(n)` splits the ranks into n replicas that keep their gradients to
  themselves and are averaged at the end of every round.
- The training loss cannot judge a regulariser: it is always lower without one. So the replicas are compared by a probe:
  the plain loss, dropout off, on images that nobody trains on, the same images for all replicas.

Dropout starts at 0.9, far too high. Seeds 0, 1, 2 brought it to 0.73, 0.19, 0.32, at a test loss of 0.69, 0.80, 0.75;
if it stays at 0.9 (--spread 0) the loss is 1.42, 1.44, 1.52, and with a good guess (--spread 0 --dropout 0.5) 0.66,
0.67, 0.67. Accuracy hardly differs: 90, 86, 86 %; 86, 88, 84 %; 89, 89, 89 %. This is what to expect of an ensemble: it
lowers a value that is too high, often too far. A value that is too low stays, and a right value is moved too:
docs/ensemble.md has the table.

Needs scikit-learn, which has the digits. Takes about a minute.
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

Split = tuple[Tensor, Tensor]
BOUNDS = (0.01, 0.98)


def digits(wrong: float) -> tuple[Split, Split, Split]:
    """600 images to train on, 600 to probe with, 597 to test with. A share of the first 1200 labels is wrong."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    images, labels = images[order].float() / 16, labels[order].long()
    flip = torch.rand(1200, generator=generator) < wrong
    labels[:1200][flip] = torch.randint(10, (int(flip.sum()),), generator=generator)
    return (images[:600], labels[:600]), (images[600:1200], labels[600:1200]), (images[1200:], labels[1200:])


def network(seed: int, dropout: float) -> nn.Module:
    """A network with far more parameters than images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = (nn.Linear(64, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 128), nn.ReLU())
        return nn.Sequential(*hidden, nn.Dropout(dropout), nn.Linear(128, 10))


def plain_loss(model: nn.Module, batch: Split) -> Tensor:
    """What the replicas are compared by: no label smoothing; the probe switches dropout off."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def main(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    (images, labels), held_out, test = digits(args.wrong)
    model = network(args.seed, args.dropout)
    arms = hdet.arms(args.arms or world)  # as many replicas as ranks, unless told otherwise
    replica = DistributedDataParallel(model, process_group=arms.gradients) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    ensemble = hdet.Ensemble(
        optimizer,
        knobs=[
            hdet.knobs.module(model, nn.Dropout, "p", scale="logit", spread=args.spread, bounds=BOUNDS),
            hdet.knobs.scalar("label_smoothing", args.smoothing, scale="logit", spread=args.spread, bounds=BOUNDS),
        ],
        sync_every=args.sync_every,
        total_steps=args.steps,
        # The loader of this probe has one batch; more would be used in turn, one per round.
        signal=hdet.ProbeLoss(hdet.ProbeBatch(replica, plain_loss, [held_out]), at="round_mean"),
        group=arms,
        journal=args.journal,
    )

    generator = torch.Generator().manual_seed(1_000_003 * args.seed + rank)  # every rank draws its own batches ...
    torch.manual_seed(1_000_003 * args.seed + rank)  # ... and its own dropout masks
    for step in range(args.steps):
        batch = torch.randint(len(labels), (args.batch,), generator=generator)
        output = replica(images[batch])
        loss = cross_entropy(output, labels[batch], label_smoothing=ensemble["label_smoothing"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)

        if rank == 0 and ((step + 1) % (args.steps // 10 or 1) == 0 or step + 1 == args.steps):
            base = ", ".join(f"{name} {value:.3f}" for name, value in ensemble.base_values.items())
            print(f"step {step + 1}: {base}", flush=True)

    if rank == 0:  # the last step ended a round: all replicas hold the mean
        model.eval()
        with torch.no_grad():
            output = model(test[0])
        accuracy = (output.argmax(1) == test[1]).double().mean().item()
        print(f"test loss {cross_entropy(output, test[1]).item():.4f}, accuracy {accuracy:.2%}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sync-every", type=int, default=40, help="steps per round")
    parser.add_argument("--arms", type=int, help="number of replicas; by default one per process")
    parser.add_argument("--batch", type=int, default=64, help="images per process and step")
    parser.add_argument("--dropout", type=float, default=0.9, help="where it starts")
    parser.add_argument("--smoothing", type=float, default=0.15, help="where it starts")
    parser.add_argument("--spread", type=float, default=0.7, help="of the outermost replicas, in logits")
    parser.add_argument("--wrong", type=float, default=0.3, help="share of labels that are wrong, but for the test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, help="write one JSON line per round to this file")
    torch.set_num_threads(1)
    main(parser.parse_args())
