"""What the user checkpoints is computed again in backward rather than kept.

In: a graph in which nodes of a call under `torch.utils.checkpoint` carry `meta["region"]`, a number.
Out: the same with copies of those that backward reads.  Next: `capture.py`.

Outside a region everything is as it was: what enters and leaves it is kept, and the planner decides how the copies run
as it does for any op. Random ops draw by their number and the step, so a copy draws the same again.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.graph import Graph


def recompute(graph: Graph) -> Graph:
    """Let the backward of a checkpointed region read copies of what its forward computed.

        %h   : f32[b, f] = mm(%x, %w)       forward, region 1
        %a   : f32[b, f] = gelu(%h)         forward, region 1
        %dw  : f32[f, d] = mm(%a_t, %dy)    backward, region 1
    becomes
        %h   : f32[b, f] = mm(%x, %w)       forward
        %a   : f32[b, f] = gelu(%h)         forward
        %h_1 : f32[b, f] = mm(%x, %w)       backward
        %a_1 : f32[b, f] = gelu(%h_1)       backward
        %dw  : f32[f, d] = mm(%a_1_t, %dy)  backward

    Needs: a phase on every node.  Leaves: no result of a region's inside crosses to its own backward.
    """
    if not any("region" in node.meta for node in graph.fx.nodes):
        return graph
    fresh = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    again: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node, region: int) -> fx.Node:
        """What backward of `region` reads for a node: its copy if it is of the region's forward."""
        if node.meta.get("region") != region or node.meta["phase"] == "backward" or node.op != "call_function":
            return env[node]
        if node not in again:
            for operand in node.all_input_nodes:
                copied(operand, region)
            again[node] = fresh.node_copy(node, lambda operand: copied(operand, region))
            again[node].meta = {**node.meta, "phase": "backward"}
        return again[node]

    for node in graph.fx.nodes:
        region = node.meta.get("region")
        if node.op == "output" or region is None or node.meta["phase"] == "forward":
            env[node] = fresh.node_copy(node, env.__getitem__)
        else:
            env[node] = fresh.node_copy(node, lambda operand, region=region: copied(operand, region))  # type: ignore[misc]
    fresh.eliminate_dead_code()
    fresh.lint()
    named = {old.name: new.name for old, new in env.items()}
    outputs = tuple(replace(o, node=None if o.node is None else named[o.node]) for o in graph.outputs)
    inputs = tuple(replace(e, node=named[e.node]) for e in graph.inputs)
    return replace(graph, fx=fresh, inputs=inputs, outputs=outputs)
