"""Problems that need no data: each has a property that is hard to find in small real ones."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lab.tasks.streams import generator_of
from lab.tasks.task import Batch
from real.models.perceptrons import GraphNet, Perceptron
from real.models.speech import Listener, heard
from real.models.transformers import GPT
from real.models.weights import draws
from real.pools import Made, Rows
from real.task import RealTask

# Sorting: learnt at a transition, which a rate that is too high prevents ---------------------------------------------

NUMBERS, LENGTH = 96, 14


def sorting(name: str, synthetic: bool) -> RealTask:
    """Numbers, then the same numbers in order: a GPT predicts the second half."""
    pool = Made(_unsorted)
    return RealTask(name, pool, pool, (256, 256), draws(lambda: GPT(NUMBERS, 2 * LENGTH - 1)), _order_loss, 32)


def _unsorted(count: int, generator: torch.Generator) -> Batch:
    return (torch.randint(NUMBERS, (count, LENGTH), generator=generator).to(torch.uint8),)


def _order_loss(model: nn.Module, batch: Batch) -> Tensor:
    numbers = batch[0].long()
    ordered = numbers.sort(-1).values
    logits = model(torch.cat([numbers, ordered[:, :-1]], 1))[:, LENGTH - 1 :]
    return cross_entropy(logits.flatten(0, 1), ordered.flatten())


# A graph in full batches: gradients agree to the end, and it overfits ------------------------------------------------

NODES, BLOCKS, LABELLED, FEATURES = 600, 6, 60, 160


def graph(name: str, synthetic: bool) -> RealTask:
    """Which block of a stochastic block model is a node of? The labels of a tenth of the nodes are known."""
    features, adjacency, blocks = _block_model()
    nodes = torch.arange(NODES)
    return RealTask(
        name,
        Rows((nodes[:LABELLED], blocks[:LABELLED])),
        Rows((nodes[LABELLED:], blocks[LABELLED:])),
        (NODES, NODES),
        draws(lambda: GraphNet(features, adjacency, BLOCKS)),
        _block_loss,
        LABELLED,
    )


@cache
def _block_model() -> tuple[Tensor, Tensor, Tensor]:
    """Features [node, number], links [node, node] and blocks [node]."""
    generator = generator_of("blocks")
    blocks = torch.randint(BLOCKS, (NODES,), generator=generator)
    likely = torch.where(blocks[:, None] == blocks, 0.04, 0.01)
    upper = (torch.rand(NODES, NODES, generator=generator) < likely).triu(1).float()
    centres = torch.randn(BLOCKS, FEATURES, generator=generator)
    features = 0.2 * centres[blocks] + torch.randn(NODES, FEATURES, generator=generator)
    return features, upper + upper.T, blocks


def _block_loss(model: nn.Module, batch: Batch) -> Tensor:
    nodes, blocks = batch
    return cross_entropy(model(nodes), blocks)


# A likelihood of small numbers: the loss goes far below zero ---------------------------------------------------------

INPUTS, SCALE = 4, 0.05


def narrow(name: str, synthetic: bool) -> RealTask:
    """The mean and the variance of targets of scale 0.05, whose noise is wider in some places."""
    pool = Made(_narrow_targets)
    return RealTask(
        name,
        pool,
        pool,
        (2048, 1024),
        draws(lambda: Perceptron((INPUTS, 128, 128, 2))),
        _likelihood_loss,
        64,
        density=True,
    )


def _narrow_targets(count: int, generator: torch.Generator) -> Batch:
    x, noise = torch.randn(count, INPUTS, generator=generator), torch.randn(count, generator=generator)
    mean = torch.sin(2 * x[:, 0]) + x[:, 1] / 2
    wide = 0.1 + 0.4 * torch.sigmoid(2 * x[:, 2])
    return x, SCALE * (mean + wide * noise)


def _likelihood_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, targets = batch
    mean, log_variance = model(x).unbind(-1)
    return 0.5 * (log_variance + (targets - mean).square() * (-log_variance).exp()).mean()


# Made speech: which sounds were said, by somebody, at some speed, in noise -------------------------------------------

SOUNDS, SAID, BANDS, MOMENTS = 20, 7, 16, 44


def speech(name: str, synthetic: bool) -> RealTask:
    """Sounds that glide from one spectrum to another, three to six moments each, told apart without their places."""
    pool = Made(_utterances)
    return RealTask(name, pool, pool, (512, 256), draws(lambda: Listener(BANDS, SOUNDS)), _hearing_loss, 32)


def _utterances(count: int, generator: torch.Generator) -> Batch:
    starts, ends = torch.randn(2, SOUNDS, BANDS, generator=generator_of("sounds"))
    said = torch.randint(SOUNDS, (count, SAID), generator=generator)
    lengths = torch.randint(3, 7, (count, SAID), generator=generator)
    until = lengths.cumsum(1)
    moments = torch.arange(MOMENTS)
    number = (moments[None, :, None] >= until[:, None]).sum(2)  # of the sound that is said; SAID: it is quiet
    within = number.clamp(max=SAID - 1)
    passed = (moments - (until - lengths).gather(1, within)) / lengths.gather(1, within)
    sound = said.gather(1, within)
    spectrum = torch.lerp(starts[sound], ends[sound], passed.clamp(0, 1)[..., None]) * (number < SAID)[..., None]
    voice = 0.3 * torch.randn(count, 1, BANDS, generator=generator)
    loudness = 0.7 + 0.6 * torch.rand(count, 1, 1, generator=generator)
    noise = 0.7 * torch.randn(count, MOMENTS, BANDS, generator=generator)
    return loudness * (spectrum + voice) + noise, said.to(torch.uint8)


def _hearing_loss(model: nn.Module, batch: Batch) -> Tensor:
    return heard(model(batch[0]), batch[1].long() + 1).mean() / SAID
