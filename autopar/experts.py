"""Expert layers: every token goes to a few of many small networks, and comes back.

In: tokens, and the experts that each of them chose.  Out: ops that can be cut over tokens, experts and widths.
Next: `rows.py`, how the rows lie; `rules/experts.py`; `adapters.py`, for the expert layers of transformers.

What an expert layer computes between sending tokens away and taking them back is one value for every pair of an expert
and a token that chose it: a sparse tensor [experts, tokens, width] of which k pairs a token are there. It is stored as
*rows*, [1, pairs, width], ordered by expert, then token, then slot. In a graph it has the sizes of the sparse tensor:
an op on it has letters for experts, tokens and width, and bringing rows from a cut over tokens to one over experts is
the all-to-all of expert parallelism.

    rows = to_experts(x, index, experts)  # x: [tokens, d], index: [tokens, k]
    rows = grouped_mm(rows, up, index)  # up: [experts, f, d]
    rows = grouped_mm(F.silu(rows), down, index)  # down: [experts, d, f]
    out = to_tokens(rows * slots_to_experts(weights, index, experts), index)  # weights: [tokens, k]

Torch alone runs this too: these are plain functions of tensors, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.rows import located, runs, tokens_in

ops = torch.ops.autopar


def to_experts(x: Tensor, index: Tensor, experts: int) -> Tensor:
    """Rows of x [tokens, width], one for each of the `experts` that a token chose; index [tokens, k], no one twice."""
    out: Tensor = ops.to_experts(x.unsqueeze(1), index, experts, [])
    return out


def slots_to_experts(x: Tensor, index: Tensor, experts: int) -> Tensor:
    """Rows of width 1 from a number for every choice: x [tokens, k]."""
    out: Tensor = ops.to_experts(x.unsqueeze(2), index, experts, [])
    return out


def to_tokens(rows: Tensor, index: Tensor) -> Tensor:
    """[tokens, width]: the sum of every token's rows."""
    out: Tensor = ops.to_tokens(rows, index, 1, [])
    return out.squeeze(1)


def grouped_mm(rows: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Rows times the transpose of their expert's weight [experts, out, in]."""
    out: Tensor = ops.grouped_mm(rows, weight, index, [])
    return out


def expert_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows that hold their expert's entry of x [experts, width]: a bias."""
    out: Tensor = ops.expert_rows(x, index, [])
    return out


# --- the ops: `piece` is the device's, see `rows.py` ------------------------------------------------------------------


def op(schema: str, fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function an op of its name; `fake` tells its result's sizes in a graph."""

    def define(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = f"autopar::{compute.__name__.removeprefix('_')}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd", compute)
        torch.library.register_fake(name, fake)
        return compute

    return define


@op(
    "(Tensor x, Tensor index, int experts, int[] piece) -> Tensor",
    fake=lambda x, index, experts, piece: x.new_empty(experts, x.shape[0], x.shape[2]),
)
def _to_experts(x: Tensor, index: Tensor, experts: int, piece: list[int]) -> Tensor:
    """[t, 1, d] or, with an entry for every slot, [t, k, d] -> [1, pairs, d]."""
    slots, _ = located(index, piece)
    return x.flatten(0, 1)[slots if x.shape[1] == index.shape[1] else slots // index.shape[1]].unsqueeze(0)


@op(
    "(Tensor rows, Tensor index, int slots, int[] piece) -> Tensor",
    fake=lambda rows, index, slots, piece: rows.new_empty(rows.shape[1], slots, rows.shape[2]),
)
def _to_tokens(rows: Tensor, index: Tensor, slots: int, piece: list[int]) -> Tensor:
    """[1, pairs, d] -> [t, slots, d]; one slot has the sum over those of a token."""
    where, _ = located(index, piece)
    tokens, k = tokens_in(piece, index.device).shape[0] if piece else index.shape[0], index.shape[1]
    out = rows.new_zeros(tokens * k, rows.shape[2]).index_copy_(0, where, rows[0]).view(tokens, k, rows.shape[2])
    return out if slots == k else out.sum(1, keepdim=True)


@op(
    "(Tensor rows, Tensor weight, Tensor index, int[] piece) -> Tensor",
    fake=lambda rows, weight, index, piece: rows.new_empty(*rows.shape[:2], weight.shape[1]),
)
def _grouped_mm(rows: Tensor, weight: Tensor, index: Tensor, piece: list[int]) -> Tensor:
    """[1, pairs, i], [experts, o, i] -> [1, pairs, o]."""
    out = rows.new_empty(1, rows.shape[1], weight.shape[1])
    for e, part in enumerate(runs(index, piece, weight.shape[0])):
        torch.mm(rows[0, part], weight[e].T, out=out[0, part])
    return out


@op(
    "(Tensor left, Tensor right, Tensor index, int experts, int[] piece) -> Tensor",
    fake=lambda left, right, index, experts, piece: left.new_empty(experts, left.shape[2], right.shape[2]),
)
def _grouped_outer(left: Tensor, right: Tensor, index: Tensor, experts: int, piece: list[int]) -> Tensor:
    """The sum over every expert's rows of left x right: [1, pairs, o], [1, pairs, i] -> [experts, o, i]."""
    parts = runs(index, piece, piece[1] if piece else experts)
    return torch.stack([left[0, part].T @ right[0, part] for part in parts])


@op(
    "(Tensor x, Tensor index, int[] piece) -> Tensor",
    fake=lambda x, index, piece: x.new_empty(x.shape[0], index.shape[0], x.shape[1]),
)
def _expert_rows(x: Tensor, index: Tensor, piece: list[int]) -> Tensor:
    """[experts, o] -> [1, pairs, o]."""
    return x[located(index, piece)[1]].unsqueeze(0)


@op(
    "(Tensor rows, Tensor index, int experts, int[] piece) -> Tensor",
    fake=lambda rows, index, experts, piece: rows.new_empty(experts, rows.shape[2]),
)
def _expert_sums(rows: Tensor, index: Tensor, experts: int, piece: list[int]) -> Tensor:
    """[1, pairs, o] -> [experts, o]."""
    parts = runs(index, piece, piece[1] if piece else experts)
    return torch.stack([rows[0, part].sum(0) for part in parts])


# --- gradients: each op's is another one of them ----------------------------------------------------------------------


def gradient(op: str, backward: Callable[..., tuple[Any, ...]]) -> None:
    """Give an op its gradient: `backward(grad, *inputs)` for those inputs that are tensors."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.others = len(inputs)

    def run(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = backward(grad, *ctx.saved_tensors)
        return (*found, *(None,) * (ctx.others - len(found)))

    torch.library.register_autograd(f"autopar::{op}", run, setup_context=setup)


gradient("to_experts", lambda g, x, index: (ops.to_tokens(g, index, x.shape[1], []),))
gradient("to_tokens", lambda g, rows, index: (ops.to_experts(g, index, rows.shape[0], []),))
gradient("expert_rows", lambda g, x, index: (ops.expert_sums(g, index, x.shape[0], []),))
gradient(
    "grouped_mm",
    lambda g, rows, weight, index: (
        ops.grouped_mm(g, weight.transpose(1, 2), index, []),
        ops.grouped_outer(g, rows, index, weight.shape[0], []),
    ),
)
