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


@computed([aten.scatter.value, aten.scatter.src, aten.scatter.reduce, aten.scatter_reduce.two], "... k, ... q -> ... k")
def scatter(node: fx.Node) -> Instance:
    return _picked(node, 2)


def _picked(node: fx.Node, form: int) -> Instance:
    """`form` 0 gathers, 1 adds what is scattered, 2 does something else with it.

    A source that is longer than the index gives its first elements only, so such a dim stays whole.
    """
    shapes = [tuple(t.meta["val"].shape) for t in operands(node)]
    rank, dim = len(shapes[0]), args_of(node)[1] % max(len(shapes[0]), 1)
    agree = [d != dim and len({shape[d] for shape in shapes}) == 1 for d in range(rank)]
    table, index, source = (" ".join(f"d{d}" if agree[d] else f"{x}{d}" for d in range(rank)) for x in "kqs")
    whole = " ".join(f"k{d} q{d} s{d}" for d in range(rank) if not agree[d])
    if form == 0:
        return instantiate(node, f"{table}, {index} -> {index}", whole=whole, linear="0")
    if form == 1:
        return instantiate(node, f"{table}, {index}, {source} -> {table}", whole=whole, linear="0+2")
    return instantiate(node, ", ".join([table, index, source][: len(shapes)]) + f" -> {table}", whole=whole)


@computed(aten.index.Tensor, "v ..., q -> q ...")
def index(node: fx.Node) -> Instance:
    """Indexed dims stay whole, the others pass through."""
    if any(boolean(p) for _, p in picks(node)):
        return run_whole(node)
    source, ins, result = places(node)
    return _listed(node, [source, *ins], result, " ".join(f"v{d}" for d, _ in picks(node)), frozenset([0]))


def picks(node: fx.Node) -> list[tuple[int, Tensor]]:
    """(dim of the table, index) of every index that is given."""
    return [(d, x.meta["val"]) for d, x in enumerate(args_of(node)[1]) if x is not None]


def places(node: fx.Node) -> tuple[str, list[str], str]:
    """Letters of the table, of every index, and of what is picked.

    Indices broadcast together; the dims they make stand where the indexed ones stood if those are neighbours, and in
    front of all others if not.
    """
    where = [d for d, _ in picks(node)]
    wide = max(p.dim() for _, p in picks(node))
    spread = [f"q{i}" for i in range(wide)]
    source = [f"v{d}" if d in where else f"t{d}" for d in range(operands(node)[0].meta["val"].dim())]
    first = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    rest = [x for d, x in enumerate(source) if d not in where]
    ins = [" ".join(spread[wide - p.dim() :]) for _, p in picks(node)]
    return " ".join(source), ins, " ".join([*rest[:first], *spread, *rest[first:]])


def boolean(pick: Tensor) -> bool:
    """An index that stands for as many dims of the table as it has, and picks as many places as it is true at.

    Torch takes uint8 for a mask too, if grudgingly.
    """
    return pick.dtype in (torch.bool, torch.uint8)


@computed([aten.index_put.default], "v ..., q, q ... -> v ...")
def index_put(node: fx.Node) -> Instance:
    """Every device sees all places that are written, those that are written more than once too."""
    if any(boolean(p) for _, p in picks(node)):
        return run_whole(node)
    source, ins, result = places(node)
    value = result.split()[len(result.split()) - operands(node)[-1].meta["val"].dim() :]
    whole = " ".join(x for x in f"{source} {result}".split() if x[0] in "vq")
    accumulate = len(args_of(node)) > 3 and bool(args_of(node)[3])
    passing = frozenset([0, len(ins) + 1]) if accumulate else None
    return _listed(node, [source, *ins, " ".join(value)], source, whole, passing)


@computed([aten.bucketize.Tensor, aten.isin.Tensor_Tensor], "..., n -> ...")
def placed(node: fx.Node) -> Instance:
    """Every element is looked for among all of the others."""
    among = [f"n{d}" for d in range(operands(node)[1].meta["val"].dim())]
    return instantiate(node, f"..., {' '.join(among)} -> ...", whole=" ".join(among))


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
