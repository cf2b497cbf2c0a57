"""A decoder whose every second block has experts in place of its perceptron: token choice, with a balancing loss.

In: token ids and labels.  Out: the mean cross entropy of the next token, and a share of the balancing losses.
Next: `../autopar/experts.py`, the functions that experts are made of.

Shapes in names: b batch, s sequence, d model width, f width of an expert, e experts, k experts of a token, t tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.experts import grouped_mm, slots_to_experts, to_experts, to_tokens
from autopar.models.gpt import Attention, Block


class Experts(nn.Module):
    """k of e gated networks for every token."""

    def __init__(self, d: int, f: int, e: int, k: int) -> None:
        super().__init__()
        self.e, self.k = e, k
        self.router = nn.Linear(d, e, bias=False)
        self.up = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.05)
        nn.init.normal_(self.down, std=0.05)

    def forward(self, x_td: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the loss that is least when all experts get as many."""
        chance_te = self.router(x_td).softmax(-1)
        weight_tk, index_tk = chance_te.topk(self.k, dim=-1)
        weight_tk = weight_tk / weight_tk.sum(-1, keepdim=True)
        gate, up = grouped_mm(to_experts(x_td, index_tk, self.e), self.up, index_tk).chunk(2, dim=-1)
        rows = grouped_mm(F.silu(gate) * up, self.down, index_tk)
        out_td = to_tokens(rows * slots_to_experts(weight_tk, index_tk, self.e), index_tk)
        share_e = F.one_hot(index_tk, self.e).sum(1).to(x_td.dtype).mean(0)
        return out_td, self.e * (share_e * chance_te.mean(0)).sum()


class ExpertBlock(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, d: int, heads: int, f: int, e: int, k: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.attn = Attention(d, heads, dropout)
        self.norm2 = nn.LayerNorm(d)
        self.experts = Experts(d, f, e, k)

    def forward(self, x_bsd: Tensor) -> tuple[Tensor, Tensor]:
        x_bsd = x_bsd + self.attn(self.norm1(x_bsd))
        y_td, balance = self.experts(self.norm2(x_bsd).flatten(0, 1))
        return x_bsd + y_td.view_as(x_bsd), balance


class MoE(nn.Module):
    """The whole model."""

    def __init__(self, v: int, s: int, d: int, heads: int, f: int, e: int, k: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, d)
        self.positions = nn.Embedding(s, d)
        self.blocks = nn.ModuleList(
            ExpertBlock(d, heads, f, e, k, dropout) if i % 2 else Block(d, heads, f, dropout) for i in range(layers)
        )
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, v, bias=False)

    def forward(self, ids_bs: Tensor, labels_bs: Tensor) -> Tensor:
        x_bsd = self.tokens(ids_bs) + self.positions(torch.arange(ids_bs.shape[1], device=ids_bs.device))
        balance = torch.zeros((), dtype=x_bsd.dtype, device=x_bsd.device)
        for block in self.blocks:
            if isinstance(block, ExpertBlock):
                x_bsd, more = block(x_bsd)
                balance = balance + more
            else:
                x_bsd = block(x_bsd)
        logits_bsv = self.head(self.norm(x_bsd))
        return F.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten()) + 0.01 * balance


def build(
    b: int, s: int, v: int, d: int, heads: int, f: int, e: int, k: int, layers: int, dropout: float = 0.1
) -> tuple[MoE, tuple[Tensor, ...]]:
    """A model and a batch of the given sizes."""
    rng = torch.Generator().manual_seed(0)
    model = MoE(v, s, d, heads, f, e, k, layers, dropout)
    ids = torch.randint(v, (b, s + 1), generator=rng)
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def tiny() -> tuple[MoE, tuple[Tensor, ...]]:
    """Odd sizes, of which 2, 3 and 4 devices each get some."""
    return build(b=7, s=5, v=37, d=33, heads=11, f=13, e=8, k=2, layers=2)


def divisible() -> tuple[MoE, tuple[Tensor, ...]]:
    """Batch, heads, widths, experts and vocabulary are multiples of 12."""
    return build(b=12, s=4, v=48, d=36, heads=12, f=24, e=12, k=2, layers=2)
