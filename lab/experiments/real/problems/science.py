"""Molecules, statements, patients, a brain, currents and genes: each with a kind of answer of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, softplus

from lab.tasks.task import Batch
from real.data import ATOM_KINDS, BOND_KINDS, CONCEPTS, FRAMES, RELATIONS, TISSUES, load_or_stand_in
from real.models.convolutions import UNet
from real.models.perceptrons import MessageNet, Mixer, Perceptron
from real.models.recurrent import StateSpace
from real.models.tables import ComplEx
from real.models.weights import draws
from real.pools import Crops, Masked, Rows, Stretches
from real.problems.texts import tag_loss
from real.task import RealTask

HIDDEN = ATOM_KINDS
"""The kind that stands for one that is hidden."""
SIDE = 32
BASES, GENE_STRETCH = 4, 96
PAST, AHEAD = 64, 16
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def molecules(name: str, synthetic: bool) -> RealTask:
    """Which atoms are hidden? Answered from the others and from all bonds."""
    train, test = Rows.of(load_or_stand_in("molecules", synthetic), "atoms", "bonds")
    return RealTask(
        name,
        Masked(train),
        Masked(test),
        (2048, 512),
        draws(lambda: MessageNet(ATOM_KINDS + 1, BOND_KINDS - 1), table=0.3),
        _atom_loss,
        64,
    )


def _atom_loss(model: nn.Module, batch: Batch) -> Tensor:
    atoms, bonds, hidden = batch[0].long(), batch[1], batch[2] & (batch[0] > 0)
    logits = model(atoms.masked_fill(hidden, HIDDEN), bonds)
    losses = cross_entropy(logits.flatten(0, 1), atoms.flatten(), reduction="none")
    return (losses * hidden.flatten()).sum() / hidden.sum().clamp(min=1)


def concepts(name: str, synthetic: bool) -> RealTask:
    """What does a concept of medicine stand in a relation to? All concepts are candidates."""
    train, test = Rows.of(load_or_stand_in("concepts", synthetic), "statements")
    return RealTask(
        name, train, test, (2048, 1024), draws(lambda: ComplEx(CONCEPTS, RELATIONS), table=0.3), _statement_loss, 128
    )


def _statement_loss(model: nn.Module, batch: Batch) -> Tensor:
    subjects, relations, things = batch[0].long().unbind(-1)
    return cross_entropy(model(subjects, relations), things)


def patients(name: str, synthetic: bool) -> RealTask:
    """Who dies first? Of many it is only known that they lived until then."""
    train, test = Rows.of(load_or_stand_in("patients", synthetic), "numbers", "years", "deaths")
    numbers = train.tables[0].shape[1]
    return RealTask(name, train, test, (2048, 512), draws(lambda: Perceptron((numbers, 64, 64, 1))), _hazard_loss, 128)


def _hazard_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cox's partial likelihood with one control for each death, over all pairs (Kvamme et al. 2019)."""
    numbers, years, deaths = batch
    risk = model(numbers)[:, 0]
    known = (deaths[:, None] > 0) & (years > years[:, None])  # the second outlived the first, who died
    return (softplus(risk - risk[:, None]) * known).sum() / known.sum().clamp(min=1)


def brain(name: str, synthetic: bool) -> RealTask:
    """Outside, grey, white or water: the tissue at every point of a square."""
    found = load_or_stand_in("brain", synthetic)
    train, test = (Crops((found[f"{part}_slices"], found[f"{part}_tissue"]), SIDE) for part in ("train", "test"))
    return RealTask(name, train, test, (256, 64), draws(lambda: UNet(TISSUES)), _tissue_loss, 16)


def _tissue_loss(model: nn.Module, batch: Batch) -> Tensor:
    slices, tissue = batch
    logits = model(slices[:, None].float() / 128 - 1)
    return cross_entropy(logits.movedim(1, -1).flatten(0, 2), tissue.long().flatten())


def appliances(name: str, synthetic: bool) -> RealTask:
    """How much power is drawn next? Five quantiles of each of sixteen moments."""
    found = load_or_stand_in("appliances", synthetic)
    train, test = (Stretches((found[f"{part}_power"],), PAST + AHEAD) for part in ("train", "test"))
    return RealTask(
        name, train, test, (1024, 512), draws(lambda: Mixer(PAST, AHEAD, len(QUANTILES))), _quantile_loss, 64
    )


def _quantile_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The pinball loss: what is above a quantile costs by its height, what is below by the rest of it."""
    power = batch[0]
    missed = (power[:, PAST:, None] - model(power[:, :PAST])).unbind(-1)
    costs = [(height * own + relu(-own)).mean() for height, own in zip(QUANTILES, missed, strict=True)]
    return torch.stack(costs).mean()


def genes(name: str, synthetic: bool) -> RealTask:
    """Is a base a part of a gene, which way is it read, and which of three in a codon is it? Seen from one side."""
    found = load_or_stand_in("genes", synthetic)
    train, test = (
        Stretches((found[f"{part}_bases"], found[f"{part}_frames"]), GENE_STRETCH) for part in ("train", "test")
    )
    return RealTask(name, train, test, (1024, 256), draws(lambda: StateSpace(BASES, FRAMES), table=0.3), tag_loss, 32)
