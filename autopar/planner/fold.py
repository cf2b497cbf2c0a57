"""Which nodes are copies of one another, so that they share one decision.

In: a graph and its factors.  Out: a key per node; equal keys share.  Next: `units.py`.

A block is what stands under one index of a list of modules ("h.0", "h.1", ...). Nodes at the same place of two blocks
share when they also have the same op, letters and sizes, hence the same choices. Chains of single layers are not
blocks: a plan may well want to cut every other one differently. Blocks with other pins are not copies either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from torch import fx

from autopar.axes import Axes, computes
from autopar.graph import Graph
from autopar.rules.core import results

CONTRACTIONS = 2  # a block has at least so many


def contracts(axes: Axes, node: fx.Node) -> bool:
    """Whether an op sums over a letter (a product of matrices, attention): what cutting is about."""
    return axes.rule(node).flops is not None


def folded_prefixes(graph: Graph, axes: Axes) -> frozenset[tuple[str, ...]]:
    """Paths of the module lists whose entries are blocks."""
    found: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for node in graph.fx.nodes:
        if computes(node) and node.meta.get("phase") == "forward" and contracts(axes, node):
            path = tuple(node.meta.get("module", "").split("."))
            for i, part in enumerate(path):
                if part.isdigit():
                    found[path[:i]][part] += 1
    return frozenset(p for p, c in found.items() if len(c) > 1 and min(c.values()) >= CONTRACTIONS)


Mark = Callable[[tuple[str, ...]], str]  # of the path of a block: what sets it apart from blocks with another mark


def unmarked(block: tuple[str, ...]) -> str:
    """No block is set apart."""
    return ""


def pattern(path: str, prefixes: frozenset[tuple[str, ...]], mark: Mark = unmarked) -> str:
    """A dotted name with the indices of blocks replaced by a star and the block's mark."""
    parts = tuple(path.split("."))
    return ".".join(
        f"*{mark(parts[: i + 1])}" if part.isdigit() and parts[:i] in prefixes else part for i, part in enumerate(parts)
    )


def keys(graph: Graph, axes: Axes, mark: Mark = unmarked) -> dict[str, Hashable]:
    """A key for every op; ops with equal keys have the same letters, sizes and choices."""
    prefixes = folded_prefixes(graph, axes)
    seen: Counter[Any] = Counter()
    out: dict[str, Hashable] = {}
    for node in graph.fx.nodes:
        if not computes(node):
            continue
        path, phase = node.meta.get("module", ""), node.meta.get("phase", "forward")
        starred = pattern(path, prefixes, mark)
        if starred == path:
            out[node.name] = node.name
            continue
        place = (path, phase, str(node.target))
        out[node.name] = (starred, phase, str(node.target), seen[place], shape_key(axes, node))
        seen[place] += 1
    return out


def shape_key(axes: Axes, node: fx.Node) -> Hashable:
    """What the choices of a node depend on: its rule instance and its results."""
    rule = axes.rule(node)
    tensors = tuple((tuple(t.shape), str(t.dtype)) for t in results(node) if t is not None)
    dtypes = tuple(str(_dtype(graph_node)) for graph_node in node.all_input_nodes)
    sizes = tuple(sorted(rule.sizes.items()))
    return rule.inputs, rule.outputs, sizes, rule.whole, rule.linear, tuple(sorted(rule.kinds.items())), tensors, dtypes


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return getattr(value, "dtype", None)
