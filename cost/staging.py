"""The buffers that a step of a conversion makes on its way from operand to result.

In: a `Step`, the mesh.  Out: elements on the first device, which holds most.  Next: `lives.py`.

A collective moves one run of memory per device. A cut in a dim behind others is packed before or unpacked after, and
pieces that do not divide are padded; see `passes/lower.py`. Each buffer is made from the one before it, which may go
then: only two neighbours are there at once.
"""

from __future__ import annotations

import math
from itertools import pairwise

from autopar.layout import Layout, Mesh, Place, Step

MOVES = ("reduce_scatter", "all_gather", "all_to_all")


def behind(layout: Layout, place: Place, mesh: Mesh) -> bool:
    """Whether a factor has others of more than one element in front of it."""
    first = dict.fromkeys(mesh.names, 0)
    sizes = [layout.span(p, mesh, first)[1] for p, _, _ in layout.places() if p < place]
    return math.prod(sizes) != 1


def copies_slice(step: Step, mesh: Mesh) -> bool:
    """Whether a slice is a copy: where it is not one run of memory."""
    place = step.after.where(step.axis)
    return isinstance(place, tuple) and behind(step.before, place, mesh)


def filled(layout: Layout, place: Place, mesh: Mesh, n: int) -> int:
    """Elements of a piece whose factor `place` is padded to a multiple of n."""
    size = layout.span(place, mesh, dict.fromkeys(mesh.names, 0))[1]
    return layout.local_numel(mesh) // size * (-(-size // n) * n)


def packed(step: Step, mesh: Mesh) -> tuple[int, ...]:
    """Copies made before anything is sent, the last of which is sent; none where the operand itself is.

    The first device's piece of what is gathered is never padded.
    """
    place = step.after.where(step.axis)
    if step.kind not in ("reduce_scatter", "all_to_all") or not isinstance(place, tuple):
        return ()
    sent = filled(step.before, place, mesh, mesh.size(step.axis))
    padding = sent != step.before.local_numel(mesh)
    return (sent,) * (padding + behind(step.before, place, mesh))


def moved(step: Step, mesh: Mesh) -> int:
    """Elements that arrive."""
    before, after, n = step.before.local_numel(mesh), step.after.local_numel(mesh), mesh.size(step.axis)
    left, landed = step.before.where(step.axis), step.after.where(step.axis)
    if step.kind == "all_to_all" and isinstance(landed, tuple):
        return filled(step.before, landed, mesh, n)
    if step.kind == "all_gather" and isinstance(left, tuple):
        return filled(step.after, left, mesh, n)
    return after if step.kind in MOVES else before


def unpacked(step: Step, mesh: Mesh) -> tuple[int, ...]:
    """Copies made of what arrived, the last of which holds the result; none where it lies as it came.

    Padding behind nothing is left where it is: the result is the run in front of it.
    """
    place = step.before.where(step.axis)
    if step.kind not in ("all_gather", "all_to_all") or not isinstance(place, tuple):
        return ()
    if not behind(step.after, place, mesh):
        return ()
    padding = filled(step.after, place, mesh, mesh.size(step.axis)) != step.after.local_numel(mesh)
    return (moved(step, mesh), *((step.after.local_numel(mesh),) * padding))


def chain(step: Step, mesh: Mesh) -> tuple[int, ...]:
    """Elements of every buffer after the operand, in order; the last holds the result."""
    if step.kind not in MOVES:
        return (step.after.local_numel(mesh),)
    return (*packed(step, mesh), moved(step, mesh), *unpacked(step, mesh))


def staging_elements(step: Step, mesh: Mesh) -> int:
    """Elements beside operand and result where a step holds most, if its operand goes as soon as it is packed."""
    if step.kind not in MOVES:
        return 0
    before, after = step.before.local_numel(mesh), step.after.local_numel(mesh)
    return max(0, max(a + b for a, b in pairwise((before, *chain(step, mesh)))) - before - after)
