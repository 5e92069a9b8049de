"""Networks of convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, gelu, pad, pixel_shuffle, relu


class CNN(nn.Module):
    """Two convolutions, each halving the image, and two linear layers; no norm."""

    def __init__(self, width: int = 8, hidden: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.second = nn.Conv2d(width, 2 * width, 5, stride=2, padding=2)
        self.hidden = nn.Linear(2 * width * 49, hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.second(relu(self.first(images))))
        return self.head(relu(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to their input; the first may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.first_norm(self.first(x)))
        return relu(self.short(x) + self.second_norm(self.second(y)))


class ResNet(nn.Module):
    """A ResNet of three stages on the image at half its size."""

    def __init__(self, widths: Sequence[int] = (8, 16, 32), blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        sizes = [(width, width, 1) for width in widths for _ in range(blocks)]
        for stage in range(1, len(widths)):
            sizes[stage * blocks] = (widths[stage - 1], widths[stage], 2)
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.stem_norm(self.stem(avg_pool2d(images, 2))))
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


class DepthwiseBlock(nn.Module):
    """A wide convolution of every channel by itself, a norm over channels, two layers per point; added to the input."""

    def __init__(self, width: int, side: int = 7) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, side, padding=side // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, channel, row, column] -> the same."""
        y = self.norm(self.depthwise(x).movedim(1, -1))
        return x + self.outer(gelu(self.inner(y))).movedim(-1, 1)  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    """Two stages of depthwise convolutions with LayerNorm, at a half and a quarter of the sides (Liu et al. 2022)."""

    def __init__(self, widths: tuple[int, int] = (24, 80), blocks: int = 2, outputs: int = 10) -> None:
        super().__init__()
        fine, coarse = widths
        self.stem = nn.Conv2d(1, fine, 2, stride=2)
        self.stem_norm, self.down_norm, self.norm = nn.LayerNorm(fine), nn.LayerNorm(fine), nn.LayerNorm(coarse)
        self.fine = nn.Sequential(*(DepthwiseBlock(fine) for _ in range(blocks)))
        self.down = nn.Conv2d(fine, coarse, 2, stride=2)
        self.coarse = nn.Sequential(*(DepthwiseBlock(coarse) for _ in range(blocks)))
        self.head = nn.Linear(coarse, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = self.fine(_over_channels(self.stem_norm, self.stem(images)))
        x = self.coarse(self.down(_over_channels(self.down_norm, x)))
        return self.head(self.norm(x.mean((2, 3))))  # type: ignore[no-any-return]


def _over_channels(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return norm(x.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]


class Upscaler(nn.Module):
    """A small image in, one of four times its sides out: convolutions that add to their input, then two that double.

    A convolution makes four channels of each, which become the four points of a square (as EDSR, Lim et al. 2017).
    """

    def __init__(self, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.inner, self.outer = (
            nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks)) for _ in range(2)
        )
        self.doubling = nn.ModuleList(nn.Conv2d(width, 4 * width, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """[sample, 1, row, column] -> the same with four times the rows and columns."""
        x = self.first(images)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(relu(inner(x)))
        for layer in self.doubling:
            x = relu(pixel_shuffle(layer(x), 2))
        return self.head(x)  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """A small U-net: from a noisy image of 16 by 16 and the strength of the noise to the noise."""

    def __init__(self, fine: int = 8, coarse: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, fine, 3, padding=1)
        self.down = nn.Conv2d(fine, coarse, 3, stride=2, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(coarse, coarse, 3, padding=1) for _ in range(2))
        self.up = nn.Conv2d(fine + coarse, fine, 3, padding=1)
        self.head = nn.Conv2d(fine, 1, 3, padding=1)

    def forward(self, noisy: Tensor, strength: Tensor) -> Tensor:
        """[sample, 1, row, column], and one number per sample."""
        fine = relu(self.first(torch.cat([noisy, strength[:, None, None, None].expand_as(noisy)], 1)))
        coarse = relu(self.down(fine))
        for layer in self.inner:
            coarse = coarse + relu(layer(coarse))
        return self.head(relu(self.up(torch.cat([fine, _doubled(coarse)], 1))))  # type: ignore[no-any-return]


def _doubled(x: Tensor) -> Tensor:
    """An image of twice the sides, every point four times."""
    return x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4).flatten(2, 3)


class Twice(nn.Module):
    """Two convolutions, each with GroupNorm and relu."""

    def __init__(self, inputs: int, outputs: int, groups: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(groups, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(groups, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(x)))


class UNet(nn.Module):
    """An image in, logits of the class of every point out: down twice, up twice, with ways across (as U-Net)."""

    def __init__(self, classes: int, widths: tuple[int, int, int] = (8, 16, 32)) -> None:
        super().__init__()
        fine, middle, coarse = widths
        self.fine, self.middle, self.coarse = Twice(1, fine), Twice(fine, middle), Twice(middle, coarse)
        self.middle_up, self.fine_up = Twice(middle + coarse, middle), Twice(fine + middle, fine)
        self.head = nn.Conv2d(fine, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        middle = self.middle(avg_pool2d(fine, 2))
        coarse = self.coarse(avg_pool2d(middle, 2))
        middle = self.middle_up(torch.cat([middle, _doubled(coarse)], 1))
        return self.head(self.fine_up(torch.cat([fine, _doubled(middle)], 1)))  # type: ignore[no-any-return]


def _later(x: Tensor, steps: int) -> Tensor:
    """[sample, time, channel], so many steps later; negative: earlier. Zeros come in."""
    return pad(x, (0, 0, steps, 0))[:, : x.shape[1]] if steps > 0 else pad(x, (0, 0, 0, -steps))[:, -steps:]


class CausalText(nn.Module):
    """Characters in, logits of the next character out: convolutions with gates that reach back 1, 2, 4 ... steps.

    As WaveNet. A convolution over two places is written as a linear layer, which is faster for many runs at once.
    """

    def __init__(self, tokens: int, width: int = 40, blocks: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.inner = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, tokens)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text)
        for number, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            new, gate = inner(torch.cat([x, _later(x, 2**number)], -1)).chunk(2, -1)
            x = x + outer(torch.tanh(new) * torch.sigmoid(gate))
        return self.head(relu(x))  # type: ignore[no-any-return]


class NameCNN(nn.Module):
    """The letters of a name in, logits of its classes out: two convolutions over three letters, then the largest."""

    def __init__(self, letters: int, classes: int, table: int = 24, widths: tuple[int, int] = (64, 96)) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, table)
        self.first = nn.Linear(3 * table, widths[0])
        self.second = nn.Linear(3 * widths[0], widths[1])
        self.head = nn.Linear(widths[1], classes)

    def forward(self, names: Tensor) -> Tensor:
        x = self.letters(names)
        for layer in (self.first, self.second):
            x = relu(layer(torch.cat([_later(x, 1), x, _later(x, -1)], -1)))
        return self.head(x.amax(1))  # type: ignore[no-any-return]
