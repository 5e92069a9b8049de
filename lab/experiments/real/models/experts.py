"""A mixture of experts over a window of characters."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


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
