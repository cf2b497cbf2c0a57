"""Give backward its own copies of what costs nothing to make again."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, ops

from autopar.graph import Graph
from autopar.rules.core import operands

aten = ops.aten

CHEAP = {
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor),
    *(aten.select.int, aten._to_copy.default, aten.full.default, aten.arange.start_step, aten.alias.default),
}


def copy_views(graph: Graph) -> Graph:
    """Let backward read inputs through views of its own, so that only the inputs themselves are kept for it.

        %w_t  : f32[d, f] = permute(%w, [1, 0])      forward
        %y    : f32[b, f] = mm(%x, %w_t)             forward
        %dx   : f32[b, d] = mm(%dy, permute(%w_t))   backward
    becomes
        %w_t  : f32[d, f] = permute(%w, [1, 0])      forward
        %y    : f32[b, f] = mm(%x, %w_t)             forward
        %w_t_1: f32[d, f] = permute(%w, [1, 0])      backward
        %dx   : f32[b, d] = mm(%dy, permute(%w_t_1)) backward

    Needs: a phase on every node.  Leaves: no cheap function of inputs alone crosses from forward to backward.
    """
    fresh = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    again: dict[fx.Node, fx.Node] = {}
    cheap: set[fx.Node] = set()

    def copied(node: fx.Node) -> fx.Node:
        """The backward copy of a cheap forward node."""
        if node not in cheap or node.op == "placeholder":
            return env[node]
        if node not in again:
            for operand in node.all_input_nodes:
                copied(operand)
            again[node] = fresh.node_copy(node, copied)
            again[node].meta = {**node.meta, "phase": "backward"}
        return again[node]

    for node in graph.fx.nodes:
        backward = node.op != "output" and node.meta.get("phase") == "backward"
        env[node] = fresh.node_copy(node, copied if backward else env.__getitem__)
        free = node.op == "placeholder" or (node.target in CHEAP and all(o in cheap for o in operands(node)))
        if free and not backward:
            cheap.add(node)
    fresh.eliminate_dead_code()
    fresh.lint()
    named = {old.name: new.name for old, new in env.items()}  # a copy may have taken a later node's name
    outputs = tuple(replace(o, node=None if o.node is None else named[o.node]) for o in graph.outputs)
    return replace(graph, fx=fresh, outputs=outputs)
