"""Legal plans drawn at random, for tests: no solver, no costs.

In: a graph, its axes, meshes to draw from, a seed.  Out: a `Plan`.  Next: `search.py`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from torch import fx

from autopar.axes import Axes, Factors, Value, analyse, computes, source
from autopar.choices import Choice, choices
from autopar.graph import Graph
from autopar.layout import Layout, Mesh, conversion
from autopar.plan import ParameterPlan, Plan
from autopar.planner.options import options
from autopar.planner.units import input_layout
from autopar.precision import reduces_early

ATTEMPTS = 200


def random_plan(
    graph: Graph, axes: Axes | None, mesh_choices: Sequence[Mesh], seed: int, *, local: Iterable[str] = ()
) -> Plan:
    """One legal plan, uniform over meshes and their axes' order, choices of ops, levels and storage of parameters.

    An op is drawn again while some operand cannot be brought into the layout it wants (a pending maximum, say).
    """
    axes = analyse(graph) if axes is None else axes
    rng = random.Random(seed)
    mesh = shuffled(rng.choice(list(mesh_choices)), rng)
    named = frozenset(local)
    entries = {entry.node: entry for entry in graph.inputs if entry.kind == "parameter"}
    ways = {n.name: choices(axes, n, mesh) for n in graph.fx.nodes if computes(n)}
    wanted = wishes(axes, graph, ways)
    parameters = {
        entry.name: rng.choice(kept(axes.factors[node, 0], wanted[node, 0], mesh, entry.trainable))
        for node, entry in entries.items()
    }
    layouts: dict[Value, Layout] = {}
    ops: dict[str, tuple[str, ...]] = {}
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "get_attr"):
            entry = entries.get(node.name)
            layouts[node.name, 0] = (
                input_layout(axes, mesh, node.name, node.name in named) if entry is None
                else handed(parameters[entry.name])
            )  # fmt: skip
        elif computes(node):
            picked = draw(rng, ways[node.name], [layouts[v] for v in axes.operands(node)], mesh, graph, node)
            ops[node.name] = picked.roles
            layouts |= {(node.name, i): layout for i, layout in enumerate(picked.outputs)}
    for output in graph.outputs:
        if output.node is None or output.kind not in ("gradient", "loss", "buffer"):
            continue
        value = source(graph.node(output.node))
        layout = layouts.get(value)
        target = parameters[output.name].stored if output.kind == "gradient" else Layout.whole(axes.factors[value])
        assert layout is None or conversion(layout, target, mesh) is not None, (
            f"%{output.node} cannot leave as {target}"
        )
    inputs = {name: input_layout(axes, mesh, name, True) for name in sorted(named)}
    return Plan(mesh, MappingProxyType(ops), MappingProxyType(parameters), MappingProxyType(inputs))


def shuffled(mesh: Mesh, rng: random.Random) -> Mesh:
    """The mesh with its axes in another order."""
    order = rng.sample(range(len(mesh.names)), len(mesh.names))
    return Mesh(tuple(mesh.names[i] for i in order), tuple(mesh.sizes[i] for i in order))


def handed(kept: ParameterPlan) -> Layout:
    """The layout in which the program gets a parameter."""
    return kept.home if kept.level < 3 else kept.stored


def wishes(axes: Axes, graph: Graph, ways: dict[str, tuple[Choice, ...]]) -> dict[Value, list[Layout]]:
    """For every value, the layouts in which some choice of a reader takes it."""
    found: dict[Value, list[Layout]] = defaultdict(list)
    for node in graph.fx.nodes:
        for i, value in enumerate(axes.operands(node) if node.name in ways else ()):
            found[value] += [choice.inputs[i] for choice in ways[node.name]]
    return found


def kept(factors: Factors, wanted: Sequence[Layout], mesh: Mesh, trainable: bool) -> list[ParameterPlan]:
    """Every way to keep a parameter, over all levels."""
    return list(options(factors, wanted, mesh, levels=(0, 1, 2, 3), trainable=trainable))


def draw(
    rng: random.Random, ways: Sequence[Choice], operands: Sequence[Layout], mesh: Mesh, graph: Graph, node: fx.Node
) -> Choice:
    """A uniformly drawn choice that its operands can be brought to."""
    for choice in rng.sample(list(ways), len(ways)):
        paths = [conversion(here, there, mesh) for here, there in zip(operands, choice.inputs, strict=True)]
        if all(path is not None and not reduces_early(graph, node, path) for path in paths):
            return choice
    raise AssertionError("every op can run whole on settled operands")
