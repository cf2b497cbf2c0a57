"""T5: an encoder and a decoder with relative positions as a bias of the scores, RMS norms, no other biases.

In: token ids of a text and of its answer.  Out: the mean cross entropy of the answer.  Next: `awkward.py`.

Shapes in names: b batch, s text, t answer, q and k places of queries and of keys, d model width, h heads, e width of a
head, f hidden width, v vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NEAR, FAR = 8, 20  # buckets of distances, and the distance from which on all are one


class Positions(nn.Module):
    """A learned number for every head and bucket of distances: single steps near by, logarithmic ones further off."""

    def __init__(self, heads: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.bias = nn.Embedding(NEAR, heads)

    def forward(self, q: int, k: int) -> Tensor:
        """Of shape 1 h q k; what lies ahead is masked where the order counts."""
        device = self.bias.weight.device
        ahead_qk = torch.arange(k, device=device)[None, :] - torch.arange(q, device=device)[:, None]
        bias_1hqk: Tensor = self.bias(self.bucket(ahead_qk)).permute(2, 0, 1)[None]
        return bias_1hqk.masked_fill(ahead_qk > 0, float("-inf")) if self.causal else bias_1hqk

    def bucket(self, ahead_qk: Tensor) -> Tensor:
        """Half of the buckets are for what lies ahead, if anything may."""
        buckets = NEAR if self.causal else NEAR // 2
        far_qk = (-ahead_qk).clamp(min=0) if self.causal else ahead_qk.abs()
        exact = buckets // 2
        steps_qk = (far_qk.clamp(min=1) / exact).log() / math.log(FAR / exact) * (buckets - exact)
        near_qk = torch.where(far_qk < exact, far_qk, (exact + steps_qk.long()).clamp(max=buckets - 1))
        return near_qk if self.causal else near_qk + buckets * (ahead_qk > 0)


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return F.rms_norm(x_bsd, x_bsd.shape[-1:], self.weight, 1e-6)


class Attention(nn.Module):
    """Queries of one sequence, keys and values of the same or of another; scores are not scaled."""

    def __init__(self, d: int, heads: int, e: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(d, heads * e, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * e, d, bias=False)

    def split(self, x_bsd: Tensor) -> Tensor:
        b, s, _ = x_bsd.shape
        return x_bsd.view(b, s, self.heads, -1).transpose(1, 2)

    def forward(self, x_bqd: Tensor, y_bkd: Tensor, bias_1hqk: Tensor | None) -> Tensor:
        q_bhqe, k_bhke, v_bhke = (
            self.split(self.query(x_bqd)),
            self.split(self.key(y_bkd)),
            self.split(self.value(y_bkd)),
        )
        dropout = self.dropout if self.training else 0.0
        y_bhqe = F.scaled_dot_product_attention(
            q_bhqe, k_bhke, v_bhke, attn_mask=bias_1hqk, dropout_p=dropout, scale=1.0
        )
        out_bqd: Tensor = self.out(y_bhqe.transpose(1, 2).flatten(2))
        return out_bqd


class Block(nn.Module):
    """Attention, attention to the text in a decoder, and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, d: int, heads: int, e: int, f: int, dropout: float, crossed: bool) -> None:
        super().__init__()
        self.norm1, self.attn = RMSNorm(d), Attention(d, heads, e, dropout)
        if crossed:
            self.norm2, self.cross = RMSNorm(d), Attention(d, heads, e, dropout)
        self.norm3, self.up, self.down = RMSNorm(d), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_bqd: Tensor, bias_1hqq: Tensor, text_bsd: Tensor | None = None) -> Tensor:
        n_bqd = self.norm1(x_bqd)
        x_bqd = x_bqd + self.drop(self.attn(n_bqd, n_bqd, bias_1hqq))
        if text_bsd is not None:
            x_bqd = x_bqd + self.drop(self.cross(self.norm2(x_bqd), text_bsd, None))
        h_bqf = self.drop(F.relu(self.up(self.norm3(x_bqd))))
        y_bqd: Tensor = x_bqd + self.drop(self.down(h_bqf))
        return y_bqd


class Stack(nn.Module):
    """An encoder, or a decoder; all blocks share the bias of positions."""

    def __init__(self, d: int, heads: int, e: int, f: int, layers: int, dropout: float, decodes: bool) -> None:
        super().__init__()
        self.positions = Positions(heads, decodes)
        self.blocks = nn.ModuleList(Block(d, heads, e, f, dropout, decodes) for _ in range(layers))
        self.norm, self.drop = RMSNorm(d), nn.Dropout(dropout)

    def forward(self, x_bqd: Tensor, text_bsd: Tensor | None = None) -> Tensor:
        q = x_bqd.shape[1]
        bias_1hqq = self.positions(q, q)
        x_bqd = self.drop(x_bqd)
        for block in self.blocks:
            x_bqd = block(x_bqd, bias_1hqq, text_bsd)
        y_bqd: Tensor = self.drop(self.norm(x_bqd))
        return y_bqd


class T5(nn.Module):
    """The whole model; text, answer and head share one table."""

    def __init__(self, v: int, d: int, heads: int, e: int, f: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(v, d)
        self.encoder = Stack(d, heads, e, f, layers, dropout, decodes=False)
        self.decoder = Stack(d, heads, e, f, layers, dropout, decodes=True)
        self.head = nn.Linear(d, v, bias=False)
        self.reset_parameters()
        self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Numbers near 1, which the head scales down."""
        nn.init.normal_(self.tokens.weight)

    def forward(self, text_bs: Tensor, answer_bt: Tensor) -> Tensor:
        before_bt = torch.zeros_like(answer_bt)  # what the decoder sees: the answer up to the word that is asked for
        before_bt[:, 1:] = answer_bt[:, :-1].clamp(min=0)
        text_bsd = self.encoder(self.tokens(text_bs))
        y_btd = self.decoder(self.tokens(before_bt), text_bsd)
        logits_btv = self.head(y_btd * y_btd.shape[-1] ** -0.5)
        return F.cross_entropy(logits_btv.flatten(0, 1), answer_bt.flatten())


def build(
    b: int, s: int, t: int, v: int, d: int, heads: int, e: int, f: int, layers: int, dropout: float = 0.1
) -> tuple[T5, tuple[Tensor, ...]]:
    """A model and a batch of the given sizes; the first answer is shorter."""
    rng = torch.Generator().manual_seed(0)
    model = T5(v, d, heads, e, f, layers, dropout)
    text, answer = torch.randint(v, (b, s), generator=rng), torch.randint(v, (b, t), generator=rng)
    answer[0, t // 2 :] = -100
    return model, (text, answer)


def tiny() -> tuple[T5, tuple[Tensor, ...]]:
    """Odd sizes, all different; heads are narrower than the model divided by their number."""
    return build(b=7, s=13, t=9, v=37, d=15, heads=5, e=4, f=23, layers=2)


def divisible() -> tuple[T5, tuple[Tensor, ...]]:
    """Batch, heads, widths and vocabulary are multiples of 12."""
    return build(b=12, s=10, t=8, v=48, d=36, heads=12, e=4, f=60, layers=2)
