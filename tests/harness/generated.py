"""Small models drawn at random from the ops of the rule table: residuals, ties, views, joins.

In: a list of moves, as hypothesis draws them.  Out: an `nn.Module` and a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

B, S, V = 4, 6, 11  # batch, sequence, vocabulary
WIDTHS = (6, 12)


@dataclass(frozen=True)
class Move:
    """One op: its name, which earlier value it joins (counted from the newest), a width, whether a weight is shared."""

    name: str
    other: int = 0
    width: int = 6
    shared: bool = False


NAMES = (
    *(
        "linear",
        "linear",
        "linear",
        "norm",
        "gelu",
        "tanh",
        "silu",
        "relu",
        "dropout",
        "residual",
        "residual",
        "product",
    ),
    *("softmax", "scores", "gate", "join", "halves", "heads", "scale", "centre", "flip", "recent", "stack"),
)


def moves() -> st.SearchStrategy[list[Move]]:
    one = st.builds(Move, st.sampled_from(NAMES), st.integers(0, 3), st.sampled_from(WIDTHS), st.booleans())
    return st.lists(one, min_size=3, max_size=12)


class Generated(nn.Module):
    """Runs the moves over an embedded batch; ends in a cross entropy or a mean square."""

    def __init__(self, plan: list[Move], classify: bool, tied: bool) -> None:
        super().__init__()
        self.plan, self.classify = plan, classify
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, WIDTHS[0])
        self.weights = nn.ModuleDict()
        width, widths = WIDTHS[0], [WIDTHS[0]]
        for i, move in enumerate(plan):
            width = self.grow(i, move, width, widths)
            widths.append(width)
        self.head = nn.Linear(width, V, bias=False)
        if tied and width == WIDTHS[0]:
            self.head.weight = self.embed.weight

    def grow(self, i: int, move: Move, width: int, widths: list[int]) -> int:
        """Make the weights of a move; the width it leaves."""
        if move.name == "linear":
            key = f"{width}_{move.width}" if move.shared else f"at{i}"
            if key not in self.weights:
                self.weights[key] = nn.Linear(width, move.width, bias=i % 2 == 0)
            return move.width
        if move.name == "norm":
            self.weights[f"at{i}"] = nn.LayerNorm(width)
        if move.name == "scale":
            self.weights[f"at{i}"] = nn.Linear(width, 1, bias=False)
        if move.name == "join":
            return width + widths[-1 - min(move.other, len(widths) - 1)]
        return width // 2 if move.name in ("gate", "halves") and width % 2 == 0 else width

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        past = [x]
        for i, move in enumerate(self.plan):
            x = self.apply_move(i, move, x, past)
            past.append(x)
        logits = self.head(x)
        if self.classify:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (logits - logits.mean(-1, keepdim=True)).square().mean()

    def apply_move(self, i: int, move: Move, x: Tensor, past: list[Tensor]) -> Tensor:
        other = past[-1 - min(move.other, len(past) - 1)]
        same = other.shape == x.shape
        match move.name:
            case "linear":
                key = f"{x.shape[-1]}_{move.width}" if move.shared else f"at{i}"
                return self.weights[key](x)
            case "norm":
                return self.weights[f"at{i}"](x)
            case "gelu" | "tanh" | "silu" | "relu":
                return getattr(F, move.name)(x)
            case "dropout":
                return F.dropout(x, 0.3, self.training)
            case "residual":
                return x + other if same else x
            case "product":
                return x * other if same else x * x
            case "softmax":
                return x.softmax(-1 if move.shared else 1)
            case "scores":
                return (x @ x.transpose(1, 2)).softmax(-1) @ x
            case "gate":
                if x.shape[-1] % 2:
                    return x
                a, b = x.chunk(2, -1)
                return a * b.sigmoid()
            case "halves":
                return x[..., x.shape[-1] // 2 :] if x.shape[-1] % 2 == 0 else x
            case "join":
                return torch.cat([x, other], -1)
            case "heads":
                h = 3 if x.shape[-1] % 3 == 0 else 1
                q = x.view(B, S, h, -1).transpose(1, 2)
                y = F.scaled_dot_product_attention(q, q, q, is_causal=move.shared)
                return y.transpose(1, 2).reshape(B, S, -1)
            case "scale":
                return x * self.weights[f"at{i}"].weight[0]
            case "centre":
                # not the whole mean: a bias before it would get a gradient of pure rounding
                return x - 0.5 * x.mean(1, keepdim=True)
            case "flip":
                return x.transpose(0, 1).contiguous().transpose(0, 1).flip(1)
            case "recent":
                return torch.cat([x[:, :1], x[:, :-1]], 1)
            case "stack":
                return torch.stack([x, x * 0.5], 1).sum(1)
        raise AssertionError(move.name)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (B, S), generator=generator)
    labels = torch.randint(V, (B, S), generator=generator)
    labels[0, :3] = -100
    return ids, labels
