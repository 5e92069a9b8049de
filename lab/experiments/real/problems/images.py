"""Images: their classes, what belongs together, what can be made of them again."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from lab.tasks.streams import generator_of
from lab.tasks.task import Batch
from real.data import load_or_stand_in
from real.models.convolutions import Denoiser, Upscaler
from real.models.perceptrons import VAE
from real.models.transformers import MaskedViT, patches_of
from real.models.weights import draws
from real.pools import Noised, Rows
from real.task import RealTask


def classes(
    data: str, model: Callable[[], nn.Module], name: str, synthetic: bool, wrong: float = 0.0, batch_size: int = 64
) -> RealTask:
    """Which of ten classes; a share of the labels may be ``wrong``."""
    found = load_or_stand_in(data, synthetic)
    labels = mislabelled(found["train_labels"], wrong)
    return RealTask(
        name,
        Rows((found["train_images"], labels)),
        Rows((found["test_images"], found["test_labels"])),
        (2048, 512),
        draws(model),
        _class_loss,
        batch_size,
    )


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return cross_entropy(model(bright(images)), labels.long())


PATCH, PATCHES, SHOWN = 4, 49, 12
"""The side of a patch; how many an image has, and how many of these are not hidden."""


def masked(name: str, synthetic: bool) -> RealTask:
    """What is in the hidden three quarters of an image? A random number for every patch says which are shown."""
    train, test = Rows.of(load_or_stand_in("fashion", synthetic), "images")
    shapes = ((PATCHES,),)
    return RealTask(
        name,
        Noised(train, shapes),
        Noised(test, shapes),
        (2048, 512),
        draws(lambda: MaskedViT(PATCHES, PATCH**2), table=0.3),
        _hidden_patch_loss,
        64,
    )


def _hidden_patch_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, noise = batch
    patches, order = patches_of(bright(images), PATCH), noise.sort(stable=True).indices
    dealt = patches.gather(1, order[..., None].expand_as(patches))
    return (model(dealt[:, :SHOWN], order) - dealt[:, SHOWN:]).square().mean()


# Patches of photographs ----------------------------------------------------------------------------------------------

PIXELS, CAUSES, ACCURACY = 256, 16, 0.1
MIDDLE, LOG_SPREAD = math.log(0.2), 0.8
"""Of the strength of noise: the logarithm is normal."""


def vae(name: str, synthetic: bool) -> RealTask:
    train, test = Rows.of(load_or_stand_in("photos", synthetic), "patches")
    shapes = ((CAUSES,),)
    return RealTask(
        name,
        Noised(train, shapes),
        Noised(test, shapes),
        (2048, 1024),
        draws(lambda: VAE(PIXELS, causes=CAUSES)),
        _evidence_loss,
        64,
    )


def _evidence_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Minus the lower bound of the evidence, in nats per pixel, without the constant of the normal density."""
    patches, noise = batch
    x = patches.flatten(1).float() / 255 - 0.5
    again, divergence = model(x, noise.to(x.dtype))
    return ((again - x).square().mean(-1) / (2 * ACCURACY**2) + divergence / PIXELS).mean()


def denoiser(name: str, synthetic: bool) -> RealTask:
    train, test = Rows.of(load_or_stand_in("photos", synthetic), "patches")
    shapes = ((), (16, 16))
    return RealTask(name, Noised(train, shapes), Noised(test, shapes), (1024, 512), draws(Denoiser), _noise_loss, 16)


def _noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of the noise, guessed from an image to which some of it was added; both are scaled to be of size 1."""
    patches, level, noise = batch
    clean = patches[:, None].float() / 127.5 - 1
    log_strength = MIDDLE + LOG_SPREAD * level.to(clean.dtype)
    strength = log_strength.exp()[:, None, None, None]
    noise = noise[:, None].to(clean.dtype)
    noisy = (clean + strength * noise) * (0.25 + strength.square()).rsqrt()
    return (model(noisy, log_strength) - noise).square().mean()


def upscaled(name: str, synthetic: bool) -> RealTask:
    """A patch of 16 by 16 points from 4 by 4, each of them the mean of 16."""
    train, test = Rows.of(load_or_stand_in("photos", synthetic), "patches")
    return RealTask(name, train, test, (2048, 512), draws(Upscaler), _detail_loss, 32)


def _detail_loss(model: nn.Module, batch: Batch) -> Tensor:
    fine = batch[0][:, None].float() / 127.5 - 1
    return (model(avg_pool2d(fine, 4)) - fine).abs().mean()


def bright(images: Tensor) -> Tensor:
    """One channel, around 0."""
    return (images[:, None].float() / 255 - 0.3) / 0.3


def mislabelled(labels: Tensor, share: float) -> Tensor:
    """A share of the labels is drawn anew, always the same ones; a tenth of these happen to be right."""
    generator = generator_of("wrong labels")
    fresh = torch.randint(10, labels.shape, generator=generator, dtype=labels.dtype)
    return torch.where(torch.rand(labels.shape, generator=generator) < share, fresh, labels)
