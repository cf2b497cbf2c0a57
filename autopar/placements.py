"""Layouts as DTensor placements, and the piece of a tensor that one rank holds.

In: a `Layout` and the `Mesh` it is about.  Out: placements on the one full device mesh, `piece`, `storable`.
Next: `runtime/parameters.py`.

DTensor applies its placements from the first mesh axis to the last, each to what the ones before it left. A factor
that is not the outermost of its dim, or that a later mesh axis cuts first, is a strided shard there: the dim is taken
as `split` equal rows and each row is chunked. For sizes that divide, this says exactly what a layout says; where they
do not divide, `placeable` tries it out on the numbers 0 .. size-1.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar._torch import strided_shard
from autopar.layout import Layout, Mesh, chunk

DimFactors = tuple[int, ...]
DimCuts = tuple[tuple[str, ...], ...]


def placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """One placement per mesh axis.  `{b=8@model@data}` on mesh(data, model) is `[strided(0, 2), Shard(0)]`."""
    assert not layout.pending, f"{layout} is pending and cannot be placed"
    out: list[Placement] = [Replicate()] * len(mesh.names)
    for d, (sizes, cuts) in enumerate(zip(layout.factors, layout.cuts, strict=True)):
        for axis, split in _splits(sizes, cuts, mesh):
            out[mesh.names.index(axis)] = Shard(d) if split == 1 else strided_shard(d, split)
    return tuple(out)


def _splits(sizes: DimFactors, cuts: DimCuts, mesh: Mesh) -> list[tuple[str, int]]:
    """The mesh axes that cut one dim, in mesh order, with the number of rows that each finds the dim divided into."""
    out: list[tuple[str, int]] = []
    for position, axis in enumerate(mesh.names):
        factor = next((f for f, cut in enumerate(cuts) if axis in cut), None)
        if factor is None:
            continue
        earlier = mesh.names[:position]
        split = 1
        for size, cut in zip(sizes[:factor], cuts[:factor], strict=True):
            for other in (a for a in cut if a in earlier):
                size = -(-size // mesh.size(other))
            split *= size
        before = cuts[factor][: cuts[factor].index(axis)]
        split *= math.prod(mesh.size(a) for a in before if a not in earlier)
        out.append((axis, split))
    return out


@cache
def _dim_placeable(sizes: DimFactors, cuts: DimCuts, mesh: Mesh) -> bool:
    """Whether placements give every rank the same piece of this dim as the layout does, and DTensor can join them."""
    splits = _splits(sizes, cuts, mesh)
    strided = [index for index, (_, split) in enumerate(splits) if split > 1]
    if strided and not _joins(splits, strided, mesh):
        return False
    if len(sizes) <= 1 and all(split == 1 for _, split in splits):
        return True
    if all(size % math.prod(mesh.size(a) for a in cut) == 0 for size, cut in zip(sizes, cuts, strict=True)):
        return True
    layout = Layout((sizes,), (cuts,))
    numbers = torch.arange(math.prod(sizes))
    axes = [axis for axis, _ in splits]
    for position in itertools.product(*(range(mesh.size(a)) for a in axes)):
        coordinate = {**dict.fromkeys(mesh.names, 0), **dict(zip(axes, position, strict=True))}
        if not torch.equal(piece(numbers, layout, mesh, coordinate), _placed(numbers, splits, mesh, coordinate)):
            return False
    return True


def _joins(splits: list[tuple[str, int]], strided: list[int], mesh: Mesh) -> bool:
    """Whether torch's `full_tensor` puts a dim with strided shards together again (tried on 2.13).

    Right: one strided shard alone; or after one plain shard; or before one whose pieces are just its rows.
    """
    if len(splits) == 1:
        return True
    if len(splits) > 2 or len(strided) > 1:
        return False
    return strided[0] == 1 or splits[0][1] == mesh.size(splits[1][0])


def _placed(numbers: Tensor, splits: list[tuple[str, int]], mesh: Mesh, at: dict[str, int]) -> Tensor:
    """What DTensor gives to one rank: rows, chunked, one mesh axis after the other."""
    for axis, split in splits:
        rows = [numbers.narrow(0, *chunk(len(numbers), split, r)) for r in range(split)]
        numbers = torch.cat([row.narrow(0, *chunk(len(row), mesh.size(axis), at[axis])) for row in rows])
    return numbers


def placeable(layout: Layout, mesh: Mesh) -> bool:
    """Whether DTensor placements can say this layout; an output of a program must be placeable."""
    if layout.pending:
        return False
    return all(_dim_placeable(s, c, mesh) for s, c in zip(layout.factors, layout.cuts, strict=True))


def storable(layout: Layout, mesh: Mesh) -> bool:
    """Whether a parameter may be stored in this layout: placeable, and no rank's piece is empty."""
    if not placeable(layout, mesh):
        return False
    last = {axis: size - 1 for axis, size in zip(mesh.names, mesh.sizes, strict=True)}
    return all(layout.span(place, mesh, last)[1] > 0 for place, _, cut in layout.places() if cut)


def piece(tensor: Tensor, layout: Layout, mesh: Mesh, coordinate: dict[str, int]) -> Tensor:
    """What the rank at `coordinate` holds of a whole tensor; a view where nothing is cut, else a view or a copy."""
    assert tuple(tensor.shape) == layout.shape, f"{tuple(tensor.shape)} is not the shape of {layout}"
    if not any(cut for _, _, cut in layout.places()):
        return tensor
    view = tensor.reshape([size for dim in layout.factors for size in dim])
    for index, (place, _, cut) in enumerate(layout.places()):
        if cut:
            view = view.narrow(index, *layout.span(place, mesh, coordinate))
    return view.reshape(layout.local_shape(mesh, coordinate))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape."""
    return tuple(math.prod(max(1, size) for size in shape[d + 1 :]) for d in range(len(shape)))


def distribute(local: Tensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh) -> DTensor:
    """The DTensor of which `local` is this rank's piece; nothing moves."""
    shape = torch.Size(layout.shape)
    with torch.no_grad():
        return DTensor.from_local(
            local.contiguous(),
            device_mesh,
            placements(layout, mesh),
            run_check=False,
            shape=shape,
            stride=contiguous_stride(shape),
        )


def together(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor on every rank, from any layout with nothing pending; every rank of the mesh must call this."""
    import torch.distributed as dist

    if not any(cut for _, _, cut in layout.places()):
        return local
    room = local.new_zeros(layout.local_numel(mesh))
    room[: local.numel()] = local.reshape(-1)
    rows = room.new_empty(mesh.devices * room.numel())
    dist.all_gather_single(rows, room)
    whole = room.new_empty([size for dim in layout.factors for size in dim])
    for rank, row in enumerate(rows.view(mesh.devices, -1)):
        coordinate = mesh.coordinate(rank)
        view = whole
        for index, (place, _, cut) in enumerate(layout.places()):
            if cut:
                view = view.narrow(index, *layout.span(place, mesh, coordinate))
        view.copy_(row[: view.numel()].view(view.shape))
    return whole.view(layout.shape)


@cache
def same_pieces(old: DimFactors, cut: DimCuts, new: DimFactors, mesh: Mesh) -> DimCuts | None:
    """Cuts of the factors `new` of one dim that give every device what `cut` of the factors `old` gives it."""
    used = [axis for axes in cut for axis in axes]
    if old == new or not used:
        return cut if old == new else tuple(() for _ in new)
    numbers = torch.arange(math.prod(old))
    before = Layout((old,), (cut,))
    ranks = [mesh.coordinate(rank) for rank in range(mesh.devices)]
    for order in itertools.permutations(used):
        for places in itertools.product(range(len(new)), repeat=len(order)):
            tried = tuple(tuple(a for a, p in zip(order, places, strict=True) if p == f) for f in range(len(new)))
            after = Layout((new,), (tried,))
            if all(
                before.local_shape(mesh, at) == after.local_shape(mesh, at)
                and torch.equal(piece(numbers, before, mesh, at), piece(numbers, after, mesh, at))
                for at in ranks
            ):
                return tried
    return None
