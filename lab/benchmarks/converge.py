"""The price of a converge, in real gloo processes on this machine, against other ways to average weights.

ours    scheduler.converge(): gather, finiteness, pack, all-reduce, divide, unpack, with bounded extra memory
flat    pack into one tensor, one all_reduce, divide, unpack: as much extra memory as the model has
torch   torch.distributed.algorithms.model_averaging.utils.average_parameters
loop    an all_reduce and a division per tensor

They take turns inside one run; each repetition starts from replicas that differ. Seconds are those of the slowest rank,
ratios are medians over repetitions of contestants that ran next to each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import parser, ratio, run_ranks, show
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters

import hdet

LAYERS, WIDTH = 26, 320
TARGETS = {
    "ours_over_flat": "target <= 1.15",
    "loop_over_ours": "target >= 3",
    "ours_over_torch": "target <= 1.35",
}


def build() -> nn.ModuleList:
    """Transformer layers: 312 tensors, 32 M parameters."""
    return nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH) for _ in range(LAYERS))


def flat(tensors: Sequence[Tensor]) -> None:
    """Pack, one all_reduce, divide, unpack."""
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(packed)
    packed.div_(dist.get_world_size())
    for tensor, part in zip(tensors, packed.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def loop(tensors: Sequence[Tensor]) -> None:
    """One all_reduce per tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def contest(rank: int, repetitions: int) -> dict[str, Any]:
    """Seconds of every contestant and repetition on this rank, and the spread that each repetition started from."""
    torch.manual_seed(0)
    model = build()
    parameters = list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    own = [parameter.data for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scheduler = hdet.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)
    contestants: dict[str, Callable[[], None]] = {
        "ours": scheduler.converge,
        "flat": lambda: flat(own),
        "torch": lambda: average_parameters(iter(parameters), None),  # None: the default group
        "loop": lambda: loop(own),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    spreads = []
    for repetition in range(-1, repetitions):  # the first one warms up: connections, our own group
        for name, average in contestants.items():
            _diverge(rank, parameters, own, start)
            spreads.append(_spread(own[0]))
            dist.barrier()
            began = time.perf_counter()
            with torch.no_grad():
                average()
            ended = time.perf_counter()
            if repetition < 0:
                _check_mean(parameters, start)
            else:
                seconds[name].append(ended - began)
    return {"seconds": seconds, "spread": min(spreads)}


def _diverge(rank: int, parameters: Sequence[Tensor], own: Sequence[Tensor], start: Sequence[Tensor]) -> None:
    """Give every rank weights of its own, in the memory they had at first: torch's contestant replaces ``.data``."""
    for parameter, memory, value in zip(parameters, own, start, strict=True):
        parameter.data = memory.copy_(value).mul_(1 + 0.01 * rank)


def _spread(tensor: Tensor) -> float:
    """How far this rank's weights are from the mean."""
    mean = tensor.clone()
    dist.all_reduce(mean)
    return float((tensor - mean / dist.get_world_size()).norm() / mean.norm())


def _check_mean(parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
    """Every contestant must have done the work."""
    factor = 1 + 0.01 * (dist.get_world_size() - 1) / 2
    for parameter, value in zip(parameters, start, strict=True):
        torch.testing.assert_close(parameter.detach(), value * factor, rtol=1e-5, atol=1e-7)


def measure(ranks: int, repetitions: int, timeout: float) -> dict[str, Any]:
    """The figures."""
    answers = run_ranks(contest, ranks, repetitions, timeout=timeout)
    if max(answer["spread"] for answer in answers) <= 0:
        raise RuntimeError("replicas were equal before a repetition, so nothing was averaged; see contest()")
    seconds = {
        name: [max(times) for times in zip(*(answer["seconds"][name] for answer in answers), strict=True)]
        for name in answers[0]["seconds"]
    }
    model = list(build().parameters())
    return {
        "ours_over_flat": ratio(seconds["ours"], seconds["flat"]),
        "loop_over_ours": ratio(seconds["loop"], seconds["ours"]),
        "ours_over_torch": ratio(seconds["ours"], seconds["torch"]),
        **{f"{name}_ms": 1000 * median(times) for name, times in seconds.items()},
        "ranks": ranks,
        "repetitions": repetitions,
        "tensors": len(model),
        "parameters": sum(parameter.numel() for parameter in model),
    }


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--ranks", type=int, default=4, help="gloo processes (default: 4)")
    line.add_argument("--repetitions", type=int, default=9, help="turns of each contestant (default: 9)")
    line.add_argument("--timeout", type=float, default=300.0, help="seconds for the whole (default: 300)")
    given = line.parse_args()
    if given.ranks < 2 or given.repetitions < 1:
        line.error("--ranks must be at least 2 and --repetitions at least 1")
    show(measure(given.ranks, given.repetitions, given.timeout), TARGETS, given.json)


if __name__ == "__main__":
    main()
