"""Budgets that bind: plans change, too little is refused, the least that is named works."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.axes import Axes, analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.cost.memory import memory
from autopar.errors import NoPlan
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.models.mlp import build
from autopar.passes import copy_views, emit
from autopar.planner import plan

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)
MESH = Mesh(("data",), (4,))


@pytest.fixture(scope="module")
def case() -> tuple[Graph, Axes]:
    model, args = build(b=8, d=20, f=44, g=36, o=12)
    graph = copy_views(capture(model, args, {}))
    return graph, analyse(graph)


def test_halving_the_budget_changes_the_plan(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    free = plan(graph, CLUSTER, axes=axes, mesh=MESH)
    budget = int(free.costs["peak_bytes"] / 2)
    tight = plan(graph, CLUSTER, axes=axes, mesh=MESH, memory_bytes=budget)
    assert tight.parameters != free.parameters
    assert tight.costs["peak_bytes"] <= budget < free.costs["peak_bytes"]
    assert tight.costs["step_s"] > free.costs["step_s"]
    assert memory(emit(graph, axes, tight), "AdamW").peak == tight.costs["peak_bytes"]


def test_too_little_is_refused_with_numbers_and_the_least_budget_then_solves(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    with pytest.raises(NoPlan) as refused:
        plan(graph, CLUSTER, axes=axes, mesh=MESH, memory_bytes=5000)
    message, least = str(refused.value), refused.value.needed_bytes
    assert "nothing fits in 4.9 KiB on 4 devices as mesh(data=4); the least peak found is" in message
    assert f"try: memory_bytes={least}, more devices, or a smaller batch" in message
    assert "it stays: optimizer" in message
    assert "from mlp.py:" in message
    found = plan(graph, CLUSTER, axes=axes, mesh=MESH, memory_bytes=least)
    assert found.costs["peak_bytes"] <= least


def test_the_default_budget_is_the_devices_less_its_reserve(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    small = CLUSTER.model_copy(update={"device": CLUSTER.device.model_copy(update={"memory_bytes": 0.3 * 2**30})})
    assert plan(graph, small, axes=axes, mesh=MESH).costs["budget_bytes"] == pytest.approx(0.05 * 2**30)


def test_the_certificate_tells_why_the_others_lost(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    found = plan(graph, CLUSTER, axes=axes)
    tried = found.certificate["tried"]
    assert [t["mesh"] for t in tried] == ["mesh(data=4)", "mesh(data=2, model=2)"]
    assert min(t["step_s"] for t in tried) == pytest.approx(found.costs["step_s"])
    assert found.certificate["gap"] == pytest.approx(0, abs=1e-6)
    assert replace(found, certificate={}) == replace(plan(graph, CLUSTER, axes=axes), certificate={})
