"""A GPT whose attention is written out, in 16 bits, as published formulas of activation memory assume it.

Scores, softmax and dropout of attention are ops of their own, and a dropout keeps its mask, one byte an element. (Ours
draws again in backward and keeps none.)

Shapes in names: b batch, s sequence, h width, a heads, e width of a head, v vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

RECOMPUTED = ("nothing", "attention", "layer")


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout of which backward needs the mask alone."""
    kept = torch.rand(x.shape, device=x.device) >= p
    return x * kept * (1 / (1 - p))


class Layer(nn.Module):
    """Attention and a perceptron of four times the width; recomputes nothing, or the core of attention."""

    def __init__(self, h: int, a: int, p: float, selective: bool) -> None:
        super().__init__()
        self.a, self.p, self.selective = a, p, selective
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.out = nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def core(self, q_bsae: Tensor, k_bsae: Tensor, v_bsae: Tensor) -> Tensor:
        """Scores, softmax, dropout, and their product with the values."""
        q_base, k_base, v_base = (t.transpose(1, 2) for t in (q_bsae, k_bsae, v_bsae))
        scores_bass = q_base @ k_base.transpose(2, 3) * (1 / math.sqrt(q_base.shape[3]))
        y_base = dropout(scores_bass.softmax(-1), self.p) @ v_base
        return y_base.transpose(1, 2).flatten(2)

    def forward(self, x_bsh: Tensor) -> Tensor:
        b, s, _ = x_bsh.shape
        n_bsh = self.norm1(x_bsh)
        heads = [layer(n_bsh).view(b, s, self.a, -1) for layer in (self.q, self.k, self.v)]
        y_bsh = checkpoint(self.core, *heads, use_reentrant=False) if self.selective else self.core(*heads)
        x_bsh = x_bsh + dropout(self.out(y_bsh), self.p)
        return x_bsh + dropout(self.down(F.gelu(self.up(self.norm2(x_bsh)))), self.p)


class GPT(nn.Module):
    """Embedding, layers, norm, and a mean in place of a loss: what is outside the layers is the same for any number."""

    def __init__(self, v: int, h: int, a: int, layers: int, recomputed: str, p: float = 0.1) -> None:
        super().__init__()
        self.whole = recomputed == "layer"
        self.tokens = nn.Embedding(v, h)
        self.layers = nn.ModuleList(Layer(h, a, p, recomputed == "attention") for _ in range(layers))
        self.norm = nn.LayerNorm(h)

    def forward(self, ids_bs: Tensor) -> Tensor:
        x_bsh = self.tokens(ids_bs)
        for layer in self.layers:
            x_bsh = checkpoint(layer, x_bsh, use_reentrant=False) if self.whole else layer(x_bsh)
        return self.norm(x_bsh).float().mean()


def build(b: int, s: int, v: int, h: int, a: int, layers: int, recomputed: str = "nothing") -> tuple[GPT, Tensor]:
    """A model on meta and a batch."""
    with torch.device("meta"):
        model = GPT(v, h, a, layers, recomputed).to(torch.bfloat16)
    return model, torch.zeros(b, s, dtype=torch.int64, device="meta")
