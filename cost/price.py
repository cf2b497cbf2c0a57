"""Seconds of a step of an emitted program: the sum over its nodes.

In: a captured graph and the `Program` emitted from it, a cluster.  Out: seconds by kind.
Next: `autopar/planner/program.py`, whose objective is this sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from autopar.axes import Axes
from autopar.choices import choice_of
from autopar.cluster import ClusterSpec
from autopar.cost.comm import step_s
from autopar.cost.compute import node_s
from autopar.cost.memory import Memory
from autopar.graph import Graph
from autopar.layout import MICRO, STAGE
from autopar.plan import Plan
from autopar.program import Program
from autopar.rules.core import operands, results


def bill(
    program: Program, held: Memory, graph: Graph, axes: Axes, cluster: ClusterSpec, budget_bytes: float
) -> dict[str, float]:
    """The costs that a plan carries: seconds of a step, bytes that stay on a device and at the peak."""
    kept = {f"{kind}_bytes": float(n) for kind, n in held.persistent.items()}
    peaks = {"peak_bytes": float(held.peak), "budget_bytes": float(budget_bytes)}
    return {**price(program, graph, axes, cluster), **peaks, **kept}


def price(program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec) -> Mapping[str, float]:
    """Seconds of one step: "compute_s", "communication_s" and their sum "step_s".

    Every op of `graph` that the program runs is priced under its choice, also one emitted as a small subgraph; every
    collective, slice and term made pending is priced as the step that it is. In a pipeline of p stages m microbatches
    take as long as m + p - 1 in the slowest stage (Huang et al. 2019); what is sent between stages is not priced.
    """
    mesh, nodes = program.plan.mesh, graph.nodes
    origins: dict[str, None] = {}
    communication = 0.0
    for part in (program.refresh, program.forward, program.backward):
        for node in part.nodes:
            if "step" in node.meta:
                communication += step_s(node.meta["step"], node.meta["val"].dtype.itemsize, mesh, cluster)
            if node.op == "call_function" and node.meta.get("origin") in axes.instances:
                origins[node.meta["origin"]] = None
    compute: dict[int, float] = defaultdict(float)
    for name in origins:
        compute[program.plan.stages.get(name, 0)] += op_s(nodes[name], axes, program.plan, cluster)
    slowest = max(compute.values(), default=0.0)
    turns = mesh.size(MICRO) + mesh.size(STAGE) - 1 if program.plan.stages else 1
    return {
        "compute_s": turns * slowest,
        "communication_s": communication,
        "step_s": turns * slowest + communication,
    }


def op_s(node: fx.Node, axes: Axes, plan: Plan, cluster: ClusterSpec) -> float:
    """Seconds of one op under its choice; of a pipeline, for one microbatch."""
    choice = choice_of(axes, node, plan.ops[node.name], plan.mesh)
    assert choice is not None, node.name
    reads = [o.meta["val"] for o in operands(node)]
    reads = [v[0] if isinstance(v, (tuple, list)) else v for v in reads]
    tensors = [(layout, t.dtype) for layout, t in zip(choice.inputs, reads, strict=True)]
    tensors += [(layout, t.dtype) for layout, t in zip(choice.outputs, results(node), strict=True) if t is not None]
    return node_s(node, axes.instances[node.name], choice.roles, tensors, plan.mesh, cluster)
