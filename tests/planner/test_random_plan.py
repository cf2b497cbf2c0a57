"""Random plans are legal, differ by seed, and are the same for the same seed."""

from __future__ import annotations

from autopar.axes import analyse
from autopar.capture import capture
from autopar.layout import Mesh
from autopar.models.mlp import tiny
from autopar.passes import copy_views, emit
from autopar.planner import random_plan

MESHES = [Mesh(("data",), (4,)), Mesh(("data", "model"), (2, 2))]


def test_random_plans_emit() -> None:
    model, args = tiny()
    graph = copy_views(capture(model, args, {}))
    axes = analyse(graph)
    plans = [random_plan(graph, axes, MESHES, seed) for seed in range(40)]
    for plan in plans:
        emit(graph, axes, plan)
    assert len({str(p.ops) for p in plans}) > 30
    assert {p.mesh.names for p in plans} == {("data",), ("data", "model"), ("model", "data")}
    assert {w.level for p in plans for w in p.parameters.values()} == {0, 1, 2, 3}
    assert random_plan(graph, axes, MESHES, 7) == plans[7]
