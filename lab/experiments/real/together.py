"""Several methods on one stack: one forward and backward serves all of them, then each steps its own columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from shapes import Factors
from stacked import Stack, TrainStep
from torch import Tensor

from real.bench import Bench, Blocks
from real.peers import PEERS, Greedy, Peer, Place, schedule_free


class Together(NamedTuple):
    """What came out of one stack: curves [column][seed][evaluation]."""

    own: list[list[list[float]]]
    """Of the columns with an optimizer of the stack."""
    others: dict[str, list[list[list[float]]]]
    """Of the methods outside it, by name."""
    broken: dict[str, str]
    """Methods that raised, and what."""
    seconds: float


def run_together(
    bench: Bench,
    own: Sequence[float],
    shape: Factors,
    methods: Sequence[str] = (),
    free: Sequence[float] = (),
    rule: Greedy | None = None,
) -> Together:
    """One stack of runs at the peak rates ``own``, of Schedule-Free at the rates ``free``, and of some of ``PEERS``.

    ``rule``: writes the rates of the first instead of ``shape``.
    """
    widths = {**({"schedulefree": len(free)} if free else {}), **dict.fromkeys(methods, 1)}
    stack, width = bench.stack(len(own) + sum(widths.values())), len(own)
    blocks = Blocks(stack.theta, width, lambda theta: bench.update(stack, theta))
    rates = bench.rates(stack, [*own, *[0.0] * sum(widths.values())], shape)
    step = TrainStep(stack, blocks, bench.supply.batches, rates, graph=bench.graph)  # type: ignore[arg-type]
    group = _Group(bench, stack, blocks, step.losses, width, widths, free)

    def after(t: int) -> None:
        group.step()
        if rule is not None:
            rule.step(step.losses[:, :width].tolist())
            if t < bench.steps:
                rates[t, :, :width] = torch.tensor(rule.rates).to(rates)[:, :, None]

    curves, seconds = bench.train(stack, step, after, group.weights if widths else None)
    others = {name: curves[place] for name, place in group.columns.items()}
    return Together(curves[:width], others, group.broken, seconds)


class _Group:
    """The methods of one stack, side by side; one that raises has no weights from then on."""

    def __init__(
        self,
        bench: Bench,
        stack: Stack,
        blocks: Blocks,
        losses: Tensor,
        first: int,
        widths: dict[str, int],
        free: Sequence[float],
    ) -> None:
        self._stack = stack
        self.columns: dict[str, slice] = {}
        self.broken: dict[str, str] = {}
        self._peers: dict[str, Peer] = {}
        begin = first
        for name, width in widths.items():
            own, within = slice(begin, begin + width), slice(begin - first, begin - first + width)
            place = Place(bench, stack, stack.theta[:, own], blocks.gradients[:, within], losses[:, own])
            self._peers[name] = schedule_free(place, free) if name == "schedulefree" else PEERS[name].build(place)
            self.columns[name] = own
            begin += width

    def step(self) -> None:
        """One step of every method."""
        for name, peer in list(self._peers.items()):
            try:
                peer.step()
            except Exception as error:  # other people's packages: the others' hour must not be lost to one of them
                self.broken[name] = f"broke off: {error!r}"
                del self._peers[name]
                self._stack.theta[:, self.columns[name]] = math.nan

    @torch.no_grad()
    def weights(self) -> Tensor:
        """What is evaluated of all runs."""
        theta = self._stack.theta.clone()
        for name, peer in self._peers.items():
            theta[:, self.columns[name]] = peer.weights()
        return theta
