"""Ops that rank or accumulate along one dim: it stays whole, so positions in it are those of the whole tensor.

In: nothing.  Out: rows of the rule table.  Next: `views.py`.
"""

from __future__ import annotations

from typing import Any

from torch import fx, ops

from autopar.rules.core import Instance, args_of, computed, instantiate, operands, results

aten = ops.aten


def named(node: fx.Node, name: str) -> Any:
    """An argument by the name it has in the op's schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    position, found = next((i, a) for i, a in enumerate(schema.arguments) if a.name == name)
    return args_of(node)[position] if position < len(args_of(node)) else node.kwargs.get(name, found.default_value)


def ranked(node: fx.Node) -> tuple[str, str]:
    """(`a k -> a q, a q`, letters that stay whole); without a dim the op looks at all elements."""
    rank, dim = operands(node)[0].meta["val"].dim(), named(node, "dim")
    looked = set(range(rank)) if dim is None else {dim % max(rank, 1)}
    source = [f"k{d}" if d in looked else f"d{d}" for d in range(rank)]
    ends = []
    for result in results(node):
        assert result is not None
        kept = [f"q{d}" if d in looked else f"d{d}" for d in range(rank) if d not in looked or result.dim() == rank]
        ends.append(" ".join(kept))
    whole = " ".join(f"k{d} q{d}" for d in looked)
    return " ".join(source) + " -> " + ", ".join(ends), whole


@computed([aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default], "a k -> a q, a q")
def sort(node: fx.Node) -> Instance:
    text, whole = ranked(node)
    return instantiate(node, text, whole=whole)


@computed([aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, aten.aminmax.default], "a k -> a, a")
def picked(node: fx.Node) -> Instance:
    return sort(node)


@computed([aten.argmax.default, aten.argmin.default, aten.prod.dim_int], "a k -> a")
def position(node: fx.Node) -> Instance:
    return sort(node)


@computed([aten.cumprod.default, aten.logcumsumexp.default], "a k -> a k")
def accumulated(node: fx.Node) -> Instance:
    return sort(node)


@computed([aten.cummax.default, aten.cummin.default], "a k -> a k, a k")
def running(node: fx.Node) -> Instance:
    return sort(node)


@computed(aten.cumsum.default, "a k -> a k")
def cumsum(node: fx.Node) -> Instance:
    text, whole = ranked(node)
    return instantiate(node, text, whole=whole, linear="each")
