"""Small tasks as a new user tries them: noisy, sparse, short, or without any noise. All of them are *dev*."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from real.models.recurrent import GRU
from sklearn.datasets import load_breast_cancer, load_wine
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    ctc_loss,
    log_softmax,
    logsigmoid,
    mse_loss,
    normalize,
    softplus,
    triplet_margin_loss,
)
from zoo_problems import OPTIMIZERS as ZOO_OPTIMIZERS
from zoo_problems import Attending, Recurrent, digit_images, layers, some_source

Batch = tuple[Tensor, ...]
Draw = Callable[[torch.Generator, int], Batch]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **ZOO_OPTIMIZERS,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "nesterov": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
}
ALL = 10**6
"""A batch of all samples."""


class Small(NamedTuple):
    """A task: its model, what a step trains on, and how it is scored."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    draw: Draw
    """Training samples, so many."""
    held_out: Callable[[], Batch]
    optimizer: str
    steps: int
    batch: int = 64
    density: bool = False
    """Whether exp(loss) is scored, because the loss may be negative."""

    def score(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            loss = float(self.loss(model, self.held_out()))
        return math.exp(min(loss, 50.0)) if self.density else loss


def model_of(task: Small, seed: int) -> nn.Module:
    """Its weights as drawn with the seed; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _fresh(draw: Draw, count: int = 4000) -> Callable[[], Batch]:
    return cache(lambda: draw(_generator(7), count))


def _of(parts: Batch) -> Draw:
    """Some of the samples, with replacement; all of them if so many are asked for."""

    def draw(g: torch.Generator, count: int) -> Batch:
        if count >= len(parts[0]):
            return parts
        chosen = torch.randint(len(parts[0]), (count,), generator=g)
        return tuple(part[chosen] for part in parts)

    return draw


def _entropy(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _squared(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def _table(load: Callable[..., Any], train: int, scaled: bool = True) -> tuple[Batch, Batch]:
    """A data set of scikit-learn's, in another order: training and held-out rows."""
    numbers, kinds = load(return_X_y=True)
    x, y = torch.tensor(numbers, dtype=torch.float32), torch.tensor(kinds)
    order = torch.randperm(len(y), generator=_generator(0))
    x = ((x - x.mean(0)) / x.std(0) if scaled else x)[order]
    y = y[order]
    return (x[:train], y[:train]), (x[train:], y[train:])


# Densities -----------------------------------------------------------------------------------------------------------


def _inverse(g: torch.Generator, count: int) -> Batch:
    y = torch.rand(count, 1, generator=g)
    x = y + 0.3 * torch.sin(2 * math.pi * y) + 0.02 * torch.randn(count, 1, generator=g)
    return 2 * x - 1, y


def _mixture_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Minus the log-likelihood of a mixture of five normals."""
    weight, mean, width = model(batch[0]).chunk(3, 1)
    width = softplus(width) + 1e-3
    each = log_softmax(weight, 1) - ((batch[1] - mean) / width).square() / 2 - width.log() - math.log(2 * math.pi) / 2
    return -each.logsumexp(1).mean()


def _moons(g: torch.Generator, count: int) -> Batch:
    angle = math.pi * torch.rand(count, generator=g)
    side = torch.where(torch.rand(count, generator=g) < 0.5, 1.0, -1.0)
    x = torch.stack([torch.cos(angle) - side / 2, side * torch.sin(angle) - side / 4], 1)
    return (x + 0.1 * torch.randn(count, 2, generator=g),)


class _Flow(nn.Module):
    """Four affine couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([layers(1, 32, 2, between=nn.Tanh) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """log p(x)."""
        total = x.new_zeros(len(x))
        for k, net in enumerate(self.nets):
            kept, moved = x.unbind(1) if k % 2 == 0 else x.unbind(1)[::-1]
            shift, scale = net(kept[:, None]).unbind(1)
            moved, total = moved * torch.tanh(scale).exp() + shift, total + torch.tanh(scale)
            x = torch.stack([kept, moved] if k % 2 == 0 else [moved, kept], 1)
        return total - x.square().sum(1) / 2 - math.log(2 * math.pi)


def _flow_loss(model: nn.Module, batch: Batch) -> Tensor:
    return -model(batch[0]).mean()


# Classes -------------------------------------------------------------------------------------------------------------


def _rare(g: torch.Generator, count: int) -> Batch:
    """One in a hundred is positive."""
    weight = torch.randn(20, generator=_generator(5))
    x = torch.randn(count, 20, generator=g)
    score = torch.tanh(x) @ weight + x[:, 0] * x[:, 1] + 0.3 * torch.randn(count, generator=g)
    return x, (score > 8.3).float()


def _yes_no(model: nn.Module, batch: Batch) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def _wrong_digits() -> Batch:
    """300 digits, a third of whose labels are drawn anew."""
    x, y = (part[:300] for part in digit_images()[0])
    g = _generator(3)
    return x, torch.where(torch.rand(300, generator=g) < 0.33, torch.randint(10, (300,), generator=g), y)


def _bags(g: torch.Generator, count: int) -> Batch:
    """Bags of twelve words of 800, most of them rare, and which of four topics they are about."""
    topic = torch.randint(4, (count,), generator=g)
    words = (torch.rand(count, 12, generator=g) ** 3 * 800).long()
    own = torch.rand(count, 12, generator=g) < 0.2
    return torch.where(own, words // 4 * 4 + topic[:, None], words), topic


# Sequences -----------------------------------------------------------------------------------------------------------


class _Listener(nn.Module):
    """Both directions of a recurrence, and a letter or nothing at each moment."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(12, 24, batch_first=True, bidirectional=True), nn.Linear(48, 7)

    def forward(self, x: Tensor) -> Tensor:
        return log_softmax(self.head(self.gru(x)[0]), -1)


def _spoken(g: torch.Generator, count: int) -> Batch:
    """Five letters of three to five moments each, in noise."""
    sounds = torch.randn(6, 12, generator=_generator(4))
    letters = torch.randint(6, (count, 5), generator=g)
    ends = torch.randint(3, 6, (count, 5), generator=g).cumsum(1)
    place = (torch.arange(25)[None, :, None] >= ends[:, None]).sum(2)
    heard = sounds[letters.gather(1, place.clamp(max=4))] * (place < 5)[..., None]
    return heard + 0.8 * torch.randn(count, 25, 12, generator=g), letters + 1


def _spelling_loss(model: nn.Module, batch: Batch) -> Tensor:
    logs, count = model(batch[0]).transpose(0, 1), len(batch[0])
    return ctc_loss(logs, batch[1], torch.full((count,), 25), torch.full((count,), 5))


def _next_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _later_source() -> Batch:
    return some_source(_generator(8), 2000)


class _Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = GRU(1, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[:, -1])  # type: ignore[no-any-return]


def _walks(g: torch.Generator, count: int) -> Batch:
    """The highest point of a walk of 15 steps."""
    x = torch.randn(count, 15, 1, generator=g)
    return x, x.cumsum(1).amax(1)


# Without noise -------------------------------------------------------------------------------------------------------


@cache
def _picture() -> Batch:
    y, x = torch.meshgrid(torch.linspace(-1, 1, 28), torch.linspace(-1, 1, 28), indexing="ij")
    shade = torch.sin(8 * x + 4 * y**2) * torch.cos(6 * y) + (x**2 + y**2 < 0.4).float()
    waves = torch.stack([x.flatten(), y.flatten()], 1) @ (4 * torch.randn(2, 32, generator=_generator(9)))
    return torch.cat([waves.sin(), waves.cos()], 1), shade.flatten()[:, None]


@cache
def _points() -> Batch:
    return (torch.linspace(-1, 1, 64)[:, None],)


def _equation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """u'' = -(3 pi)^2 sin(3 pi x) with u(-1) = u(1) = 0; u is 1 - x^2 times the network."""
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        u = (1 - x**2) * model(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    wave = 3 * math.pi
    return (bend / wave**2 + torch.sin(wave * x)).square().mean()


@cache
def _taught() -> Batch:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(11)
        x = torch.randn(256, 10)
        return x, 2 * layers(10, 16, 1, between=nn.Tanh)(x)


# Pairs and triples ---------------------------------------------------------------------------------------------------


class _Pairs(nn.Module):
    """Users, things, and how much each thing is liked by all."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things, self.liked = nn.Embedding(200, 16), nn.Embedding(300, 16), nn.Embedding(300, 1)
        for table in (self.users, self.things, self.liked):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users(user) * self.things(thing)).sum(1) + self.liked(thing)[:, 0]  # type: ignore[no-any-return]


@cache
def _chosen() -> Tensor:
    """Thirty things that each user likes."""
    g = _generator(1)
    scores = torch.randn(200, 6, generator=g) @ torch.randn(6, 300, generator=g) + torch.randn(300, generator=g)
    best = (scores + torch.randn(200, 300, generator=g)).topk(30, 1).indices
    return best[:, torch.randperm(30, generator=g)]


def _choices(first: int, last: int) -> Draw:
    def draw(g: torch.Generator, count: int) -> Batch:
        user = torch.randint(200, (count,), generator=g)
        place = torch.randint(first, last, (count,), generator=g)
        return user, _chosen()[user, place], torch.randint(300, (count,), generator=g)

    return draw


def _choice_loss(model: nn.Module, batch: Batch) -> Tensor:
    user, liked, other = batch
    return -logsigmoid(model(user, liked) - model(user, other)).mean()


def _triples(samples: Batch) -> Draw:
    """A digit, another of its kind, one of another kind."""
    x, y = samples
    order = y.argsort()
    counts = torch.bincount(y, minlength=10)
    begins = counts.cumsum(0) - counts

    def draw(g: torch.Generator, count: int) -> Batch:
        kind = torch.randint(10, (count,), generator=g)
        other = (kind + torch.randint(1, 10, (count,), generator=g)) % 10
        places = [(torch.rand(count, generator=g) * counts[k]).long() + begins[k] for k in (kind, kind, other)]
        return tuple(x[order[place]] for place in places)

    return draw


def _triple_loss(model: nn.Module, batch: Batch) -> Tensor:
    return triplet_margin_loss(*[normalize(model(part)) for part in batch], margin=0.5)


def _views(images: Tensor) -> Draw:
    """Two noisy views of each of some digits."""

    def draw(g: torch.Generator, count: int) -> Batch:
        x = images[torch.randint(len(images), (count,), generator=g)]
        return tuple(x + 0.7 * torch.randn(x.shape, generator=g) for _ in range(2))

    return draw


def _contrast_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Which of the others is the same digit? Asked in groups of 64."""
    one, two = (normalize(model(part)).unflatten(0, (-1, 64)) for part in batch)
    return cross_entropy((one @ two.mT / 0.2).flatten(0, 1), torch.arange(64).repeat(len(one)))


def _preferred(g: torch.Generator, count: int) -> Batch:
    """Two things, of which the one of higher hidden worth is preferred more often."""
    worth = torch.randn(8, generator=_generator(6))
    a, b = (torch.randn(count, 8, generator=g) for _ in range(2))
    gap = (a.sin() - b.sin()) @ worth
    swap = (torch.rand(count, generator=g) > torch.sigmoid(gap))[:, None]
    return torch.where(swap, b, a), torch.where(swap, a, b)


def _preference_loss(model: nn.Module, batch: Batch) -> Tensor:
    return -logsigmoid(model(batch[0]) - model(batch[1])).mean()


# Others --------------------------------------------------------------------------------------------------------------


def _smooth(noise: float) -> Draw:
    def draw(g: torch.Generator, count: int) -> Batch:
        x = torch.randn(count, 6, generator=g)
        y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
        return x, y + noise * torch.randn(count, 1, generator=g)

    return draw


@cache
def _turned() -> nn.Sequential:
    """Convolutions that have learned by how much digits were turned."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        body = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, 2, 1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(768, 64),
            nn.ReLU(),
        )
        head = nn.Linear(64, 4)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=2e-3)
    g, images = _generator(50), digit_images()[0][0].view(-1, 8, 8)
    for _ in range(300):
        some, turns = torch.randint(900, (64,), generator=g), torch.randint(4, (64,), generator=g)
        x = torch.stack([torch.rot90(images[i], int(k)).flatten() for i, k in zip(some, turns, strict=True)])
        optimizer.zero_grad()
        cross_entropy(head(body(x)), turns).backward()
        optimizer.step()
    return body


def _fine_tuned() -> nn.Module:
    return nn.Sequential(copy.deepcopy(_turned()), nn.Linear(64, 10))


def _encoder() -> nn.Module:
    return layers(64, 64, 16)


def _tanh_layers(*widths: int) -> Callable[[], nn.Module]:
    return lambda: layers(*widths, between=nn.Tanh)


def _relu_layers(*widths: int) -> Callable[[], nn.Module]:
    return lambda: layers(*widths)


def _topics() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(800, 16), nn.Linear(16, 4))


_CANCER, _WINE = _table(load_breast_cancer, 400), _table(load_wine, 120, scaled=False)
_DIGITS, _UNSEEN = digit_images()
_FEW = tuple(part[:300] for part in _DIGITS)


def _unseen_digits() -> Batch:
    return _UNSEEN


def _unseen_patients() -> Batch:
    return _CANCER[1]


SMALL: dict[str, Small] = {
    # The eight of issue 42, written anew.
    "mixture": Small(_tanh_layers(1, 64, 64, 15), _mixture_loss, _inverse, _fresh(_inverse), "adam", 800, 128, True),
    "batch-of-one": Small(_tanh_layers(30, 32, 2), _entropy, _of(_CANCER[0]), _unseen_patients, "sgd", 1500, 1),
    "rare": Small(_relu_layers(20, 64, 64, 1), _yes_no, _rare, _fresh(_rare, 40000), "adamw", 800, 128),
    "ctc": Small(_Listener, _spelling_loss, _spoken, _fresh(_spoken, 400), "adam", 400, 8),
    "picture": Small(_relu_layers(64, 96, 96, 1), _squared, _of(_picture()), _picture, "adam", 300, ALL),
    "fine-tuning": Small(_fine_tuned, _entropy, _of(_FEW), _unseen_digits, "adamw", 200, 32),
    "unscaled": Small(lambda: nn.Linear(13, 3), _entropy, _of(_WINE[0]), lambda: _WINE[1], "sgd", 1000, 32),
    "choices": Small(_Pairs, _choice_loss, _choices(0, 24), _fresh(_choices(24, 30), 8000), "adagrad", 1000, 128),
    # More of what is noisy or sparse.
    "flow": Small(_Flow, _flow_loss, _moons, _fresh(_moons), "adam", 500, 64, True),
    "wrong-labels": Small(_relu_layers(64, 64, 10), _entropy, _of(_wrong_digits()), _unseen_digits, "adamw", 400, 32),
    "topics": Small(_topics, _entropy, _bags, _fresh(_bags), "adam", 400, 32),
    "preferences": Small(_relu_layers(8, 48, 48, 1), _preference_loss, _preferred, _fresh(_preferred), "adam", 300, 32),
    "batch-of-four": Small(_relu_layers(30, 32, 2), _entropy, _of(_CANCER[0]), _unseen_patients, "adam", 400, 4),
    "noisy-function": Small(_relu_layers(6, 64, 1), _squared, _smooth(1.0), _fresh(_smooth(0.3)), "momentum", 400, 32),
    "source-nesterov": Small(Attending, _next_loss, some_source, _later_source, "nesterov", 500, 32),
    # Without noise, or nearly.
    "equation": Small(_tanh_layers(1, 48, 48, 1), _equation_loss, _of(_points()), _points, "adam", 500, ALL),
    "teacher": Small(_tanh_layers(10, 64, 1), _squared, _of(_taught()), _taught, "momentum", 400, ALL),
    "tiny": Small(_tanh_layers(6, 32, 32, 1), _squared, _smooth(0.05), _fresh(_smooth(0.05)), "adam", 300),
    # Losses that are bounded, and sequences.
    "triples": Small(_encoder, _triple_loss, _triples(_DIGITS), _fresh(_triples(_UNSEEN), 2000), "adam", 300, 32),
    "contrast": Small(_encoder, _contrast_loss, _views(_DIGITS[0]), _fresh(_views(_UNSEEN[0]), 512), "adamw", 400),
    "highest-point": Small(_Summing, _squared, _walks, _fresh(_walks), "rmsprop", 400, 32),
    "source-gru": Small(Recurrent, _next_loss, some_source, _later_source, "adam", 300, 32),
    "source": Small(Attending, _next_loss, some_source, _later_source, "adamw", 400),
}
