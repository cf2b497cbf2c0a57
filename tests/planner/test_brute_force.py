"""The programme against enumeration of every legal plan, each emitted, priced and swept."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache

import pytest

from autopar.axes import Axes, analyse, computes
from autopar.choices import choices
from autopar.cluster import ClusterSpec
from autopar.cost.memory import memory
from autopar.cost.price import price
from autopar.errors import NoPlan, PlanError
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.passes import emit
from autopar.plan import Plan
from autopar.planner import plan
from autopar.planner.options import options
from tests.planner.toys import linear

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)
MESH = Mesh(("data",), (4,))


@dataclass(frozen=True)
class Tried:
    """One legal plan, as it is emitted."""

    seconds: float
    peak: int


def enumerated(graph: Graph, axes: Axes, mesh: Mesh) -> list[Tried]:
    """Every plan: every choice of every op times every way to keep every parameter."""
    nodes = [n for n in graph.fx.nodes if computes(n)]
    per_op = [[c.roles for c in choices(axes, n, mesh)] for n in nodes]
    entries = [e for e in graph.inputs if e.kind == "parameter"]
    per_parameter = []
    for entry in entries:
        wanted = [
            c.inputs[i]
            for n in nodes
            for i, value in enumerate(axes.operands(n))
            if value == (entry.node, 0)
            for c in choices(axes, n, mesh)
        ]
        per_parameter.append(options(axes.factors[entry.node, 0], wanted, mesh, trainable=entry.trainable))
    found = []
    for roles in itertools.product(*per_op):
        for kept in itertools.product(*per_parameter):
            ops = dict(zip([n.name for n in nodes], roles, strict=True))
            whole = Plan(mesh, ops, dict(zip([e.name for e in entries], kept, strict=True)))
            try:
                program = emit(graph, axes, whole)
            except PlanError:
                continue
            held = memory(program, "AdamW").peak
            found.append(Tried(price(program, graph, axes, CLUSTER, copies=2), held))
    return found


def size(graph: Graph, axes: Axes) -> int:
    return math.prod(len(choices(axes, n, MESH)) for n in graph.fx.nodes if computes(n))


@cache
def seeds() -> list[int]:
    """Seeds of 200 graphs, those that are quickest to enumerate first."""
    graphs = {seed: linear(seed) for seed in range(200)}
    return sorted(graphs, key=lambda seed: (size(graphs[seed], analyse(graphs[seed])), seed))


@pytest.mark.parametrize("number", range(20))
def test_the_programme_finds_what_enumeration_finds_under_a_binding_budget(number: int) -> None:
    seed = seeds()[number]
    graph = linear(seed)
    axes = analyse(graph)
    tried = enumerated(graph, axes, MESH)
    fastest = min(tried, key=lambda t: (t.seconds, t.peak))
    least = min(t.peak for t in tried)
    free = plan(graph, CLUSTER, mesh=MESH, axes=axes)
    assert free.certificate["objective_s"] == pytest.approx(fastest.seconds, rel=1e-9)
    rng = random.Random(seed)
    for budget in {least, rng.randint(least, fastest.peak), (least + fastest.peak) // 2}:
        best = min(t.seconds for t in tried if t.peak <= budget)
        found = plan(graph, CLUSTER, mesh=MESH, axes=axes, memory_bytes=budget)
        assert found.costs["peak_bytes"] <= budget
        assert found.certificate["objective_s"] == pytest.approx(best, rel=1e-9), f"budget {budget}"
        assert found.certificate["programme_s"] == pytest.approx(found.certificate["objective_s"], rel=1e-9)
    with pytest.raises(NoPlan) as refused:
        plan(graph, CLUSTER, mesh=MESH, axes=axes, memory_bytes=least - 1)
    assert refused.value.needed_bytes == least
