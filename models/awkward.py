"""Five small models whose sharding is awkward, each in its own way.

In: a batch and its target.  Out: the mean squared error.  Next: `autopar/capture.py`.

    square      a residual square Linear: one axis is both rows and columns of the weight
    scores      attention in plain ops: the sequence sits on both dims of the scores
    gram        z @ z.T: one axis on both dims of one product
    recurrent   a weight shared by every step of a loop
    fused       one projection for query, key and value, cut apart by `chunk`

Shapes in names: b batch, s sequence, d width, e width of a head, o features out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[nn.Module, tuple[Tensor, ...]]


class Square(nn.Module):
    """x + W relu(x), twice, with dropout."""

    def __init__(self, d: int, o: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, o)
        self.drop = nn.Dropout(0.1)

    def forward(self, x_bd: Tensor, target_bo: Tensor) -> Tensor:
        x_bd = x_bd + self.first(F.relu(x_bd))
        x_bd = x_bd + self.drop(self.second(torch.tanh(x_bd)))
        return F.mse_loss(self.out(x_bd), target_bo)


class Scores(nn.Module):
    """softmax(q k^T / sqrt(e)) v, written out."""

    def __init__(self, d: int, e: int, o: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, e), nn.Linear(d, e), nn.Linear(d, e)
        self.out = nn.Linear(e, o)
        self.drop = nn.Dropout(0.1)

    def forward(self, x_bsd: Tensor, target_bso: Tensor) -> Tensor:
        q_bse, k_bse, v_bse = self.q(x_bsd), self.k(x_bsd), self.v(x_bsd)
        p_bss = (q_bse @ k_bse.transpose(1, 2) * q_bse.shape[-1] ** -0.5).softmax(-1)
        return F.mse_loss(self.out(self.drop(p_bss) @ v_bse), target_bso)


class Gram(nn.Module):
    """Similarities of all pairs of a batch."""

    def __init__(self, d: int, e: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, e)
        self.norm = nn.LayerNorm(e)

    def forward(self, x_bd: Tensor, target_bb: Tensor) -> Tensor:
        z_be = self.norm(self.up(x_bd))
        return F.mse_loss(z_be @ z_be.T, target_bb)


class Recurrent(nn.Module):
    """h = tanh(A x_t + B h) over the sequence, then a projection."""

    def __init__(self, d: int, e: int, o: int) -> None:
        super().__init__()
        self.e = e
        self.a, self.b = nn.Linear(d, e), nn.Linear(e, e, bias=False)
        self.out = nn.Linear(e, o)

    def forward(self, x_bsd: Tensor, target_bso: Tensor) -> Tensor:
        h_be = x_bsd.new_zeros(x_bsd.shape[0], self.e)
        steps = []
        for x_bd in x_bsd.unbind(1):
            h_be = torch.tanh(self.a(x_bd) + self.b(h_be))
            steps.append(h_be)
        return F.mse_loss(self.out(torch.stack(steps, 1)), target_bso)


class Fused(nn.Module):
    """Two-headed attention whose query, key and value come from one projection."""

    def __init__(self, d: int, heads: int, o: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, o)

    def forward(self, x_bsd: Tensor, target_bso: Tensor) -> Tensor:
        b, s, d = x_bsd.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x_bsd).chunk(3, -1))
        y_bsd = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        return F.mse_loss(self.out(y_bsd), target_bso)


def batch(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Normal tensors from a fixed seed."""
    rng = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=rng) for shape in shapes)


def square() -> Example:
    """The residual square Linear."""
    return Square(d=10, o=3), batch((7, 10), (7, 3))


def scores() -> Example:
    """Materialised attention."""
    return Scores(d=5, e=6, o=3), batch((4, 7, 5), (4, 7, 3))


def gram() -> Example:
    """z @ z.T."""
    return Gram(d=5, e=9), batch((7, 5), (7, 7))


def recurrent() -> Example:
    """The shared recurrent weight."""
    return Recurrent(d=5, e=6, o=3), batch((7, 4, 5), (7, 4, 3))


def fused() -> Example:
    """Fused query-key-value with chunk."""
    return Fused(d=12, heads=2, o=5), batch((3, 7, 12), (3, 7, 5))


def tiny() -> Example:
    """The first of them."""
    return square()


ALL = {"square": square, "scores": scores, "gram": gram, "recurrent": recurrent, "fused": fused}
