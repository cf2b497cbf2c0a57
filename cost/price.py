"""Seconds that the planner adds up: of every op, every step of a conversion, every update of a parameter.

In: a captured graph and the `Program` emitted from it, a cluster.  Out: their sum.  Next: `timeline.py`, which tells
what of it goes on at the same time; `autopar/planner/program.py` minimises this sum.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.axes import Axes
from autopar.choices import choice_of
from autopar.cluster import ClusterSpec
from autopar.cost.comm import step_s
from autopar.cost.compute import Work, node_s, update_s, work_of
from autopar.graph import Graph
from autopar.layout import Layout
from autopar.plan import Plan
from autopar.program import Program
from autopar.rules.core import operands, results


def price(program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec, copies: float) -> float:
    """Seconds of everything in a step, one after another; `copies` of a parameter are in the optimizer's state.

    Every op of `graph` that the program runs is priced under its choice, also one emitted as a small subgraph; every
    collective, slice and term made pending is priced as the step that it is.
    """
    plan, nodes = program.plan, graph.nodes
    origins: dict[str, None] = {}
    seconds = 0.0
    for part in (program.refresh, program.forward, program.backward):
        for node in part.nodes:
            if "step" in node.meta:
                seconds += step_s(node.meta["step"], node.meta["val"].dtype.itemsize, plan.mesh, cluster)
            if node.op == "call_function" and node.meta.get("origin") in axes.instances:
                origins[node.meta["origin"]] = None
    for entry in graph.trained:
        stored = plan.parameters[entry.name].stored
        seconds += update_s(stored, graph.stored_dtype(entry), copies, plan.mesh, cluster)
    return seconds + sum(op_s(nodes[name], axes, plan, cluster) for name in origins)


def op_s(node: fx.Node, axes: Axes, plan: Plan, cluster: ClusterSpec) -> float:
    """Seconds of one op under its choice; of a pipeline, for one microbatch."""
    return node_s(node, axes.instances[node.name], *chosen(node, axes, plan), plan.mesh, cluster)


def op_work(node: fx.Node, axes: Axes, plan: Plan) -> Work:
    """What one op does under its choice."""
    return work_of(node, axes.instances[node.name], *chosen(node, axes, plan), plan.mesh)


def chosen(node: fx.Node, axes: Axes, plan: Plan) -> tuple[tuple[str, ...], list[tuple[Layout, torch.dtype]]]:
    """Roles of an op's choice; layout and dtype of every operand and result."""
    choice = choice_of(axes, node, plan.ops[node.name], plan.mesh)
    assert choice is not None, node.name
    reads = [o.meta["val"] for o in operands(node)]
    reads = [v[0] if isinstance(v, (tuple, list)) else v for v in reads]
    tensors = [(layout, t.dtype) for layout, t in zip(choice.inputs, reads, strict=True)]
    tensors += [(layout, t.dtype) for layout, t in zip(choice.outputs, results(node), strict=True) if t is not None]
    return choice.roles, tensors
