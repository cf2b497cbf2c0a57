"""Rows of expert layers: sparse tensors [experts, tokens, width].

In: nothing.  Out: rows of the rule table; which tensors of a graph are rows.  Next: `table.py`, `axes.py`.

Which experts a token chose is read whole everywhere. Between `to_experts` and `to_tokens` only ops that keep rows apart
may stand; `passing` refuses others by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from torch import fx, ops

import autopar.experts  # noqa: F401  (it defines the ops)
from autopar.errors import UnsupportedError
from autopar.layout import Layout, Mesh
from autopar.rules.bind import Call, Site, run_of
from autopar.rules.core import Instance, args_of, computed, instantiate, operands, results, rule
from autopar.rules.pointwise import is_pointwise

aten, own = ops.aten, ops.autopar

NAMES = {"e": "experts"}
MAKE = (own.to_experts.default, own.expert_rows.default)
TAKE = (own.to_tokens.default, own.grouped_outer.default, own.expert_sums.default)
PER_ROW: dict[Any, int | None] = {  # op that may work on each row alone -> position of the dims that it works along
    aten._to_copy.default: None,
    aten.reshape.default: None,
    aten.expand.default: None,
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.slice_backward.default: 2,
    aten.select_backward.default: 2,
    aten.cat.default: 1,
    aten.sum.dim_IntList: 1,
    aten.unsqueeze.default: 1,
}


def bind(at: Site) -> Call:
    """The piece of all experts and tokens whose rows this device has."""
    rows = at.results[0] if at.node.target in (*MAKE, own.grouped_mm.default) else at.operands[0]
    return at.node.target, (*at.args[:-1], piece(rows, at.mesh, at.coordinate)), {}


def piece(rows: Layout, mesh: Mesh, coordinate: dict[str, int]) -> list[int]:
    """The piece of a device as numbers, see `autopar/rows.py`."""
    if not any(cut for dim in rows.cuts[:2] for cut in dim):
        return []
    found = list(run_of(rows, 0, mesh, coordinate))
    for (dim, factor), size, _ in rows.places():
        if dim == 1:
            found += [size, *rows.span((dim, factor), mesh, coordinate)]
    return found


for op, text in (
    (own.to_experts.default, "t k d, T j -> e t d"),
    (own.to_tokens.default, "e t d, T j -> t k d"),
    (own.expert_rows.default, "e o, T j -> e t o"),
    (own.expert_sums.default, "e t o, T j -> e o"),
):
    rule(op, text, bind=bind, whole="T j k", linear="0", names=NAMES)


@computed(own.grouped_mm.default, "e t i, e o i, T j -> e t o", bind=bind)
def grouped_mm(node: fx.Node) -> Instance:
    return product(node, "e t i, e o i, T j -> e t o")


@computed(own.grouped_outer.default, "e t o, e t i, T j -> e o i", bind=bind)
def grouped_outer(node: fx.Node) -> Instance:
    return product(node, "e t o, e t i, T j -> e o i")


def product(node: fx.Node, text: str) -> Instance:
    """A product of rows and weights works only on the pairs that are there."""
    index, experts = operands(node)[2].meta["val"], operands(node)[0].meta["val"].shape[0]
    flops = f"{2 * index.shape[1] / experts} e t i o"
    return instantiate(node, text, whole="T j", linear="0 1", flops=flops, names=NAMES)


# --- which tensors are rows -------------------------------------------------------------------------------------------


def passing(node: fx.Node, given: Sequence[Fraction | None]) -> Fraction | None:
    """How many pairs of an expert and a token are there in the node's results; None where those are no rows.

    given   the same of every operand
    """
    if node.target in MAKE:
        index = operands(node)[1].meta["val"]
        return Fraction(index.shape[1], results(node)[0].shape[0])  # type: ignore[union-attr]
    found = next((rows for rows in given if rows is not None), None)
    if found is None or node.target in TAKE or sums_all(node):
        return None
    if node.target is own.grouped_mm.default or keeps_pairs(node, given):
        return found
    raise UnsupportedError(
        f"{node.target} does not keep the rows of an expert layer apart (%{node.name})"
        + (f"\n  from {node.meta['source']}" if node.meta.get("source") else "")
        + "\n  try: only ops that work on each row alone between to_experts and to_tokens, or autopar.opaque(module)"
    )


def dims_of(node: fx.Node) -> set[int]:
    """Dims along which an op works, counted from the front."""
    position = PER_ROW[node.target]
    if position is None:
        return set()
    rank = max(len(shape_of(operands(node)[0])), len(shape_of(node)))  # the op may take a dim away or add one
    given = args_of(node)[position] if len(args_of(node)) > position else 0
    return {d % rank for d in (given if isinstance(given, (list, tuple)) else [given])}


def sums_all(node: fx.Node) -> bool:
    """A sum over all experts and tokens is a tensor like any other."""
    return node.target is aten.sum.dim_IntList and {0, 1} <= dims_of(node)


def keeps_pairs(node: fx.Node, given: Sequence[Fraction | None]) -> bool:
    """Whether what an op makes has the pairs of its operands, and each depends on that pair alone."""
    value = results(node)[0]
    pairs = next(shape_of(x)[:2] for x, rows in zip(operands(node), given, strict=True) if rows is not None)
    if value is None or tuple(value.shape[:2]) != pairs:
        return False
    if is_pointwise(node):
        others = [shape_of(x) for x, rows in zip(operands(node), given, strict=True) if rows is None]
        return all(math.prod(shape[: max(0, len(shape) - value.dim() + 2)]) == 1 for shape in others)
    return node.target in PER_ROW and not dims_of(node) & {0, 1}


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


INDEX_AT = {own.to_experts.default: 1, own.to_tokens.default: 1, own.expert_rows.default: 1, own.expert_sums.default: 1}
INDEX_AT |= {own.grouped_mm.default: 2, own.grouped_outer.default: 2}


def index_of(node: fx.Node) -> fx.Node:
    """The choices of the tokens whose rows a node computes."""
    while node.target not in INDEX_AT:
        node = next(x for x in operands(node) if shape_of(x)[:2] == shape_of(node)[:2])
    found: fx.Node = args_of(node)[INDEX_AT[node.target]]
    return found
