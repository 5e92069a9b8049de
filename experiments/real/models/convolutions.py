"""Networks of convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu

__all__ = ["CNN", "ResNet"]


class CNN(nn.Module):
    """Two convolutions, each halving the image, and two linear layers; no norm."""

    def __init__(self, width: int = 8, hidden: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.second = nn.Conv2d(width, 2 * width, 5, stride=2, padding=2)
        self.hidden = nn.Linear(2 * width * 49, hidden)
        self.head = nn.Linear(hidden, 10)

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
