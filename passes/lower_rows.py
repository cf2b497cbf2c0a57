"""One step of a conversion of rows (`autopar/rows.py`) as torch ops on one device.

In: a `Step` between two layouts [experts, tokens, width] of rows.  Out: nodes in a graph.  Next: `bind.py`.

How many rows a device has is known when the program runs. Rows go to other devices whole, by an all-to-all whose parts
differ, or a gather of parts padded to the longest; along the width they are cut and gathered like any tensor.
"""

from __future__ import annotations

from operator import getitem

from torch import fx, ops

from autopar import rows
from autopar.layout import Layout, Place, Step
from autopar.passes.lower import Lowering, flat, landed, left, wait_tensor_of
from autopar.rules.bind import sizes_of
from autopar.rules.experts import piece

aten = ops.aten
c10d = ops._c10d_functional


def moves_rows(step: Step) -> bool:
    """Whether a step changes which rows a device has."""
    if step.before.rows is None:
        return False
    return step.before.cuts[:2] != step.after.cuts[:2]


def lower_rows(low: Lowering, x: fx.Node, step: Step, index: fx.Node | None) -> fx.Node:
    """The nodes of one step; `index`: the choices of all tokens, where rows move."""
    if step.kind in ("all_reduce", "to_pending"):
        return low.step(x, step)
    if index is None:
        return (cut_width if step.kind == "slice" else gather_width)(low, x, step)
    have, want = pieces(low, step, step.before), pieces(low, step, step.after)
    me, n, group = low.coordinate[step.axis], low.mesh.size(step.axis), low.groups[step.axis]
    if step.kind == "slice":
        return low.call(rows.pick, x, index, have[me], want[me])
    if step.kind == "all_gather":
        sent = low.call(rows.padded, x, index, have)
        got = low.call(wait_tensor_of, low.call(c10d.all_gather_into_tensor.default, sent, n, group), sent)
        return low.call(rows.joined, got, index, have, want[me])
    packed = low.call(rows.packed, x, index, me, have, want)
    sent, into, out = (low.call(getitem, packed, i) for i in range(3))
    got = low.call(wait_tensor_of, low.call(c10d.all_to_all_single.default, sent, into, out, group), sent)
    return low.call(rows.unpacked, got, index, me, have, want)


def pieces(low: Lowering, step: Step, layout: Layout) -> list[list[int]]:
    """The piece of every device along the step's mesh axis."""
    places = [{**low.coordinate, step.axis: i} for i in range(low.mesh.size(step.axis))]
    return [piece(layout, low.mesh, place) for place in places]


# --- along the width: dims behind the rows, factor by factor ----------------------------------------------------------


def widths(low: Lowering, layout: Layout) -> list[int]:
    """Local sizes of the factors behind experts and tokens."""
    return [n for dim in layout.local_factors(low.mesh, dict(low.coordinate))[2:] for n in dim]


def behind(layout: Layout, place: Place) -> int:
    """Number of a factor among those, counted from 1: the rows stand in front."""
    return flat(layout, place) - sum(len(dim) for dim in layout.factors[:2]) + 1


def cut_width(low: Lowering, x: fx.Node, step: Step) -> fx.Node:
    """This device's piece of a factor."""
    at, before, after = behind(step.before, landed(step)), widths(low, step.before), widths(low, step.after)
    start = -(-before[at - 1] // low.mesh.size(step.axis)) * low.coordinate[step.axis]
    parted = low.call(aten.reshape.default, x, [-1, *before])
    cut = low.call(aten.slice.Tensor, parted, at, start, start + after[at - 1])
    return low.call(aten.reshape.default, cut, sizes_of(step.after, low.mesh, dict(low.coordinate)))


def gather_width(low: Lowering, x: fx.Node, step: Step) -> fx.Node:
    """The whole of a factor, which stands in front on the way."""
    at, before, after = behind(step.before, left(step)), widths(low, step.before), widths(low, step.after)
    n, rest = low.mesh.size(step.axis), [i for i in range(len(before) + 1) if i != at]
    parted = low.call(aten.reshape.default, x, [-1, *before])
    parted = low.pad(parted, [-1, *before], at, -(-after[at - 1] // n))
    sent = low.contiguous(low.call(aten.permute.default, parted, [at, *rest]))
    got = low.call(c10d.all_gather_into_tensor.default, sent, n, low.groups[step.axis])
    got = low.call(aten.slice.Tensor, low.call(wait_tensor_of, got, sent), 0, 0, after[at - 1])
    back = low.call(aten.permute.default, got, [*range(1, at + 1), 0, *range(at + 1, len(before) + 1)])
    return low.call(aten.reshape.default, back, sizes_of(step.after, low.mesh, dict(low.coordinate)))
