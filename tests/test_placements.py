"""Layouts as DTensor placements: the right piece on every rank, and torch puts it together again."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar._torch import settle_pending_items
from autopar.layout import Layout, Mesh
from autopar.placements import distribute, piece, placeable, placements, storable, together
from autopar.runtime import norms
from autopar.verify.pool import Pool

Factors = tuple[tuple[int, ...], ...]
SHAPES: tuple[Factors, ...] = (
    ((8,), (4,)), ((7,), (5,)), ((3, 5), (4,)), ((5,), (3, 7)), ((3, 2, 4), ()), ((3, 6), (5,)), ((4, 4), (3,)),
)  # fmt: skip
MESHES = (Mesh(("a", "b"), (2, 2)), Mesh(("a",), (3,)), Mesh(("a",), (4,)), Mesh(("a",), (2,)))


def layouts(factors: Factors, mesh: Mesh) -> list[Layout]:
    """Every way to cut these factors by the axes of a mesh."""
    places = [(d, f) for d, dim in enumerate(factors) for f in range(len(dim))]
    found = {}
    for order in itertools.permutations(mesh.names):
        for chosen in itertools.product([None, *places], repeat=len(order)):
            layout = Layout.whole(factors)
            for axis, place in zip(order, chosen, strict=True):
                if place is not None:
                    layout = layout.with_cut(place, (*layout.cut_at(place), axis))
            found[layout] = None
    return list(found)


def whole(layout: Layout) -> torch.Tensor:
    return torch.randn(layout.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def put_together(mesh: Mesh) -> tuple[int, int]:
    """(layouts that can be placed, those that cannot): both come back exactly."""
    settle_pending_items()
    torch_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    here = mesh.coordinate(dist.get_rank())
    counts = [0, 0]
    for factors in SHAPES:
        for layout in layouts(factors, mesh):
            tensor = whole(layout)
            local = piece(tensor, layout, mesh, here)
            assert torch.equal(together(local, layout, mesh), tensor), layout
            counts[not placeable(layout, mesh)] += 1
            if not placeable(layout, mesh):
                continue
            placed = distribute(local.clone(), layout, mesh, torch_mesh)
            assert torch.equal(placed.full_tensor(), tensor), (layout, placements(layout, mesh))
            if storable(layout, mesh):
                norm(placed, tensor)
    return counts[0], counts[1]


def norm(placed: torch.Tensor, tensor: torch.Tensor) -> None:
    for order in (2.0, 1.0, float("inf")):
        ours, theirs = [], []
        for source, into in ((placed, ours), (tensor, theirs)):
            for scale in (1.0, -2.5):
                parameter = torch.nn.Parameter(source.detach().clone())
                parameter.grad = source.detach() * scale
                into.append(parameter)
        expected = norms.norm([p.grad for p in theirs], order)
        assert norms.norm([p.grad for p in ours], order) == pytest.approx(expected, rel=1e-12)
        assert float(torch.nn.utils.clip_grad_norm_(ours, 0.5, order)) == pytest.approx(expected, rel=1e-12)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5, order)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_layout_comes_back_and_norms_are_those_of_the_whole(ranks: Pool, mesh: Mesh) -> None:
    placed, other = ranks.run(put_together, mesh, world=mesh.devices)[0]
    assert placed > other > 0


def test_a_layout_prints_as_placements() -> None:
    mesh = Mesh(("data", "model"), (2, 4))
    later_first = Layout(((8,), (3, 8, 2)), ((("model", "data"),), ((), (), ())))
    assert str(placements(later_first, mesh)) == "(_StridedShard(dim=0, sf=4), Shard(dim=0))"
    inner = Layout(((8,), (3, 8, 2)), (((),), ((), ("model",), ())))
    assert str(placements(inner, mesh)) == "(Replicate(), _StridedShard(dim=1, sf=3))"


def test_what_cannot_be_stored() -> None:
    mesh = Mesh(("data", "model"), (2, 4))
    assert not storable(Layout(((5,),), ((("model",),),)), mesh)  # 2, 2, 1, 0 rows
    assert placeable(Layout(((5,),), ((("model",),),)), mesh)
    assert not placeable(Layout(((3, 8),), (((), ("data", "model")),)), mesh)  # torch joins two strided shards wrongly
