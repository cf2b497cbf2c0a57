"""Repeated blocks share their decisions, so solving does not grow with depth."""

from __future__ import annotations

import pytest

from autopar.axes import Axes, analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.models.gpt import build
from autopar.passes import copy_views
from autopar.planner import plan
from autopar.planner.program import Programme
from autopar.planner.units import problem

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)
MESH = Mesh(("data",), (4,))


def graph_of(layers: int) -> tuple[Graph, Axes]:
    model, args = build(b=12, s=8, v=48, d=36, heads=12, f=60, layers=layers)
    graph = copy_views(capture(model, args, {}))
    return graph, analyse(graph)


def test_the_programme_does_not_grow_with_depth() -> None:
    sizes = [Programme(problem(*graph_of(layers), MESH, CLUSTER)).model.size for layers in (3, 6)]
    assert sizes[1] <= sizes[0] * 1.02


def test_equal_blocks_get_equal_plans_and_folding_costs_nothing_where_nothing_binds() -> None:
    graph, axes = graph_of(3)
    folded = plan(graph, CLUSTER, axes=axes, mesh=MESH)
    apart = plan(graph, CLUSTER, axes=axes, mesh=MESH, fold=False)
    assert folded.costs["step_s"] == pytest.approx(apart.costs["step_s"], rel=1e-9)
    assert folded.certificate["variables"] < apart.certificate["variables"]
    kept = {n: w for n, w in folded.parameters.items() if n.endswith("up.weight")}
    assert len(kept) == 3
    assert len(set(kept.values())) == 1
