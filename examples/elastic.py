"""Replicas that come and go: each process trains at a rate of its own, may be killed, and may come back.

    pip install torchft                                  # has wheels for x86_64
    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 2000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python examples/elastic.py --name r0 --journal runs/r0.jsonl &
    python examples/elastic.py --name r1 --journal runs/r1.jsonl &
    python examples/elastic.py --name r2 --journal runs/r2.jsonl

Kill any of them and start it again by the same line: the others go on without it from the end of their round, and it
gets weights, optimizer state, controller and schedule from one of them. `hdet report runs/r0.jsonl` says who
was gone, and from which step on.

Learns the digits of examples/ddp.py, which need scikit-learn. On machines of your own: one lighthouse for all, with
--join_timeout_ms longer than a round takes.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
from ddp import digits, evaluate, network
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import Manager, ProcessGroupGloo

import hdet


def manager_of(name: str) -> Manager:
    """torchft's manager of a replica of one process. TORCHFT_LIGHTHOUSE says where the lighthouse is."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=None,  # hdet sends weights, optimizer and scheduler; register here what else a newcomer needs
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,  # one that comes has its state before the others go on
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=name,
        hostname=os.environ.get("HOSTNAME_FOR_PEERS", "localhost"),
    )
    manager.own_store = store  # lives as long as the manager
    return manager


def main(args: argparse.Namespace) -> None:
    images, labels, val_images, val_labels = digits()
    model = network(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.max_lr, momentum=0.9)
    manager = manager_of(args.name)
    group = hdet.torchft(manager, name=args.name, timeout=args.timeout)
    scheduler = hdet.OneCycleLR(
        optimizer, args.max_lr, args.steps, group=group, model=model, sync_every=args.sync_every, journal=args.journal
    )
    group.join(scheduler)
    print(f"{args.name} begins at step {scheduler.last_epoch} of {args.steps}", flush=True)
    batches = torch.Generator().manual_seed(hash_of(args.name))
    while scheduler.last_epoch < args.steps:  # not a range: one that comes later begins where the others are
        batch = torch.randint(len(labels), (args.batch,), generator=batches)
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        if scheduler.last_epoch % (10 * args.sync_every) == 0:  # where a round has ended all replicas are equal
            val_loss, accuracy = evaluate(model, val_images, val_labels)
            step = scheduler.last_epoch
            print(f"step {step}: validation loss {val_loss:.4f}, accuracy {accuracy:.2%}", flush=True)
    val_loss, accuracy = evaluate(model, val_images, val_labels)
    print(f"{args.name} ends: validation loss {val_loss:.6f}, accuracy {accuracy:.2%}", flush=True)
    manager.shutdown(wait=False)


def hash_of(name: str) -> int:
    """A seed, the same whenever the replica is started."""
    return int.from_bytes(name.encode()[-6:], "big")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of this replica, different for each")
    parser.add_argument("--steps", type=int, default=2000, help="length of the schedule")
    parser.add_argument("--sync-every", type=int, default=10, help="steps per round")
    parser.add_argument("--batch", type=int, default=16, help="images per replica and step")
    parser.add_argument("--max-lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one meeting of the replicas")
    parser.add_argument("--journal", type=Path, help="write one JSON line per round to this file")
    torch.set_num_threads(1)
    main(parser.parse_args())
