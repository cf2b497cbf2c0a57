"""The ways to keep a parameter: ZeRO level, layout it is computed with, layout it is stored in.

In: a parameter's factors, the layouts its consumers want, a mesh.  Out: `ParameterPlan`s.  Next: `units.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from autopar.layout import Layout, Mesh, chunk
from autopar.placements import placeable
from autopar.plan import ParameterPlan


def pieces(size: int, axes: tuple[str, ...], mesh: Mesh) -> set[int]:
    """Every length that a piece has when a factor is cut by some mesh axes, one after the other."""
    found = {size}
    for axis in axes:
        parts = mesh.size(axis)
        found = {chunk(length, parts, i)[1] for length in found for i in (0, parts - 2, parts - 1) if i >= 0}
    return found


def storable(layout: Layout, mesh: Mesh) -> bool:
    """Whether a DTensor can hold this layout (nothing pending) and no rank's piece is empty."""
    full = all(0 not in pieces(size, cut, mesh) for _, size, cut in layout.places() if cut)
    return full and placeable(layout, mesh)


def shard(layout: Layout, axis: str, mesh: Mesh) -> Layout | None:
    """`layout` cut by one more axis: where it divides evenly, else where no piece is empty; outer places first."""
    fitting: list[tuple[bool, tuple[int, int], Layout]] = []
    for place, size, cut in layout.places():
        longer = (*cut, axis)
        lengths = pieces(size, longer, mesh)
        if 0 not in lengths and placeable(layout.with_cut(place, longer), mesh):
            fitting.append((len(lengths) > 1, place, layout.with_cut(place, longer)))
    return min(fitting, key=lambda f: f[:2])[2] if fitting else None


def shards(home: Layout, mesh: Mesh) -> Iterator[Layout]:
    """`home` cut further by every non-empty set of the mesh axes it does not use, as far as that can be done."""
    free = [axis for axis in mesh.names if axis not in home.axes]
    for count in range(1, len(free) + 1):
        for axes in combinations(free, count):
            layout: Layout | None = home
            for axis in axes:
                layout = shard(layout, axis, mesh) if layout is not None else None
            if layout is not None:
                yield layout


def homes(factors: tuple[tuple[int, ...], ...], wanted: Iterable[Layout], mesh: Mesh) -> list[Layout]:
    """Layouts a parameter may be computed with: whole, and every one that a consumer wants and that can be stored."""
    found = dict.fromkeys([Layout.whole(factors), *(layout.settled() for layout in wanted)])
    return [layout for layout in found if storable(layout, mesh)]


def options(
    factors: tuple[tuple[int, ...], ...],
    wanted: Iterable[Layout],
    mesh: Mesh,
    *,
    levels: Iterable[int] = (0, 2, 3),
    trainable: bool = True,
) -> tuple[ParameterPlan, ...]:
    """Every way to keep one parameter.

    Level 1 is as fast as level 2 and takes more memory: it is there for those who ask for it. A frozen parameter has no
    gradient and no optimizer state, so levels 1 and 2 would only cost it memory.
    """
    allowed = set(levels) - (set() if trainable else {1, 2})
    found: dict[ParameterPlan, None] = {}
    for home in homes(factors, wanted, mesh):
        if 0 in allowed:
            found[ParameterPlan(0, home, home)] = None
        for stored in shards(home, mesh):
            for level in sorted(allowed & {1, 2}):
                found[ParameterPlan(level, home, stored)] = None
            if 3 in allowed:
                found[ParameterPlan(3, stored, stored, False)] = None
                found[ParameterPlan(3, stored, stored, True)] = None
    return tuple(found)
