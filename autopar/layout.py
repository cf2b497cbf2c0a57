"""How one tensor is spread over the device mesh, and how it gets from one such layout to another.

In: nothing but sizes and names.  Out: `Layout`, `Mesh`, `conversion`.  Next: `rules/`, then `choices.py`.

A dim is a product of factors, major first (rows of a fused query-key-value weight: 3 x heads x head_dim). A layout
cuts factors by mesh axes; several axes on one factor cut one after the other. Cuts follow `torch.chunk`: pieces of
ceil(size / n), the last one shorter, so that every layout of a stored tensor is also a DTensor placement.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

Place = tuple[int, int]  # (dim, index of a factor in it)

MICRO = "micro"  # the axis that is no direction of the device mesh: its pieces, microbatches, run one after another
STAGE = "stage"  # the axis along which devices run different ops


@dataclass(frozen=True)
class Mesh:
    """Named directions of the device mesh, the slowest first: ranks are numbered row-major. `MICRO` is one of time."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]

    @property
    def space(self) -> Mesh:
        """The directions of the device mesh alone."""
        kept = [(n, s) for n, s in zip(self.names, self.sizes, strict=True) if n != MICRO]
        return self if len(kept) == len(self.names) else Mesh(tuple(n for n, _ in kept), tuple(s for _, s in kept))

    @property
    def devices(self) -> int:
        return math.prod(self.space.sizes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis of the device mesh."""
        out: dict[str, int] = {}
        for name, size in zip(reversed(self.space.names), reversed(self.space.sizes), strict=True):
            rank, out[name] = divmod(rank, size)
        return out

    def __str__(self) -> str:
        return "mesh(" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index` when `size` is cut into `parts` pieces of ceil(size / parts)."""
    step = -(-size // parts)
    start = min(size, step * index)
    return start, min(size, start + step) - start


@dataclass(frozen=True)
class Layout:
    """A tensor's layout.

    factors   sizes of the factors of every dim, major first; () for a dim of size 1
    cuts      mesh axes that cut each of those factors, in the order of cutting
    pending   (mesh axis, "sum" | "max" | "min"): each device along the axis holds one term
    rows      of a sparse tensor [experts, tokens, width] that is stored as rows (`rows.py`): which part of all pairs of
              an expert and a token is there; None of any other tensor
    """

    factors: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[tuple[str, ...], ...], ...]
    pending: tuple[tuple[str, str], ...] = ()
    rows: Fraction | None = None

    @staticmethod
    def whole(factors: tuple[tuple[int, ...], ...]) -> Layout:
        return Layout(factors, tuple(tuple(() for _ in dim) for dim in factors))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the whole tensor."""
        return tuple(math.prod(dim) for dim in self.factors)

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes that this layout uses in any way."""
        return frozenset(a for dim in self.cuts for f in dim for a in f) | {a for a, _ in self.pending}

    def places(self) -> Iterator[tuple[Place, int, tuple[str, ...]]]:
        """Every factor: its place, size and cuts."""
        for d, (sizes, cuts) in enumerate(zip(self.factors, self.cuts, strict=True)):
            for f, (size, cut) in enumerate(zip(sizes, cuts, strict=True)):
                yield (d, f), size, cut

    def where(self, axis: str) -> Place | str | None:
        """The factor that `axis` cuts, or the kind of pending term ("sum"), or None."""
        for place, _, cut in self.places():
            if axis in cut:
                return place
        return dict(self.pending).get(axis)

    def cut_at(self, place: Place) -> tuple[str, ...]:
        return self.cuts[place[0]][place[1]]

    def with_cut(self, place: Place, cut: tuple[str, ...]) -> Layout:
        """The same layout with the cuts of one factor replaced."""
        dim = list(self.cuts[place[0]])
        dim[place[1]] = cut
        cuts = (*self.cuts[: place[0]], tuple(dim), *self.cuts[place[0] + 1 :])
        return replace(self, cuts=cuts)

    def with_pending(self, axis: str, kind: str | None) -> Layout:
        """The same layout with `axis` pending (`kind`), or settled (None)."""
        terms = {a: k for a, k in self.pending if a != axis}
        if kind is not None:
            terms[axis] = kind
        return replace(self, pending=tuple(sorted(terms.items())))

    def without(self, axis: str) -> Layout:
        """The same layout with nothing cut by `axis`."""
        if axis not in self.axes:
            return self
        return replace(self, cuts=tuple(tuple(tuple(a for a in f if a != axis) for f in dim) for dim in self.cuts))

    def settled(self) -> Layout:
        """The same cuts with nothing pending."""
        return replace(self, pending=())

    def span(self, place: Place, mesh: Mesh, coordinate: dict[str, int]) -> tuple[int, int]:
        """(start, length) of a device's piece of one factor."""
        start, length = 0, self.factors[place[0]][place[1]]
        for axis in self.cut_at(place):
            offset, length = chunk(length, mesh.size(axis), coordinate[axis])
            start += offset
        return start, length

    def local_factors(self, mesh: Mesh, coordinate: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        """Sizes of a device's piece, factor by factor."""
        return tuple(
            tuple(self.span((d, f), mesh, coordinate)[1] for f in range(len(dim))) for d, dim in enumerate(self.factors)
        )

    def local_shape(self, mesh: Mesh, coordinate: dict[str, int] | None = None) -> tuple[int, ...]:
        """Sizes of a device's piece; without a coordinate those of the first device, which holds the largest piece."""
        coordinate = coordinate or dict.fromkeys(mesh.names, 0)
        return tuple(math.prod(dim) for dim in self.local_factors(mesh, coordinate))

    def local_numel(self, mesh: Mesh) -> int:
        """Elements of the largest piece; of rows, where all experts get as many."""
        count = math.prod(self.local_shape(mesh))
        return count if self.rows is None else math.ceil(count * self.rows)

    def __str__(self) -> str:
        return self.text(None)

    def text(self, names: tuple[tuple[str, ...], ...] | None) -> str:
        """`[b=64@data, s=512, d=1024]{sum:model}`; a dim of several factors prints as `(h=4@model * e=16)`."""
        dims = []
        for d, sizes in enumerate(self.factors):
            parts = []
            for f, size in enumerate(sizes):
                label = f"{names[d][f]}=" if names else ""
                parts.append(f"{label}{size}" + "".join(f"@{a}" for a in self.cuts[d][f]))
            dims.append(parts[0] if len(parts) == 1 else "(" + "*".join(parts) + ")" if parts else "1")
        terms = ", ".join(f"{kind}:{axis}" for axis, kind in self.pending)
        return f"[{', '.join(dims)}]" + (f"{{{terms}}}" if terms else "")


@dataclass(frozen=True)
class Step:
    """One step of a conversion, and the layouts at both ends of it.

    kind    "all_reduce" | "reduce_scatter" | "all_gather" | "all_to_all" | "slice" | "to_pending" | "relabel"; the last
            three move nothing between devices, and "relabel" only reads a whole dim as other factors. Along `MICRO`
            an all-reduce adds up what the microbatches gave, an all-gather puts it side by side
    axis    the one mesh axis it works on ("" for a relabel)
    """

    kind: str
    axis: str
    before: Layout
    after: Layout

    @property
    def free(self) -> bool:
        return self.kind in ("slice", "to_pending", "relabel")


def steps_from(layout: Layout, mesh: Mesh) -> Iterator[Step]:
    """Every single step that changes what one mesh axis does and leaves no device without a piece."""
    steps = _steps_from(layout, mesh)
    return steps if layout.rows is None else filter(keeps_rows, steps)


def keeps_rows(step: Step) -> bool:
    """Whether rows can take a step: they go to other devices whole, by expert or by token."""
    if step.kind == "all_to_all":
        ends = step.before.where(step.axis), step.after.where(step.axis)
        return all(isinstance(place, tuple) and place[0] < 2 for place in ends)
    return step.kind != "reduce_scatter"


def _steps_from(layout: Layout, mesh: Mesh) -> Iterator[Step]:
    places = [place for place, _, _ in layout.places()]
    for axis in mesh.names:
        here = layout.where(axis)
        if isinstance(here, str):
            bare, moves, ends = layout.with_pending(axis, None), "reduce_scatter", "all_reduce"
        elif here is None:
            bare, moves, ends = layout, "slice", ""
            yield Step("to_pending", axis, layout, layout.with_pending(axis, "sum"))
        elif layout.cut_at(here)[-1] == axis:
            bare, moves, ends = layout.with_cut(here, layout.cut_at(here)[:-1]), "all_to_all", "all_gather"
        else:
            continue  # cut again by another axis, which has to go first
        if ends:
            yield Step(ends, axis, layout, bare)
        for place in places:
            if place != here and (axis != MICRO or here is None):  # a microbatch gives nothing to another
                cut = bare.with_cut(place, (*bare.cut_at(place), axis))
                if feeds(cut, place, mesh):
                    yield Step(moves, axis, layout, cut)


def feeds(layout: Layout, place: Place, mesh: Mesh) -> bool:
    """Whether every device has a piece of one factor."""
    size = layout.factors[place[0]][place[1]]
    for axis in layout.cut_at(place):
        size = chunk(size, mesh.size(axis), mesh.size(axis) - 1)[1]
    return size > 0


def moved(step: Step, before: int, after: int, n: int) -> float:
    """Elements that one device sends in a step, for choosing between sequences (a step itself counts as one)."""
    if step.free:
        return 1e-6
    sent = {"all_reduce": 2 * before, "reduce_scatter": before, "all_gather": after, "all_to_all": before}[step.kind]
    return 1 + (n - 1) / n * sent


class _Space:
    """The layouts of one shape on one mesh as a graph of single steps. It grows as it is walked."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.numbers: dict[Layout, int] = {}
        self.layouts: list[Layout] = []
        self.numel: list[int] = []
        self.where: list[tuple[Place | str | None, ...]] = []
        self.next: list[list[tuple[int, float, Step, int]] | None] = []

    def number(self, layout: Layout) -> int:
        found = self.numbers.get(layout)
        if found is None:
            found = self.numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
            self.numel.append(layout.local_numel(self.mesh))
            self.where.append(tuple(layout.where(axis) for axis in self.mesh.names))
            self.next.append(None)
        return found

    def steps(self, i: int) -> list[tuple[int, float, Step, int]]:
        """Where one step leads from layout i, what it costs, and the number of the axis it moves."""
        known = self.next[i]
        if known is None:
            known = self.next[i] = []
            for step in steps_from(self.layouts[i], self.mesh):
                j = self.number(step.after)
                cost = moved(step, self.numel[i], self.numel[j], self.mesh.size(step.axis))
                known.append((j, cost, step, self.mesh.names.index(step.axis)))
        return known

    def path(self, source: int, target: int) -> tuple[Step, ...] | None:
        """Dijkstra over layouts in which every axis is where the source has it, nowhere, or where the target has it."""
        allowed = [{a, None, b} for a, b in zip(self.where[source], self.where[target], strict=True)]
        best, came = {source: 0.0}, {}
        heap, pushed = [(0.0, 0, source)], 0  # ties by order of pushing: every rank finds the same path
        while heap:
            cost, _, i = heapq.heappop(heap)
            if i == target:
                break
            if cost > best[i]:
                continue
            for j, more, step, axis in self.steps(i):
                if self.where[j][axis] in allowed[axis] and cost + more < best.get(j, math.inf):
                    best[j], came[j] = cost + more, (i, step)
                    pushed += 1
                    heapq.heappush(heap, (cost + more, pushed, j))
        if target not in best:
            return None
        steps: list[Step] = []
        while target != source:
            target, step = came[target]
            steps.append(step)
        return tuple(reversed(steps))


@cache
def _space(factors: tuple[tuple[int, ...], ...], rows: Fraction | None, mesh: Mesh) -> _Space:
    return _Space(mesh)


@cache
def conversion(source: Layout, target: Layout, mesh: Mesh) -> tuple[Step, ...] | None:
    """The sequence of steps from one layout to another that moves the fewest elements; None where there is none.

    Dims that the two ends see as different factors are whole in between. What the microbatches hold is put together
    before anything else happens to it, so that the rest happens once; what a stage holds is cut into the pieces that
    all stages store when nothing else is left to do.
    """
    if source == target:
        return ()
    between = source.without(MICRO).with_pending(MICRO, None) if MICRO in source.axes - target.axes else source
    if between == source and STAGE in target.axes - source.axes:
        between = target.without(STAGE)
    if between not in (source, target):
        first, last = conversion(source, between, mesh), conversion(between, target, mesh)
        return None if first is None or last is None else (*first, *last)
    if source.rows != target.rows or (source.rows is not None and source.factors != target.factors):
        return None
    if source.factors != target.factors:
        return _through_whole_dims(source, target, mesh)
    space = _space(source.factors, source.rows, mesh)
    return space.path(space.number(source), space.number(target))


def _through_whole_dims(source: Layout, target: Layout, mesh: Mesh) -> tuple[Step, ...] | None:
    """A conversion whose ends do not factor every dim alike: those dims are made whole, relabelled, and cut again."""
    alike = [a == b for a, b in zip(source.factors, target.factors, strict=True)]
    whole = Layout.whole(source.factors).cuts
    cuts = tuple(c if same else w for c, w, same in zip(source.cuts, whole, alike, strict=True))
    before = replace(source, cuts=cuts)
    other = Layout.whole(target.factors).cuts
    after = Layout(target.factors, tuple(c if same else w for c, w, same in zip(cuts, other, alike, strict=True)))
    after = replace(after, pending=source.pending)
    first, last = conversion(source, before, mesh), conversion(after, target, mesh)
    return None if first is None or last is None else (*first, Step("relabel", "", before, after), *last)
