"""Arguments of view-like ops for one device: sizes and positions that a cut makes smaller.

In: a node, the layouts of its ends and a device's coordinate (a `Place`).  Out: new arguments.  Next: `passes/bind.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, ops

from autopar.layout import Layout, Mesh

aten = ops.aten


@dataclass(frozen=True)
class Site:
    """One node on one device: what it is given (`args`), and the layouts of its operands and results."""

    node: fx.Node
    args: tuple[Any, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    mesh: Mesh
    coordinate: dict[str, int]

    def shape(self, layout: Layout) -> list[int]:
        return sizes_of(layout, self.mesh, self.coordinate)

    def span(self, layout: Layout, dim: int) -> tuple[int, int]:
        """(start, length) of this device's piece of a dim."""
        return run_of(layout, dim, self.mesh, self.coordinate)


def sizes_of(layout: Layout, mesh: Mesh, coordinate: dict[str, int]) -> list[int]:
    """Sizes of a device's piece, to reshape to; how many rows there are is known when the program runs."""
    sizes = list(layout.local_shape(mesh, coordinate))
    return sizes if layout.rows is None else [1, -1, *sizes[2:]]


def run_of(layout: Layout, dim: int, mesh: Mesh, coordinate: dict[str, int]) -> tuple[int, int]:
    """(start, length) of a device's piece of a dim cut in its first factor at most."""
    factors = layout.factors[dim]
    if not factors:
        return 0, 1
    assert not any(layout.cuts[dim][1:]), f"{layout}: a dim cut in an inner factor has no single run"
    start, length = layout.span((dim, 0), mesh, coordinate)
    rest = math.prod(factors[1:])
    return start * rest, length * rest


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def view(at: Site) -> Call:
    """Every reshaping becomes `reshape` to the local sizes."""
    return aten.reshape.default, (at.args[0], at.shape(at.results[0])), {}


def view_as_complex(at: Site) -> Call:
    """Pairs must lie side by side, which those of a piece may not."""
    return complex_of, at.args, {}


def complex_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous())


def slice(at: Site) -> Call:
    """Along a dim of equal parts the part's number counts, and its local length."""
    source, result = at.operands[0], at.results[0]
    dim = (at.args[1] if len(at.args) > 1 else 0) % len(source.factors)
    size, length = source.shape[dim], result.shape[dim]
    start = at.args[2] if len(at.args) > 2 and at.args[2] is not None else 0
    start = max(start + size, 0) if start < 0 else start
    local, mine = at.shape(source)[dim], at.shape(result)[dim]
    if length == size:
        return aten.slice.Tensor, (at.args[0], dim, 0, local), {}
    step = at.args[4] if len(at.args) > 4 else 1
    if local == size:
        return aten.slice.Tensor, (at.args[0], dim, start, at.args[3] if len(at.args) > 3 else None, step), {}
    part = start // length
    return aten.slice.Tensor, (at.args[0], dim, part * mine, (part + 1) * mine), {}


def slice_backward(at: Site) -> Call:
    grad, result = at.operands[0], at.results[0]
    dim, start, end, step = at.args[2] % len(result.factors), at.args[3] or 0, at.args[4], at.args[5]
    size, length = result.shape[dim], grad.shape[dim]
    local, mine = at.shape(result)[dim], at.shape(grad)[dim]
    start = max(start + size, 0) if start < 0 else start
    if length == size:
        start, end = 0, local
    elif local != size:
        part = start // length
        start, end = part * mine, (part + 1) * mine
    return with_sizes(at, aten.slice_backward.default, dim, start, end, step)


def select_backward(at: Site) -> Call:
    return with_sizes(at, aten.select_backward.default, *at.args[2:])


def with_sizes(at: Site, op: Any, *where: Any) -> Call:
    """An op that puts its operand into zeros of the result's local sizes."""
    sizes = at.shape(at.results[0])
    if at.results[0].rows is None:
        return op, (at.args[0], sizes, *where), {}
    return among_rows, (op, at.args[0], sizes, *where), {}


def among_rows(op: Any, x: Tensor, sizes: list[int], *where: Any) -> Tensor:
    """The same for rows: as many as the operand has."""
    found: Tensor = op(x, [sizes[0], x.shape[1], *sizes[2:]], *where)
    return found


def arange(at: Site) -> Call:
    """The piece of a range that this device holds."""
    start, _, step = at.args[0], at.args[1], at.args[2] if len(at.args) > 2 else 1
    first, length = at.span(at.results[0], 0)
    low = start + first * step
    return at.node.target, (low, low + length * step, step), dict(at.node.kwargs)


def dropout(at: Site) -> Call:
    piece = random_piece(at.operands[0], at.mesh, at.coordinate)
    return at.node.target, (*at.args[:4], *piece), {}


def uniform(at: Site) -> Call:
    piece = random_piece(at.results[0], at.mesh, at.coordinate)
    return at.node.target, (*at.args[:2], at.shape(at.results[0]), *piece, *at.args[6:]), {}


def attention(at: Site) -> Call:
    """Which piece of the probabilities [b, h, q, k] this device computes, and the row of its first query."""
    first = 0 if at.node.target is ops.autopar.attention.default else 1
    q, k = at.operands[first], at.operands[first + 1]
    rows = Layout((*q.factors[:3], k.factors[2]), (*q.cuts[:3], k.cuts[2]))
    piece = random_piece(rows, at.mesh, at.coordinate)
    return at.node.target, (*at.args[:-4], *piece, at.span(q, 2)[0]), {}


def random_piece(layout: Layout, mesh: Mesh, coordinate: dict[str, int]) -> tuple[list[int], list[int], list[int]]:
    """(sizes, local sizes, starts) of all factors of a tensor, dims concatenated: what the random ops count by."""
    sizes, local, start = [], [], []
    for place, size, _ in layout.places():
        first, length = layout.span(place, mesh, coordinate)
        sizes.append(size)
        local.append(length)
        start.append(first)
    assert math.prod(sizes) == math.prod(layout.shape)
    return sizes, local, start


def groups_of(at: Site, operand: int, groups: int) -> int:
    """How many of a convolution's groups this device has: the outer factors of the channels of its input."""
    layout, found, whole = at.operands[operand], 1, 1
    if not any(layout.cuts[1]):
        return groups
    for place, size in enumerate(layout.factors[1]):
        if whole == groups:
            break
        whole *= size
        found *= layout.span((1, place), at.mesh, at.coordinate)[1]
    assert whole == groups, f"{layout}: no {groups} groups of channels"
    return found


def convolution(at: Site) -> Call:
    """The number of groups that the device has."""
    return at.node.target, (*at.args[:8], groups_of(at, 0, at.args[8])), {}


def convolution_backward(at: Site) -> Call:
    """The number of groups that the device has."""
    return at.node.target, (*at.args[:9], groups_of(at, 1, at.args[9]), at.args[10]), {}


def upsample_backward(at: Site) -> Call:
    """The sizes of the input's piece."""
    return at.node.target, (*at.args[:2], at.shape(at.results[0]), *at.args[3:]), {}
