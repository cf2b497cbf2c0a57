"""The check after every pass: both ends of every edge agree."""

from __future__ import annotations

from autopar.axes import is_getitem
from autopar.graph import Graph
from autopar.rules.core import operands


def verify(graph: Graph, after: str) -> Graph:
    """Raise AssertionError, naming the pass and the node, if a layout does not fit its tensor or its reader."""
    for node in graph.fx.nodes:
        where = f"after {after}: %{node.name}"
        if node.op == "output":
            continue
        layouts = node.meta.get("layouts")
        assert layouts is not None, f"{where} has no layout"
        vals = node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]
        for layout, val in zip(layouts, vals, strict=False):
            if val is not None:
                assert layout.shape == tuple(val.shape), f"{where}: {layout} is no layout of {list(val.shape)}"
        if "step" in node.meta:
            found = node.args[0].meta["layouts"][0]
            assert found.factors == node.meta["step"].before.factors, f"{where}: starts from {found}"
        choice = node.meta.get("choice")
        if choice is not None and not is_getitem(node):
            for operand, wanted in zip(operands(node), choice.inputs, strict=True):
                found = operand.meta["layouts"][0]
                assert found == wanted, f"{where} wants %{operand.name} as {wanted}, it is {found}"
    return graph
