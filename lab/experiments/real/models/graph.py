"""Graph networks: on a graph that is always the same, and on many small ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


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
