"""Everything that has to be decided, in one shape: units with options, and the edges between them.

In: a graph, its factors, a mesh, a cluster, restrictions.  Out: `Problem`.  Next: `program.py`.

A unit is an op (its options are its choices), a graph input (one option), a parameter (its options are the ways to keep
it; it reads its own gradient and hands out its compute copy) or a sink (loss, other outputs, buffers). Units of one
class share the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.axes import Axes, Value, computes, source
from autopar.choices import Choice, choices
from autopar.cluster import ClusterSpec
from autopar.cost.comm import steps_s
from autopar.cost.compute import node_s, owns, update_s
from autopar.errors import UnsupportedError
from autopar.graph import Graph, Input
from autopar.layout import Layout, Mesh, conversion
from autopar.plan import ParameterPlan
from autopar.planner.fold import folded_prefixes, keys, pattern, unmarked
from autopar.planner.options import options as parameter_options
from autopar.planner.pinned import Pinned
from autopar.rules.core import operands, results

State = tuple[Layout, str]
"""A layout at one end of an edge, and how it is handed over. Where the edge starts: "" | "use" (level 3: gathered for
every use) | "keep" (level 3: gathered once a module); where it ends: "" | "end" (level 1: converted when backward ends)
| "settled" (an output: as computed, without pending sums)."""


@dataclass(frozen=True)
class Option:
    """One way to decide a unit: layouts it reads and hands out, seconds it takes by itself, what it stands for."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    seconds: float
    label: Any


@dataclass
class Unit:
    """Something to decide.

    kind      "op" | "input" | "parameter" | "loss" | "output" | "buffer"
    free      its results share the memory of its operand and it takes no time
    itemsizes bytes of an element of every result
    shape     class: units of one class share the decision
    """

    index: int
    name: str
    kind: str
    phase: str
    module: str
    free: bool
    itemsizes: tuple[int, ...]
    shape: int


@dataclass(frozen=True)
class Edge:
    """Result `result` of unit `source` is operand `operand` of unit `target`; `shape` is the edge's class."""

    source: int
    result: int
    target: int
    operand: int
    shape: int


@dataclass
class Problem:
    """What the programme is built from.

    copies    of a parameter in the optimizer's state
    units     in the order in which they run
    options   per class of units
    edges     all edges; `readers` of every value (unit, result)
    shapes    edge class -> (class of the source, result, class of the target, operand)
    """

    graph: Graph
    axes: Axes
    mesh: Mesh
    cluster: ClusterSpec
    copies: float = 2.0
    units: list[Unit] = field(default_factory=list)
    options: list[tuple[Option, ...]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    shapes: list[tuple[int, int, int, int]] = field(default_factory=list)
    readers: dict[tuple[int, int], list[Edge]] = field(default_factory=dict)

    def options_of(self, unit: Unit) -> tuple[Option, ...]:
        return self.options[unit.shape]


OpFilter = Callable[[fx.Node, str, str], bool]  # node, mesh axis, role
ParameterFilter = Callable[[Input, ParameterPlan], bool]


@dataclass(frozen=True)
class Restriction:
    """What a strategy and pins allow; the planner's own is the one that allows everything.

    stored   parameters that are kept in one way already, because another program of the module decided so
    """

    ops: OpFilter | None = None
    parameters: ParameterFilter | None = None
    levels: tuple[int, ...] = (0, 2, 3)
    what: str = ""
    stored: Mapping[str, ParameterPlan] = field(default_factory=dict)
    pins: Pinned | None = None

    def plays(self, node: fx.Node, choice: Choice, mesh: Mesh) -> bool:
        """Whether every mesh axis may play its role at an op: as pinned, else as the strategy has it."""
        for axis, role in zip(mesh.names, choice.roles, strict=True):
            allowed = None if self.pins is None else self.pins.allows(node, axis, role)
            if not (allowed if allowed is not None else self.ops is None or self.ops(node, axis, role)):
                return False
        return True


FREE = Restriction()


def problem(
    graph: Graph,
    axes: Axes,
    mesh: Mesh,
    cluster: ClusterSpec,
    restriction: Restriction = FREE,
    *,
    fold: bool = True,
    local: Iterable[str] = (),
    copies: float = 2.0,
) -> Problem:
    """All units, options and edges of one graph on one mesh; the optimizer's state holds `copies` of a parameter."""
    builder = _Builder(Problem(graph, axes, mesh, cluster, copies), restriction, frozenset(local), fold)
    builder.build()
    return builder.made


class _Builder:
    def __init__(self, made: Problem, restriction: Restriction, local: frozenset[str], fold: bool) -> None:
        self.made, self.restriction, self.local = made, restriction, local
        self.mark = unmarked if restriction.pins is None else restriction.pins.pins.on
        self.keys = keys(made.graph, made.axes, self.mark) if fold else {}
        self.prefixes = folded_prefixes(made.graph, made.axes) if fold else frozenset()
        self.classes: dict[Hashable, int] = {}
        self.edge_classes: dict[tuple[int, int, int, int], int] = {}
        self.at: dict[Value, tuple[int, int]] = {}

    def build(self) -> None:
        graph, made = self.made.graph, self.made
        inputs = {entry.node: entry for entry in graph.inputs}
        nodes = [node for node in graph.fx.nodes if node.op != "output"]
        pending_parameters = []
        for node in sorted(nodes, key=lambda n: n.meta.get("phase", "forward") == "backward"):
            if node.op in ("placeholder", "get_attr"):
                entry = inputs.get(node.name)
                if entry is not None and entry.kind == "parameter":
                    pending_parameters.append((node, entry))
                    self.unit(node.name, "parameter", node, None)
                else:
                    self.unit(node.name, "input", node, self.once(node.name, partial(self.input_options, node)))
            elif computes(node):
                key = self.keys.get(node.name, node.name)
                unit = self.unit(node.name, "op", node, self.once(("op", key), partial(self.op_options, node)))
                for operand, value in enumerate(made.axes.operands(node)):
                    self.edge(value, unit, operand)
        self.parameters(pending_parameters)
        self.sinks()
        for edge in made.edges:
            made.readers.setdefault((edge.source, edge.result), []).append(edge)

    # --- units and edges ---------------------------------------------------------------------------------------------

    def once(self, key: Hashable, make: Callable[[], tuple[Option, ...]]) -> int:
        """The class of a key; its options are made at its first unit."""
        if key not in self.classes:
            self.classes[key] = len(self.made.options)
            self.made.options.append(make())
        return self.classes[key]

    def unit(self, name: str, kind: str, node: fx.Node | None, shape: int | None, phase: str = "forward") -> Unit:
        tensors = results(node) if node is not None and kind in ("op", "input", "parameter") else []
        sizes = tuple(t.dtype.itemsize if isinstance(t, torch.Tensor) else 0 for t in tensors)
        phase = node.meta.get("phase", phase) if node is not None and kind == "op" else phase
        module = node.meta.get("module", "") if node is not None else ""
        free = kind == "op" and node is not None and not owns(node)
        made = Unit(len(self.made.units), name, kind, phase, module, free, sizes, -1 if shape is None else shape)
        self.made.units.append(made)
        for i in range(len(sizes)):
            self.at[name, i] = (made.index, i)
        return made

    def edge(self, value: Value, target: Unit, operand: int) -> None:
        # edge classes need the classes of both ends: parameters get theirs late, so edges are classed in `parameters`
        index, result = self.at[value]
        self.made.edges.append(Edge(index, result, target.index, operand, -1))

    def class_edges(self) -> None:
        units = self.made.units
        classed = []
        for e in self.made.edges:
            key = (units[e.source].shape, e.result, units[e.target].shape, e.operand)
            if key not in self.edge_classes:
                self.edge_classes[key] = len(self.made.shapes)
                self.made.shapes.append(key)
            classed.append(Edge(e.source, e.result, e.target, e.operand, self.edge_classes[key]))
        self.made.edges[:] = classed

    # --- options -----------------------------------------------------------------------------------------------------

    def op_options(self, node: fx.Node) -> tuple[Option, ...]:
        made = self.made
        dtypes = [_result(made.graph, value).dtype for value in made.axes.operands(node)]
        outs = [t.dtype if isinstance(t, torch.Tensor) else torch.bool for t in results(node)]
        found: dict[Any, Option] = {}
        allowed = 0
        for choice in choices(made.axes, node, made.mesh):
            if not self.restriction.plays(node, choice, made.mesh):
                continue
            allowed += 1
            tensors = [*zip(choice.inputs, dtypes, strict=True), *zip(choice.outputs, outs, strict=False)]
            seconds = node_s(node, made.axes.rule(node), choice.roles, tensors, made.mesh, made.cluster)
            seconds += steps_s(choice.inner, dtypes[0].itemsize if dtypes else 4, made.mesh, made.cluster)
            ins, outputs = tuple((x, "") for x in choice.inputs), tuple((x, "") for x in choice.outputs)
            key = (ins, outputs)
            if key not in found or seconds < found[key].seconds:
                found[key] = Option(ins, outputs, seconds, choice.roles)
        if not allowed:
            pins = self.restriction.pins
            why = "" if pins is None else pins.no_choice(node, [c.roles for c in choices(made.axes, node, made.mesh)])
            raise UnsupportedError(
                (why or f"{self.restriction.what or 'the strategy'} leaves no way to run {node.name}")
                + (f"\n  from {node.meta['source']}" if node.meta.get("source") else "")
            )
        return tuple(found.values())

    def input_options(self, node: fx.Node) -> tuple[Option, ...]:
        return (Option((), ((self.input_layout(node), ""),), 0.0, None),)

    def input_layout(self, node: fx.Node) -> Layout:
        return input_layout(self.made.axes, self.made.mesh, node.name, node.name in self.local)

    def parameters(self, entries: list[tuple[fx.Node, Input]]) -> None:
        """Options of parameters, from what their consumers want, and the edges of their gradients."""
        made = self.made
        gradients = {o.name: o.node for o in made.graph.outputs if o.kind == "gradient"}
        readers: dict[int, list[Edge]] = {}
        for e in made.edges:
            readers.setdefault(e.source, []).append(e)
        for node, entry in entries:
            unit = made.units[self.at[node.name, 0][0]]
            uses = [(made.units[e.target].shape, e.operand) for e in readers.get(unit.index, ())]
            factors = made.axes.factors[node.name, 0]
            has_gradient = entry.trainable and gradients.get(entry.name) is not None
            fixed, name = self.restriction.stored.get(entry.name), pattern(entry.name, self.prefixes, self.mark)
            key = ("parameter", name, factors, unit.itemsizes, has_gradient, tuple(sorted(set(uses))), fixed)
            wanted = [o.inputs[k][0] for c, k in uses for o in made.options[c]]
            unit.shape = self.once(key, partial(self.keeping, factors, wanted, entry, unit, has_gradient))
            if has_gradient:
                self.edge(source(made.graph.node(str(gradients[entry.name]))), unit, 0)

    def keeping(
        self, factors: tuple[tuple[int, ...], ...], wanted: list[Layout], entry: Input, unit: Unit, has_gradient: bool
    ) -> tuple[Option, ...]:
        made, out = self.made, []
        for way in self.ways(factors, wanted, entry):
            steps = conversion(way.stored, way.home, made.mesh) or ()
            ins: tuple[State, ...] = ((way.stored, "end" if way.level == 1 else ""),) if has_gradient else ()
            hands = "" if way.level < 3 else "keep" if way.keep else "use"
            seconds = steps_s(steps, unit.itemsizes[0], made.mesh, made.cluster)
            if has_gradient:
                seconds += update_s(way.stored, made.graph.stored_dtype(entry), made.copies, made.mesh, made.cluster)
            out.append(Option(ins, ((way.home, hands),), seconds, way))
        if not out:
            raise UnsupportedError(f"{self.restriction.what or 'the strategy'} leaves no way to keep {entry.name}")
        return tuple(out)

    def ways(
        self, factors: tuple[tuple[int, ...], ...], wanted: list[Layout], entry: Input
    ) -> tuple[ParameterPlan, ...]:
        """The ways to keep a parameter: as it is kept already, else as pinned, else as the strategy has it."""
        fixed = self.restriction.stored.get(entry.name)
        if fixed is not None:
            return (fixed,)
        levels, allowed, pins = self.restriction.levels, self.restriction.parameters, self.restriction.pins
        pinned = None if pins is None else pins.ways(entry, factors, wanted, levels)
        if pinned is not None:
            return pinned
        kept = parameter_options(factors, wanted, self.made.mesh, levels=levels, trainable=entry.trainable)
        return kept if allowed is None else tuple(way for way in kept if allowed(entry, way))

    def sinks(self) -> None:
        made = self.made
        for i, output in enumerate(made.graph.outputs):
            if output.node is None or output.kind == "gradient":
                continue
            value = source(made.graph.node(output.node))
            if value not in made.axes.factors:
                continue
            factors = made.axes.factors[value]
            if output.kind in ("output", "input_gradient"):
                producer = made.options_of(made.units[self.at[value][0]])
                targets = dict.fromkeys(o.outputs[value[1]][0].settled() for o in producer)
                ways = tuple(Option(((t, "settled"),), (), 0.0, None) for t in targets)
            else:
                ways = (Option(((Layout.whole(factors), ""),), (), 0.0, None),)
            phase = "backward" if output.kind == "input_gradient" else "forward"
            shape = self.once(("sink", i), partial(tuple, ways))
            self.edge(value, self.unit(f"output {i}", output.kind, None, shape, phase), 0)
        self.class_edges()


def input_layout(axes: Axes, mesh: Mesh, name: str, is_local: bool) -> Layout:
    """Layout in which an input arrives: whole, or dim 0 cut by every mesh axis."""
    layout = Layout.whole(axes.factors[name, 0])
    if is_local and layout.factors and layout.factors[0]:
        return layout.with_cut((0, 0), mesh.names)
    return layout


def _result(graph: Graph, value: Value) -> torch.Tensor:
    found = results(graph.node(value[0]))[value[1]]
    assert isinstance(found, torch.Tensor), value
    return found


def tensor_of(graph: Graph, value: Value) -> torch.Tensor:
    """The fake tensor of a value."""
    return _result(graph, value)


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """Operands of a node, in the order of its choices' inputs."""
    return operands(node)
