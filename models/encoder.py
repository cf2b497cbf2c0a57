"""A BERT-like encoder: token, position and segment embeddings, post-norm blocks, a padding mask, masked words.

In: token ids, segments, which places are real, labels.  Out: the mean cross entropy of the masked words.
Next: `t5.py`.

Shapes in names: b batch, s sequence, d model width, h heads, e width of a head, f hidden width, v vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a norm behind its residual."""

    def __init__(self, d: int, heads: int, f: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x_bsd: Tensor, real_b11s: Tensor) -> Tensor:
        b, s, d = x_bsd.shape
        dropout = self.dropout if self.training else 0.0
        q_bhse, k_bhse, v_bhse = (
            layer(x_bsd).view(b, s, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse, attn_mask=real_b11s, dropout_p=dropout)
        y_bsd = F.dropout(self.out(y_bhse.transpose(1, 2).reshape(b, s, d)), self.dropout, self.training)
        x_bsd = self.norm1(x_bsd + y_bsd)
        h_bsd = F.dropout(self.down(F.gelu(self.up(x_bsd))), self.dropout, self.training)
        out_bsd: Tensor = self.norm2(x_bsd + h_bsd)
        return out_bsd


class Encoder(nn.Module):
    """The whole model; the head shares the embedding's weight and has a bias of its own."""

    def __init__(self, v: int, s: int, d: int, heads: int, f: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions, self.segments = (
            nn.Embedding(v, d, padding_idx=0),
            nn.Embedding(s, d),
            nn.Embedding(2, d),
        )
        self.norm, self.drop = nn.LayerNorm(d), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d, heads, f, dropout) for _ in range(layers))
        self.transform, self.after = nn.Linear(d, d), nn.LayerNorm(d)
        self.head = nn.Linear(d, v)
        self.reset_parameters()
        self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Small embeddings; that of padding is zero."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        with torch.no_grad():
            self.tokens.weight[0] = 0.0

    def forward(self, ids_bs: Tensor, segments_bs: Tensor, real_bs: Tensor, labels_bs: Tensor) -> Tensor:
        s = ids_bs.shape[1]
        places_s = torch.arange(s, device=ids_bs.device)
        x_bsd = self.tokens(ids_bs) + self.positions(places_s) + self.segments(segments_bs)
        x_bsd = self.drop(self.norm(x_bsd))
        for block in self.blocks:
            x_bsd = block(x_bsd, real_bs[:, None, None, :])
        logits_bsv = self.head(self.after(F.gelu(self.transform(x_bsd))))
        return F.cross_entropy(logits_bsv.transpose(1, 2), labels_bs)


def build(
    b: int, s: int, v: int, d: int, heads: int, f: int, layers: int, dropout: float = 0.1
) -> tuple[Encoder, dict[str, Tensor]]:
    """A model and a batch; later sequences are shorter, a third of the words is asked for."""
    rng = torch.Generator().manual_seed(0)
    model = Encoder(v, s, d, heads, f, layers, dropout)
    ids = torch.randint(1, v, (b, s), generator=rng)
    real = torch.arange(s) < s - torch.arange(b)[:, None] % (s // 2)
    asked = (torch.rand(b, s, generator=rng) < 0.4) & real
    batch = {
        "ids_bs": ids.masked_fill(~real, 0),
        "segments_bs": torch.randint(2, (b, s), generator=rng),
        "real_bs": real,
        "labels_bs": ids.masked_fill(~asked, -100),
    }
    return model, batch


def tiny() -> tuple[Encoder, dict[str, Tensor]]:
    """Odd sizes, all different."""
    return build(b=7, s=9, v=37, d=15, heads=5, f=23, layers=2)


def divisible() -> tuple[Encoder, dict[str, Tensor]]:
    """Batch, heads, widths and vocabulary are multiples of 12."""
    return build(b=12, s=8, v=48, d=36, heads=12, f=60, layers=2)
