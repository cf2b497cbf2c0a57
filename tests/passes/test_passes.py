"""Each pass, on a two-layer perceptron with its hidden width cut: before and after as golden text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar import ClusterSpec, strategies
from autopar.axes import Axes, analyse, computes
from autopar.capture import capture
from autopar.choices import choices
from autopar.dump import graph_text
from autopar.errors import PlanError
from autopar.graph import Graph
from autopar.layout import Layout, Mesh
from autopar.passes import bind, copy_views, emit, expand_local, insert_conversions
from autopar.passes.buckets import buckets
from autopar.passes.in_place import alone as in_place
from autopar.passes.verify import verify
from autopar.plan import ParameterPlan, Plan
from autopar.planner import plan as search
from autopar.verify.simulate import run
from tests.harness.reference import errors, run_whole, values_of

MESH = Mesh(("data", "model"), (2, 2))
aten = torch.ops.aten


class Net(nn.Module):
    """b=6, d=4, f=10, v=8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 10, bias=False)
        self.down = nn.Linear(10, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()).softmax(-1) ** 2).sum()


INPUT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return copy_views(capture(Net(), (INPUT,), double=True))


def planned(graph: Graph, axes: Axes, *, level: int = 0, local: bool = False, **keywords: Any) -> Plan:
    """Batch over data, hidden width (`local`: the classes) over model, parameters at a ZeRO level over data."""
    hidden = "10" if not local else "8"
    ops = {}
    for node in graph.fx.nodes:
        if not computes(node):
            continue
        rule = axes.rule(node)
        batch = next((x for x, n in rule.sizes.items() if n == 6), "")
        width = next((x for x, n in rule.sizes.items() if str(n) == hidden), "")
        ops[node.name] = (batch, width)
    parameters = {}
    for entry in graph.inputs:
        if entry.kind == "parameter":
            home = Layout.whole(axes.factors[entry.node, 0])
            cut = next((p for p, n, _ in home.places() if str(n) == hidden), None)
            home = home if cut is None else home.with_cut(cut, ("model",))
            place = next(p for p, n, _ in home.places() if n == (4 if entry.name == "up.weight" else 10))
            stored = home.with_cut(place, (*home.cut_at(place), "data")) if level else home
            parameters[entry.name] = ParameterPlan(level, stored if level == 3 else home, stored)
    legal = {n.name: {c.roles for c in choices(axes, n, MESH)} for n in graph.fx.nodes if computes(n)}
    ops = {name: roles if roles in legal[name] else ("", "") for name, roles in ops.items()}
    return Plan(MESH, ops, parameters, **keywords)


def test_golden_backward_reads_parameters_through_views_of_its_own(golden: Callable[[str, str], None]) -> None:
    traced = capture(Net(), (INPUT,), double=True)
    golden("pass_copy_views", graph_text(traced.fx) + "\n\nbecomes\n\n" + graph_text(copy_views(traced).fx))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_golden_disagreements_become_collectives(golden: Callable[[str, str], None], graph: Graph, level: int) -> None:
    axes = analyse(graph)
    after = insert_conversions(graph, axes, planned(graph, axes, level=level))
    golden(f"pass_insert_conversions_zero{level}", graph_text(verify(after, "insert_conversions").fx))


def test_golden_a_softmax_over_a_cut_dim_becomes_a_subgraph(golden: Callable[[str, str], None], graph: Graph) -> None:
    axes = analyse(graph)
    plan = planned(graph, axes, local=True)
    after = expand_local(insert_conversions(graph, axes, plan), axes, plan)
    golden("pass_expand_local", graph_text(verify(after, "expand_local").fx))


def test_the_graph_that_is_emitted_from_is_left_as_it_was(graph: Graph) -> None:
    before = graph_text(graph.fx)
    axes = analyse(graph)
    emit(graph, axes, planned(graph, axes))
    assert graph_text(graph.fx) == before


def groups(coordinate: dict[str, int]) -> dict[str, str]:
    return {"data": f"data {coordinate['model']}", "model": f"model {coordinate['data']}"}


def bound(graph: Graph, plan: Plan, device: str = "cpu") -> Any:
    coordinate = MESH.coordinate(3)
    return bind(emit(graph, analyse(graph), plan), coordinate, groups(coordinate), device)


def collectives(module: fx.GraphModule) -> list[str]:
    names = [str(n.target).split(".")[1] for n in module.graph.nodes if "_c10d_functional" in str(n.target)]
    return [n for n in names if n != "wait_tensor"]


def test_a_bucket_reduces_several_gradients_in_one_collective(graph: Graph) -> None:
    axes = analyse(graph)
    alone, together = planned(graph, axes), planned(graph, axes, bucket_bytes=1 << 20)
    assert collectives(bound(graph, alone).backward).count("all_reduce_") == 2
    assert collectives(bound(graph, together).backward).count("all_reduce_") == 1


def test_products_are_written_into_their_bucket(graph: Graph) -> None:
    plan = planned(graph, analyse(graph), bucket_bytes=1 << 20)
    ops = [str(n.target) for n in bound(graph, plan).backward.graph.nodes]
    assert ops.count("aten.mm.out") == 2
    assert "aten.copy_.default" not in ops and "aten.cat.default" not in ops


def test_what_no_op_can_write_elsewhere_is_copied_into_the_bucket() -> None:
    model = nn.Sequential(nn.Linear(4, 10), nn.LayerNorm(10), nn.Linear(10, 8))
    graph = copy_views(capture(model, (INPUT,), loss_fn=torch.sum, double=True))
    plan = search(graph, ClusterSpec.preset("cpu-gloo", devices=2), strategy=strategies.ddp())
    backward = bind(emit(graph, analyse(graph), plan), {"data": 1}, {"data": "group"}).backward
    ops = [str(n.target) for n in backward.graph.nodes]
    written = ops.count("aten.mm.out"), ops.count("aten.sum.IntList_out"), ops.count("aten.copy_.default")
    assert (*written, collectives(backward)) == (2, 2, 2, ["all_reduce_"])


def test_a_sum_is_reduced_in_place_where_nobody_else_reads_its_terms() -> None:
    fresh = fx.Graph()
    x = fresh.placeholder("x")
    product, viewed = fresh.call_function(aten.mm.default, (x, x)), fresh.call_function(aten.t.default, (x,))
    once = fresh.call_function(aten.relu.default, (product,))
    assert in_place(product) and not in_place(x) and not in_place(viewed)
    fresh.output((once, product))
    assert not in_place(product)


def test_a_tensor_as_large_as_a_bucket_runs_alone(graph: Graph) -> None:
    axes = analyse(graph)
    program = emit(graph, axes, planned(graph, axes))
    assert buckets(program.backward, replace(program.plan, bucket_bytes=8 * 4 * 5)) == []
    assert len(buckets(program.backward, replace(program.plan, bucket_bytes=1 << 20))) == 1


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes, copied_bytes", [(0, 0), (200, 200), (1 << 20, 1 << 20), (1 << 20, 0)])
def test_every_level_with_and_without_buckets_equals_the_whole_graph(
    graph: Graph, level: int, bucket_bytes: int, copied_bytes: int
) -> None:
    axes = analyse(graph)
    plan = planned(graph, axes, level=level, bucket_bytes=bucket_bytes, copied_bytes=copied_bytes)
    values = values_of(graph, Net(), [INPUT])
    tangent = values[next(e.node for e in graph.inputs if e.kind == "tangent")]
    found, _ = run(emit(graph, axes, plan), values, [tangent])
    assert max(errors(graph, found, run_whole(graph, values)).values()) < 1e-12


def test_a_bias_is_added_inside_its_product() -> None:
    model = nn.Sequential(nn.Linear(4, 10), nn.Flatten(0))
    graph = capture(model, (INPUT,), loss_fn=torch.sum, double=True)
    axes = analyse(graph)
    whole = Plan(MESH, {n.name: ("", "") for n in graph.fx.nodes if computes(n)}, {
        e.name: ParameterPlan(0, w := Layout.whole(axes.factors[e.node, 0]), w)
        for e in graph.inputs if e.kind == "parameter"
    })  # fmt: skip
    ops = [str(n.target) for n in bound(graph, whole).forward.graph.nodes]
    assert ops.count("aten.addmm.default") == 1
    assert "aten.add.Tensor" not in ops


def test_waits_stand_just_before_their_readers(graph: Graph) -> None:
    nodes = list(bound(graph, planned(graph, analyse(graph)), "meta").backward.graph.nodes)
    first = next(i for i, n in enumerate(nodes) if "all_reduce" in str(n.target))
    wait = next(i for i, n in enumerate(nodes) if "wait_tensor" in str(n.target) and n.args[0] is nodes[first])
    between = [n for n in nodes[first + 1 : wait] if "mm" in str(n.target)]
    assert between, "a gradient's reduction runs while the next gradient is computed"


def test_on_cpu_a_collective_is_waited_for_before_the_next_starts(graph: Graph) -> None:
    nodes = [str(n.target) for n in bound(graph, planned(graph, analyse(graph))).backward.graph.nodes]
    moves = [n for n in nodes if "_c10d_functional" in n or "wait_tensor_of" in n]
    assert len(moves) > 2
    assert all("wait_tensor" in name for name in moves[1::2])
    assert not any("wait_tensor" in name for name in moves[::2])


def test_verify_names_the_pass_and_the_node(graph: Graph) -> None:
    axes = analyse(graph)
    after = insert_conversions(graph, axes, planned(graph, axes))
    node = next(n for n in after.fx.nodes if str(n.target) == "aten.mm.default")
    operand = node.args[0]
    operand.meta["layouts"] = (Layout.whole(operand.meta["layouts"][0].factors),)
    with pytest.raises(AssertionError, match=r"after insert_conversions: %mm wants %"):
        verify(after, "insert_conversions")


def test_an_illegal_role_is_refused_with_the_node_and_the_line(graph: Graph) -> None:
    axes = analyse(graph)
    plan = planned(graph, axes)
    broken = replace(plan, ops={**plan.ops, "mm": ("nonsense", "")})
    with pytest.raises(PlanError, match=r"no legal choice for %mm: \('nonsense', ''\)\n  from test_passes.py:"):
        emit(graph, axes, broken)
