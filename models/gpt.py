"""GPT-2: learned positions, pre-norm blocks, tied embedding and head, dropout everywhere.

In: token ids and labels.  Out: the mean cross entropy of the next token.  Next: `llama.py`.

Shapes in names: b batch, s sequence, d model width, h heads, e width of a head, f hidden width, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention with a fused query-key-value projection."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x_bsd: Tensor) -> Tensor:
        b, s, d = x_bsd.shape
        q_bsd, k_bsd, v_bsd = self.qkv(x_bsd).chunk(3, dim=-1)
        q_bhse, k_bhse, v_bhse = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q_bsd, k_bsd, v_bsd))
        dropout = self.dropout if self.training else 0.0
        y_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse, dropout_p=dropout, is_causal=True)
        y_bsd: Tensor = self.out(y_bhse.transpose(1, 2).reshape(b, s, d))
        return F.dropout(y_bsd, self.dropout, self.training)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, d: int, heads: int, f: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.attn = Attention(d, heads, dropout)
        self.norm2 = nn.LayerNorm(d)
        self.up = nn.Linear(d, f)
        self.down = nn.Linear(f, d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attn(self.norm1(x_bsd))
        h_bsf = F.gelu(self.up(self.norm2(x_bsd)), approximate="tanh")
        y_bsd: Tensor = self.drop(self.down(h_bsf))
        return x_bsd + y_bsd


class GPT(nn.Module):
    """The whole model; `head.weight` is `tokens.weight`."""

    def __init__(self, v: int, s: int, d: int, heads: int, f: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, d)
        self.positions = nn.Embedding(s, d)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d, heads, f, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, v, bias=False)
        self.reset_parameters()
        self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Small embeddings, so that a fresh model's loss is near log v."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids_bs: Tensor, labels_bs: Tensor) -> Tensor:
        s = ids_bs.shape[1]
        x_bsd = self.drop(self.tokens(ids_bs) + self.positions(torch.arange(s, device=ids_bs.device)))
        for block in self.blocks:
            x_bsd = block(x_bsd)
        logits_bsv = self.head(self.norm(x_bsd))
        return F.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten())


def build(
    b: int, s: int, v: int, d: int, heads: int, f: int, layers: int, dropout: float = 0.1
) -> tuple[GPT, tuple[Tensor, ...]]:
    """A model and a batch of the given sizes; some labels are left out."""
    rng = torch.Generator().manual_seed(0)
    model = GPT(v, s, d, heads, f, layers, dropout)
    ids = torch.randint(v, (b, s + 1), generator=rng)
    labels = ids[:, 1:].clone()
    labels[0, : s // 2] = -100
    return model, (ids[:, :-1].contiguous(), labels)


def tiny() -> tuple[GPT, tuple[Tensor, ...]]:
    """Odd sizes, all different, of which 2, 3 and 4 devices each get some."""
    return build(b=7, s=13, v=37, d=33, heads=11, f=23, layers=2)


def divisible() -> tuple[GPT, tuple[Tensor, ...]]:
    """Batch, heads, widths and vocabulary are multiples of 12."""
    return build(b=12, s=8, v=48, d=36, heads=12, f=60, layers=2)


def gpt2_small() -> tuple[GPT, tuple[Tensor, ...]]:
    """The published GPT-2 of 124 M parameters, with a batch of 4 sequences of 512."""
    return build(b=4, s=512, v=50257, d=768, heads=12, f=3072, layers=12)
