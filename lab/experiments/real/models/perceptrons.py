"""Plain layers, one after the other, and what is made of them: mixers, sets, paths, densities, experts, graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


class Perceptron(nn.Module):
    """Linear layers with a function between them; no norm. Two widths are a linear model."""

    def __init__(self, widths: Sequence[int], function: Callable[[Tensor], Tensor] = relu) -> None:
        super().__init__()
        self.function = function
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths[:-1]))
        self.head = nn.Linear(widths[-2], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.function(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """A stretch of a series in, several numbers for each later moment out: an MLP-Mixer (Tolstikhin et al. 2021).

    The stretch is cut into patches; layers take turns with the axis of the patches and with that of their features.
    """

    def __init__(self, length: int, ahead: int, numbers: int, patch: int = 8, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        patches = length // patch
        self.patch, self.ahead = patch, ahead
        self.first = nn.Linear(patch, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.across = nn.ModuleList(Perceptron((patches, 4 * patches, patches)) for _ in range(blocks))
        self.within = nn.ModuleList(Perceptron((width, 2 * width, width)) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(patches * width, ahead * numbers)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time] -> [sample, later time, number]."""
        x = self.first(x.unflatten(1, (-1, self.patch)))
        for number, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            normed = self.norms[2 * number](x).mT
            x = x + across(normed.flatten(0, 1)).view(normed.shape).mT
            normed = self.norms[2 * number + 1](x)
            x = x + within(normed.flatten(0, 1)).view(normed.shape)
        return self.head(self.norm(x).flatten(1)).unflatten(1, (self.ahead, -1))


class DeepSets(nn.Module):
    """A set of numbers in, one number out: the sum of what one network makes of each goes through another.

    (Zaheer et al. 2017.)
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(1, width), nn.Linear(width, width)])
        self.whole = Perceptron((width, width, 1))

    def forward(self, numbers: Tensor, present: Tensor) -> Tensor:
        """[sample, number], and which of them belong to the set -> [sample]."""
        x = numbers[..., None]
        for layer in self.each:
            x = relu(layer(x))
        return self.whole((x * present[..., None]).sum(1))[:, 0]  # type: ignore[no-any-return]


class NeuralODE(nn.Module):
    """A network is the velocity of a state; the path from a first state is that of so many Runge-Kutta steps."""

    def __init__(self, numbers: int, steps: int, length: float, hidden: int = 48) -> None:
        super().__init__()
        self.steps, self.length = steps, length
        self.velocity = Perceptron((numbers, hidden, hidden, numbers), torch.tanh)

    def forward(self, state: Tensor) -> Tensor:
        """[sample, number] -> [sample, step, number]."""
        path = []
        for _ in range(self.steps):
            state = runge_kutta(self.velocity, state, self.length)
            path.append(state)
        return torch.stack(path, 1)


def runge_kutta(velocity: Callable[[Tensor], Tensor], state: Tensor, length: float) -> Tensor:
    """One classical step of fourth order."""
    first = velocity(state)
    second = velocity(state + length / 2 * first)
    third = velocity(state + length / 2 * second)
    fourth = velocity(state + length * third)
    return state + length / 6 * (first + 2 * second + 2 * third + fourth)


# Densities: by a hidden cause, or by a change of variables ------------------------------------------------------------


class VAE(nn.Module):
    """A variational autoencoder; the noise that it samples with is handed in."""

    def __init__(self, inputs: int, hidden: int = 128, causes: int = 16) -> None:
        super().__init__()
        self.encoder = Perceptron((inputs, hidden, 2 * causes))
        self.decoder = Perceptron((causes, hidden, inputs))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """What it makes of its inputs, and for each of them the divergence of the causes from a standard normal."""
        mean, log_variance = self.encoder(x).chunk(2, -1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), divergence


class Coupling(nn.Module):
    """One half of the numbers is scaled and shifted by what a small network makes of the other half."""

    def __init__(self, half: int, hidden: int) -> None:
        super().__init__()
        self.network = Perceptron((half, hidden, hidden, 2 * half))

    def forward(self, kept: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        """The changed half, and the logarithm of what it was scaled by."""
        scale, shift = self.network(kept).chunk(2, -1)
        scale = 2 * torch.tanh(scale / 2)
        return changed * scale.exp() + shift, scale.sum(-1)


class Flow(nn.Module):
    """A RealNVP: couplings that take turns with the two halves; numbers are dealt to them alternately."""

    def __init__(self, numbers: int, couplings: int = 8, hidden: int = 48) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(numbers // 2, hidden) for _ in range(couplings))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The standard normal numbers that x stands for, and the logarithm of the volume's change."""
        a, b = x[:, ::2], x[:, 1::2]
        volume = torch.zeros_like(x[:, 0])
        for coupling in self.couplings:
            changed, scaled = coupling(a, b)
            a, b, volume = changed, a, volume + scaled
        return torch.cat([a, b], -1), volume


# A mixture of experts over a window of characters ---------------------------------------------------------------------


class Experts(nn.Module):
    """The characters before in, logits of the next one out. Of the experts between, two answer each window.

    All experts are computed and most are multiplied by 0: what they cost is not the point here.
    """

    def __init__(
        self, tokens: int, context: int, table: int = 12, width: int = 64, experts: int = 8, hidden: int = 48
    ) -> None:
        super().__init__()
        self.experts = experts
        self.tokens = nn.Embedding(tokens, table)
        self.reader = nn.Linear(context * table, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.inner = nn.Linear(width, experts * hidden)  # one beside the other
        self.outer = nn.Linear(experts * hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and how uneven the load is: 1 where all experts are used alike (Switch Transformer)."""
        x = relu(self.reader(self.tokens(window).flatten(1)))
        likely = self.gate(x).softmax(-1)
        chosen = likely >= likely.topk(2, -1).values[:, 1:]
        share = likely * chosen
        share = share / share.sum(-1, keepdim=True)
        answers = relu(self.inner(x)).unflatten(-1, (self.experts, -1)) * share[..., None]
        x = x + self.outer(answers.flatten(1))
        uneven = self.experts * (chosen.to(x.dtype).mean(0) / 2 * likely.mean(0)).sum()
        return self.head(self.norm(x)), uneven


# Graphs: one that is always the same, and many small ones -------------------------------------------------------------


class GraphNet(nn.Module):
    """Two layers, each over the mean of a node and its neighbours (Kipf and Welling 2017)."""

    features: Tensor
    links: Tensor

    def __init__(self, features: Tensor, adjacency: Tensor, classes: int, width: int = 128) -> None:
        super().__init__()
        linked = adjacency + torch.eye(len(adjacency))
        degree = linked.sum(1).rsqrt()
        self.register_buffer("features", features)
        self.register_buffer("links", degree[:, None] * linked * degree)
        self.hidden = nn.Linear(features.shape[1], width)
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor) -> Tensor:
        """Logits of some nodes."""
        x = relu(self.links @ self.hidden(self.features))
        logits: Tensor = self.links @ self.head(x)
        return logits.index_select(0, nodes)


class MessageNet(nn.Module):
    """Atoms and bonds in, logits of the kind of each atom out: atoms send messages along bonds, in some rounds.

    Every kind of bond has messages of its own (Gilmer et al. 2017, Schlichtkrull et al. 2018).
    """

    def __init__(self, atoms: int, bonds: int, width: int = 64, rounds: int = 4) -> None:
        super().__init__()
        self.bonds = bonds
        self.atoms = nn.Embedding(atoms, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.messages = nn.ModuleList(nn.Linear(width, bonds * width, bias=False) for _ in range(rounds))
        self.inner = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, atoms)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        """[molecule, atom] and [molecule, atom, atom], where 0 is no bond -> [molecule, atom, kind]."""
        kinds = torch.arange(1, self.bonds + 1, device=bonds.device)
        x = self.atoms(atoms)
        linked = (bonds[:, None] == kinds[:, None, None]).to(x.dtype)  # [molecule, kind, atom, atom]
        for norm, message, inner, outer in zip(self.norms, self.messages, self.inner, self.outer, strict=True):
            normed = norm(x)
            sent = message(normed).unflatten(-1, (self.bonds, -1)).transpose(1, 2)
            heard = (linked @ sent).sum(1)
            x = x + outer(relu(inner(torch.cat([normed, heard], -1))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]
