"""The price of a round's end with torchft, in real gloo processes on this machine, against our own.

ours       scheduler.step() where a round ends, in a process group that stays together: compare, average, decide
elastic    the same with group=hdet.torchft(manager): quorum, copy, compare, average, confirm, commit
local_sgd  torchft's LocalSGD.sync(): quorum, average, commit; nothing is compared or decided
quorum     start_quorum() and should_commit() alone

They take turns inside one run; each repetition starts from replicas that differ. Seconds are those of the slowest rank,
ratios are medians over repetitions of contestants that ran next to each other. Needs torchft. The lighthouse looks for
a quorum every --tick milliseconds: its own default is 100.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import parser, ratio, run_ranks, show
from torch import nn

import hdet

LAYERS, WIDTH = 9, 320
TARGETS: dict[str, str] = {}


def build() -> nn.ModuleList:
    """Transformer layers: 108 tensors, 11 M parameters."""
    return nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH) for _ in range(LAYERS))


def managed(rank: int, lighthouse: str) -> Any:
    """torchft's manager of a replica of one process."""
    from torchft import Manager, ProcessGroupGloo

    store, patience = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=patience,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"r{rank}",
        hostname="localhost",
    )
    manager.own_store = store
    return manager


def contest(rank: int, lighthouse: str, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every contestant and repetition on this rank."""
    from torchft.local_sgd import LocalSGD

    torch.manual_seed(0)
    model = build()
    parameters = list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    ours, bare, elastic = (torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for _ in range(3))
    given = {"max_lr": 0.1, "total_steps": 10_000, "sync_every": 1}
    plain = hdet.OneCycleLR(ours, group=hdet.arms(dist.get_world_size()), **given)
    manager = managed(rank, lighthouse)
    group = hdet.torchft(manager, name=f"r{rank}", timeout=120.0)
    scheduler = hdet.OneCycleLR(elastic, group=group, **given)
    group.join(scheduler)
    sync = LocalSGD(manager, model, bare, sync_every=1)

    def quorum() -> None:
        manager.start_quorum()
        manager.should_commit()

    for optimizer in (ours, elastic):
        optimizer.step()  # without gradients: torch warns of a scheduler that comes first
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: plain.step(loss=1.0),
        "elastic": lambda: scheduler.step(loss=1.0),
        "local_sgd": sync.sync,
        "quorum": quorum,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(-1, repetitions):  # the first one warms up: connections
        for name, average in contestants.items():
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value).mul_(1 + 0.01 * rank)
            dist.barrier()
            began = time.perf_counter()
            average()
            ended = time.perf_counter()
            if repetition < 0 and name != "quorum":
                _check_mean(name, model, start)
            if repetition >= 0:
                seconds[name].append(ended - began)
    dist.barrier()
    manager.shutdown(wait=False)
    return seconds


def _check_mean(name: str, model: nn.Module, start: list[torch.Tensor]) -> None:
    """Every contestant must have done the work."""
    factor = 1 + 0.01 * (dist.get_world_size() - 1) / 2
    for parameter, value in zip(model.parameters(), start, strict=True):
        torch.testing.assert_close(parameter.detach(), value * factor, rtol=1e-5, atol=1e-7, msg=name)


def measure(ranks: int, repetitions: int, tick: int, timeout: float) -> dict[str, Any]:
    """The figures."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=ranks, join_timeout_ms=60_000, quorum_tick_ms=tick)
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    answers = run_ranks(contest, ranks, address, repetitions, timeout=timeout)
    lighthouse.shutdown()
    seconds = {name: [max(row) for row in zip(*(one[name] for one in answers), strict=True)] for name in answers[0]}
    model = list(build().parameters())
    return {
        "elastic_over_ours": ratio(seconds["elastic"], seconds["ours"]),
        "elastic_over_local_sgd": ratio(seconds["elastic"], seconds["local_sgd"]),
        **{f"{name}_ms": 1000 * median(times) for name, times in seconds.items()},
        "ranks": ranks,
        "repetitions": repetitions,
        "tick_ms": tick,
        "tensors": len(model),
        "parameters": sum(parameter.numel() for parameter in model),
    }


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--ranks", type=int, default=4, help="gloo processes (default: 4)")
    line.add_argument("--repetitions", type=int, default=15, help="turns of each contestant (default: 15)")
    line.add_argument("--tick", type=int, default=100, help="milliseconds between looks for a quorum (default: 100)")
    line.add_argument("--timeout", type=float, default=300.0, help="seconds for the whole (default: 300)")
    given = line.parse_args()
    if given.ranks < 2 or given.repetitions < 1:
        line.error("--ranks must be at least 2 and --repetitions at least 1")
    show(measure(given.ranks, given.repetitions, given.tick, given.timeout), TARGETS, given.json)


if __name__ == "__main__":
    main()
