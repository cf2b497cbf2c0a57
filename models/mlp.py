"""A three-layer perceptron with dropout that returns its own mean squared error.

In: x and its target.  Out: the loss.  Next: `gpt.py`.

Shapes in names: b batch, d features in, f hidden, g second hidden, o features out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear, GELU, dropout, Linear, ReLU, Linear."""

    def __init__(self, d: int, f: int, g: int, o: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(d, f)
        self.mid = nn.Linear(f, g)
        self.down = nn.Linear(g, o)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_bd: Tensor, target_bo: Tensor) -> Tensor:
        h_bf = self.drop(F.gelu(self.up(x_bd)))
        h_bg = F.relu(self.mid(h_bf))
        y_bo = self.down(h_bg)
        return F.mse_loss(y_bo, target_bo)


def build(b: int, d: int, f: int, g: int, o: int, dropout: float = 0.1) -> tuple[MLP, tuple[Tensor, ...]]:
    """A model and a batch of the given sizes."""
    rng = torch.Generator().manual_seed(0)
    model = MLP(d, f, g, o, dropout)
    return model, (torch.randn(b, d, generator=rng), torch.randn(b, o, generator=rng))


def tiny() -> tuple[MLP, tuple[Tensor, ...]]:
    """Odd sizes, all different."""
    return build(b=7, d=5, f=11, g=9, o=3)


def divisible() -> tuple[MLP, tuple[Tensor, ...]]:
    """Every size a multiple of 12."""
    return build(b=12, d=24, f=48, g=36, o=60)
