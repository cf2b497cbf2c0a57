"""Plans as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autopar.axes import Axes, analyse, computes
from autopar.capture import capture
from autopar.choices import choices
from autopar.cluster import ClusterSpec
from autopar.graph import Graph
from autopar.layout import Layout, Mesh
from autopar.models import gpt, mlp
from autopar.passes import copy_views, emit
from autopar.plan import ParameterPlan, Plan
from autopar.text import listed, size, text

MESH = Mesh(("data", "model"), (2, 3))


def batch_cut(graph: Graph, axes: Axes, mesh: Mesh) -> Plan:
    """The first mesh axis cuts the batch wherever an op has it; everything else is whole and replicated."""
    ops = {}
    for node in graph.fx.nodes:
        if computes(node):
            ways = [c for c in choices(axes, node, mesh) if not any(c.roles[1:])]
            cut = [c for c in ways if on_batch(axes, node.name, c.outputs, mesh.names[0])]
            ops[node.name] = (cut or ways)[0].roles
    parameters = {}
    for entry in graph.inputs:
        if entry.kind == "parameter":
            whole = Layout.whole(axes.factors[entry.node, 0])
            parameters[entry.name] = ParameterPlan(0, whole, whole)
    return Plan(mesh, ops, parameters)


def on_batch(axes: Axes, name: str, outputs: tuple[Layout, ...], axis: str) -> bool:
    places = [(i, layout.where(axis)) for i, layout in enumerate(outputs)]
    return any(isinstance(p, tuple) and axes.labels[name, i][p[0]][p[1]] == "batch" for i, p in places)


def made(model: object, args: object, mesh: Mesh = MESH) -> Plan:
    graph = copy_views(capture(model, args))  # type: ignore[arg-type]
    axes = analyse(graph)
    program = emit(graph, axes, batch_cut(graph, axes, mesh))
    return listed(program, graph, axes, ClusterSpec.preset("cpu-gloo", devices=mesh.devices))


def test_a_plan_of_32_layers_fits_a_screen() -> None:
    model, args = gpt.build(b=4, s=6, v=11, d=8, heads=2, f=10, layers=32, dropout=0.0)
    lines = str(made(model, args)).splitlines()
    assert len(lines) <= 60
    assert "blocks.0-31  x 32" in lines


def test_a_plan_says_what_each_op_does(golden: Callable[[str, str], None]) -> None:
    golden("plan_mlp", str(made(*mlp.divisible())))


def test_a_plan_prints_alone(golden: Callable[[str, str], None]) -> None:
    weight = Layout(((9, 7), (5,)), (((), ("model",)), ((),)))
    plan = Plan(
        MESH,
        {"mm": ("m", "k")},
        {
            "w": ParameterPlan(3, weight, weight.with_cut((1, 0), ("data",)), keep=True),
            "b": ParameterPlan(0, Layout.whole(((5,),)), Layout.whole(((5,),))),
        },
        costs={
            "step_s": 0.0124,
            "compute_s": 0.0098,
            "exposed_s": 0.0026,
            "peak_bytes": 41.2 * 2**30,
            "budget_bytes": 72.0 * 2**30,
            "parameters_bytes": 10.5 * 2**30,
            "optimizer_bytes": 21.0 * 2**30,
            "copies_bytes": 0.0,
        },
        certificate={
            "gap": 0.0001,
            "objective_s": 0.0124,
            "bound_s": 0.01239,
            "variables": 1234,
            "tried": [
                {"mesh": str(MESH), "step_s": 0.0124},
                {"mesh": "mesh(data=6)", "step_s": 0.0186},
                {"mesh": "mesh(data=3, model=2)", "needed_bytes": 80.1 * 2**30},
            ],
        },
    )
    golden("plan_alone", str(plan))


def test_a_plan_that_knows_nothing_prints_its_mesh() -> None:
    assert text(Plan(MESH, {}, {})) == "plan  mesh(data=2, model=3)"


@pytest.mark.parametrize(
    ("count", "printed"), [(72 * 2**30, "72.00 GiB"), (2**30 / 4, "0.25 GiB"), (2**20 * 3.14159, "3.14 MiB")]
)
def test_bytes_print_in_a_unit_that_fits(count: float, printed: str) -> None:
    assert size(count) == printed


def names(plan: Plan) -> Iterator[str]:
    for line in plan.certificate["program"]:
        yield line.split()[0]


def test_lines_outside_blocks_stand_under_their_own_names() -> None:
    model, args = gpt.build(b=4, s=6, v=11, d=8, heads=2, f=10, layers=3, dropout=0.0)
    assert "head" in list(names(made(model, args)))
