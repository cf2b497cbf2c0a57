"""The loss as a sum over labels, random numbers, attention.

In: nothing.  Out: rows of the rule table.  Next: `table.py`.
"""

import torch
from torch import fx, ops

import autopar.attention
import autopar.random  # noqa: F401  (they define the ops)
from autopar.rules import bind, local
from autopar.rules.core import Instance, args_of, computed, instantiate, operands, rule

aten = ops.aten

MEAN = 1  # torch's number for reduction="mean"


def _rows(node: fx.Node, operand: int) -> str:
    """Letters of the dims in front of the classes."""
    return "n" if operands(node)[operand].meta["val"].dim() == 2 else ""


@computed(aten.nll_loss_forward.default, "n v, n, v -> n, 1")
def nll(node: fx.Node) -> Instance:
    """Summed or by row; a mean is not a sum of parts and stays whole."""
    n, reduction = _rows(node, 0), args_of(node)[3]
    weighted = args_of(node)[2] is not None
    text = f"{n} v, {n}, v -> {n if reduction == 0 else ''}, "
    whole = "n v" if reduction == MEAN else "v" if weighted else ""
    kinds = {"v:1": "same"} | ({"n:1": "same"} if reduction == 0 else {})
    return instantiate(node, text, whole=whole, positional="v", local={"v": local.nll}, kinds=kinds)


@computed(aten.nll_loss_backward.default, "n, n v, n, v, 1 -> n v")
def nll_backward(node: fx.Node) -> Instance:
    n, reduction = _rows(node, 1), args_of(node)[4]
    weighted = args_of(node)[3] is not None
    text = f"{n if reduction == 0 else ''}, {n} v, {n}, v,  -> {n} v"
    whole = "n v" if reduction == MEAN else "v" if weighted else ""
    return instantiate(node, text, whole=whole, linear="0", positional="v", local={"v": local.nll_backward})


# --- random numbers: an element's draw depends on its place in the whole tensor ---------------------------------------

rule(torch.ops.autopar.dropout.default, "..., n -> ...", whole="n", linear="0", bind=bind.dropout)
rule(torch.ops.autopar.uniform.default, "n -> ...", whole="n", bind=bind.uniform)


# --- attention --------------------------------------------------------------------------------------------------------

NAMES = {"g": "heads", "r": "group", "q": "sequence", "e": "head", "f": "head"}


def _mask(node: fx.Node, position: int) -> str:
    """Letters of the mask, aligned from the right."""
    mask = args_of(node)[position]
    rank = 4 if mask is None else mask.meta["val"].dim()
    return " ".join(["b", "(g r)", "q", "k"][4 - rank :])


def _work(node: fx.Node, k: int, along_e: int, along_f: int) -> str:
    """Floating-point operations of so many products along the width of keys and of values, which may differ."""
    e, f = (args_of(node)[i].meta["val"].shape[3] for i in (k, k + 1))
    return f"{2 * (along_e + along_f * f / max(1, e))} b g r q k e"


def _groups(node: fx.Node, q: int, k: int) -> dict[str, int]:
    """Key heads and query heads per key head."""
    heads, groups = args_of(node)[q].meta["val"].shape[1], args_of(node)[k].meta["val"].shape[1]
    return {"g": groups, "r": heads // groups}


@computed(
    torch.ops.autopar.attention.default, "b (g r) q e, b g k e, b g k f -> b (g r) q f, b (g r) q", bind=bind.attention
)
def attention(node: fx.Node) -> Instance:
    text = f"b (g r) q e, b g k e, b g k f, {_mask(node, 3)}, n -> b (g r) q f, b (g r) q"
    sizes, flops = _groups(node, 0, 1), _work(node, 1, 1, 1)  # scores; their product with the values
    return instantiate(node, text, whole="k e f n", flops=flops, sizes=sizes, positional="q", names=NAMES)


@computed(torch.ops.autopar.attention_backward.default, "... -> b (g r) q e, b g k e, b g k f", bind=bind.attention)
def attention_backward(node: fx.Node) -> Instance:
    reads = f"b (g r) q f, b (g r) q e, b g k e, b g k f, b (g r) q f, b (g r) q, {_mask(node, 6)}, n"
    text = f"{reads} -> b (g r) q e, b g k e, b g k f"
    sizes, flops = _groups(node, 1, 2), _work(node, 2, 3, 2)  # scores again, dq, dk; their gradient, dv
    return instantiate(node, text, whole="k e f n", flops=flops, sizes=sizes, positional="q", names=NAMES)
