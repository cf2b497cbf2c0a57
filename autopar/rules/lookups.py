"""Ops that pick rows by number: embeddings, gathers, the loss.

In: nothing.  Out: rows of the rule table.  Next: `special.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, ops

from autopar.rules import local
from autopar.rules.core import Instance, args_of, computed, instantiate, operands, rule, run_whole

aten = ops.aten

rule(
    aten.embedding.default,
    "v d, ... -> ... d",
    linear="0",
    positional="v",
    local={"v": local.embedding},
    names={"v": "vocab", "d": "model"},
)


@computed(aten.embedding_dense_backward.default, "... d, ... -> v d")
def embedding_dense_backward(node: fx.Node) -> Instance:
    """With scale_grad_by_freq a row is divided by how often it occurs in all indices, which no piece of them tells."""
    by_frequency = len(args_of(node)) > 4 and bool(args_of(node)[4])
    indices = " ".join(f".{i}" for i in range(operands(node)[1].meta["val"].dim()))
    return instantiate(
        node,
        "... d, ... -> v d",
        whole=f"{indices} v" if by_frequency else "",
        linear="0",
        positional="v",
        local={"v": local.embedding_backward},
        names={"v": "vocab", "d": "model"},
    )


@computed(aten.gather.default, "... k, ... q -> ... q")
def gather(node: fx.Node) -> Instance:
    """Dims other than the gathered one agree only where the index spans them whole."""
    return _picked(node, 0)


@computed(aten.scatter_add.default, "... k, ... q, ... q -> ... k")
def scatter_add(node: fx.Node) -> Instance:
    return _picked(node, 1)


@computed([aten.scatter.value, aten.scatter.src], "... k, ... q -> ... k")
def scatter(node: fx.Node) -> Instance:
    return _picked(node, 2)


def _picked(node: fx.Node, form: int) -> Instance:
    tensors = [t.meta["val"] for t in operands(node)]
    rank, dim = tensors[0].dim(), args_of(node)[1] % max(tensors[0].dim(), 1)
    agree = [tensors[0].shape[d] == tensors[1].shape[d] and d != dim for d in range(rank)]
    table = " ".join(f"d{d}" if agree[d] else f"k{d}" for d in range(rank))
    index = " ".join(f"d{d}" if agree[d] else f"q{d}" for d in range(rank))
    whole = " ".join(f"k{d} q{d}" for d in range(rank) if not agree[d])
    if form == 0:
        return instantiate(node, f"{table}, {index} -> {index}", whole=whole, linear="0")
    if form == 1:
        return instantiate(node, f"{table}, {index}, {index} -> {table}", whole=whole, linear="0+2")
    return instantiate(node, ", ".join([table] + [index] * (len(tensors) - 1)) + f" -> {table}", whole=whole)


@computed(aten.index.Tensor, "v ..., q -> q ...")
def index(node: fx.Node) -> Instance:
    """Index tensors broadcast together; indexed dims stay whole, dims behind leading indices pass through."""
    table = operands(node)[0].meta["val"]
    given = list(args_of(node)[1])
    where = [i for i, x in enumerate(given) if x is not None]
    result = node.meta["val"]
    picks = [given[i].meta["val"] for i in where]
    wide = max(p.dim() for p in picks)
    together = where == list(range(where[0], where[-1] + 1))
    if any(boolean(p) for p in picks):
        return run_whole(node)
    spread = [f"q{i}" for i in range(wide)]
    rest = [None if d in where else f"t{d}" for d in range(table.dim())]
    before = [x for d, x in enumerate(rest) if x and d < where[0]] if together else []
    after = [x for x in rest if x and x not in before]
    source = " ".join(x or f"v{d}" for d, x in enumerate(rest))
    outs = " ".join([*before, *spread, *after])
    ins = [" ".join(spread[wide - p.dim() :]) for p in picks]
    assert len(outs.split()) == result.dim(), node.name
    return _listed(node, [source, *ins], outs, " ".join(f"v{d}" for d in where), frozenset([0]))


def boolean(pick: Tensor) -> bool:
    """An index that stands for as many dims of the table as it has, and picks as many places as it is true at.

    Torch takes uint8 for a mask too, if grudgingly.
    """
    return pick.dtype in (torch.bool, torch.uint8)


@computed([aten.index_put.default], "v ..., q, q ... -> v ...")
def index_put(node: fx.Node) -> Instance:
    table, values = operands(node)[0].meta["val"], operands(node)[-1].meta["val"]
    given = list(args_of(node)[1])
    where = [i for i, x in enumerate(given) if x is not None]
    picks = [given[i].meta["val"] for i in where]
    if any(boolean(p) for p in picks):
        return run_whole(node)
    wide = max(p.dim() for p in picks)
    spread = [f"q{i}" for i in range(wide)]
    source = [f"v{d}" if d in where else f"t{d}" for d in range(table.dim())]
    leading = where == list(range(len(where)))
    full = [*spread, *(x for d, x in enumerate(source) if d not in where)]
    value = full[len(full) - values.dim() :] if leading else [f"x{i}" for i in range(values.dim())]
    whole = [f"v{d}" for d in where] + spread + ([] if leading else value + source)
    ins = [" ".join(spread[wide - p.dim() :]) for p in picks]
    entries = [" ".join(source), *ins, " ".join(value)]
    accumulate = len(args_of(node)) > 3 and bool(args_of(node)[3])
    passing = frozenset([0, len(entries) - 1]) if accumulate else None
    return _listed(node, entries, " ".join(source), " ".join(whole), passing)


def _listed(node: fx.Node, entries: list[str], result: str, whole: str, passing: frozenset[int] | None) -> Instance:
    """An instance for an op with a list argument: one entry per operand rather than per schema slot."""
    sizes: dict[str, int] = {}
    dims = []
    for text, tensor in zip(
        [*entries, result], [*(o.meta["val"] for o in operands(node)), node.meta["val"]], strict=True
    ):
        letters = text.split()
        for letter, size in zip(letters, tensor.shape, strict=True):
            if size != 1:
                sizes.setdefault(letter, size)
        dims.append(tuple((x,) if n != 1 else () for x, n in zip(letters, tensor.shape, strict=True)))
    return Instance(tuple(dims[:-1]), (dims[-1],), sizes, frozenset(whole.split()), (passing,) if passing else ())
