"""A GPT as Megatron-LM of 2020 to 2022 has it, for published step times: what its kernels fuse is one op here.

Scaling is part of the queries, and no mask is added: Megatron's softmax does both in one pass. Dropout is one op.

Shapes in names: b batch, s sequence, h width, a heads, e width of a head, v vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Attention and a perceptron of four times the width. `recomputed`: "nothing", "attention" or "layer"."""

    def __init__(self, h: int, a: int, recomputed: str, p: float = 0.1) -> None:
        super().__init__()
        self.a, self.p, self.recomputed = a, p, recomputed
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.out = nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def core(self, q_bsae: Tensor, k_bsae: Tensor, v_bsae: Tensor) -> Tensor:
        q_base, k_base, v_base = (t.transpose(1, 2) for t in (q_bsae, k_bsae, v_bsae))
        scores_bass = q_base * (1 / math.sqrt(q_base.shape[3])) @ k_base.transpose(2, 3)
        y_base = F.dropout(scores_bass.softmax(-1), self.p) @ v_base
        return y_base.transpose(1, 2).flatten(2)

    def block(self, x_bsh: Tensor) -> Tensor:
        b, s, _ = x_bsh.shape
        n_bsh = self.norm1(x_bsh)
        heads = [layer(n_bsh).view(b, s, self.a, -1) for layer in (self.q, self.k, self.v)]
        selective = self.recomputed == "attention"
        y_bsh = checkpoint(self.core, *heads, use_reentrant=False) if selective else self.core(*heads)
        x_bsh = x_bsh + F.dropout(self.out(y_bsh), self.p)
        return x_bsh + F.dropout(self.down(F.gelu(self.up(self.norm2(x_bsh)))), self.p)

    def forward(self, x_bsh: Tensor) -> Tensor:
        if self.recomputed != "layer":
            return self.block(x_bsh)
        y_bsh: Tensor = checkpoint(self.block, x_bsh, use_reentrant=False)
        return y_bsh


class GPT(nn.Module):
    """Tied embedding and head, learned positions, the loss."""

    def __init__(self, v: int, s: int, h: int, a: int, layers: int, recomputed: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(v, h), nn.Embedding(s, h)
        self.layers = nn.ModuleList(Layer(h, a, recomputed) for _ in range(layers))
        self.norm = nn.LayerNorm(h)

    def forward(self, ids_bs: Tensor, labels_bs: Tensor) -> Tensor:
        x_bsh = self.tokens(ids_bs) + self.positions(torch.arange(ids_bs.shape[1], device=ids_bs.device))
        for layer in self.layers:
            x_bsh = layer(x_bsh)
        logits_bsv = F.linear(self.norm(x_bsh), self.tokens.weight)
        return F.cross_entropy(logits_bsv.flatten(0, 1).float(), labels_bs.flatten())


def build(b: int, s: int, v: int, h: int, a: int, layers: int, recomputed: str) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A model on meta and a batch."""
    with torch.device("meta"):
        model = GPT(v, s, h, a, layers, recomputed)
        ids = torch.zeros(b, s, dtype=torch.int64)
    return model, (ids, ids.clone())
