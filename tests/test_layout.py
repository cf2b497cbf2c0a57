"""Layouts, pieces and conversions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.choices import starves
from autopar.graph import Graph, Input, Output
from autopar.layout import Layout, Mesh, chunk, conversion
from autopar.passes.markers import COLLECTIVES
from autopar.plan import Plan
from autopar.program import Program
from autopar.verify.simulate import run

MESHES = (Mesh(("data",), (3,)), Mesh(("data", "model"), (2, 3)), Mesh(("a", "b", "c"), (2, 2, 2)))
FACTORS = ((7,), (3, 4, 5), ())


def test_pieces_follow_torch_chunk() -> None:
    for size, parts in itertools.product((1, 5, 8, 13), (2, 3, 4)):
        whole = torch.arange(size)
        expected = [*(len(p) for p in whole.chunk(parts)), *[0] * parts][:parts]
        assert [chunk(size, parts, i)[1] for i in range(parts)] == expected


def test_ranks_are_numbered_row_major() -> None:
    mesh = Mesh(("data", "model"), (2, 3))
    assert [tuple(mesh.coordinate(r).values())[::-1] for r in range(6)] == list(itertools.product(range(2), range(3)))


def test_a_layout_prints_factors_cuts_and_terms() -> None:
    layout = Layout.whole(FACTORS).with_cut((1, 1), ("model",)).with_pending("data", "sum")
    assert str(layout) == "[7, (3*4@model*5), 1]{sum:data}"
    assert layout.text((("b",), ("c", "h", "e"), ())) == "[b=7, (c=3*h=4@model*e=5), 1]{sum:data}"


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    """Any layout of a [7, 60, 1] tensor that leaves no device without a piece."""
    layout = Layout.whole(FACTORS)
    places = [place for place, _, _ in layout.places()]
    for axis in draw(st.permutations(mesh.names)):
        where = draw(st.sampled_from([None, "sum", *places]))
        if where == "sum":
            layout = layout.with_pending(axis, "sum")
        elif where is not None:
            longer = layout.with_cut(where, (*layout.cut_at(where), axis))
            layout = layout if starves(longer, mesh) else longer
    return layout


def program(steps: tuple[object, ...], source: Layout, target: Layout, mesh: Mesh, value: torch.Tensor) -> Program:
    """A program that only converts."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": value, "layouts": (source,)}
    for step in steps:
        kind = (dict(step.before.pending)[step.axis],) if step.kind in ("all_reduce", "reduce_scatter") else ()  # type: ignore[attr-defined]
        x = graph.call_function(COLLECTIVES[step.kind], (x, step.axis, *kind))  # type: ignore[attr-defined]
        x.meta = {"val": value, "layouts": (step.after,), "step": step}  # type: ignore[attr-defined]
    graph.output((x,))
    empty = fx.Graph()
    empty.output(())
    ends = Graph(graph, (Input("x", "input", "x"),), (Output("output", "y", x.name),))
    return Program(ends, Plan(mesh, {}, {}), empty, graph, empty, (), ("x",), (), (), {"x": source}, (target,))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_conversion_keeps_the_value(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    source, target = data.draw(layouts(mesh)), data.draw(layouts(mesh))
    steps = conversion(source, target, mesh)
    assert steps is not None
    assert all(a.after == b.before for a, b in itertools.pairwise(steps))
    value = torch.randn(7, 60, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (found,), _ = run(program(steps, source, target, mesh, value), {"x": value}, [])
    assert found is not None
    assert (found - value).abs().max() < 1e-12


def kinds(source: Layout, target: Layout, mesh: Mesh) -> list[str]:
    return [step.kind for step in conversion(source, target, mesh) or ()]


def test_the_cheapest_sequence_is_taken() -> None:
    mesh = Mesh(("data", "model"), (2, 4))
    whole = Layout.whole(((8,), (16,)))
    rows, columns = whole.with_cut((0, 0), ("model",)), whole.with_cut((1, 0), ("model",))
    pending = whole.with_pending("model", "sum")
    assert kinds(pending, whole, mesh) == ["all_reduce"]
    assert kinds(pending, rows, mesh) == ["reduce_scatter"]
    assert kinds(rows, columns, mesh) == ["all_to_all"]
    assert kinds(whole, rows, mesh) == ["slice"]
    assert kinds(rows.with_pending("data", "sum"), rows.with_cut((0, 0), ("model", "data")), mesh) == ["reduce_scatter"]
    assert kinds(rows, pending, mesh) == ["all_gather", "to_pending"]


@pytest.mark.parametrize("kind", ["max", "min"])
def test_nothing_becomes_a_pending_extreme(kind: str) -> None:
    mesh = Mesh(("data",), (2,))
    whole = Layout.whole(((8,),))
    assert conversion(whole, whole.with_pending("data", kind), mesh) is None
    assert kinds(whole.with_pending("data", kind), whole, mesh) == ["all_reduce"]
