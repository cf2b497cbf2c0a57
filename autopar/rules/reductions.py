"""Sums, extremes, softmax and normalisation: ops that look along a dim.

In: nothing.  Out: rows of the rule table.  Next: `order.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx, ops

from autopar.rules import local
from autopar.rules.core import Instance, args_of, computed, instantiate, operands, rule

aten = ops.aten


def along(node: fx.Node, dims: Any, keepdim: bool) -> str:
    """The rule of a reduction: `a b c -> a 1 c` or `a b c -> a c`."""
    rank = operands(node)[0].meta["val"].dim()
    if dims is None or dims == []:
        dims = list(range(rank))
    gone = {d % max(rank, 1) for d in (dims if isinstance(dims, Sequence) else [dims])}
    letters = [f"d{i}" for i in range(rank)]
    kept = [("1" if keepdim else "") if i in gone else letters[i] for i in range(rank)]
    return " ".join(letters) + " -> " + " ".join(k for k in kept if k)


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument by position or keyword."""
    return args_of(node)[position] if position < len(args_of(node)) else node.kwargs.get(name, default)


@computed([aten.sum.default, aten.sum.dim_IntList], "a b -> a")
def sums(node: fx.Node) -> Instance:
    dims = None if node.target is aten.sum.default else argument(node, 1, "dim", None)
    keep = False if node.target is aten.sum.default else argument(node, 2, "keepdim", False)
    return instantiate(node, along(node, dims, keep), linear="each")


@computed([aten.amax.default, aten.amin.default], "a b -> a, max or min")
def extremes(node: fx.Node) -> Instance:
    kind = "max" if node.target is aten.amax.default else "min"
    text = along(node, argument(node, 1, "dim", None), argument(node, 2, "keepdim", False))
    letters = text.split("->")[0].split()
    return instantiate(node, text, kinds=dict.fromkeys(letters, kind))


def over_dim(node: fx.Node, dim: int, tensors: int) -> tuple[str, str]:
    """(`a k c, ... -> a k c`, letter of `dim`) for ops whose tensors all have one shape and that look along `dim`."""
    rank = operands(node)[0].meta["val"].dim()
    letters = " ".join("k" if i == dim % rank else f"d{i}" for i in range(rank))
    return ", ".join([letters] * tensors) + " -> " + letters, "k"


@computed([aten._softmax.default, aten._log_softmax.default], "... k -> ... k")
def softmax(node: fx.Node) -> Instance:
    return instantiate(node, over_dim(node, args_of(node)[1], 1)[0], local={"k": local.softmax})


@computed([aten._softmax_backward_data.default, aten._log_softmax_backward_data.default], "... k, ... k -> ... k")
def softmax_backward(node: fx.Node) -> Instance:
    text = over_dim(node, args_of(node)[2], 2)[0]
    return instantiate(node, text, linear="0", local={"k": local.softmax_backward})


def norm_letters(node: fx.Node, normalized: int, rank: int) -> tuple[str, str, str]:
    """(letters of the input, of the weight, of the statistics) of a layer norm over the last `normalized` dims."""
    rows = [f"r{i}" for i in range(rank - normalized)]
    columns = [f"c{i}" for i in range(normalized)]
    return " ".join(rows + columns), " ".join(columns), " ".join(rows + ["1"] * normalized)


@computed(aten.native_layer_norm.default, "r c, c, c -> r c, r 1, r 1")
def layer_norm(node: fx.Node) -> Instance:
    rank, normalized = args_of(node)[0].meta["val"].dim(), len(args_of(node)[1])
    x, w, stats = norm_letters(node, normalized, rank)
    settled = {f"{c}:{result}": "same" for c in w.split() for result in (1, 2)}
    text = f"{x}, {w}, {w} -> {x}, {stats}, {stats}"
    return instantiate(node, text, kinds=settled, local=dict.fromkeys(w.split(), local.layer_norm))


@computed(aten.native_layer_norm_backward.default, "r c, r c, r 1, r 1, c, c -> r c, c, c")
def layer_norm_backward(node: fx.Node) -> Instance:
    rank, normalized = args_of(node)[1].meta["val"].dim(), len(args_of(node)[2])
    x, w, stats = norm_letters(node, normalized, rank)
    emit = local.layer_norm_backward
    if not args_of(node)[7][0]:  # without the input's gradient nothing has to be reduced
        emit = replace(emit, reduces=())
    text = f"{x}, {x}, {stats}, {stats}, {w}, {w} -> {x}, {w}, {w}"
    return instantiate(node, text, linear="0", local=dict.fromkeys(w.split(), emit))


rule([aten.any.default, aten.all.default], "... -> ", whole=".0 .1 .2 .3 .4")
