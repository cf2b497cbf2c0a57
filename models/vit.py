"""A vision transformer: patches by a strided convolution, a class token, bidirectional attention.

In: pictures and their classes.  Out: the mean cross entropy.  Next: `encoder.py`.

Shapes in names: b batch, c channels, y and x rows and columns of the picture, s patches and the class token, d model
width, h heads, e width of a head, f hidden width, k classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, d: int, heads: int, f: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def attend(self, x_bsd: Tensor) -> Tensor:
        """Every place looks at every place."""
        b, s, d = x_bsd.shape
        q_bhse, k_bhse, v_bhse = self.qkv(x_bsd).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse)
        y_bsd: Tensor = self.out(y_bhse.transpose(1, 2).reshape(b, s, d))
        return F.dropout(y_bsd, self.dropout, self.training)

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attend(self.norm1(x_bsd))
        h_bsd: Tensor = self.down(F.gelu(self.up(self.norm2(x_bsd))))
        return x_bsd + F.dropout(h_bsd, self.dropout, self.training)


class ViT(nn.Module):
    """The whole model; the class token's last state goes to the head."""

    def __init__(
        self, c: int, side: int, patch: int, d: int, heads: int, f: int, layers: int, k: int, dropout: float
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(c, d, patch, stride=patch)
        self.token = nn.Parameter(torch.empty(1, 1, d))
        self.positions = nn.Parameter(torch.empty(1, 1 + (side // patch) ** 2, d))
        self.blocks = nn.ModuleList(Block(d, heads, f, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, k)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random token and positions."""
        nn.init.normal_(self.token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x_bcyx: Tensor, classes_b: Tensor) -> Tensor:
        p_bsd = self.patches(x_bcyx).flatten(2).transpose(1, 2)
        x_bsd = torch.cat([self.token.expand(len(p_bsd), -1, -1), p_bsd], dim=1) + self.positions
        for block in self.blocks:
            x_bsd = block(x_bsd)
        return F.cross_entropy(self.head(self.norm(x_bsd)[:, 0]), classes_b)


def build(
    b: int,
    c: int,
    side: int,
    patch: int,
    d: int,
    heads: int,
    f: int,
    layers: int,
    k: int,
    dropout: float = 0.1,
) -> tuple[ViT, tuple[Tensor, ...]]:
    """A model and a batch of square pictures."""
    rng = torch.Generator().manual_seed(0)
    model = ViT(c, side, patch, d, heads, f, layers, k, dropout)
    return model, (torch.randn(b, c, side, side, generator=rng), torch.randint(k, (b,), generator=rng))


def tiny() -> tuple[ViT, tuple[Tensor, ...]]:
    """Odd sizes, all different."""
    return build(b=7, c=3, side=9, patch=3, d=15, heads=5, f=23, layers=2, k=11)


def divisible() -> tuple[ViT, tuple[Tensor, ...]]:
    """Batch, heads, widths and classes are multiples of 12."""
    return build(b=12, c=3, side=8, patch=4, d=36, heads=12, f=60, layers=2, k=24)
