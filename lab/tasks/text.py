"""Text: a small byte-level GPT on the source of Python's own standard library.

Nothing is downloaded. The numbers depend on the version of Python, whose library is the text.
"""

from __future__ import annotations

import math
import sysconfig
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hdet.errors import ArgumentError
from lab.tasks.streams import check_count, check_place, epoch_places, generator_of
from lab.tasks.task import Batch, device_of, evaluating, moved
from lab.tasks.transformer import Block, four_groups, unseeded

__all__ = ["GPT", "TextTask", "library"]

MAX_BYTES = 8_000_000
VALIDATION_BATCHES, VALIDATION_SIZE = 8, 64


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        for layer in (self.bytes, self.places, self.head):
            layer.weight.normal_(0, 0.02, generator=generator)
        for block in self.modules():
            if isinstance(block, Block):
                block.draw(generator, 0.02, len(self.blocks))


class TextTask:
    """Predict the next byte of the standard library without its tests, up to 8 MB; every twentieth file is held out.

    Args:
        width: numbers per byte inside the model, a multiple of ``heads``.
        depth: transformer blocks.
        heads: attention heads.
        context: bytes that the model sees at once.
        batch_size: sequences per replica and step.
    """

    name = "text"

    def __init__(
        self,
        width: int = 128,
        depth: int = 3,
        heads: int = 4,
        context: int = 128,
        batch_size: int = 64,
    ) -> None:
        check_count(width=width, depth=depth, heads=heads, context=context, batch_size=batch_size)
        if width % heads:
            raise ArgumentError(f"width must be a multiple of heads, but got width={width} and heads={heads}")
        self.width, self.depth, self.heads, self.context = width, depth, heads, context
        self.batch_size = batch_size
        train, held_out = library()
        self._train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        self._held_out = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)

    def model(self, seed: int) -> nn.Module:
        model = unseeded(lambda: GPT(self.width, self.depth, self.heads, self.context))
        model.draw(generator_of("text model", seed))
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return four_groups(model)

    def batch(self, seed: int, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        """The text is cut into windows, at other places in every epoch, and the windows are shuffled."""
        check_place(step, replica, replicas)
        windows = (len(self._train) - 1) // self.context - 1
        epoch, places = epoch_places(f"text {seed}", windows, self.batch_size, step, replica, replicas)
        shift = int(torch.randint(self.context, (), generator=generator_of("text shift", seed, epoch)))
        return self._windows(self._train, places * self.context + shift)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        text, following = batch
        return cross_entropy(model(text).flatten(0, 1), following.flatten())

    def validation(self) -> list[Batch]:
        """Up to eight batches of 64 windows, spread evenly over the held-out text."""
        windows = (len(self._held_out) - 1) // self.context
        size = min(VALIDATION_SIZE, windows)
        count = min(VALIDATION_BATCHES, windows // size)
        places = torch.arange(count * size) * windows // (count * size)
        return [self._windows(self._held_out, part * self.context) for part in places.split(size)]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            device = device_of(model)
            losses = [float(self.loss(model, moved(batch, device))) for batch in self.validation()]
        loss = math.fsum(losses) / len(losses)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def library() -> tuple[bytes, bytes]:
    """Training and held-out source. A hash of its name decides a file's place, so neither depends on the folder."""
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = [file.relative_to(root) for file in root.rglob("*.py")]
    hashed = sorted((sha256(name.as_posix().encode()).digest(), name) for name in names if not foreign & {*name.parts})
    parts, total = (bytearray(), bytearray()), 0
    for digest, name in hashed:
        text = (root / name).read_bytes()
        if total + len(text) > MAX_BYTES:
            continue
        parts[digest[-1] % 20 == 0].extend(text)
        total += len(text)
    return bytes(parts[0]), bytes(parts[1])
