"""Llama: RMS norms, rotary positions, grouped queries, gated perceptron, no biases.

In: token ids and labels.  Out: the mean cross entropy of the next token.  Next: `awkward.py`.

Shapes in names: b batch, s sequence, d model width, h query heads, g key-value heads, e width of a head, f hidden
width, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, d: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return x_bsd * torch.rsqrt(x_bsd.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Tables of cosines and sines for every position."""

    def __init__(self, e: int, base: float = 10000.0) -> None:
        super().__init__()
        self.e, self.base = e, base
        self.register_buffer("frequency", torch.empty(e // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """1 / base^(2i / e); the buffer is not saved, so a model on meta must be able to compute it again."""
        self.frequency: Tensor
        exponent = torch.arange(0, self.e, 2, device=self.frequency.device) / self.e
        with torch.no_grad():
            self.frequency.copy_(1.0 / self.base**exponent)

    def forward(self, s: int) -> tuple[Tensor, Tensor]:
        position_s = torch.arange(s, device=self.frequency.device)
        angle_se = torch.outer(position_s, self.frequency).repeat(1, 2)
        return angle_se.cos(), angle_se.sin()


def rotate(x_bhse: Tensor, cos_se: Tensor, sin_se: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) by the position's angle; tables of a wider dtype do not widen them."""
    first, second = x_bhse.chunk(2, dim=-1)
    return x_bhse * cos_se.to(x_bhse.dtype) + torch.cat((-second, first), dim=-1) * sin_se.to(x_bhse.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key-value head."""

    def __init__(self, d: int, h: int, g: int, e: int) -> None:
        super().__init__()
        self.h, self.g, self.e = h, g, e
        self.q = nn.Linear(d, h * e, bias=False)
        self.k = nn.Linear(d, g * e, bias=False)
        self.v = nn.Linear(d, g * e, bias=False)
        self.out = nn.Linear(h * e, d, bias=False)

    def forward(self, x_bsd: Tensor, cos_se: Tensor, sin_se: Tensor) -> Tensor:
        b, s, _ = x_bsd.shape
        q_bhse = rotate(self.q(x_bsd).view(b, s, self.h, self.e).transpose(1, 2), cos_se, sin_se)
        k_bgse = rotate(self.k(x_bsd).view(b, s, self.g, self.e).transpose(1, 2), cos_se, sin_se)
        v_bgse = self.v(x_bsd).view(b, s, self.g, self.e).transpose(1, 2)
        y_bhse = F.scaled_dot_product_attention(q_bhse, k_bgse, v_bgse, is_causal=True, enable_gqa=True)
        y_bsd: Tensor = self.out(y_bhse.transpose(1, 2).reshape(b, s, self.h * self.e))
        return y_bsd


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, f, bias=False)
        self.up = nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x_bsd: Tensor) -> Tensor:
        y_bsd: Tensor = self.down(F.silu(self.gate(x_bsd)) * self.up(x_bsd))
        return y_bsd


class Block(nn.Module):
    """Attention and perceptron, each behind a norm and beside a residual."""

    def __init__(self, d: int, h: int, g: int, e: int, f: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = RMSNorm(d)
        self.attn = Attention(d, h, g, e)
        self.norm2 = RMSNorm(d)
        self.mlp = MLP(d, f)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_bsd: Tensor, cos_se: Tensor, sin_se: Tensor) -> Tensor:
        x_bsd = x_bsd + self.drop(self.attn(self.norm1(x_bsd), cos_se, sin_se))
        y_bsd: Tensor = self.mlp(self.norm2(x_bsd))
        return x_bsd + y_bsd


class Llama(nn.Module):
    """The whole model; head and embedding are separate."""

    def __init__(self, v: int, d: int, h: int, g: int, e: int, f: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, d)
        self.rotary = Rotary(e)
        self.blocks = nn.ModuleList(Block(d, h, g, e, f, dropout) for _ in range(layers))
        self.norm = RMSNorm(d)
        self.head = nn.Linear(d, v, bias=False)

    def forward(self, ids_bs: Tensor, labels_bs: Tensor) -> Tensor:
        x_bsd = self.tokens(ids_bs)
        cos_se, sin_se = self.rotary(ids_bs.shape[1])
        for block in self.blocks:
            x_bsd = block(x_bsd, cos_se, sin_se)
        logits_bsv = self.head(self.norm(x_bsd))
        return F.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten())


def build(
    b: int, s: int, v: int, d: int, h: int, g: int, e: int, f: int, layers: int, dropout: float = 0.1
) -> tuple[Llama, tuple[Tensor, ...]]:
    """A model and a batch of the given sizes; some labels are left out."""
    rng = torch.Generator().manual_seed(0)
    model = Llama(v, d, h, g, e, f, layers, dropout)
    ids = torch.randint(v, (b, s + 1), generator=rng)
    labels = ids[:, 1:].clone()
    labels[-1, s // 3 :] = -100
    return model, (ids[:, :-1].contiguous(), labels)


def tiny() -> tuple[Llama, tuple[Tensor, ...]]:
    """6 query heads on 2 key-value heads; odd sizes, all different."""
    return build(b=5, s=7, v=37, d=15, h=6, g=2, e=4, f=23, layers=2)


def divisible() -> tuple[Llama, tuple[Tensor, ...]]:
    """Batch, heads, key-value heads, widths and vocabulary are multiples of 12."""
    return build(b=12, s=8, v=48, d=36, h=24, g=12, e=2, f=60, layers=2)


def llama3_8b(layers: int = 32, b: int = 1, s: int = 4096) -> tuple[Llama, tuple[Tensor, ...]]:
    """The published shape of Llama 3 8B, on meta."""
    with torch.device("meta"):
        model = Llama(v=128256, d=4096, h=32, g=8, e=128, f=14336, layers=layers, dropout=0.0)
    ids = torch.zeros(b, s, dtype=torch.int64, device="meta")
    return model, (ids, ids)
