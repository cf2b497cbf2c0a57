"""Add a bias inside the matrix product that it follows."""

from __future__ import annotations

from typing import Any

from torch import fx, ops

aten = ops.aten


def fuse_bias(graph: fx.Graph) -> fx.Graph:
    """One kernel where a product's only reader adds a vector to it: planning wants them apart, devices together.

        %y = mm(%x, %w);  %z = add(%y, %bias)
    becomes
        %z = addmm(%bias, %x, %w)

    Needs: a bound graph; `meta["vector"]` marks adds of a one-dimensional second operand.  Leaves: the same values.
    """
    for node in list(graph.nodes):
        product: Any = node.args[0] if node.meta.get("vector") and not node.kwargs else None
        if product is None or product.target is not aten.mm.default or len(product.users) != 1:
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(aten.addmm.default, (node.args[1], *product.args))
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(product)
    return graph
