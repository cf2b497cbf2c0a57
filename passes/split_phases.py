"""Cut the joint program into what forward and what backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from autopar.axes import Axes
from autopar.graph import Graph
from autopar.layout import Layout, conversion
from autopar.passes.insert_conversions import arrives
from autopar.passes.markers import COLLECTIVES
from autopar.plan import Plan
from autopar.program import Program


def split_phases(graph: Graph, axes: Axes, plan: Plan) -> Program:
    """Cut the joint program into forward and backward; what backward reads of forward is saved.

        forward(%ids, %w)        -> %loss, %h          # %h: saved
        backward(%h, %w, %dloss) -> %dw

    Needs: local pieces everywhere.  Leaves: three graphs, the third renews compute copies.
    """
    nodes = graph.nodes
    results: list[fx.Node | None] = [None if o.node is None else nodes[o.node] for o in graph.outputs]
    ends = [(o, r) for o, r in zip(graph.outputs, results, strict=True)]
    first = [r for o, r in ends if "gradient" not in o.kind]
    second = [r for o, r in ends if "gradient" in o.kind]
    late = reach(second, lambda n: n.meta.get("phase") == "backward")
    tangents = tuple(e.node for e in graph.inputs if e.kind == "tangent")
    saved = [n for n in boundary(late, second) if n.name not in tangents]
    forward_nodes = reach([*first, *saved], lambda n: True)
    handed = tuple(e.node for e in graph.inputs if e.kind != "tangent")
    forward = build(graph.fx, [nodes[n] for n in handed], forward_nodes, [*first, *saved])
    ends_in = [*saved, *(nodes[t] for t in tangents)]
    backward = build(graph.fx, ends_in, late, second)
    refresh, refreshed = refreshes(graph, plan)
    return Program(
        graph=graph,
        plan=plan,
        refresh=refresh,
        forward=forward,
        backward=backward,
        refreshed=refreshed,
        forward_inputs=handed,
        saved=tuple(n.name for n in saved),
        tangents=tangents,
        input_layouts={e.node: arrives(e, axes, plan) for e in graph.inputs},
        output_layouts=tuple(None if r is None else r.meta["layouts"][0] for r in results),
    )


def reach(ends: Iterable[fx.Node | None], admits: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Every op that the ends need and `admits` lets in."""
    found: set[fx.Node] = set()
    stack = [n for n in ends if n is not None]
    while stack:
        node = stack.pop()
        if node in found or node.op == "placeholder" or not admits(node):
            continue
        found.add(node)
        stack += node.all_input_nodes
    return found


def boundary(late: set[fx.Node], ends: Iterable[fx.Node | None]) -> list[fx.Node]:
    """What backward reads from outside itself, in graph order."""
    read = {x for n in late for x in n.all_input_nodes if x not in late} | {n for n in ends if n and n not in late}
    order = {n: i for i, n in enumerate(next(iter(read)).graph.nodes)} if read else {}
    return sorted(read, key=order.__getitem__)


def build(graph: fx.Graph, inputs: list[fx.Node], kept: set[fx.Node], outputs: list[fx.Node | None]) -> fx.Graph:
    """The part of a graph between `inputs` and `outputs`."""
    fresh = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = fresh.placeholder(node.name)
        env[node].meta = {k: node.meta[k] for k in ("val", "layouts", "phase", "module") if k in node.meta}
    for node in graph.nodes:
        if node in kept and node not in env:
            env[node] = fresh.node_copy(node, env.__getitem__)
    fresh.output(tuple(None if n is None else env[n] for n in outputs))
    fresh.lint()
    return fresh


def refreshes(graph: Graph, plan: Plan) -> tuple[fx.Graph, tuple[str, ...]]:
    """The graph that gathers the compute copies of parameters at ZeRO 1 and 2 from their stored shards."""
    fresh = fx.Graph()
    names, inputs, results = [], [], []
    for entry in graph.inputs:
        kept = plan.parameters.get(entry.name) if entry.kind == "parameter" else None
        if kept is None or kept.level not in (1, 2):
            continue
        names.append(entry.name)
        node = fresh.placeholder(entry.node)
        val = graph.node(entry.node).meta["val"]
        node.meta = {"val": val, "layouts": (kept.stored,), "phase": "refresh", "module": ""}
        inputs.append((node, kept.stored, kept.home))
    for node, stored, home in inputs:
        results.append(_gathered(fresh, node, stored, home, plan))
    fresh.output(tuple(results))
    return fresh, tuple(names)


def _gathered(fresh: fx.Graph, node: fx.Node, stored: Layout, home: Layout, plan: Plan) -> fx.Node:
    steps = conversion(stored, home, plan.mesh)
    assert steps is not None, f"{node}: {stored} does not lead to {home}"
    x = node
    for step in steps:
        x = fresh.call_function(COLLECTIVES[step.kind], (x, step.axis))
        x.meta = {**node.meta, "layouts": (step.after,), "step": step}
    return x
