"""Whether a plan that somebody brings fits a graph: every op and parameter has its entry, and each is possible.

In: a plan from a file, perhaps edited by hand, a graph and its axes.  Out: nothing, or a `PlanError` that names the
first thing that is wrong.  Next: `fingerprint.py`, which tells whether the plan was made for this graph at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.axes import Axes, Value, computes, source
from autopar.choices import choice_of, choices
from autopar.errors import PlanError
from autopar.files import AGAIN
from autopar.graph import Graph, Input
from autopar.layout import MICRO, STAGE, Layout, conversion
from autopar.placements import storable
from autopar.plan import ParameterPlan, Plan
from autopar.planner.stages import without_parameters
from autopar.planner.units import input_layout


def check_legal(plan: Plan, graph: Graph, axes: Axes, local: Iterable[str] = (), where: str = "plan") -> None:
    """Refuse a plan, which came from `where`, that the passes could not turn into a program of this graph."""
    try:
        check_names(plan, graph)
        check_inputs(plan, graph, axes, frozenset(local))
        check_covers(plan, graph)
        check_parameters(plan, graph, axes)
        check_ops(plan, graph, axes)
        check_stages(plan, graph)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def check_names(plan: Plan, graph: Graph) -> None:
    """The plan speaks of nothing that the graph does not have."""
    inputs = {entry.node for entry in graph.inputs if entry.kind == "input"}
    owned = {entry.name for entry in graph.inputs if entry.kind == "parameter"}
    ops = {node.name for node in graph.fx.nodes if computes(node)}
    for section, here, known in (
        ("ops", plan.ops, ops),
        ("parameters", plan.parameters, owned),
        ("inputs", plan.inputs, inputs),
    ):
        if foreign := [name for name in here if name not in known]:
            raise PlanError(f"{section}.{foreign[0]}: the model has no such name{AGAIN}")


def check_inputs(plan: Plan, graph: Graph, axes: Axes, local: frozenset[str]) -> None:
    """The inputs that arrive in parts are those that the plan takes in parts."""
    for entry in graph.inputs:
        if entry.kind != "input":
            continue
        here = input_layout(axes, plan.mesh, entry.node, entry.node in local)
        there = plan.inputs.get(entry.node, Layout.whole(axes.factors[entry.node, 0]))
        if here != there:
            how = "Local" if entry.node in local else "whole"
            raise PlanError(
                f"inputs.{entry.node}: {entry.name} is {how}, {here}, but the plan takes it as {there}{AGAIN}"
            )


def check_covers(plan: Plan, graph: Graph) -> None:
    """Every parameter has its entry."""
    for entry in graph.inputs:
        if entry.kind == "parameter" and entry.name not in plan.parameters:
            raise PlanError(f"parameters: the plan does not tell how {entry.name} is kept{AGAIN}")


def check_parameters(plan: Plan, graph: Graph, axes: Axes) -> None:
    """Every parameter is kept in layouts of its own shape that torch can hold and that follow from each other."""
    for entry in graph.inputs:
        if entry.kind != "parameter":
            continue
        kept = plan.parameters[entry.name]
        for what, layout in (("home", kept.home), ("stored", kept.stored)):
            if layout.factors != axes.factors[entry.node, 0]:
                there = Layout.whole(axes.factors[entry.node, 0])
                raise PlanError(f"parameters.{entry.name}.{what} is {layout}, but its dims are {there}{AGAIN}")
            if not storable(layout, plan.mesh):
                raise PlanError(
                    f"parameters.{entry.name}.{what}: {layout} cannot be stored on {plan.mesh}: a device would have no "
                    f"piece of it, or torch has no placements for it{AGAIN}"
                )
        check_level(entry, kept, plan)


def check_level(entry: Input, kept: ParameterPlan, plan: Plan) -> None:
    """Levels 0 and 3 have one layout; levels 1 and 2 gather the copy from what is stored."""
    name = entry.name
    if kept.keep and kept.level != 3:
        raise PlanError(f"parameters.{name}.keep: it is for level 3, and this is level {kept.level}{AGAIN}")
    if kept.level in (1, 2) and not entry.trainable:
        raise PlanError(f"parameters.{name}.level: it is frozen, and level {kept.level} spreads gradients{AGAIN}")
    if kept.level in (1, 2) and kept.home == kept.stored:
        raise PlanError(f"parameters.{name}: level {kept.level} stores less than {kept.home}; that is level 0{AGAIN}")
    if kept.level == 3 and not kept.stored.axes:
        raise PlanError(f"parameters.{name}: level 3 has nothing to gather in {kept.stored}; that is level 0{AGAIN}")
    if kept.level in (0, 3) and kept.home != kept.stored:
        both = f"{kept.home} and {kept.stored}"
        raise PlanError(f"parameters.{name}: level {kept.level} has one layout, not {both}{AGAIN}")
    if conversion(kept.stored, kept.home, plan.mesh) is None:
        raise PlanError(f"parameters.{name}: {kept.stored} cannot be brought into {kept.home}{AGAIN}")


def check_ops(plan: Plan, graph: Graph, axes: Axes) -> None:
    """Every op has roles it can play, and its operands can be brought to them."""
    layouts: dict[Value, Layout] = {}
    for entry in graph.inputs:
        value = (entry.node, 0)
        if entry.kind == "parameter":
            kept = plan.parameters[entry.name]
            layouts[value] = kept.stored if kept.level == 3 else kept.home
    for node in graph.fx.nodes:
        if not computes(node):
            if node.op in ("placeholder", "get_attr"):
                layouts.setdefault((node.name, 0), plan.inputs.get(node.name, Layout.whole(axes.factors[node.name, 0])))
            continue
        roles = plan.ops.get(node.name)
        if roles is None or len(roles) != len(plan.mesh.names):
            raise PlanError(f"ops: the plan does not tell how %{node.name} runs{origin(node)}{AGAIN}")
        found = choice_of(axes, node, tuple(roles), plan.mesh)
        if found is None:
            able = [list(choice.roles) for choice in choices(axes, node, plan.mesh)]
            raise PlanError(
                f"ops.{node.name}: it cannot run as {list(roles)} on {plan.mesh}{origin(node)}\n"
                f"  it can run as {', '.join(map(str, able))}{AGAIN}"
            )
        for value, wanted in zip(axes.operands(node), found.inputs, strict=True):
            if conversion(layouts[value], wanted, plan.mesh) is None:
                raise PlanError(
                    f"ops.{node.name}: %{value[0]} is {layouts[value]} and cannot be brought into {wanted}"
                    f"{origin(node)}{AGAIN}"
                )
        layouts |= {(node.name, i): layout for i, layout in enumerate(found.outputs)}
    check_results(plan, graph, axes, layouts)


def check_stages(plan: Plan, graph: Graph) -> None:
    """Every op has a stage where the mesh has an axis of them; forward goes to later ones, backward to earlier."""
    count = plan.mesh.size(STAGE) if STAGE in plan.mesh.names else 0
    if not count:
        if plan.stages or MICRO in plan.mesh.names:
            raise PlanError(f"stages: {plan.mesh} has no axis {STAGE}{AGAIN}")
        return
    if MICRO not in plan.mesh.names:
        raise PlanError(f"mesh: {plan.mesh} has stages, but no axis {MICRO} of microbatches{AGAIN}")
    for name, kept in plan.parameters.items():
        if MICRO in kept.home.axes | kept.stored.axes or STAGE in kept.home.axes or kept.level > 1:
            raise PlanError(
                f"parameters.{name}: in a pipeline its level is 0 or 1, stages alone cut what is stored, neither they "
                f"nor microbatches cut what is computed with{AGAIN}"
            )
    if unknown := plan.stages.keys() - {node.name for node in graph.fx.nodes}:
        raise PlanError(f"stages.{min(unknown)}: the graph has no such op{AGAIN}")
    once, at = without_parameters(graph), plan.mesh.names.index(STAGE)
    for node in graph.fx.nodes:
        if plan.ops.get(node.name, ("",) * (at + 1))[at]:
            raise PlanError(f"ops.{node.name}: an op runs in one stage, its role along {STAGE} is empty{AGAIN}")
        if node.op != "call_function" or node.name in once:
            continue
        here = plan.stages.get(node.name, -1)
        if not 0 <= here < count:
            raise PlanError(f"stages.{node.name}: there are stages 0 to {count - 1}, one must be given{AGAIN}")
        for other in node.all_input_nodes:
            phases = {node.meta["phase"], other.meta.get("phase")}
            there = plan.stages.get(other.name, here)
            if len(phases) == 1 and (there - here) * (1 if "forward" in phases else -1) > 0:
                raise PlanError(
                    f"stages.{node.name}: it reads %{other.name} of stage {there}, which comes after stage {here} in "
                    f"{node.meta['phase']}{origin(node)}{AGAIN}"
                )


def check_results(plan: Plan, graph: Graph, axes: Axes, layouts: dict[Value, Layout]) -> None:
    """Gradients can leave as their parameters are stored, losses and buffers whole."""
    for output in graph.outputs:
        if output.node is None or output.kind not in ("gradient", "loss", "buffer"):
            continue
        value = source(graph.node(output.node))
        layout = layouts.get(value)
        target = plan.parameters[output.name].stored if output.kind == "gradient" else Layout.whole(axes.factors[value])
        if layout is not None and conversion(layout, target, plan.mesh) is None:
            raise PlanError(f"the {output.kind} of {output.name} is {layout} and cannot leave as {target}{AGAIN}")


def origin(node: object) -> str:
    """The user's line of a node, as a line of an error."""
    line = getattr(node, "meta", {}).get("source")
    return f"\n  from {line}" if line else ""
